"""When a store that fails is left alone, and when it is tried again."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given, settings

from disagg.offload.breaker import Breaker, StoreState
from disagg.offload.causes import Cause


def fail(breaker: Breaker, now_s: float) -> None:
    call = breaker.begin(now_s)
    assert call is not None
    breaker.end(call, now_s, Cause.FAILED)


def test_a_few_failures_in_a_row_open_it_and_one_success_between_them_does_not() -> None:
    breaker = Breaker(failures=3)
    for _ in range(4):
        fail(breaker, 0)
        fail(breaker, 0)
        call = breaker.begin(0)
        assert call is not None
        breaker.end(call, 0, None)
    assert breaker.state is StoreState.OK
    for _ in range(3):
        fail(breaker, 0)
    assert breaker.state is StoreState.DEGRADED
    assert breaker.begin(0.5) is None
    assert breaker.opened == 1


def test_after_a_pause_one_call_tries_and_each_pause_is_longer() -> None:
    breaker = Breaker(failures=1, pause_s=1, most_pause_s=4)
    fail(breaker, 0)
    now_s = 0.0
    for pause_s in (1, 2, 4, 4):
        assert breaker.begin(now_s + pause_s - 0.01) is None
        now_s += pause_s
        trial = breaker.begin(now_s)
        assert trial is not None
        assert breaker.begin(now_s) is None, "one call tries; the others do not wait"
        breaker.end(trial, now_s, Cause.LATE)
    assert breaker.failed_calls == {Cause.FAILED: 1, Cause.LATE: 4}


def test_it_closes_by_itself_when_the_trial_succeeds() -> None:
    breaker = Breaker(failures=1, pause_s=1)
    fail(breaker, 0)
    trial = breaker.begin(2)
    assert trial is not None
    breaker.end(trial, 2, None)
    assert breaker.state is StoreState.OK
    assert breaker.begin(2) is not None
    fail(breaker, 3)
    assert breaker.begin(3.5) is None and breaker.begin(4.1) is not None, "the pause is a short one again"


def test_it_may_be_told_never_to_open() -> None:
    breaker = Breaker(failures=math.inf)
    for _ in range(100):
        fail(breaker, 0)
    assert breaker.state is StoreState.OK and breaker.failed_calls == {Cause.FAILED: 100}


def test_calls_from_before_that_fail_after_it_has_closed_do_not_open_it_again() -> None:
    breaker = Breaker(failures=3, pause_s=1)
    hanging = [breaker.begin(0) for _ in range(6)]
    for call in hanging[:3]:
        assert call is not None
        breaker.end(call, 10, Cause.LATE)
    trial = breaker.begin(12)
    assert trial is not None
    breaker.end(trial, 12, None)
    for call in hanging[3:]:
        assert call is not None
        breaker.end(call, 13, Cause.LATE)
    assert breaker.state is StoreState.OK and breaker.opened == 1
    assert breaker.failed_calls == {Cause.LATE: 6}
    for _ in range(3):
        fail(breaker, 14)
    assert breaker.state is StoreState.DEGRADED


def test_a_call_from_before_says_nothing_of_how_it_is_now() -> None:
    breaker = Breaker(failures=2)
    early = breaker.begin(0)
    assert early is not None
    fail(breaker, 0)
    fail(breaker, 0)
    breaker.end(early, 0, None)
    assert breaker.state is StoreState.DEGRADED


def test_a_trial_that_nobody_waits_for_any_more_is_made_again() -> None:
    breaker = Breaker(failures=1)
    fail(breaker, 0)
    trial = breaker.begin(10)
    assert trial is not None
    breaker.give_up(trial, 10)
    assert breaker.begin(10) is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(["begin", "ok", "bad", "give up"]), st.integers(0, 9))))
def test_whatever_happens_a_store_that_answers_again_is_used_again(events: list[tuple[float, str, int]]) -> None:
    breaker, calls, now_s = Breaker(), [], 0.0
    for later_s, what, number in events:
        now_s += later_s
        if what == "begin":
            call = breaker.begin(now_s)
            calls += [call] if call is not None else []
        elif calls:
            call = calls.pop(number % len(calls))
            if what == "give up":
                breaker.give_up(call, now_s)
            else:
                breaker.end(call, now_s, None if what == "ok" else Cause.FAILED)
    for call in calls:
        breaker.end(call, now_s, Cause.LATE)
    trial = breaker.begin(now_s + 30)
    assert trial is not None, "it is left alone for ever"
    breaker.end(trial, now_s + 30, None)
    assert breaker.state is StoreState.OK
