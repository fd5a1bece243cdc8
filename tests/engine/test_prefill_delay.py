"""A mixed engine whose prompts wait for a better pass: what goes on meanwhile, what is counted, and that all of it ends."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from disagg.engine.core import Core
from disagg.engine.data_parallel import DataParallel
from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Counters, Instruction
from disagg.messages.legs import Outcome, StartLeg
from disagg.mixed_server.role import mixed_engine
from disagg.scheduler.policies import POLICIES
from disagg.scheduler.prefill_delayer import RankState, Together
from tests.engine.lone_engine import Lone, facts, outcomes, plans, said
from tests.engine.lone_mixed import Mixed, leg
from tests.scheduler.mixed_policies import MIXED_POLICIES

PASSES = 6
READY, BUSY = RankState(True, False, 3, 0), RankState(False, False, 3, 0)


class Beside(Together):
    """Another rank, which says this."""

    def __init__(self, state: RankState) -> None:
        super().__init__(1)
        self.state = state

    def gather(self, state: RankState) -> tuple[RankState, ...]:
        return *super().gather(state), self.state


class OneRank(DataParallel):
    """Of which tests look at the one that they have made."""

    @property
    def core(self) -> Core:
        return self.ranks[0].core

    @property
    def counters(self) -> Counters:
        return self.ranks[0].counters


class Delaying(Mixed):
    """A rank in lockstep with others, which `gather` stands for; by default it is alone."""

    def __init__(self, gather: Together | None = None, **changes: object) -> None:
        Lone.__init__(self)
        self.gather = gather or Together(1)
        self.engine = OneRank((mixed_engine(delaying_facts(**changes), self.gather),), self.gather)

    def begin(self, *legs: StartLeg) -> None:
        """In one pass, if they may."""
        for each in legs:
            self.engine.start_leg(1, each, self.now)
        self.do([])

    def steps_before(self, name: str) -> int:
        """Steps until this request is in one; others run in each of them."""
        for step in range(100):
            if self.unreported and name in self.names(self.unreported[-1]):
                return step
            assert self.unreported and self.names(self.unreported[-1]), "something runs while it waits"
            self.now_s += 0.25
            self.compute()
        raise AssertionError(f"{name} is never run")

    def passes(self, reason: str) -> int:
        """In which prompts might run, or not, for this reason."""
        return sum(count for key, count in self.engine.counters.prefill_delays.items() if key[2] == reason)

    def observed(self) -> list[tuple[str, float]]:
        """Of delays that ended."""
        return [each for each in self.engine.counters.observations if each[0].startswith("prefill_delay")]


def delaying_facts(**changes: object) -> EngineFacts:
    usual: dict[str, object] = {"max_model_len": 4096, "max_slots": 4 + 63, "max_running": 4, "chunk_tokens": 64}
    return facts(**{"num_large": 400, "prefill_delay_passes": PASSES, **usual, **changes})


def of_four() -> tuple[Delaying, dict[str, StartLeg]]:
    """Four of at most four decode, three of which began in one pass; the first delay has been let off."""
    mixed = Delaying()
    legs = {name: leg(name, 3, 500, first_token=1000 * at) for at, name in enumerate("abcd", 1)}
    mixed.begin(legs["a"], legs["b"], legs["c"])
    mixed.compute()
    mixed.start(legs["d"])
    assert mixed.steps_before("d") <= 1, "one slot where three may be wanted: let off"
    while any(s.is_prompt for s in mixed.engine.core.batch.running.values()):
        mixed.compute()
    assert len(mixed.engine.core.batch.running) == 4 and mixed.passes("delay") == 0
    return mixed, legs


def test_a_prompt_for_which_too_few_slots_are_free_waits_and_is_run_at_last() -> None:
    mixed, legs = of_four()
    mixed.start(leg("new", 3, 5, first_token=9000))
    for _ in range(4):
        mixed.compute()
    assert mixed.passes("delay") == 0, "no slot at all is free: nothing could be run"
    mixed.abort(legs["a"])
    assert mixed.steps_before("new") in (5, 6)
    assert mixed.passes("delay") == 5 and mixed.passes("wait_timeout") == 1
    (_, passes), (_, seconds) = mixed.observed()
    assert passes == 5 and seconds == pytest.approx(5 * 0.25)
    assert mixed.engine.counters.prefill_delays["all", True, "wait_timeout", True] == 1, "and it was run"


def test_enough_slots_end_the_delay() -> None:
    mixed, legs = of_four()
    mixed.start(leg("new", 3, 5, first_token=9000))
    mixed.abort(legs["a"])
    for _ in range(3):
        mixed.now_s += 0.25
        mixed.compute()
    assert mixed.passes("delay") == 3
    mixed.abort(legs["b"])
    mixed.abort(legs["c"])
    assert mixed.steps_before("new") <= 1
    assert mixed.passes("wait_success") == 1 and mixed.observed()[0] == ("prefill_delay_passes", 3)


def test_what_decodes_loses_no_step_while_prompts_wait() -> None:
    mixed, legs = of_four()
    mixed.start(leg("new", 200, 5, first_token=9000))
    mixed.abort(legs["a"])
    for _ in range(20):
        mixed.compute()
        assert mixed.names(mixed.unreported[-1]).keys() >= {"b", "c", "d"}


def test_without_a_setting_nothing_waits_and_nothing_is_counted() -> None:
    mixed = Delaying(prefill_delay_passes=0)
    mixed.begin(*(leg(name, 3, 500, first_token=1000 * at) for at, name in enumerate("abc", 1)))
    mixed.compute()
    for name in "de":
        mixed.start(leg(name, 3, 1, first_token=ord(name) * 100))
        assert mixed.steps_before(name) <= 1
        mixed.compute()
        mixed.compute()
        mixed.compute()
    assert not mixed.engine.counters.prefill_delays


def test_an_idle_engine_has_no_passes() -> None:
    mixed = Delaying()
    for _ in range(5):
        mixed.do([])
    assert not mixed.engine.counters.prefill_delays


# ---- beside another rank


def beside_busy(**changes: object) -> Delaying:
    """`x` decodes here, and so does everything at the other rank."""
    other = Beside(READY)
    mixed = Delaying(other, **changes)
    mixed.start(leg("x", 3, 500))
    mixed.compute()
    other.state = BUSY
    mixed.compute()
    mixed.engine.counters.prefill_delays.clear()
    return mixed


def test_a_prompt_waits_for_the_other_rank_and_goes_on_once_it_has_begun() -> None:
    mixed = beside_busy(chunk_tokens=16)
    mixed.start(leg("new", 35, 1, first_token=9000))  # chunks of 15, beside one that decodes
    chunks = []
    for _ in range(20):
        mixed.compute()
        step = mixed.names(mixed.unreported[-1])
        assert step["x"] == 1
        chunks.append(step.get("new", 0))
    assert chunks == [*[0] * 5, 15, 15, 5, *[0] * 12]
    assert mixed.passes("wait_timeout") == 1 and mixed.passes("delay") == 5


def test_nothing_waits_for_a_rank_that_has_prompts_too() -> None:
    mixed = beside_busy()
    gather = mixed.gather
    mixed.start(leg("new", 30, 3, first_token=9000))
    for _ in range(3):
        mixed.compute()
    assert mixed.passes("delay") == 3
    gather.state = READY
    assert mixed.steps_before("new") <= 1 and mixed.passes("wait_success") == 1


def test_nothing_waits_while_a_pool_is_hardly_used() -> None:
    low, high = (beside_busy(prefill_delay_low_usage=usage) for usage in (0.9, 0.0001))
    for mixed in (low, high):
        mixed.start(leg("new", 30, 3, first_token=9000))
        mixed.steps_before("new")
    assert low.passes("delay") == 0 < low.passes("token_watermark")
    assert high.passes("delay") == 5 and high.passes("token_watermark") == 0


def test_what_gave_way_is_no_prompt_and_goes_on_while_prompts_wait() -> None:
    other = Beside(READY)
    mixed = Delaying(
        other, num_large=8, max_model_len=60, spare_tokens=0, prefix_cache=False, prefill_delay_passes=10_000
    )
    mixed.begin(leg("a", 4, 22), leg("b", 4, 22, first_token=500))
    mixed.compute()
    other.state = BUSY
    mixed.start(leg("new", 4, 2, first_token=900))
    ended, went_on = Counter[Outcome](), 0
    while mixed.unreported:
        ended.update(outcomes(out := mixed.compute()))
        for plan in plans(out):
            assert "new" not in mixed.names(plan)
            went_on += any(run.num_tokens > 1 for run in plan.runs)
        if ended[Outcome.DONE] == 2:
            break
    assert mixed.engine.counters.preemptions["memory"] and went_on, "it was computed again"
    assert ended == {Outcome.DONE: 2} and mixed.passes("delay") > 5


def test_passes_in_which_nothing_is_computed_follow_each_other_at_once() -> None:
    """Another rank decodes; here nothing does, and no step would ever end."""
    mixed = Delaying(Beside(BUSY))
    mixed.start(leg("new", 30, 2))
    assert mixed.names(mixed.unreported[-1]) == {"new": 30}
    assert mixed.passes("delay") == 5 and mixed.passes("wait_timeout") == 1


def test_each_decision_is_a_line_for_who_looks_closely(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="disagg.engine.passes"):
        mixed = Delaying(Beside(BUSY), prefill_delay_passes=2)
        mixed.start(leg("new", 30, 2))
    first, second, *_ = caplog.messages
    assert first == (
        "prompts of pass 0: mixed, allow False (delay), executed False, after 0 passes; rows [(1, 0, 0, 0), (0, 0, 3, 0)]"
    )
    assert "pass 1: mixed, allow True (wait_timeout), executed True, after 1 passes" in second
    assert len(caplog.messages) == sum(mixed.engine.counters.prefill_delays.values())


# ---- whatever comes


class Anybody(Together):
    """Another rank, of which anything is heard."""

    def __init__(self, rng: random.Random, max_running: int) -> None:
        super().__init__(1)
        self._rng, self._most = rng, max_running

    def gather(self, state: RankState) -> tuple[RankState, ...]:
        rng = self._rng
        prefillable = rng.random() < 0.3
        other = RankState(
            prefillable, prefillable and rng.random() < 0.1, rng.randint(0, self._most), rng.randint(0, self._most)
        )
        return *super().gather(state), other


@pytest.mark.parametrize("policy", MIXED_POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_whatever_waits_for_whom(policy: str, seed: int) -> None:
    rng = random.Random(f"delays {policy} {seed}")
    most = rng.choice((1, 3, 6))
    mixed = Delaying(
        Anybody(rng, most) if seed % 2 else None,
        num_large=rng.choice((16, 24, 60)),
        policy=policy,
        max_model_len=60,
        chunk_tokens=60 if POLICIES[policy].whole_prompts else rng.choice((5, 8, 16)),
        max_slots=most + 3,
        max_running=most,
        max_waiting=100,
        spare_tokens=rng.choice((0, 4)),
        lookahead_tokens=rng.choice((0, 8, 60)),
        prefill_delay_passes=rng.choice((2, 5, 30)),
        prefill_delay_low_usage=rng.choice((0.0, 0.3)),
    )
    waiting = [
        leg(
            f"r{i}", rng.choice((1, 4, 5, 8, 17, 30)), rng.randint(1, 25), rng.randrange(2000), rng.choice((1, 1, 2, 3))
        )
        for i in range(14)
    ]
    legs, ended, told = list(waiting), Counter[Outcome](), Counter[tuple[str, int]]()
    ran_in = 0

    def hear(out: list[Instruction]) -> None:
        nonlocal ran_in
        ended.update(outcomes(out))
        told.update((name, choice) for name, choice, *_ in said(out))
        for plan in plans(out):
            ran_in += any(s.is_prompt for run in plan.runs if (s := mixed.engine.core.batch.sequence(run.seq_id)))

    for _ in range(5000):
        if waiting and (not mixed.unreported or rng.random() < 0.3):
            hear(mixed.start(waiting.pop(0)))
        elif mixed.unreported:
            hear(mixed.compute())
        elif mixed.engine.idle:
            break
        else:  # who gave way may be waiting for time to pass
            assert mixed.engine.core.batch.parked, "no step under way, and nothing else happens"
            mixed.now_s += 5.0
            hear(mixed.do([]))
        mixed.now_s += 0.05
    assert ended == {Outcome.DONE: len(legs)} and mixed.used == 0 and mixed.engine.idle
    assert all(told[each.key.request_id, choice] == each.params.max_tokens for each in legs for choice in each.choices)
    counted = mixed.engine.counters.prefill_delays
    assert ran_in == sum(count for key, count in counted.items() if key[3])
