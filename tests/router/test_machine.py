"""One request's machine: events in, instructions out. From its first pair to its one end, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import LegEnd, LegTokens, Outcome, StartLeg, TimelineEvent
from disagg.router import machine as r
from disagg.router.view import NoPair, NoPairReason
from disagg.types.errors import Cancelled, DeadlineExceeded, InvalidRequest, NoCompatiblePeer, RequestFailed
from disagg.types.ids import FinishReason, LegKey
from tests.router.request_machines import PROMPT, aborts, ended, failure, lost, machine, pair, running, starts, tokens


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


def test_refused_is_final_and_the_clients_fault() -> None:
    for server, other in (("p0", "d0"), ("d0", "p0")):
        refused = ended(running(), server, Outcome.REFUSED)
        assert isinstance(failure(refused), InvalidRequest)
        assert aborts(refused) == [(other, 0, None)]


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
