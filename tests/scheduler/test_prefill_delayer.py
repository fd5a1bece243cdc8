"""When prompts wait for a better pass: what four ranks say, and what they all make of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.scheduler import prefill_delayer as delayer

MAX_RUNNING = 16
PASSES = 6
LOW = 0.3


class Ranks:
    """One rank of a group in which the others say what they are told to. Passes follow each other in tenths of a second."""

    def __init__(self, passes: int = PASSES, low_usage: float = 0.0, skips: bool = False) -> None:
        self.limits = delayer.Limits(passes, MAX_RUNNING, low_usage)
        self.delayer = delayer.PrefillDelayer(self.limits, self)
        self.now_s = 100.0
        self.states: tuple[delayer.RankState, ...] = ()
        self.heard: list[delayer.RankState] = []
        if not skips:
            full = [delayer.RankState(True, False, MAX_RUNNING, 1)] * 4
            assert self.one(full).verdict.allow, "the first delay is let off"
        self.heard.clear()

    def gather(self, state: delayer.RankState) -> tuple[delayer.RankState, ...]:
        self.heard.append(state)
        return state, *self.states[1:]

    def one(self, states: list[delayer.RankState], executed: bool = False) -> delayer.Outcome:
        """A pass; rank 0 asks if it could run prompts."""
        self.states = tuple(states)
        one = delayer.SinglePass(self.delayer, lambda prefillable: states[0], self.now_s)
        if states[0].prefillable:
            one.may_prefill()
        self.now_s += 0.1
        return one.finalize(executed=executed)


def states(
    low_usage: float, prefillable: str, usage: tuple[float, ...], running: tuple[int, ...], largest: tuple[int, ...]
) -> list[delayer.RankState]:
    """Of four ranks."""
    limits = delayer.Limits(PASSES, MAX_RUNNING, low_usage)
    return [
        limits.state(prefillable=bool(int(p)), usage=u, running=r, largest_batch=b)
        for p, u, r, b in zip(prefillable, usage, running, largest, strict=True)
    ]


USED = (0.9, 0.8, 0.7, 0.9)
LITTLE = (0.9, 0.1, 0.7, 0.9)  # of rank 1
FEW, MANY = (12, 3, 11, 12), (12, 3, 13, 12)  # that run, beside 4 and 3 free slots
BURST, NO_BURST = (1, 4, 2, 0), (1, 3, 2, 0)  # prompts that began at once

# which ranks   watermark  usage   running  largest    estimate, allow, reason after 0, 2 and 5 passes of waiting
TABLE = [
    ("1111", 0.0, USED, FEW, BURST, "all", ("no_wait", "wait_success", "wait_success")),
    ("1111", 0.0, LITTLE, FEW, NO_BURST, "all", ("no_wait", "wait_success", "wait_success")),
    ("1111", LOW, LITTLE, MANY, NO_BURST, "all", ("no_wait", "wait_success", "wait_success")),
    ("1111", 0.0, USED, MANY, BURST, "all", ("delay", "delay", "wait_timeout")),
    ("1111", LOW, USED, MANY, BURST, "all", ("delay", "delay", "wait_timeout")),
    ("1111", LOW, LITTLE, MANY, BURST, "all", ("delay", "delay", "wait_timeout")),  # a pool is for some ranks alone
    ("1100", 0.0, USED, FEW, NO_BURST, "mixed", ("delay", "delay", "wait_timeout")),
    ("1100", 0.0, LITTLE, FEW, BURST, "mixed", ("delay", "delay", "wait_timeout")),  # off
    ("1100", LOW, USED, FEW, BURST, "mixed", ("delay", "delay", "wait_timeout")),
    ("1100", LOW, LITTLE, FEW, NO_BURST, "mixed", ("token_watermark",) * 3),
    ("1100", LOW, LITTLE, MANY, BURST, "mixed", ("token_watermark",) * 3),
    ("0111", LOW, LITTLE, MANY, BURST, "mixed", ("token_watermark",) * 3),  # whichever rank it is
    ("1011", LOW, LITTLE, FEW, BURST, "mixed", ("delay", "delay", "wait_timeout")),  # it has no prompts
    ("0000", 0.0, USED, MANY, BURST, "none", ("none",) * 3),
    ("0000", LOW, LITTLE, FEW, NO_BURST, "none", ("none",) * 3),
    ("0000", 0.0, LITTLE, FEW, BURST, "none", ("none",) * 3),
]


def case(number: int) -> None:
    which, low_usage, usage, running, largest, found, reasons = TABLE[number]
    said = tuple(states(low_usage, which, usage, running, largest))
    limits = delayer.Limits(PASSES, MAX_RUNNING, low_usage)
    for passes, reason in zip((0, 2, PASSES - 1), reasons, strict=True):
        delay = delayer.Delay(passes, 7.0) if passes else None
        verdict = delayer.decide(said, delay, limits, skips=False)
        got = (verdict.estimate.value, verdict.allow, verdict.reason.value, verdict.skipped)
        assert got == (found, reason != "delay", reason, False), f"after {passes} passes"


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_what_four_ranks_make_of_what_they_say(number: int) -> None:
    case(number)


def test_the_first_delay_for_want_of_slots_is_let_off_once_and_one_for_other_ranks_is_not() -> None:
    ranks = Ranks(skips=True)
    others = states(0.0, "1100", USED, MANY, BURST)
    full = states(0.0, "1111", USED, MANY, BURST)
    said = [ranks.one(each).verdict for each in (others, full, full, full)]
    assert [(each.reason.value, each.skipped) for each in said] == [
        ("delay", False),
        ("wait_success", True),
        ("delay", False),
        ("delay", False),
    ]


def test_a_pass_with_enough_slots_does_not_use_up_the_one_that_is_let_off() -> None:
    ranks = Ranks(skips=True)
    enough, full = states(0.0, "1111", USED, FEW, BURST), states(0.0, "1111", USED, MANY, BURST)
    assert [ranks.one(each).verdict.reason.value for each in (enough, full, full)] == ["no_wait", "no_wait", "delay"]


@pytest.mark.parametrize("which", ["1111", "1100"])
def test_prompts_delayed_for_5_passes_and_then_allowed_have_waited_for_5_passes_and_some_time(which: str) -> None:
    ranks = Ranks()
    full = states(0.0, which, USED, MANY, BURST)
    outcomes = [ranks.one(full) for _ in range(PASSES + 1)]
    assert [each.verdict.reason.value for each in outcomes] == ["delay"] * 5 + ["wait_timeout", "delay"]
    ended = outcomes[5].delay
    assert ended is not None and ended.passes == 5, "before it was allowed: after that nothing is left of it"
    assert ranks.now_s - 0.2 - ended.since_s == pytest.approx(0.5)
    assert outcomes[6].delay is None and ranks.delayer.delay == delayer.Delay(1, ranks.now_s - 0.1)


@pytest.mark.parametrize("ends", ["1111", "0000"])
def test_whatever_allows_ends_the_delay(ends: str) -> None:
    ranks = Ranks()
    some = states(0.0, "1000", USED, FEW, NO_BURST)
    for _ in range(3):
        ranks.one(some)
    outcome = ranks.one(states(0.0, ends, USED, FEW, NO_BURST))
    assert outcome.verdict.allow and outcome.delay is not None and outcome.delay.passes == 3
    assert ranks.delayer.delay is None
    again = [ranks.one(some).verdict.reason.value for _ in range(PASSES)]
    assert again == ["delay"] * 5 + ["wait_timeout"], "from the beginning"


def test_of_one_pass_nothing_is_delayed() -> None:
    ranks = Ranks(passes=1)
    for which in ("1111", "1000"):
        assert ranks.one(states(0.0, which, USED, MANY, BURST)).verdict.reason.value == "wait_timeout"


def test_a_pass_is_negotiated_once_however_often_it_is_asked() -> None:
    ranks = Ranks()
    ranks.states = full = tuple(states(0.0, "1111", USED, MANY, BURST))
    one = delayer.SinglePass(ranks.delayer, lambda prefillable: full[0], 0.0)
    assert not ranks.heard
    assert [one.may_prefill() for _ in range(3)] == [False] * 3
    assert not one.finalize(executed=False).verdict.allow
    assert len(ranks.heard) == 1 and ranks.delayer.delay == delayer.Delay(1, 0.0)


def test_a_rank_that_did_not_ask_takes_part_as_one_without_prompts() -> None:
    ranks = Ranks(low_usage=LOW)
    ranks.states = tuple(states(LOW, "1111", USED, FEW, NO_BURST))
    one = delayer.SinglePass(
        ranks.delayer,
        lambda prefillable: ranks.limits.state(prefillable=prefillable, usage=0.1, running=5, largest_batch=2),
        0.0,
    )
    outcome = one.finalize(executed=False)
    assert ranks.heard == [delayer.RankState(False, False, 5, 2)], "nor has it anything to force"
    assert outcome.verdict.reason.value == "delay" and outcome.states[0] == ranks.heard[0]


def test_what_was_executed_is_in_the_outcome() -> None:
    ranks = Ranks()
    enough = states(0.0, "1111", USED, FEW, NO_BURST)
    assert [ranks.one(enough, executed).executed for executed in (True, False)] == [True, False]


def test_a_pool_at_the_watermark_is_used_enough() -> None:
    limits = delayer.Limits(PASSES, MAX_RUNNING, LOW)
    forced = [
        limits.state(prefillable=True, usage=usage, running=0, largest_batch=0).force for usage in (0.0, 0.29, LOW)
    ]
    assert forced == [True, True, False]
    off = delayer.Limits(PASSES, MAX_RUNNING, 0.0)
    assert not off.state(prefillable=True, usage=0.0, running=0, largest_batch=0).force


def test_one_burst_does_not_raise_the_bar_for_good() -> None:
    largest = delayer.LargestBatch(10)
    seen = []
    for pass_no in range(30):
        seen.append(largest.at(pass_no))
        largest.add(pass_no, {0: 2, 3: 9, 5: 4, 12: 3}.get(pass_no, 0))
    assert seen == [0, 2, 2, 2, *[9] * 10, 4, 4, *[3] * 7, *[0] * 7]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_the_largest_batch_is_that_of_the_window(batches: list[int], window: int) -> None:
    largest = delayer.LargestBatch(window)
    for pass_no, prompts in enumerate(batches):
        assert largest.at(pass_no) == max(batches[max(0, pass_no - window) : pass_no], default=0)
        largest.add(pass_no, prompts)


state = st.builds(
    delayer.RankState, st.booleans(), st.booleans(), st.integers(0, MAX_RUNNING), st.integers(0, MAX_RUNNING)
)


@settings(max_examples=200)
@given(st.lists(st.lists(state, min_size=4, max_size=4), max_size=40), st.integers(1, 8))
def test_no_prompt_waits_for_as_many_passes_as_are_configured(said: list[list[delayer.RankState]], passes: int) -> None:
    ranks = Ranks(passes)
    delayed = 0
    for each in said:
        outcome = ranks.one(each)
        delayed = 0 if outcome.verdict.allow else delayed + 1
        assert delayed < passes
        assert outcome.verdict.allow or any(one.prefillable for one in each), "it waits for nothing"
        assert (ranks.delayer.delay.passes if ranks.delayer.delay is not None else 0) == delayed


NAMED = (
    *((lambda number=number: case(number)) for number in range(len(TABLE))),
    test_the_first_delay_for_want_of_slots_is_let_off_once_and_one_for_other_ranks_is_not,
    test_a_pass_with_enough_slots_does_not_use_up_the_one_that_is_let_off,
    lambda: test_prompts_delayed_for_5_passes_and_then_allowed_have_waited_for_5_passes_and_some_time("1111"),
    lambda: test_prompts_delayed_for_5_passes_and_then_allowed_have_waited_for_5_passes_and_some_time("1100"),
    lambda: test_whatever_allows_ends_the_delay("1111"),
    lambda: test_whatever_allows_ends_the_delay("0000"),
    test_of_one_pass_nothing_is_delayed,
    test_a_pass_is_negotiated_once_however_often_it_is_asked,
    test_a_rank_that_did_not_ask_takes_part_as_one_without_prompts,
    test_what_was_executed_is_in_the_outcome,
    test_a_pool_at_the_watermark_is_used_enough,
    test_one_burst_does_not_raise_the_bar_for_good,
)
