"""What a tokenizer may make of a text, by what tokenizer.json says of its parts: how many bytes, how many ids. Pure.

    text ── normalizer ── pre-tokenizer ── model ── post-processor ── ids ── decoder ── text
            └───────── growth ─────────┘   check_model  check_post_processor    decoder_growth

The library takes some 30 bytes of memory for each byte that it looks at, and any step may write many bytes for one:
`Replace` as many as the file holds. So growth, the most bytes after all steps for one before them, is known before any
text is read, and a text is measured by its bytes times that (`Tokenizer.most_bytes`). It errs on the large side:
steps that cannot meet in one character are multiplied all the same. GPT and Qwen have 2 to 6, Llama and Gemma 3 to 6, T5 and
XLNet, whose charts fold Unicode's compatibility characters, 100 to 800.
"""

from __future__ import annotations

import base64
import binascii
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import models

from disagg.types.errors import ConfigError

Spec = Mapping[str, Any]  # a part of tokenizer.json: an object with a "type"

MAX_GROWTH: Final = 1024  # at this, texts of 16 KiB are read
MAX_DECODER_GROWTH: Final = 16.0
MAX_PREPENDED_BYTES: Final = 64
MAX_TEMPLATE_IDS: Final = 64  # beside the text's own
MAX_TOKEN_CHARS: Final = 4096  # the longest known have a few hundred
MAX_AFFIX_CHARS: Final = 64  # of a model's prefix or suffix for parts of words
MAX_WORD_CHARS: Final = 1024  # of WordPiece, which takes the square of it; its default is 100

_DECOMPOSED: Final = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "BertNormalizer": 3.0}  # in UTF-8, by Unicode
_LOWERED: Final = 1.5  # e.g. U+0130: two bytes become three
_LOWERS: Final = frozenset(("Lowercase", "BertNormalizer"))
_SPACED: Final = 2.0  # BertNormalizer sets a space at each side of a Chinese character of three bytes
_SHRINKS: Final = frozenset(("Strip", "StripAccents", "Nmt"))
_BYTE_LEVEL: Final = 2.0  # a byte becomes a character of at most two bytes
_CUTS: Final = frozenset(
    (
        "BertPreTokenizer",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    )
)


def flat(spec: Spec | None, inner: str) -> Iterator[Spec]:
    """The parts of a part, in their order. inner: what a Sequence calls them."""
    if spec is None:
        return
    if spec.get("type") != "Sequence":
        yield spec
        return
    for part in spec[inner]:
        yield from flat(part, inner)


def growth(normalizer: Spec | None, pre_tokenizer: Spec | None, shortest_added: int = 1) -> float:
    """The most bytes that the model sees for one byte of text. shortest_added: bytes of the shortest added token: what is
    between two of them is normalized by itself. Raises ConfigError for more than MAX_GROWTH, and for steps that are not known."""
    steps = [*_normalized(flat(normalizer, "normalizers"), shortest_added)]
    steps += [_pre_tokenized(part) for part in flat(pre_tokenizer, "pretokenizers")]
    product = 1.0
    for step in steps:
        product *= step
        if product > MAX_GROWTH:
            raise ConfigError(
                f"its normalizer and pre-tokenizer may make more than {MAX_GROWTH} bytes of one byte of text, which is not "
                "served: see what Replace, Prepend, Metaspace and Precompiled write"
            )
    return product


def _normalized(parts: Iterable[Spec], shortest_added: int) -> Iterator[float]:
    """A factor for each step. What Unicode decomposes and lowers is so afterwards, and grows no more, until something
    is written that is not."""
    decomposed = lowered = 1.0
    for part in parts:
        kind = part.get("type")
        if kind in _DECOMPOSED or kind in _LOWERS:
            most = max(decomposed, _DECOMPOSED.get(str(kind), 1.0))
            yield most / decomposed
            decomposed = most
            if kind in _LOWERS:
                yield _LOWERED / lowered
                lowered = _LOWERED
            if kind == "BertNormalizer":
                yield _SPACED
        elif kind == "ByteLevel":
            yield _BYTE_LEVEL
            decomposed = lowered = 1.0
        elif kind == "Precompiled":
            yield charsmap_growth(part.get("precompiled_charsmap") or "")
            decomposed = lowered = 1.0
        elif kind in ("Replace", "Prepend"):
            written = str(part["content"] if kind == "Replace" else part["prepend"])
            yield replaced(part) if kind == "Replace" else _prepended(written, shortest_added)
            if unicodedata.normalize("NFKD", written).lower() != written:
                decomposed = lowered = 1.0
        elif kind not in _SHRINKS:
            raise ConfigError(f"it has a normalizer that is not known: {str(kind)[:40]!r}")


def replaced(part: Spec) -> float:
    """Of a Replace. Raises ConfigError for a pattern that is nowhere and everywhere."""
    content, pattern = len(_bytes(part["content"])), part["pattern"]
    if "String" not in pattern:
        return 1.0 + content  # it may be written before every character, where the expression finds nothing at all
    if not pattern["String"]:
        raise ConfigError("it has a Replace with an empty pattern")
    return max(1.0, content / len(_bytes(pattern["String"])))


def _prepended(written: str, shortest_added: int) -> float:
    if len(_bytes(written)) > MAX_PREPENDED_BYTES:
        raise ConfigError(
            f"it has a Prepend of {len(_bytes(written))} bytes; at most {MAX_PREPENDED_BYTES} are allowed"
        )
    return 1.0 + len(_bytes(written)) / (1 + max(1, shortest_added))


def _pre_tokenized(part: Spec) -> float:
    kind = part.get("type")
    if kind == "Metaspace":
        return 1.0 + len(_bytes(part["replacement"]))  # one before each piece, and a piece may be a byte
    if kind == "ByteLevel":
        return _BYTE_LEVEL * (2.0 if part.get("add_prefix_space") else 1.0)
    if kind not in _CUTS:
        raise ConfigError(f"it has a pre-tokenizer that is not known: {str(kind)[:40]!r}")
    return 1.0


def charsmap_growth(charsmap: str) -> float:
    """Of SentencePiece's chart, in base64: the size of a trie of keys (Darts: units of 32 bits), the trie, and what is
    written for them, each with a NUL at its end. Keys of one and two bytes are looked at; all others have three or more.
    Raises ConfigError where it cannot be read."""
    try:
        raw = base64.b64decode(charsmap, validate=True)
        (size,) = struct.unpack_from("<I", raw)
        units = struct.unpack_from(f"<{size // 4}I", raw, 4)
    except (binascii.Error, struct.error, ValueError) as error:
        raise ConfigError(f"its Precompiled normalizer has a chart that cannot be read: {error}") from error
    written = raw[4 + size :]
    longest = max(map(len, written.split(b"\0")))
    most = longest / 3
    if units:
        for first, at in _children(units, _offset(units[0])):
            most = max(most, float(_written_for(units, at, written)))
            for _, below in _children(units, first):
                most = max(most, _written_for(units, below, written) / 2)
    return max(1.0, most)


def _children(units: Sequence[int], base: int) -> Iterator[tuple[int, int]]:
    """(where its own children begin, its place) of each child."""
    for byte in range(1, 256):
        at = base ^ byte
        if at < len(units) and units[at] & 0x800000FF == byte:
            yield at ^ _offset(units[at]), at


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


def _written_for(units: Sequence[int], at: int, written: bytes) -> int:
    """Bytes; 0 where no key ends here."""
    leaf = at ^ _offset(units[at])
    if not units[at] >> 8 & 1 or leaf >= len(units):
        return 0
    begin = units[leaf] & 0x7FFFFFFF
    end = written.find(b"\0", begin)
    return max(0, (len(written) if end < 0 else end) - begin)


def check_post_processor(spec: Spec | None) -> None:
    """A text once, and a few ids beside it. Raises ConfigError."""
    beside = 0
    for part in flat(spec, "processors"):
        if part.get("type") != "TemplateProcessing":
            continue
        known, texts = part.get("special_tokens", {}), 0
        for piece in part["single"]:
            if "Sequence" in piece:
                texts += 1
                if piece["Sequence"]["id"] != "A":
                    raise ConfigError("its TemplateProcessing names a second text in the template for a single one")
                continue
            name = piece["SpecialToken"]["id"]
            if name not in known:
                raise ConfigError(
                    f"its TemplateProcessing has the special token {str(name)[:64]!r}, which its special_tokens lack"
                )
            beside += len(known[name]["ids"])
        if texts != 1:
            raise ConfigError(f"its TemplateProcessing has the text {texts} times; it must have it once")
    if beside > MAX_TEMPLATE_IDS:
        raise ConfigError(f"its post-processor adds {beside} ids to each text; at most {MAX_TEMPLATE_IDS} are allowed")


def decoder_growth(spec: Spec) -> float:
    """The most bytes of text for one of a token. Raises ConfigError for more than MAX_DECODER_GROWTH."""
    product = 1.0
    for part in flat(spec, "decoders"):
        if part.get("type") == "Replace":
            product *= replaced(part)
    if product > MAX_DECODER_GROWTH:
        raise ConfigError(
            f"its decoder may make {product:.4g} bytes of one byte of a token; at most {MAX_DECODER_GROWTH:g} are allowed"
        )
    return product


def check_model(inner: tokenizers.Tokenizer, longest: int, bytes_known: bool) -> None:
    """longest: characters of a token. bytes_known: nothing is unknown to it, since it falls back on bytes. Raises ConfigError."""
    model = inner.model
    kind = type(model).__name__
    if longest > MAX_TOKEN_CHARS:
        raise ConfigError(f"it has a token of {longest} characters; at most {MAX_TOKEN_CHARS} are allowed")
    unknown = None if isinstance(model, models.Unigram) else model.unk_token
    if isinstance(model, models.BPE) and (bytes_known or not unknown):
        unknown = None
    if unknown is not None and model.token_to_id(unknown) is None:
        raise ConfigError(
            f"its {kind} model stands {unknown[:64]!r} in for what it does not know (unk_token), which its own vocabulary lacks"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, name, None) or ""
        if len(affix) > MAX_AFFIX_CHARS:
            raise ConfigError(f"its {name} has {len(affix)} characters; at most {MAX_AFFIX_CHARS} are allowed")
    if isinstance(model, models.WordPiece) and model.max_input_chars_per_word > MAX_WORD_CHARS:
        raise ConfigError(
            f"its max_input_chars_per_word is {model.max_input_chars_per_word}; at most {MAX_WORD_CHARS} are allowed"
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def without_chance(inner: tokenizers.Tokenizer) -> str:
    """Makes the same text the same ids always. What was turned off, which is of use in training; empty: nothing was."""
    model = inner.model
    found = []
    for name in ("dropout", "alpha", "nbest_size"):
        value = getattr(model, name, None)
        if value:
            setattr(model, name, None)
            found.append(f"{name} {value:g}")
    return ", ".join(found)
