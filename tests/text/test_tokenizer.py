from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import ConfigError
from tests.text.conftest import gemma_style

# SmolLM2 was trained without these: its vocabulary lacks the control bytes and 0xF1 and up.
NOT_IN_SMOLLM = "\x04\x06\x13\x14\x16\x1d"
FIXED = settings(derandomize=True, deadline=None, max_examples=150)


@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF, exclude_characters=NOT_IN_SMOLLM), max_size=60
    )
)
@FIXED
def test_byte_level_text_survives_the_round_trip(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smollm.token_bytes(token_id) for token_id in ids) == text.encode()


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60))
@FIXED
def test_sentencepiece_bytes_join_to_the_text(text: str) -> None:
    tokenizer = gemma_style()
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """The token alone; U+FFFD where it holds part of a character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def test_a_token_that_is_half_a_character_has_true_bytes(smollm: Tokenizer) -> None:
    first, *rest = smollm.encode("🎉")
    assert smollm.token_bytes(first) == "🎉".encode()[: len(smollm.token_bytes(first))]
    assert rest
    assert "�" in text_of(smollm, first)


def test_digits_stand_alone(smollm: Tokenizer) -> None:
    assert [text_of(smollm, token_id) for token_id in smollm.encode("12345")] == list("12345")


def test_the_model_directory_says_where_text_ends_and_how_many_ids_there_are(smollm: Tokenizer) -> None:
    assert smollm.end_token_id is None, "the model's own configuration names it, too"
    assert text_of(smollm, 2) == "<|im_end|>"
    assert smollm.vocab_size == 49152
    assert smollm.is_special(2)


def test_ids_beyond_the_vocabulary_stand_for_nothing(smollm: Tokenizer) -> None:
    assert smollm.token_bytes(smollm.vocab_size + 5) == b""
    assert text_of(smollm, smollm.vocab_size + 5) == ""


def test_encoding_is_linear_in_the_text(smollm: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. 1234 "
    times = []
    for copies in (1_000, 8_000):
        start = time.process_time()
        smollm.encode(text * copies)
        times.append(time.process_time() - start)
    assert times[1] < 8 * 5 * times[0] + 0.1


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_text_and_convert_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, disagg.text.chat, disagg.text.detokenizer, disagg.text.stops, disagg.convert.model_dir, "
        "disagg.convert.inspect; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
