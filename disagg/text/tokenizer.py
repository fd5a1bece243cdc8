"""Text to token ids and back, from a model directory's tokenizer.json. Without transformers or torch.

Knows ids, text and bytes; nothing of chats (chat.py) or of text that arrives token by token (detokenizer.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tokenizers

from disagg.text.declared import declare
from disagg.text.decoders import StagedDecoder, byte_level_bytes, byte_of, staged_decoder
from disagg.text.model_files import CONFIG, GENERATION, TOKENIZER, ModelFiles
from disagg.text.tokenizer_bounds import check_model, check_post_processor, decoder_growth, growth, without_chance
from disagg.types.errors import ConfigError, DisaggError, InvalidRequest
from disagg.types.plain import quoted

MAX_VOCAB_SIZE = 1 << 24  # the largest known has a million ids
READ_BYTES = 16 << 20  # that the model sees of one text: half a GiB of the library's memory
READ_BYTES_PER_TOKEN = 64  # where a context is so long that more may be of use


class Tokenizer:
    """Immutable once loaded, and safe to share between threads."""

    def __init__(
        self, inner: tokenizers.Tokenizer, vocab_size: int | None = None, end_token_id: int | None = None
    ) -> None:
        """vocab_size: how many logits the model has; by default as many as the tokenizer has ids. end_token_id: by which an
        answer ends, where it is none of those that the model's configuration names."""
        inner.no_padding()  # some tokenizer.json files were saved with padding or truncation on
        inner.no_truncation()
        self._inner = inner
        self._decoder_spec: Mapping[str, Any] = _decoder_spec(inner)
        staged_decoder(self._decoder_spec)  # a decoder that is not served is found now, not at the first request
        added = inner.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # tokenizers tells special tokens by text when it decodes.
        special_texts = {self._added[token_id] for token_id in self._special_ids}
        self._special_ids |= {token_id for token_id, text in self._added.items() if text in special_texts}
        self._byte_level = any(part.get("type") == "ByteLevel" for part in _parts(self._decoder_spec))
        if vocab_size is None:
            vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = vocab_size
        self.end_token_id = end_token_id
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, vocabulary), default=1)  # a byte-level token has a character per byte
        self._slack = _SHRINKS if _may_shrink(inner) else 1
        self.growth = self._bounded(inner)
        self._decoder_growth = decoder_growth(self._decoder_spec)
        self.without_chance = without_chance(inner)
        beyond = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= vocab_size)
        self.beyond_vocab = tuple((token_id, self._added.get(token_id, token)) for token_id, token in beyond)

    def _bounded(self, inner: tokenizers.Tokenizer) -> float:
        """The most bytes for one of a text. Raises ConfigError for a part that may take any amount of memory or time."""
        check_post_processor(_spec(inner.post_processor))
        normalizer, pre_tokenizer = _spec(inner.normalizer), _spec(inner.pre_tokenizer)
        parts = [*_specs(inner.normalizer), *_specs(inner.pre_tokenizer)]
        check_model(inner, self._longest, _bytes_known(inner, parts))
        shortest = min((len(text.encode()) for text in self._added.values()), default=1)
        return growth(normalizer, pre_tokenizer, shortest)

    @classmethod
    def load(cls, model_dir: Path, rows: int | None = None) -> Self:
        """Raises ConfigError naming the file that is missing or cannot be used. rows: see `of`."""
        return cls.of(ModelFiles.read(model_dir), rows)

    @classmethod
    def of(cls, files: ModelFiles, rows: int | None = None) -> Self:
        """The same, from files that were read already. rows: of the model's embeddings, where they are known better than
        config.json says it.
        """
        path = files.model_dir / TOKENIZER
        if TOKENIZER not in files.contents:
            raise ConfigError(f"model directory {files.model_dir} lacks {TOKENIZER}")
        config = files.json(CONFIG)
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            config = {**config, **text_config}
        vocab_size = config.get("vocab_size")
        if vocab_size is not None and (not isinstance(vocab_size, int) or not 0 < vocab_size < MAX_VOCAB_SIZE):
            raise ConfigError(
                f"{files.model_dir / CONFIG}: vocab_size is {str(vocab_size)[:40]!r}; it must be from 1 to {MAX_VOCAB_SIZE - 1}"
            )
        inner = _parse(files.contents[TOKENIZER], path)
        rows = rows or vocab_size
        end = inner.token_to_id(declare(inner, files, rows).get("eos_token", ""))
        said = files.json(GENERATION).get("eos_token_id")
        known = _ids(config.get("eos_token_id") if said is None else said)
        if end in known or (end is not None and rows is not None and end >= rows):
            end = None
        try:
            return cls(inner, rows, end)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: as the model's post-processor does, e.g. BOS. A rendered chat brings its own."""
        return self.encoding(text, add_special_tokens=add_special_tokens).ids

    def encoding(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The same, not yet as Python integers: `len()` of it costs nothing, `.ids` 25 ns per token.

        Lets other threads run meanwhile, which the library's own `encode` does not: it would keep the interpreter for
        0.5 s per million characters. Raises InvalidRequest for a text that the tokenizer cannot take.
        """
        with _refusing(
            lambda why: InvalidRequest(f"text that the model's tokenizer cannot make tokens of: {quoted(why)}")
        ):
            return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def most_chars(self, num_tokens: int) -> int:
        """No text of more characters becomes so few tokens.

        A token stands for at most as many characters as it has bytes. Where the tokenizer may drop characters before it
        looks for tokens (blanks, accents, what it does not know) there is no such bound in theory: then eight times as
        many are allowed, which is far beyond what people write, and still finite.
        """
        return num_tokens * self._longest * self._slack

    def most_bytes(self, num_tokens: int) -> int:
        """Of a text that is read, in UTF-8, where the context holds so many tokens: by what the tokenizer may make of it."""
        return int(max(READ_BYTES, num_tokens * READ_BYTES_PER_TOKEN) / self.growth)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids that the tokenizer does not know (a model may have more logits than tokens) stand for no text.

        Lets other threads run meanwhile, as `encoding` does. Raises InvalidRequest for a text that is too long, or that the
        tokenizer cannot make.
        """
        self._check_text_of(ids)
        says = "the model's tokenizer cannot make text of these tokens: {}"
        with _refusing(lambda why: InvalidRequest(says.format(quoted(why)), "token_ids")):
            return self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def _check_text_of(self, ids: Sequence[int]) -> None:
        """By the longest token first: each by itself takes 0.3 us."""
        most = max(READ_BYTES, len(ids) * READ_BYTES_PER_TOKEN)
        if len(ids) * self._longest * self._decoder_growth <= most:
            return
        if sum(len(self.token(token_id) or "") for token_id in ids) * self._decoder_growth > most:
            raise InvalidRequest(f"the text of {len(ids)} token ids may have more than {most} characters", "token_ids")

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, e.g. "Ġthe" or "▁the" or "<0x0A>"; None for an id without a token."""
        return self._inner.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, in bytes; half a character for some tokens."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        if token_id in self._added:
            return token.encode("utf-8")
        byte = byte_of(token)
        if byte is not None:
            return bytes([byte])
        return token.replace("▁", " ").encode("utf-8")

    def new_decoder(self) -> StagedDecoder:
        """A fresh incremental decoder for one text."""
        return staged_decoder(self._decoder_spec)


def _parse(content: bytes, path: Path) -> tokenizers.Tokenizer:
    with _refusing(lambda why: ConfigError(f"{path} cannot be read: {why[:400]}")):
        return tokenizers.Tokenizer.from_buffer(content)


@contextmanager
def _refusing(as_error: Callable[[str], DisaggError]) -> Iterator[None]:
    """Around the library, which raises plain Exception for whatever it does not like; a panic is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise as_error(str(error)) from error


_SHRINKS = 8  # how many characters may come to be one, where a tokenizer drops some
_KEEP_ALL = frozenset(("Sequence", "ByteLevel", "Digits", "Prepend", "Metaspace"))  # parts that drop no character


def _may_shrink(inner: tokenizers.Tokenizer) -> bool:
    """Whether fewer characters may reach the model than the text has, as far as is known of its parts."""
    if any(token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values()):
        return True
    kept = [*_specs(inner.normalizer), *_specs(inner.pre_tokenizer)]
    if not all(_keeps_all(part) for part in kept):
        return True
    return not _bytes_known(inner, kept)  # what is unknown may become one token


def _bytes_known(inner: tokenizers.Tokenizer, parts: Sequence[Mapping[str, Any]]) -> bool:
    return any(part.get("type") == "ByteLevel" for part in parts) or bool(getattr(inner.model, "byte_fallback", False))


def _keeps_all(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Replace":
        pattern = part.get("pattern")
        return isinstance(pattern, dict) and len(pattern.get("String", "  ")) <= len(part.get("content", ""))
    if kind == "Split":
        return part.get("behavior") != "Removed"
    return kind in _KEEP_ALL


def _specs(part: Any) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as tokenizer.json writes it, and what it is made of."""
    whole = _spec(part)
    return [] if whole is None else [whole, *_inner_parts(whole)]


def _spec(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _inner_parts(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [*spec.get("normalizers", ()), *spec.get("pretokenizers", ())]
    return [found for part in inner for found in (part, *_inner_parts(part))]


def _decoder_spec(inner: tokenizers.Tokenizer) -> Mapping[str, Any]:
    """The decoder alone: serializing the whole tokenizer takes a second for a large vocabulary."""
    if inner.decoder is None:
        raise ConfigError("tokenizer.json has no decoder, so tokens cannot be joined to text")
    spec: Mapping[str, Any] = json.loads(inner.decoder.__getstate__())
    return spec


def _parts(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for inner in spec["decoders"] for part in _parts(inner)] if "decoders" in spec else [spec]


def _ids(value: object) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []
