"""How long a text may be, known before it is read; and tokens that the model has no row for."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from disagg.text.limits import TextLimits
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import InvalidRequest
from tests.text.conftest import gemma_style, llama_style, metaspace_style

STYLES = {"llama": llama_style(), "gemma": gemma_style(), "metaspace": metaspace_style()}
TEXTS = st.text(st.sampled_from("ab the, .\n日é🙂\u0301") | st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXTS, style=st.sampled_from(sorted(STYLES)))
@settings(derandomize=True, deadline=None, max_examples=1000)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(text: str, style: str) -> None:
    tokenizer = STYLES[style]
    assert len(text) <= tokenizer.most_chars(len(tokenizer.encode(text, add_special_tokens=False)))


@given(text=TEXTS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_the_same_of_a_real_tokenizer_of_bytes(text: str, smollm: Tokenizer) -> None:
    assert len(text) <= smollm.most_chars(len(smollm.encode(text, add_special_tokens=False)))


def words(**parts: object) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "bb": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    for name, part in parts.items():
        setattr(inner, name, part)
    return Tokenizer(inner)


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(normalizer=normalizers.Strip()),
        words(normalizer=normalizers.NFC()),
        words(pre_tokenizer=pre_tokenizers.Whitespace()),
        words(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        words(),  # a word that it does not know is one token, however long
    ],
)
def test_a_tokenizer_that_drops_characters_is_given_eight_times_as_many(tokenizer: Tokenizer) -> None:
    assert tokenizer.most_chars(10) == 10 * len("<unk>") * 8


def test_a_limit_says_what_was_given_and_what_is_allowed() -> None:
    limits = TextLimits(max_tokens=10, max_chars=50)
    limits.check_chars(50, "the prompt has", "prompt")
    with pytest.raises(
        InvalidRequest, match=r"the prompt has 51 characters; at most 50 are read.*of 10 tokens"
    ) as caught:
        limits.check_chars(51, "the prompt has", "prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="token_ids has 11 token ids; the model's context holds 10"):
        limits.check_count(11, "token_ids has", "token_ids")
    assert limits.message_bytes > 50 * 4


def test_a_tokenizer_says_which_of_its_tokens_the_model_has_no_row_for(smollm_dir: Path) -> None:
    assert Tokenizer.load(smollm_dir).beyond_vocab == ()
    whole = llama_style()
    last = whole.vocab_size - 1
    assert Tokenizer(whole._inner, vocab_size=last).beyond_vocab == ((last, "<tool>"),)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_read_or_written(work: str, smollm: Tokenizer) -> None:
    """Counted by how often this thread gets on: it would not once, if the tokenizer kept the interpreter."""
    ids = smollm.encode("hello world, this is it. " * 4000)
    text = "hello world, this is it. " * 20_000
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        (smollm.encoding(text) if work == "encode" else smollm.decode(ids * 30))
        ended.set()

    before = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert sys.getswitchinterval() == before
    assert turns > 10
