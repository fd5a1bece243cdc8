"""A decode engine holds its next plan while KV is on its way, so that what lands joins the step after the one under way."""

from __future__ import annotations

import pytest

from disagg.engine.instructions import Instruction
from disagg.messages.plan import SampledToken, StepResult
from disagg.messages.transfer import ExpectPiece
from disagg.types.sampling import SamplingParams
from tests.engine.lone_engine import P_REF, Decode, facts, plans, start

STEP_S = 0.010
DUE_S = STEP_S - 0.003  # after a step has begun, while nothing else is known
FACTS = facts(prefix_cache=False, num_large=40)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def report(decode: Decode, now_s: float, *tokens: tuple[int, int]) -> list[Instruction]:
    """The oldest plan in flight has been computed, in STEP_S. tokens: (sequence, token)."""
    decode.now_s = now_s
    sampled = tuple(SampledToken(seq_id, 0, token) for seq_id, token in tokens)
    plan_no = decode.unreported.pop(0).plan_no
    return decode.do(decode.engine.step_done(StepResult(0, plan_no, sampled, STEP_S, 1.0, 2.0), decode.now))


@pytest.fixture
def decode() -> Decode:
    """One sequence decodes: a step is under way since 1.0 s, and how long it takes is known."""
    decode = Decode(FACTS)
    decode.joined(start("first", 5, params=LONG, peer=P_REF))
    report(decode, 0.99, (0, 40))
    report(decode, 1.0, (0, 41))
    assert len(decode.unreported) == 2, "nobody is expected: the next plan is sent at once"
    return decode


def expected(decode: Decode) -> ExpectPiece:
    """The second leg is granted, and its one piece has an entry."""
    return decode.receiving(start("second", 5, params=LONG, peer=P_REF))


def test_what_lands_before_the_plan_is_due_is_in_it(decode: Decode) -> None:
    expect = expected(decode)
    assert plans(report(decode, 1.01, (0, 42))) == [], "it is held for the second leg"
    assert decode.engine.due_s == pytest.approx(1.01 + DUE_S)
    decode.now_s = 1.014
    decode.first_tokens(start("second", 5, params=LONG, peer=P_REF))
    (plan,) = plans(decode.land(expect))
    assert {run.seq_id for run in plan.runs} == {0, 1}, "nobody else is on the way: it is sent at once"
    assert decode.engine.due_s is None


def test_once_it_is_due_it_is_sent(decode: Decode) -> None:
    expected(decode)
    report(decode, 1.01, (0, 42))
    decode.now_s = 1.01 + DUE_S - 1e-6
    assert plans(decode.do([])) == []
    decode.now_s = 1.01 + DUE_S + 1e-6
    (plan,) = plans(decode.do([]))
    assert {run.seq_id for run in plan.runs} == {0} and decode.engine.due_s is None
    assert plans(decode.do([])) == [], "as many are in flight as may be"


def test_if_nobody_wakes_the_engine_the_report_does(decode: Decode) -> None:
    expected(decode)
    report(decode, 1.01, (0, 42))
    (plan,) = plans(report(decode, 1.02, (0, 43)))
    assert plan.runs and decode.unreported == [plan]


def test_if_who_was_expected_does_not_come_it_is_sent(decode: Decode) -> None:
    expected(decode)
    report(decode, 1.01, (0, 42))
    decode.now_s = 1.012
    (plan,) = plans(decode.abort(start("second", 5, params=LONG, peer=P_REF)))
    assert {run.seq_id for run in plan.runs} == {0}


def test_who_waits_for_pages_is_not_waited_for(decode: Decode) -> None:
    decode.announced(start("second", 5, params=LONG, peer=P_REF))  # not bound: prefill has no grant
    assert len(plans(report(decode, 1.01, (0, 42)))) == 1


def test_what_a_person_is_told(decode: Decode) -> None:
    expected(decode)
    report(decode, 1.01, (0, 42))
    report(decode, 1.02, (0, 43))
    dump = decode.engine.dump()
    assert dump["plans held so far"] == 1 and dump["lead of plans ms"] == 3.0
