"""One request's machine when legs fail and servers are lost: whose verdict counts, what is run again, and how often."""

from __future__ import annotations

import pytest

from disagg.messages.legs import LegEnd, LegTokens, Outcome
from disagg.router import machine as r
from disagg.types.errors import RequestFailed
from disagg.types.ids import FinishReason, LegKey
from tests.router.request_machines import (
    PROMPT,
    aborts,
    ended,
    failure,
    lost,
    machine,
    need,
    pair,
    running,
    starts,
    tokens,
)


def test_decodes_verdict_replays_on_the_same_decode_with_the_tokens_accepted_so_far() -> None:
    m = running()
    tokens(m, "p0", 0, 0, 5)
    tokens(m, "d0", 0, 0, 5, 6)
    again = ended(m, "d0", Outcome.PEER_LOST)
    assert aborts(again) == [("p0", 0, None)]
    assert need(again) == r.NeedPair(pair().decode, frozenset({"p0"}), 0.5, "peer_lost", "d0: why")
    begun, *sends = m.handle(r.PairPicked(pair("p1"), 50.0))
    assert begun == r.Attempted(2, pair("p1"), "peer_lost", 5, 1, again=True)
    [(_, leg), _] = starts(sends)
    assert (leg.key.attempt, leg.token_ids, leg.num_prompt, leg.deadline_s) == (2, (*PROMPT, 5, 6), 3, 50.0)
    assert tokens(m, "d0", 0, 2, 7, attempt=1) == []
    assert [type(i) for i in tokens(m, "p1", 0, 2, 7)] == [r.Emit]


def test_prefill_lost_before_the_kv_was_over_stays_with_the_decode_server_that_has_part_of_it() -> None:
    m = running()
    lost(m, "p0", crashed=True)
    assert need(ended(m, "d0", Outcome.PEER_LOST)).prefer_decode == pair().decode
    m.handle(r.PairPicked(pair("p1"), 0.0))
    again = need(ended(m, "p1", Outcome.GIVEN_BACK))  # it still loads; what landed is where it was
    assert (again.prefer_decode, again.avoid) == (pair().decode, {"p1"})
    m.handle(r.PairPicked(pair("p2"), 0.0))
    assert need(lost(m, "d0")).prefer_decode is None
    m.handle(r.PairPicked(pair("p2", "d1"), 0.0))
    assert need(ended(m, "p2", Outcome.GIVEN_BACK)).prefer_decode is None


@pytest.mark.parametrize("outcome", [Outcome.WORKER_LOST, Outcome.DRAINED])
def test_a_decode_server_that_cannot_go_on_is_avoided(outcome: Outcome) -> None:
    again = ended(running(), "d0", outcome)
    assert need(again).prefer_decode is None
    assert need(again).avoid == {"p0", "d0"}


def test_a_replay_groups_unfinished_choices_by_equal_outputs() -> None:
    m = running(n=4)
    tokens(m, "d0", 0, 0, 5)
    tokens(m, "d0", 1, 0, 6)
    tokens(m, "d0", 2, 0, 5)
    tokens(m, "d0", 3, 0, 9, finish=FinishReason.STOP)
    lost(m, "d0")
    legs = starts(m.handle(r.PairPicked(pair("p1", "d1"), 0.0)))
    assert [(leg.key.prefix_no, leg.choices, leg.token_ids[3:]) for name, leg in legs if name == "d1"] == [
        (0, (0, 2), (5,)),
        (1, (1,), (6,)),
    ]


def test_one_prefixs_failure_retires_the_whole_attempt() -> None:
    m = running(n=2)
    tokens(m, "d0", 0, 0, 5)
    lost(m, "d0")
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    again = ended(m, "d1", Outcome.BAD_TRANSFER, prefix_no=1)
    assert aborts(again) == [("p1", 0, None), ("d1", 0, None), ("p1", 1, None)]
    assert need(again).prefer_decode == pair("p1", "d1").decode


def test_a_lost_decode_server_replays_at_once() -> None:
    m = running()
    again = lost(m, "d0")
    assert aborts(again) == [("p0", 0, None)]
    assert need(again).cause == "decode_lost"


def test_a_lost_prefill_server_waits_for_decodes_verdict_and_then_gives_up() -> None:
    m = running()
    assert lost(m, "p0") == [r.ArmVerdictTimer(1, 10.0)]
    again = m.handle(r.VerdictTimeout(1))
    assert aborts(again) == [("d0", 0, None)]
    assert need(again).cause == "no_verdict"


def test_what_prefill_said_of_its_failure_is_said_where_decode_says_nothing() -> None:
    m = running()
    m.handle(r.LegEnded("p0", LegEnd(LegKey("r", 1, 0), Outcome.WORKER_LOST, "its logits are no numbers")))
    said = need(m.handle(r.VerdictTimeout(1))).reason
    assert said == "p0: its logits are no numbers; and d0 gave no verdict in 10 s"


def test_a_lost_prefill_server_is_no_loss_once_decode_has_spoken() -> None:
    m = running()
    lost(m, "p0")
    tokens(m, "d0", 0, 0, 5)
    assert m.handle(r.VerdictTimeout(1)) == []
    done = running()
    assert ended(done, "p0") == []
    assert lost(done, "p0") == []


def test_a_failed_prefill_leg_waits_for_decodes_verdict_too() -> None:
    m = running()
    assert ended(m, "p0", Outcome.WORKER_LOST) == [r.ArmVerdictTimer(1, 10.0)]
    assert need(ended(m, "d0", Outcome.PEER_LOST)).cause == "peer_lost"
    m.handle(r.PairPicked(pair("p1"), 0.0))
    assert m.handle(r.VerdictTimeout(1)) == []  # of the attempt before


def test_every_leg_that_prefill_fails_gets_its_own_time_for_decodes_verdict() -> None:
    m = parted()  # two prefixes in the second attempt
    first, second = (LegEnd(LegKey("r", 2, prefix_no), Outcome.WORKER_LOST, "") for prefix_no in (0, 1))
    assert m.handle(r.LegEnded("p0", first)) == [r.ArmVerdictTimer(2, 10.0, 0)]
    m.handle(r.TokensCame("d0", LegTokens(LegKey("r", 2, 0), 0, 1, (11,))))  # the first leg's verdict: all is well
    assert m.handle(r.LegEnded("p0", second)) == [r.ArmVerdictTimer(2, 10.0, 1)]
    assert m.handle(r.VerdictTimeout(2, 0)) == [], "the first one's time is over, not the second one's"
    again = m.handle(r.VerdictTimeout(2, 1))
    assert need(again).cause == "no_verdict"


def test_a_lost_prefill_server_starts_the_time_of_each_leg_once() -> None:
    m = parted()
    assert lost(m, "p0") == [r.ArmVerdictTimer(2, 10.0, 0), r.ArmVerdictTimer(2, 10.0, 1)]
    assert m.handle(r.LegEnded("p0", LegEnd(LegKey("r", 2, 1), Outcome.WORKER_LOST, ""))) == []


def parted() -> r.RequestMachine:
    """A request whose two choices said different tokens before their server was lost, and run again."""
    m = running(n=2)
    tokens(m, "d0", 0, 0, 10)
    tokens(m, "d0", 1, 0, 20)
    lost(m, "d0")
    m.handle(r.PairPicked(pair(), 0.0))
    return m


def test_what_prefill_gives_back_is_tried_again_free_of_charge_after_a_pause() -> None:
    m = running(max_attempts=1)
    again = need(ended(m, "p0", Outcome.GIVEN_BACK))  # at once: decode was never told of it
    assert (again.cause, again.delay_s) == ("given_back", 0.05)
    m.handle(r.PairPicked(pair("p1"), 0.0))
    assert (m.attempt, m.attempts_counted) == (2, 1)


def test_a_request_is_tried_no_more_often_than_allowed() -> None:
    m = machine()
    for _ in range(2):
        m.handle(r.PairPicked(pair(), 0.0))
        need(lost(m, "d0"))
    m.handle(r.PairPicked(pair(), 0.0))
    error = failure(lost(m, "d0"))
    assert isinstance(error, RequestFailed)
    assert "3 times" in str(error)


def test_decode_done_before_all_tokens_came_is_tried_again() -> None:
    m = running()
    tokens(m, "d0", 0, 0, 5)
    assert need(ended(m, "d0")).cause == "incomplete"


def test_an_abort_that_nobody_asked_for_is_tried_again() -> None:
    assert need(ended(running(), "d0", Outcome.ABORTED)).cause == "aborted"


def test_decode_contradicting_an_accepted_token_is_tried_again_and_prefill_ignored() -> None:
    m = running()
    tokens(m, "p0", 0, 0, 5)
    assert tokens(m, "p0", 0, 0, 6) == []
    assert need(tokens(m, "d0", 0, 0, 6)).cause == "contradiction"


def test_a_link_that_breaks_again_and_again_does_not_take_all_attempts_in_a_moment() -> None:
    """As when decode's worker dies and prefill is the first to see it: each attempt waits longer for the news."""
    m, pauses = running(), []
    for _ in range(2):
        needed = need(ended(m, "d0", Outcome.PEER_LOST))
        pauses.append(needed.delay_s)
        m.handle(r.PairPicked(pair(), 0.0))
    assert pauses == [0.5, 1.0]


# ---- crashes


def test_a_request_present_at_two_crashes_is_poison() -> None:
    m = running(max_attempts=9)
    need(lost(m, "d0", crashed=True))
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    error = failure(ended(m, "d1", Outcome.WORKER_LOST))
    assert isinstance(error, RequestFailed)
    assert "d0, d1" in str(error)


def test_one_crash_told_twice_is_one_crash() -> None:
    m = running()
    ended(m, "p0", Outcome.WORKER_LOST)
    lost(m, "p0", crashed=True)
    assert need(ended(m, "d0", Outcome.PEER_LOST))


def late(m: r.RequestMachine, server: str, attempt: int, outcome: Outcome) -> list[r.Instruction]:
    return m.handle(r.LegEnded(server, LegEnd(LegKey("r", attempt, 0), outcome, "why", (), 0)))


@pytest.mark.parametrize("waits", [True, False])
def test_a_crash_that_the_other_servers_word_overtook_counts(waits: bool) -> None:
    m = running(max_attempts=9)
    assert need(ended(m, "d0", Outcome.PEER_LOST)), "p0's own word is still on its way"
    assert late(m, "p0", 1, Outcome.WORKER_LOST) == []
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    assert need(ended(m, "d1", Outcome.PEER_LOST))
    if not waits:
        m.handle(r.PairPicked(pair("p2", "d2"), 0.0))
    out = late(m, "p1", 2, Outcome.WORKER_LOST)
    assert "p0, p1" in str(failure(out))
    assert aborts(out) == ([] if waits else [("p2", 0, None), ("d2", 0, None)])
    assert m.phase is r.Phase.ENDED


def test_a_lost_server_that_the_other_servers_word_overtook_counts() -> None:
    m = running(max_attempts=9)
    need(ended(m, "d0", Outcome.PEER_LOST))
    assert lost(m, "p0", crashed=True) == []
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    assert "p0, p1" in str(failure(ended(m, "p1", Outcome.WORKER_LOST) + ended(m, "d1", Outcome.PEER_LOST)))


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.DONE])
def test_what_dies_after_a_request_has_left_it_does_not_count(outcome: Outcome) -> None:
    m = running(max_attempts=9)
    need(lost(m, "d0", crashed=True))
    assert late(m, "p0", 1, outcome) == []
    assert lost(m, "p0", crashed=True) == [], "its part was over"
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    assert m.phase is r.Phase.RUNNING


def test_a_late_word_of_long_ago_does_not_count() -> None:
    m = running(max_attempts=9)
    need(ended(m, "d0", Outcome.PEER_LOST))
    for number in (1, 2):
        m.handle(r.PairPicked(pair(f"p{number}", f"d{number}"), 0.0))
        ended(m, f"p{number}", Outcome.DRAINED)
        need(ended(m, f"d{number}", Outcome.DRAINED))
    m.handle(r.PairPicked(pair("p3", "d3"), 0.0))
    assert late(m, "p0", 1, Outcome.WORKER_LOST) == []
    assert need(lost(m, "d3", crashed=True))


def test_a_crash_after_the_servers_part_was_done_does_not_count() -> None:
    m = running(max_attempts=9)
    ended(m, "p0")
    lost(m, "p0", crashed=True)
    assert need(lost(m, "d0", crashed=True))
