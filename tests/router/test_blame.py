"""Who is charged with an attempt that failed: whose fault is known, and nobody beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages.legs import Outcome, PeerRef
from disagg.router.blame import MAX_ATTEMPTS, NO_VERDICT, SUSPECT_S, Attempt, Blame, Charge
from disagg.router.view import Pair, Work

P, D = PeerRef("p", "", "p-1"), PeerRef("d", "", "d-1")
PAIR = Pair(P, D, 10)
ATTEMPT: Attempt = ("r", 1)
INTENDED = (Outcome.DRAINED, Outcome.GIVEN_BACK)
BOTH = [Charge("p", Work.PREFILL, False), Charge("d", Work.DECODE, False)]
PREFILL_DIED = [Charge("p", Work.PREFILL, False, "p-1")]


def charged(*ends: tuple[str, Outcome], gone: set[PeerRef] | None = None, cause: str = "") -> list[Charge]:
    """Of one attempt, when everything is over. gone: known by the end; cause: of the replay."""
    known: set[PeerRef] = set()
    blame = Blame(known.__contains__)
    found = [charge for server, outcome in ends for charge in blame.leg_ended(ATTEMPT, PAIR, server, outcome, 0.0)]
    known |= gone or set()
    found += blame.replayed(ATTEMPT, PAIR, cause)
    assert list(blame.due(SUSPECT_S - 0.01)) == [], "it may still be heard of"
    return found + list(blame.due(SUSPECT_S))


def test_a_peer_that_is_lost_for_no_known_reason_counts_against_both_once() -> None:
    assert charged(("d", Outcome.PEER_LOST), ("d", Outcome.PEER_LOST)) == BOTH, "however many legs it had"
    assert charged(("d", Outcome.PEER_LOST), ("p", Outcome.PEER_LOST)) == BOTH


@pytest.mark.parametrize("gone", [P, D])
def test_a_peer_that_is_gone_or_going_explains_a_lost_link(gone: PeerRef) -> None:
    assert charged(("d", Outcome.PEER_LOST), gone={gone}) == []
    assert charged(("p", Outcome.PEER_LOST), gone={gone}, cause=NO_VERDICT) == []


def test_a_decode_server_that_gives_no_verdict_on_a_link_that_broke_is_to_blame() -> None:
    assert charged(("p", Outcome.PEER_LOST), cause=NO_VERDICT) == [Charge("d", Work.DECODE, False)]
    assert charged(("p", Outcome.DRAINED), cause="contradiction") == [Charge("d", Work.DECODE, False)]


@given(
    decode=st.lists(st.sampled_from([Outcome.PEER_LOST, Outcome.BAD_TRANSFER]), min_size=1, max_size=4),
    prefill=st.lists(st.sampled_from([Outcome.WORKER_LOST, *INTENDED]), min_size=1, max_size=1),
    first=st.booleans(),
    cause=st.sampled_from(["", NO_VERDICT]),
)
def test_of_two_servers_only_the_one_whose_fault_is_known_is_charged_and_nobody_for_what_was_intended(
    decode: list[Outcome], prefill: list[Outcome], first: bool, cause: str
) -> None:
    """In either order, for a link; damaged KV that is heard of before anybody ended stays with both."""
    if not first:
        decode = [Outcome.PEER_LOST for _ in decode]
    own, other = [("p", outcome) for outcome in prefill], [("d", outcome) for outcome in decode]
    found = charged(*(own + other if first else other + own), cause=cause)
    assert found == (PREFILL_DIED if Outcome.WORKER_LOST in prefill else [])


@given(intended=st.sampled_from(INTENDED), server=st.sampled_from(["p", "d"]), first=st.booleans())
def test_an_intended_end_of_either_charges_nobody(intended: Outcome, server: str, first: bool) -> None:
    ends = [(server, intended), ("d", Outcome.PEER_LOST), ("p", Outcome.PEER_LOST)]
    assert charged(*(ends if first else reversed(ends))) == []


def test_one_attempts_end_explains_nothing_of_another_and_what_is_remembered_is_bounded() -> None:
    blame = Blame(lambda ref: False)
    assert list(blame.leg_ended(("other", 1), PAIR, "p", Outcome.DRAINED, 0.0)) == []
    for number in range(MAX_ATTEMPTS + 5):
        assert list(blame.leg_ended(("r", number), PAIR, "d", Outcome.PEER_LOST, 0.0)) == []
    assert len(list(blame.due(SUSPECT_S))) == 2 * MAX_ATTEMPTS
    assert list(blame.due(1e9)) == []
