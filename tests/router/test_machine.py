"""One request's machine: events in, instructions out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import AbortLeg, HandOver, LegEnd, LegTokens, Outcome, PeerRef, StartLeg, TimelineEvent
from disagg.router import machine as r
from disagg.router.requests import Asked
from disagg.router.view import NoPair, NoPairReason, Pair
from disagg.types.errors import Cancelled, DeadlineExceeded, InvalidRequest, NoCompatiblePeer, RequestFailed
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams

PROMPT = (1, 2, 3)


def pair(prefill: str = "p0", decode: str = "d0", weights: str = "w") -> Pair:
    refs = (PeerRef(name, f"{name}:1", f"{name}-i") for name in (prefill, decode))
    return Pair(*refs, max_total_tokens=100, weights=weights)


def machine(n: int = 1, max_tokens: int = 8, **changes: Any) -> r.RequestMachine:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    asked = Asked(
        request_id="r", prompt_token_ids=PROMPT, params=params, cache_salt="s", deadline_s=100.0, limit_s=60.0
    )
    bounds = {"max_total_tokens": 90, "max_attempts": 3, "verdict_s": 10.0, "linger_s": 0.2}
    return r.RequestMachine(asked, r.Bounds(**{**bounds, **changes}))


def running(n: int = 1, **changes: Any) -> r.RequestMachine:
    made = machine(n, **changes)
    made.handle(r.PairPicked(pair(), 40.0))
    return made


def tokens(m: r.RequestMachine, server: str, choice: int, first: int, *ids: int, **more: Any) -> list[r.Instruction]:
    prefix_no = more.pop("prefix_no", 0)
    attempt = more.pop("attempt", m.attempt)
    return m.handle(r.TokensCame(server, LegTokens(LegKey("r", attempt, prefix_no), choice, first, ids, (), **more)))


def ended(
    m: r.RequestMachine, server: str, outcome: Outcome = Outcome.DONE, prefix_no: int = 0, cached: int = 2
) -> list[r.Instruction]:
    return m.handle(r.LegEnded(server, LegEnd(LegKey("r", m.attempt, prefix_no), outcome, "why", (), cached)))


def lost(m: r.RequestMachine, server: str, crashed: bool = False) -> list[r.Instruction]:
    return m.handle(r.ServerLost(server, f"{server}-i", crashed, "gone"))


def aborts(instructions: list[r.Instruction]) -> list[tuple[str, int, int | None]]:
    sends = [i for i in instructions if isinstance(i, r.Send) and isinstance(i.message, AbortLeg)]
    return [(s.server, s.message.key.prefix_no, s.message.choice) for s in sends if isinstance(s.message, AbortLeg)]


def starts(instructions: list[r.Instruction]) -> list[tuple[str, StartLeg]]:
    return [(i.server, i.message) for i in instructions if isinstance(i, r.Send) and isinstance(i.message, StartLeg)]


def need(instructions: list[r.Instruction]) -> r.NeedPair:
    [found] = [i for i in instructions if isinstance(i, r.NeedPair)]
    return found


def failure(instructions: list[r.Instruction]) -> Exception:
    [found] = [i for i in instructions if isinstance(i, r.Fail)]
    return found.error


def test_a_pair_gets_both_legs_at_once_each_with_the_other_as_its_peer() -> None:
    m = machine(n=2)
    begun, *sends = m.handle(r.PairPicked(pair(), 40.0))
    assert begun == r.Attempted(1, pair(), "first", 3, 2)
    (p_name, p_leg), (d_name, d_leg) = starts(sends)
    assert (p_name, p_leg.peer, d_name, d_leg.peer) == ("p0", pair().decode, "d0", pair().prefill)
    assert p_leg.key == d_leg.key == LegKey("r", 1, 0)
    assert (p_leg.token_ids, p_leg.num_prompt, p_leg.choices, p_leg.deadline_s) == (PROMPT, 3, (0, 1), 60.0)
    assert p_leg.cache_salt == "s"


def test_as_many_as_fit_is_filled_in_by_the_first_pair() -> None:
    m = machine(max_tokens=0)
    assert m.facts.total_tokens == 4
    [(_, leg), _] = starts(m.handle(r.PairPicked(pair(), 0.0)))
    assert leg.params.max_tokens == 87
    assert m.facts.total_tokens == 90


def test_as_many_as_fit_is_filled_in_anew_where_servers_that_are_left_hold_less() -> None:
    """Else it waited for its deadline, though its client had named no limit."""
    m = machine(max_tokens=0)
    m.handle(r.PairPicked(pair(), 0.0))
    tokens(m, "d0", 0, 0, 5, 6)
    assert m.facts.total_tokens == 90, "where it runs, and may be moved from"
    lost(m, "d0")
    assert (m.facts.prefill_tokens, m.facts.total_tokens) == (5, 6), "a token more than it has"
    smaller = replace(pair("p1", "d1"), max_total_tokens=50)
    legs = starts(m.handle(r.PairPicked(smaller, 0.0)))
    assert [leg.params.max_tokens for _, leg in legs] == [47, 47] and m.facts.total_tokens == 50


def test_a_request_finishes_when_both_servers_have_said_their_last_word() -> None:
    m = running()
    assert [type(i) for i in tokens(m, "p0", 0, 0, 5)] == [r.Emit]
    assert tokens(m, "d0", 0, 0, 5) == []
    assert ended(m, "p0") == []
    last = tokens(m, "d0", 0, 1, 6, finish=FinishReason.LENGTH)
    assert [type(i) for i in last] == [r.Emit, r.ArmLingerTimer]
    assert ended(m, "d0") == [r.Finish()]
    assert (m.phase, m.cached_tokens, m.attempts_counted) == (r.Phase.ENDED, 2, 1)


def test_cached_tokens_are_the_most_of_the_prompt_that_a_prefill_server_found_in_its_cache() -> None:
    m = running()
    ended(m, "p0", cached=2)
    ended(m, "d0", Outcome.BAD_TRANSFER, cached=3)  # decode's are no part of the bill
    assert m.cached_tokens == 2
    m.handle(r.PairPicked(pair("p1"), 0.0))
    ended(m, "p1", cached=1)
    assert m.cached_tokens == 2
    again = running()
    ended(again, "p0", cached=9)  # of a replay's prefix, outputs among them
    assert again.cached_tokens == len(PROMPT)


def test_a_finished_request_waits_for_the_last_words_no_longer_than_it_lingers() -> None:
    m = running()
    tokens(m, "p0", 0, 0, 5, finish=FinishReason.STOP)
    assert m.handle(r.LingerTimeout(9)) == []
    done = m.handle(r.LingerTimeout(1))
    assert aborts(done) == [("p0", 0, None), ("d0", 0, None)]
    assert done[-1] == r.Finish()


@pytest.mark.parametrize("event", [r.DeadlinePassed(), r.ShutDown(Cancelled("x"))])
def test_nothing_spoils_a_request_whose_tokens_are_all_here(event: r.Event) -> None:
    m = running()
    tokens(m, "d0", 0, 0, 5, finish=FinishReason.STOP)
    assert m.handle(event)[-1] == r.Finish()


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


def test_refused_is_final_and_the_clients_fault() -> None:
    for server, other in (("p0", "d0"), ("d0", "p0")):
        refused = ended(running(), server, Outcome.REFUSED)
        assert isinstance(failure(refused), InvalidRequest)
        assert aborts(refused) == [(other, 0, None)]


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


def test_a_stop_string_aborts_its_choice_and_the_last_one_the_leg() -> None:
    m = running(n=2)
    tokens(m, "d0", 0, 0, 5)
    assert aborts(m.handle(r.StopFound(0))) == [("d0", 0, 0)]
    tokens(m, "d0", 1, 0, 5)
    done = m.handle(r.StopFound(1))
    assert aborts(done) == [("p0", 0, None), ("d0", 0, None)]
    assert m.phase is r.Phase.CLOSING
    ended(m, "p0", Outcome.ABORTED)
    assert ended(m, "d0", Outcome.ABORTED) == [r.Finish()]


def test_a_leg_that_a_stop_string_ended_may_fail_without_a_replay() -> None:
    m = running(n=2)
    tokens(m, "d0", 0, 0, 5)
    tokens(m, "d0", 1, 0, 6)
    lost(m, "d0")
    m.handle(r.PairPicked(pair("p1", "d1"), 0.0))
    m.handle(r.StopFound(0))
    assert ended(m, "d1", Outcome.PEER_LOST, prefix_no=0) == []
    assert ended(m, "p1", Outcome.ABORTED, prefix_no=0) == []
    assert m.phase is r.Phase.RUNNING


def test_the_deadline_and_the_client_end_a_request_wherever_it_is() -> None:
    for event, error in ((r.DeadlinePassed(), DeadlineExceeded), (r.ClientGone("gone"), Cancelled)):
        waiting = machine()
        assert isinstance(failure(waiting.handle(event)), error)
        stopped = running().handle(event)
        assert isinstance(failure(stopped), error)
        assert aborts(stopped) == [("p0", 0, None), ("d0", 0, None)]


def test_why_there_is_no_pair_decides_whether_to_wait() -> None:
    m = machine()
    assert m.handle(r.NoPairFound(NoPair(NoPairReason.EMPTY_POOL))) == []
    assert "no server of one role" in str(failure(m.handle(r.DeadlinePassed())))
    assert isinstance(failure(machine().handle(r.NoPairFound(NoPair(NoPairReason.NO_COMPATIBLE)))), NoCompatiblePeer)
    error = failure(machine().handle(r.NoPairFound(NoPair(NoPairReason.TOO_LARGE, 9))))
    assert isinstance(error, InvalidRequest)
    assert "3 tokens" in str(error)
    assert "hold 9" in str(error)


def test_late_timings_still_reach_the_timeline() -> None:
    m = running()
    event = TimelineEvent("chunk", 1.0, 2.0)
    m.handle(r.LegEnded("p0", LegEnd(LegKey("r", 1, 0), Outcome.DONE, "", (event,))))
    assert m.timeline == [TimelineEvent("p0/chunk", 1.0, 2.0)]


def test_an_event_without_a_row_names_both() -> None:
    with pytest.raises(AssertionError, match="PairPicked while running"):
        running().handle(r.PairPicked(pair(), 0.0))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_whatever_happens_a_request_ends_once_with_a_right_prefix(data: st.DataObject) -> None:
    """Servers fail, speak late, twice and out of turn; every emitted sequence is the right one, and there is one end."""
    n = data.draw(st.integers(1, 3))
    outputs = [[10 * choice + i for i in range(4)] for choice in range(n)]
    outputs[-1][:2] = outputs[0][:2]
    m = machine(n, max_tokens=4)
    got: list[list[int]] = [[] for _ in range(n)]
    ends: list[r.Instruction] = []
    legs: list[tuple[str, StartLeg]] = []

    def do(event: r.Event) -> None:
        for instruction in m.handle(event):
            match instruction:
                case r.Emit(accepted):
                    got[accepted.choice].extend(accepted.token_ids)
                case r.Finish() | r.Fail():
                    ends.append(instruction)
                case r.Send(server, StartLeg() as leg):
                    legs.append((server, leg))
                case r.Send() | r.NeedPair() | r.Attempted() | r.ArmVerdictTimer() | r.ArmLingerTimer():
                    pass

    for _ in range(data.draw(st.integers(1, 40))):
        if m.phase is r.Phase.WAITING:
            do(
                r.PairPicked(
                    pair(data.draw(st.sampled_from(["p0", "p1"])), data.draw(st.sampled_from(["d0", "d1"]))), 0
                )
            )
            continue
        kind = data.draw(st.sampled_from(["tokens"] * 6 + ["end", "lost", "verdict", "linger", "stop"]))
        server, leg = data.draw(st.sampled_from(legs[-8:]))
        if kind == "tokens":
            choice = data.draw(st.sampled_from(leg.choices))
            start = len(leg.token_ids) - 3
            stop = start + 1 if server.startswith("p") else data.draw(st.integers(start + 1, 4))
            finish = FinishReason.LENGTH if stop == 4 else None
            do(r.TokensCame(server, LegTokens(leg.key, choice, start, tuple(outputs[choice][start:stop]), (), finish)))
        elif kind == "end":
            do(r.LegEnded(server, LegEnd(leg.key, data.draw(st.sampled_from(Outcome)), "")))
        elif kind == "lost":
            do(r.ServerLost(server, f"{server}-i", data.draw(st.booleans()), ""))
        elif kind == "verdict":
            do(r.VerdictTimeout(data.draw(st.integers(1, m.attempt))))
        elif kind == "linger":
            do(r.LingerTimeout(m.attempt))
        elif m.phase is not r.Phase.WAITING and data.draw(st.integers(0, 3)) == 0:
            do(r.StopFound(data.draw(st.integers(0, n - 1))))
    do(r.DeadlinePassed())
    assert m.phase is r.Phase.ENDED
    assert len(ends) == 1
    for choice in range(n):
        assert got[choice] == outputs[choice][: len(got[choice])]
    assert m.attempts_counted <= 3


def test_a_leg_names_the_workers_that_it_is_meant_for() -> None:
    sends = [i for i in machine().handle(r.PairPicked(pair(), 40.0)) if isinstance(i, r.Send)]
    assert [(send.server, send.message.incarnation) for send in sends] == [("p0", "p0-i"), ("d0", "d0-i")]


def test_weights_are_free_until_a_token_is_accepted_and_then_stay() -> None:
    m = machine(n=2)
    assert m.facts.weights == ""
    m.handle(r.PairPicked(pair(weights="old"), 40.0))
    assert m.facts.weights == ""
    lost(m, "d0")
    assert m.facts.weights == ""  # nothing was said: any model may answer
    m.handle(r.PairPicked(pair(weights="new"), 41.0))
    tokens(m, "p0", 1, 0, 7)
    lost(m, "d0")
    assert m.facts.weights == "new"  # for both choices: they are one answer
    m.handle(r.PairPicked(pair(weights="new"), 42.0))
    assert m.facts.weights == "new"


def test_an_answer_that_no_server_can_continue_fails_and_says_so() -> None:
    m = running()
    tokens(m, "p0", 0, 0, 7)
    lost(m, "d0")
    error = failure(m.handle(r.NoPairFound(NoPair(NoPairReason.OTHER_WEIGHTS))))
    assert isinstance(error, RequestFailed) and "other weights" in str(error)
    error = failure(machine().handle(r.NoPairFound(NoPair(NoPairReason.MISMATCH))))
    assert isinstance(error, NoCompatiblePeer) and "tokenizer" in str(error)


def test_a_link_that_breaks_again_and_again_does_not_take_all_attempts_in_a_moment() -> None:
    """As when decode's worker dies and prefill is the first to see it: each attempt waits longer for the news."""
    m, pauses = running(), []
    for _ in range(2):
        needed = need(ended(m, "d0", Outcome.PEER_LOST))
        pauses.append(needed.delay_s)
        m.handle(r.PairPicked(pair(), 0.0))
    assert pauses == [0.5, 1.0]


# ---- mixed servers


def mixed(n: int = 1, **changes: Any) -> r.RequestMachine:
    made = machine(n, **changes)
    made.handle(r.PairPicked(pair("m0", "m0"), 40.0))
    return made


def test_a_mixed_server_gets_the_leg_once() -> None:
    m = machine(n=2)
    begun, *sends = m.handle(r.PairPicked(pair("m0", "m0"), 40.0))
    assert begun == r.Attempted(1, pair("m0", "m0"), "first", 3, 2)
    [(name, leg)] = starts(sends)
    assert (name, leg.key, leg.choices) == ("m0", LegKey("r", 1, 0), (0, 1))


def test_its_work_is_a_prompts_until_it_speaks_and_then_decode_until_it_ends() -> None:
    m = mixed()
    assert m.busy(r.Work.PREFILL) and m.busy(r.Work.DECODE)
    assert [type(i) for i in tokens(m, "m0", 0, 0, 5)] == [r.Emit]
    assert not m.busy(r.Work.PREFILL) and m.busy(r.Work.DECODE)
    last = tokens(m, "m0", 0, 1, 6, finish=FinishReason.LENGTH)
    assert [type(i) for i in last] == [r.Emit, r.ArmLingerTimer]
    assert ended(m, "m0") == [r.Finish()]
    assert (m.phase, m.cached_tokens, m.attempts_counted) == (r.Phase.ENDED, 2, 1)


@pytest.mark.parametrize("outcome", [Outcome.WORKER_LOST, Outcome.DRAINED, Outcome.DONE])
def test_what_it_says_of_a_leg_is_decodes_verdict(outcome: Outcome) -> None:
    m = mixed()
    tokens(m, "m0", 0, 0, 5)
    again = need(ended(m, "m0", outcome))
    assert again.prefer_decode is None and again.avoid == frozenset({"m0"}) and m.attempts_counted == 1
    [_, (_, leg)] = starts(m.handle(r.PairPicked(pair(), 50.0)))
    assert leg.token_ids == (*PROMPT, 5), "a pair goes on from what was accepted"


def test_what_it_gives_back_is_not_counted_and_what_it_refuses_is_the_clients_fault() -> None:
    m = mixed()
    assert need(ended(m, "m0", Outcome.GIVEN_BACK)).delay_s > 0 and m.attempts_counted == 0
    assert isinstance(failure(ended(mixed(), "m0", Outcome.REFUSED)), InvalidRequest)


def test_its_loss_replays_at_once_and_counts_as_one_crash() -> None:
    m = mixed()
    tokens(m, "m0", 0, 0, 5)
    assert need(lost(m, "m0", crashed=True)).avoid == frozenset({"m0"})
    m.handle(r.PairPicked(pair("m1", "m1"), 50.0))
    assert isinstance(failure(lost(m, "m1", crashed=True)), RequestFailed), "two incarnations died of it"


def test_a_stop_string_and_a_client_that_goes_abort_it_once() -> None:
    m = mixed(n=2)
    tokens(m, "m0", 0, 0, 5)
    assert aborts(m.handle(r.StopFound(0))) == [("m0", 0, 0)]
    assert aborts(m.handle(r.ClientGone("left"))) == [("m0", 0, None)]


# ---- a decode server drains


def handed_over(n: int = 1) -> tuple[r.RequestMachine, list[r.Instruction]]:
    """A request whose answer stands still at d0, with two tokens of each choice."""
    m = running(n=n)
    for choice in range(n):
        tokens(m, "d0", choice, 0, 10 + choice, 20)
    ended(m, "p0")
    asked = m.handle(r.TargetSeen())
    assert asked == [r.Send("d0", HandOver(LegKey("r", 1, 0)))]
    assert m.movable is None and m.stopping == "d0", "it is asked once"
    return m, ended(m, "d0", Outcome.HANDED_OVER)


def moving(m: r.RequestMachine) -> list[tuple[str, StartLeg]]:
    return starts(m.handle(r.PairPicked(replace(pair("d0", "d1"), moves=True), 41.0)))


def test_a_request_moves_with_its_last_token_as_the_first_of_the_next_server() -> None:
    m, said = handed_over()
    wish = need(said)
    assert (wish.cause, wish.source, wish.delay_s) == ("moved", pair().decode, 0.0)
    (source, sends), (target, receives) = moving(m)
    assert (source, target) == ("d0", "d1")
    assert sends.token_ids == receives.token_ids == (*PROMPT, 10), "the KV of the last token is not written yet"
    assert (sends.moves_attempt, sends.moved) == (1, False) and (receives.moves_attempt, receives.moved) == (0, True)
    assert (sends.peer.name, receives.peer.name) == ("d1", "d0")
    assert m.stopping == "d0" and m.attempts_counted == 1, "it costs no attempt"
    assert tokens(m, "d1", 0, 1, 20) == [], "the router has it"
    assert m.stopping == "" and m.movable == pair(decode="d1").decode
    assert tokens(m, "d1", 0, 2, 30)
    assert m.table.token_ids(0) == (10, 20, 30)


def test_choices_that_differ_move_each_by_itself() -> None:
    m, _ = handed_over(n=2)
    sent = [start for server, start in moving(m) if server == "d0"]
    assert [(start.token_ids, start.choices) for start in sent] == [((*PROMPT, 10), (0,)), ((*PROMPT, 11), (1,))]


def test_a_move_that_fails_is_replayed_from_every_token() -> None:
    for fail in (
        lambda m: ended(m, "d0", Outcome.GIVEN_BACK),
        lambda m: ended(m, "d1", Outcome.PEER_LOST),
        lambda m: lost(m, "d1"),
    ):
        m, _ = handed_over()
        moving(m)
        assert need(fail(m)).source is None
        again = starts(m.handle(r.PairPicked(pair("p0", "d1"), 42.0)))
        assert [start.token_ids for _, start in again] == [(*PROMPT, 10, 20)] * 2
        assert not any(start.moved or start.moves_attempt for _, start in again)


def test_the_loss_of_the_source_waits_for_what_the_other_server_says() -> None:
    m, _ = handed_over()
    moving(m)
    assert [type(i) for i in lost(m, "d0")] == [r.ArmVerdictTimer]
    tokens(m, "d1", 0, 1, 20)
    assert m.handle(r.VerdictTimeout(2, 0)) == [], "the KV was there"


def test_an_answer_that_ends_before_it_stops_moves_nowhere() -> None:
    m = running()
    m.handle(r.TargetSeen())
    tokens(m, "d0", 0, 0, 10, finish=FinishReason.STOP)
    assert [type(i) for i in ended(m, "d0") + ended(m, "p0")] == [r.Finish]


def test_an_answer_that_stands_still_goes_on_when_the_last_choice_beside_it_ends() -> None:
    """After a move each choice has a leg of its own; the next server drains, too, and stops one of them before the other ends."""
    for end in (
        lambda m: tokens(m, "d1", 1, 3, 40, prefix_no=1, finish=FinishReason.LENGTH),
        lambda m: m.handle(r.StopFound(1)),
    ):
        m, _ = handed_over(n=2)
        moving(m)
        for choice in (0, 1):
            tokens(m, "d1", choice, 1, 20, 30, prefix_no=choice)
            ended(m, "d0", prefix_no=choice)
        assert len(m.handle(r.TargetSeen())) == 2
        assert ended(m, "d1", Outcome.HANDED_OVER, prefix_no=0) == []
        assert need(end(m)).source == pair(decode="d1").decode
        assert m.handle(r.StopFound(1)) == [], "found in what came last"
        assert ended(m, "d1", prefix_no=1) == []
        sent = starts(m.handle(r.PairPicked(replace(pair("d1", "d2"), moves=True), 42.0)))
        assert [(server, start.choices) for server, start in sent] == [("d1", (0,)), ("d2", (0,))]


def test_a_mixed_server_is_not_asked_to_hand_over() -> None:
    m = machine()
    m.handle(r.PairPicked(pair("m0", "m0"), 40.0))
    assert m.movable is None


# ---- a decode server that computes the rest of the prompt itself


def local() -> r.RequestMachine:
    m = machine()
    assert m.facts.first
    m.handle(r.PairPicked(replace(pair("d0", "d0"), local_prefill=True), 40.0))
    return m


def test_it_hears_of_the_leg_once_and_what_it_says_is_decodes_word() -> None:
    m = machine()
    [(server, leg)] = starts(m.handle(r.PairPicked(replace(pair("d0", "d0"), local_prefill=True), 40.0)))
    assert (server, leg.local_prefill, leg.peer.name) == ("d0", True, "d0")
    assert tokens(m, "d0", 0, 0, 5)
    tokens(m, "d0", 0, 1, 6, finish=FinishReason.LENGTH)
    assert ended(m, "d0", cached=3) == [r.Finish()]
    assert m.cached_tokens == 3


def test_what_it_gives_back_goes_to_a_pair_with_it_at_no_cost() -> None:
    m = local()
    wish = need(ended(m, "d0", Outcome.GIVEN_BACK))
    assert (wish.prefer_decode, wish.avoid) == (pair("d0", "d0").decode, frozenset())
    assert not m.facts.first, "so that it is not asked again"
    begun, *sent = m.handle(r.PairPicked(pair("p0", "d0"), 41.0))
    assert isinstance(begun, r.Attempted) and not begun.again, "prefill is given it for the first time"
    sends = starts(sent)
    assert [(server, leg.local_prefill) for server, leg in sends] == [("p0", False), ("d0", False)]
    assert m.attempts_counted == 1


def test_its_answer_moves_where_it_drains() -> None:
    m = local()
    tokens(m, "d0", 0, 0, 10, 20)
    assert m.movable == pair("d0", "d0").decode
    assert m.handle(r.TargetSeen()) == [r.Send("d0", HandOver(LegKey("r", 1, 0)))]
    assert need(ended(m, "d0", Outcome.HANDED_OVER)).source == pair("d0", "d0").decode
    (_, sends), (_, receives) = moving(m)
    assert sends.moves_attempt == 1 and receives.moved and not (sends.local_prefill or receives.local_prefill)


def test_its_loss_is_replayed_from_the_tokens_that_came() -> None:
    m = local()
    tokens(m, "d0", 0, 0, 10)
    assert need(lost(m, "d0")).cause == "decode_lost"
    assert starts(m.handle(r.PairPicked(pair(), 41.0)))[0][1].token_ids == (*PROMPT, 10)
