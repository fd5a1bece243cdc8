"""Step times are learned from steps: budgets that come to the time that is asked for, also where measurements are rough."""

from __future__ import annotations

import random

import pytest

from disagg.config.check import WHOLE_PROMPTS
from disagg.scheduler.policies import POLICIES
from disagg.scheduler.step_times import LEAST, StepTimes, fit
from tests.scheduler.mixed_policies import MIXED_POLICIES


class Machine:
    """Steps take fixed + each * tokens + attended * what they attend to, and now and then three times as long."""

    def __init__(self, fixed: float, each: float, attended: float, seed: int = 0, noise: float = 0.0) -> None:
        self.truth = fixed, each, attended
        self.rng = random.Random(seed)
        self.noise = noise

    def seconds(self, runs: list[tuple[int, int]]) -> float:
        fixed, each, attended = self.truth
        exact = fixed + sum(n * each + attended * n * (start + n / 2) for start, n in runs)
        held_up = 3.0 if self.noise and self.rng.random() < 0.03 else 1.0
        return exact * held_up * (1 + self.noise * self.rng.uniform(-1, 1))


@pytest.mark.parametrize("truth", [(2e-3, 1e-5, 2e-9), (0.0, 1e-4, 0.0), (5e-3, 2e-5, 1e-8)])
def test_without_noise_the_fit_is_exact(truth: tuple[float, float, float]) -> None:
    machine = Machine(*truth)
    runs = [[(start, n)] for start in (0, 500, 4000, 20000) for n in (1, 64, 256, 700)]
    found = fit([(float(n), n * (s + n / 2), machine.seconds([(s, n)])) for ((s, n),) in runs])
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("target_s", [0.01, 0.03])
def test_chunks_come_to_take_as_long_as_they_should(seed: int, target_s: float) -> None:
    """A long prompt beside sixteen that decode: the median step is right, and few are far off."""
    machine, times = Machine(2e-3, 1e-5, 2e-9, seed, noise=0.1), StepTimes()
    took = []
    position = 0
    for _ in range(150):
        decodes = [(machine.rng.randrange(3000), 1) for _ in range(16)]
        budget = times.budget(target_s, 8192)
        left = budget.less(sum(budget.cost_of(start, 1) for start, _ in decodes), 16)
        chunk = max(16, left.tokens_at(position))
        runs = [*decodes, (position, chunk)]
        took.append(machine.seconds(runs))
        times.observe(runs, took[-1])
        position = (position + chunk) % 60_000
    late = sorted(took[30:])
    assert late[len(late) // 2] == pytest.approx(target_s, rel=0.15)
    assert late[len(late) * 9 // 10] < 1.4 * target_s


def test_nothing_is_said_before_enough_is_known_and_a_step_never_has_more_tokens_than_it_may() -> None:
    times = StepTimes()
    for n in range(LEAST - 1):
        times.observe([(0, 100 + n)], 0.001)
        assert times.budget(1.0, 512).tokens_at(0) == 512
    times.observe([(0, 200)], 0.002)
    assert times.budget(1e9, 512).tokens_at(0) == 512
    assert times.budget(1e-9, 512).tokens_at(0) == 0


@pytest.mark.parametrize("steps", [[(1.0, 0.5, 0.01)], [(64.0, 100.0, 1e-9)] * 9, [(5.0, 9.0, 1.0), (5.0, 9.0, 3.0)]])
def test_steps_that_are_all_alike_give_a_usable_fit(steps: list[tuple[float, float, float]]) -> None:
    fixed, each, attended = fit(steps)
    assert fixed >= 0 and attended >= 0 and each > 0


def test_the_configuration_knows_which_policies_compute_prompts_whole() -> None:
    assert tuple(name for name in MIXED_POLICIES if POLICIES[name].whole_prompts) == WHOLE_PROMPTS
