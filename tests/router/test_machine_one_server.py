"""One request's machine where one server has both halves: a mixed one, or decode that computes the rest of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from disagg.messages.legs import HandOver, Outcome
from disagg.router import machine as r
from disagg.types.errors import InvalidRequest, RequestFailed
from disagg.types.ids import FinishReason, LegKey
from tests.router.request_machines import (
    PROMPT,
    aborts,
    ended,
    failure,
    lost,
    machine,
    moving,
    need,
    pair,
    starts,
    tokens,
)

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
