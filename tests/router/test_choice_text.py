"""Tokens to text: the same answer however the tokens are cut into messages."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages.plan import TokenLogprobs
from disagg.router.acceptance import Accepted
from disagg.router.choice_text import ChoiceText, merged
from disagg.router.intake import with_end
from disagg.router.requests import ChoiceDelta
from disagg.text.tokenizer import Tokenizer
from disagg.types.ids import FinishReason
from disagg.types.sampling import MAX_STOP_TOKENS, SamplingParams
from tests.router.fake_server import TOKENIZER


def play(
    text: str, cuts: list[int], finish: FinishReason, stop: tuple[str, ...] = (), min_tokens: int = 0
) -> ChoiceDelta:
    """Pushes the text's tokens in pieces; all that came out as one delta."""
    ids = TOKENIZER.encode(text)
    params = SamplingParams(max_tokens=len(ids), min_tokens=min_tokens, stop=stop, logprobs=0)
    choice = ChoiceText(TOKENIZER, 0, (), params)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    deltas = []
    for start, end in pairwise(edges):
        piece = tuple(ids[start:end])
        last = finish if end == len(ids) else None
        delta = choice.push(Accepted(0, start, piece, tuple(TokenLogprobs(-1.0) for _ in piece), last))
        if delta is not None:
            deltas.append(delta)
        if choice.stopped_by is not None:
            break
    whole = merged(deltas)
    assert choice.num_tokens == len(whole.token_ids) == len(whole.logprobs)
    return whole


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.text("abé€", min_size=1, max_size=20),
    st.lists(st.integers(0, 60)),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
)
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    got = play(text, cuts, FinishReason.LENGTH, tuple(stops))
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        assert (got.text, got.finish, got.stop_reason) == (text, FinishReason.LENGTH, None)
        assert list(got.token_ids) == TOKENIZER.encode(text)
        return
    end, minus_length = min(ends)
    expected = text[: end + minus_length]
    assert (got.text, got.finish, got.stop_reason) == (expected, FinishReason.STOP, text[len(expected) : end])
    assert list(got.token_ids) == TOKENIZER.encode(expected)


def test_half_a_character_is_held_back_and_replaced_at_the_end_when_its_rest_never_comes() -> None:
    first, second = TOKENIZER.encode("é")
    choice = ChoiceText(TOKENIZER, 0, (), SamplingParams(max_tokens=2))
    half = choice.push(Accepted(0, 0, (first,), (), None))
    assert half == ChoiceDelta(0, "", (first,))
    assert choice.push(Accepted(0, 1, (second,), (), FinishReason.LENGTH)) == ChoiceDelta(
        0, "é", (second,), finish=FinishReason.LENGTH
    )
    cut = ChoiceText(TOKENIZER, 0, (), SamplingParams(max_tokens=1)).push(
        Accepted(0, 0, (first,), (), FinishReason.LENGTH)
    )
    assert cut is not None
    assert cut.text == "\ufffd"


def test_a_stop_string_counts_where_it_is_complete_after_min_tokens() -> None:
    assert play("abab", [1, 2, 3], FinishReason.LENGTH, ("ab",), min_tokens=1).text == ""
    assert play("abab", [1, 2, 3], FinishReason.LENGTH, ("ab",), min_tokens=2).text == "ab"
    assert play("abab", [2], FinishReason.LENGTH, ("ab",), min_tokens=3).text == "ab"
    assert play("abab", [2], FinishReason.LENGTH, ("ab",), min_tokens=4).text == "abab"


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.text("ab", min_size=1, max_size=20), st.lists(st.integers(0, 60)), st.text("ab", min_size=1), st.integers(0, 20)
)
def test_before_min_tokens_no_stop_string_is_complete(text: str, cuts: list[int], stop: str, min_tokens: int) -> None:
    least = min(min_tokens, len(text))  # a token is a character here
    got = play(text, cuts, FinishReason.LENGTH, (stop,), min_tokens=least)
    ends = (at for at in range(least + 1, len(text) + 1) if text[:at].endswith(stop))
    end = next(ends, None)
    assert got.text == (text if end is None else text[: end - len(stop)])
    assert got.stop_reason == (None if end is None else stop)


def test_tokens_that_may_still_be_taken_back_are_not_given_out() -> None:
    ids = TOKENIZER.encode("abc")
    choice = ChoiceText(TOKENIZER, 0, (), SamplingParams(max_tokens=9, stop=("bcd",)))
    assert choice.push(Accepted(0, 0, tuple(ids), (), None)) == ChoiceDelta(0, "a", (ids[0],))
    assert choice.push(Accepted(0, 3, (ids[0],), (), None)) == ChoiceDelta(0, "bca", (ids[1], ids[2], ids[0]))


def test_a_stop_token_is_given_out_without_its_text() -> None:
    ids = TOKENIZER.encode("ab")
    choice = ChoiceText(TOKENIZER, 0, (), SamplingParams(max_tokens=9, stop_token_ids=(ids[1],)))
    assert choice.push(Accepted(0, 0, tuple(ids), (), FinishReason.STOP)) == ChoiceDelta(
        0, "a", tuple(ids), finish=FinishReason.STOP, stop_reason=ids[1]
    )


def test_the_tokenizers_own_end_is_no_reason_to_name_unless_ends_are_ignored() -> None:
    ids = TOKENIZER.encode("ab")
    ending = Tokenizer(TOKENIZER._inner, TOKENIZER.vocab_size, end_token_id=ids[1])
    params = with_end(SamplingParams(max_tokens=9, stop_token_ids=(7,)), ids[1])
    assert params.stop_token_ids == (7, ids[1])
    whole = Accepted(0, 0, tuple(ids), (), FinishReason.STOP)
    assert ChoiceText(ending, 0, (), params).push(whole) == ChoiceDelta(0, "a", tuple(ids), finish=FinishReason.STOP)
    ignoring = SamplingParams(max_tokens=9, stop_token_ids=(ids[1],), ignore_eos=True)
    assert with_end(ignoring, ids[1]) is ignoring
    named = ChoiceText(ending, 0, (), ignoring).push(whole)
    assert named is not None
    assert named.stop_reason == ids[1]


def test_the_tokenizers_own_end_is_asked_for_once_and_within_the_bound() -> None:
    full = SamplingParams(max_tokens=9, stop_token_ids=tuple(range(MAX_STOP_TOKENS)))
    for params, token_id in ((full, 300), (full, 3), (SamplingParams(max_tokens=9), None)):
        assert with_end(params, token_id) is params
