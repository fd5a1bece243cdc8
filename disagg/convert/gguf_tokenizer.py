"""Builds the tokenizer files of a Hugging Face directory from a GGUF's vocabulary.

Two kinds: byte-level BPE (GGUF "gpt2"), whose merges are in the file, and SentencePiece BPE (GGUF "llama"), whose
merges follow from the scores. Knows text and ids; nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from disagg.convert.gguf_file import GgufFile
from disagg.types.errors import ConfigError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_SPACE: Final = "▁"  # SentencePiece's visible space
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_KEYS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

_END_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_TURN_ENDS: Final = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Raises ConfigError for a kind of tokenizer that cannot be rebuilt exactly."""
    kind = gguf.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(gguf)
    elif kind == "llama":
        tokenizer = _sentencepiece(gguf)
    else:
        raise ConfigError(f"{gguf.path} has a tokenizer of kind {kind!r}; 'gpt2' and 'llama' can be converted")
    _add_tokens(gguf, tokenizer)
    _add_post_processor(gguf, tokenizer)
    return tokenizer


def special_tokens(gguf: GgufFile) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token, as far as the file names them."""
    tokens = gguf.require("tokenizer.ggml.tokens")
    return {role: tokens[gguf.metadata[key]] for role, key in _SPECIAL_KEYS.items() if key in gguf.metadata}


def ends_of_text(gguf: GgufFile) -> list[int]:
    """Ids that end an answer: EOS, and what ends a turn of a chat. Files of chat models may say EOS alone, as Gemma's do:
    llama.cpp knows the others by their texts, of which here those count that the chat template writes."""
    template = gguf.metadata.get("tokenizer.chat_template", "")
    rows = zip(gguf.require("tokenizer.ggml.tokens"), gguf.require("tokenizer.ggml.token_type"), strict=True)
    said = [gguf.metadata[key] for key in _END_KEYS if key in gguf.metadata]
    named = [
        token_id
        for token_id, (token, kind) in enumerate(rows)
        if kind in (_CONTROL, _USER_DEFINED) and token in _TURN_ENDS and token in template
    ]
    return list(dict.fromkeys([*said, *named]))


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """The contents of tokenizer_config.json, with the chat template where the file has one."""
    architecture = gguf.require("general.architecture")
    config: dict[str, Any] = {
        # The plain class: a model's own class would rebuild the pre-tokenizer and lose what tokenizer.json says.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.require(f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(gguf),
        "add_eos_token": bool(gguf.metadata.get("tokenizer.ggml.add_eos_token", False)),
        **special_tokens(gguf),
    }
    template = gguf.metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}


def _byte_level(gguf: GgufFile) -> Tokenizer:
    """Byte-level BPE, cut into words first as the file's `pre` says."""
    pre = gguf.require("tokenizer.ggml.pre")
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if pre not in splitters:
        raise ConfigError(f"{gguf.path} splits text as {pre!r}; {', '.join(splitters)} can be converted")
    merges = [tuple(merge.split(" ")) for merge in gguf.require("tokenizer.ggml.merges")]
    # Llama 3 has words that its merges do not build.
    tokenizer = Tokenizer(BPE(_vocabulary(gguf), merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile) -> Tokenizer:
    vocabulary = _vocabulary(gguf)
    scores = gguf.require("tokenizer.ggml.scores")
    unknown = special_tokens(gguf).get("unk_token")
    merges = merges_of(vocabulary, {token: scores[token_id] for token, token_id in vocabulary.items()})
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", _SPACE)
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def merges_of(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best score first.

    SentencePiece merges whatever neighbours give the best-scored token; a list of merges in that order does the same.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort(key=lambda row: row[:3])
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(gguf: GgufFile) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(gguf.require("tokenizer.ggml.tokens"))}


def _add_tokens(gguf: GgufFile, tokenizer: Tokenizer) -> None:
    """Control tokens are special, user-defined ones are not; both are taken whole out of any text."""
    tokens, kinds = gguf.require("tokenizer.ggml.tokens"), gguf.require("tokenizer.ggml.token_type")
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _adds_bos(gguf: GgufFile) -> bool:
    """Whether a text begins with BOS. Files that do not say, such as Llama 3's, are read as llama.cpp reads them: those of
    SentencePiece and of Llama 3 begin with it."""
    said = gguf.metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    usual = gguf.require("tokenizer.ggml.model") == "llama" or gguf.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return usual and _SPECIAL_KEYS["bos_token"] in gguf.metadata


def _add_post_processor(gguf: GgufFile, tokenizer: Tokenizer) -> None:
    special = special_tokens(gguf)
    template = ["$A"]
    used = []
    if _adds_bos(gguf):
        template.insert(0, special["bos_token"])
        used.append(special["bos_token"])
    if gguf.metadata.get("tokenizer.ggml.add_eos_token", False):
        template.append(special["eos_token"])
        used.append(special["eos_token"])
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(used)]
        )
