"""A decode engine computes the rest of a prompt that it has cached but for a few tokens, and gives back what would be more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.engine.instructions import ToLink, ToTransfer
from disagg.messages.legs import LegEnd, Outcome, StartLeg
from disagg.types.ids import LegKey
from tests.engine.lone_engine import P_REF, PARAMS, Decode, facts, outcomes, plans, said, start, to_router

MOST = 8  # tokens; pages have 4


def local(name: str, tokens: int, outputs: int = 3) -> StartLeg:
    leg = start(name, tokens, params=replace(PARAMS, max_tokens=outputs), peer=P_REF)
    return replace(leg, local_prefill=True)


def warm(tokens: int = 12, **changes: int) -> Decode:
    """It has cached so many tokens of the prompt that `start` makes, less what its last page lacks."""
    decode = Decode(facts(num_large=12, local_prefill_tokens=MOST, **changes))
    decode.through(start("before", tokens, params=replace(PARAMS, max_tokens=2), peer=P_REF))
    return decode


def test_the_rest_is_computed_and_the_answer_goes_on_in_the_same_pages() -> None:
    decode = warm()
    out = decode.start(local("r", 18))
    (first,) = [run for plan in plans(out) for run in plan.runs]
    assert (first.num_tokens, first.sample) == (18 - 12, True)
    out += decode.compute_all()
    assert [(index, token) for _, _, index, token in said(out)] == [(0, 101), (1, 102), (2, 103)]
    (end,) = [message for message in to_router(out) if isinstance(message, LegEnd)]
    assert (end.outcome, end.cached_tokens) == (Outcome.DONE, 12)
    assert [event.name for event in end.timeline] == ["queued", "chunk", "first_token"]
    assert not [i for i in out if isinstance(i, ToLink | ToTransfer)], "no other server has a part in it"
    assert not decode.used and decode.engine.idle


@pytest.mark.parametrize("rest", [1, MOST, MOST + 1])
def test_more_than_it_computes_itself_is_given_back_at_once(rest: int) -> None:
    decode = warm(12)
    cached = decode.cached()
    out = decode.start(local("r", 12 + rest))
    if rest <= MOST:
        assert not outcomes(out) and plans(out)
        return
    (end,) = to_router(out)
    assert isinstance(end, LegEnd) and end.outcome is Outcome.GIVEN_BACK
    assert end.reason == "9 of 21 tokens are not cached any more; a decode server computes at most 8 itself"
    assert not plans(out) and decode.cached() == cached and not decode.used and decode.engine.idle


def test_a_server_that_computes_none_gives_all_back() -> None:
    decode = Decode(facts(local_prefill_tokens=0))
    assert outcomes(decode.start(local("r", 1))) == [Outcome.GIVEN_BACK]
    assert decode.engine.idle


def test_what_is_no_more_cached_when_its_turn_comes_is_given_back() -> None:
    decode = warm(12, max_slots=1)
    decode.joined(start("long", 5, params=replace(PARAMS, max_tokens=43), peer=P_REF, first_token=500))
    assert not outcomes(decode.start(local("r", 18))), "the only slot is taken"
    out = decode.compute_all()
    assert sorted(outcomes(out)) == [Outcome.DONE, Outcome.GIVEN_BACK], (
        "the pages of what was cached are the long one's"
    )
    assert not decode.used


def test_what_is_asked_to_stop_is_handed_over_once_it_has_begun() -> None:
    decode = warm()
    leg = replace(local("r", 18, outputs=20), key=LegKey("r", 1, 0))
    out = decode.start(leg)
    out += decode.do(decode.engine.hand_over(leg.key))
    assert not outcomes(out), "its prompt is being computed"
    out += decode.compute_all()
    assert outcomes(out) == [Outcome.HANDED_OVER] and len(said(out)) >= 1
    told = [token for *_, token in said(out)]
    moves = replace(
        leg, key=LegKey("r", 2, 0), token_ids=(*leg.token_ids, *told[:-1]), moves_attempt=1, local_prefill=False
    )
    assert not outcomes(decode.start(moves)), "it is kept"


def test_it_ends_wherever_it_is_aborted() -> None:
    for steps in range(4):
        decode = warm()
        leg = local("r", 18, outputs=20)
        decode.start(leg)
        for _ in range(steps):
            decode.compute()
        assert outcomes(decode.abort(leg)) == [Outcome.ABORTED]
        decode.compute_all()
        assert not decode.used and decode.engine.idle
