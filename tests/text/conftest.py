"""The tokenizers that text is tested with: SmolLM2's own, and small ones of the kinds that other models use."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from disagg.convert.model_dir import resolve
from disagg.text.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁a", "a", "b", "ab", "▁the", "the", "é", "▁▁", ".", "日", "\n", "x▁y", "▁,"]


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    return resolve("smollm2-135m", Path("~/.cache/disagg/models").expanduser())


@pytest.fixture(scope="session")
def smollm(smollm_dir: Path) -> Tokenizer:
    return Tokenizer.load(smollm_dir)


def sentencepiece(decoder: decoders.Decoder, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A BPE of single characters and a few words, with all bytes to fall back on."""
    vocabulary = {token: at for at, token in enumerate(SPECIAL + BYTES + WORDS)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "▁"), ("▁", ",")]
    merges = [pair for pair in merges if all(part in vocabulary for part in pair)]
    inner = tokenizers.Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    inner.decoder = decoder
    if normalizer is not None:
        inner.normalizer = normalizer
    return Tokenizer(inner)


def llama_style() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma_style() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizers.Replace(" ", "▁"),
    )


def metaspace_style() -> Tokenizer:
    tokenizer = sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
    tokenizer._inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


STYLES = {"llama": llama_style, "gemma": gemma_style, "metaspace": metaspace_style}


@pytest.fixture(scope="session", params=["smollm", *STYLES])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "smollm":
        return request.getfixturevalue("smollm")
    return STYLES[request.param]()
