"""One request's machine when its decode server drains: the answer moves with its KV, or is run again."""

from __future__ import annotations

from msgspec.structs import replace

from disagg.messages.legs import HandOver, Outcome
from disagg.router import machine as r
from disagg.types.ids import FinishReason, LegKey
from tests.router.request_machines import PROMPT, ended, lost, machine, moving, need, pair, running, starts, tokens


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
