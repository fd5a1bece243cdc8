"""Plans are held for as long as their steps still follow the ones before them: on a machine that is simulated."""

from __future__ import annotations

import itertools
import random

import pytest

from disagg.scheduler.late_plans import AHEAD_S, FIRST_LEAD_S, LEAST_LEAD_S, MOST_SHARE, RECENT, LatePlans

STEP_S = 0.006


class Machine:
    """Steps follow each other where their plans are there in time: a plan takes way_s to be launched, a report report_s to be
    heard. Every plan is sent when it is due."""

    def __init__(self, way_s: float, report_s: float = 0.0003, noise: float = 0.0, seed: int = 0) -> None:
        self.late = LatePlans()
        self.way_s, self.report_s, self.noise = way_s, report_s, noise
        self.rng = random.Random(seed)
        self.idle_s: list[float] = []
        self.held_s: list[float] = []

    def varied(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.rng.uniform(-1, 1))

    def run(self, steps: int, step_s: float = STEP_S) -> None:
        late = self.late
        heard_s = ended_s = 0.0
        late.sent(0, 0.0, alone=True, held=False)
        ended_s = heard_s = self.varied(step_s)
        late.computed(0, step_s, 0.0, heard_s, decodes_only=True)
        late.sent(1, heard_s, alone=True, held=False)
        began_s = heard_s + self.way_s
        for number in itertools.count(2):
            if number > steps:
                return
            # Plan number - 1 has begun; the next one is sent when it is due, or when that is reported.
            seconds = self.varied(step_s)
            ended_s = began_s + seconds
            reported_s = ended_s + self.report_s
            due_s = max(late.due_s, heard_s)
            self.held_s.append(due_s - heard_s)
            if due_s < reported_s:
                late.sent(number, due_s, alone=False, held=due_s > heard_s)
            late.computed(number - 1, seconds, self.ahead_s if number > 2 else 0.0, reported_s, decodes_only=True)
            if due_s >= reported_s:
                due_s = reported_s
                late.sent(number, due_s, alone=True, held=True)
            heard_s = reported_s
            launched_s = due_s + self.varied(self.way_s)
            self.ahead_s = ended_s - launched_s
            began_s = max(ended_s, launched_s)
            self.idle_s.append(began_s - ended_s)


@pytest.mark.parametrize("way_s", [0.0005, 0.001, 0.002])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_once_the_lead_is_learned_plans_are_held_and_steps_follow_each_other(way_s: float, noise: float) -> None:
    machine = Machine(way_s, noise=noise)
    machine.run(2000)
    settled = machine.idle_s[200:]
    assert sum(settled) / len(settled) < 0.01 * STEP_S, "the device stands idle"
    held_s = sum(machine.held_s[200:]) / len(settled)
    # What is left before the end of a step is what a plan needs, and not much more.
    assert STEP_S - held_s < max(LEAST_LEAD_S, way_s + AHEAD_S + machine.report_s) + 0.15 * STEP_S


def test_where_plans_need_most_of_a_step_none_is_held_and_little_is_lost() -> None:
    machine = Machine(0.005)
    machine.run(4000)
    settled_s = machine.idle_s[200:]
    assert sum(settled_s) / len(settled_s) < 0.02 * STEP_S
    assert sum(held_s > 0 for held_s in machine.held_s[200:]) < 0.1 * len(settled_s)


def test_what_held_a_machine_up_for_once_is_forgotten() -> None:
    machine = Machine(0.001)
    machine.run(100)
    machine.late.lead_s = 10 * STEP_S
    machine.run(40_000)
    assert machine.late.lead_s < MOST_SHARE * STEP_S and machine.held_s[-1] > 0


def test_nothing_is_held_while_it_is_not_known_how_long_steps_take() -> None:
    late = LatePlans()
    late.sent(0, 5.0, alone=True, held=False)
    assert late.due_s <= 5.0
    late.computed(0, 0.5, None, 5.5, decodes_only=False)  # a prompt's chunk says nothing of steps that decode
    assert late.due_s <= 5.5
    late.computed(1, 0.02, None, 6.0, decodes_only=True)
    assert late.due_s == pytest.approx(6.015), "a quarter of a long step is left"


def test_the_shortest_of_the_last_steps_counts() -> None:
    late = LatePlans()
    for number, seconds in enumerate([0.006, 0.030, 0.008, *[0.010] * RECENT]):
        late.computed(number, seconds, None, 1.0, decodes_only=True)
        shortest = 0.006 if number < RECENT else 0.008 if number < RECENT + 2 else 0.010
        assert late.due_s == pytest.approx(1.0 + shortest - max(FIRST_LEAD_S, shortest / 4))


def test_a_plan_that_was_sent_before_it_was_due_says_nothing_of_the_lead() -> None:
    late = LatePlans()
    late.computed(0, 0.010, None, 1.0, decodes_only=True)
    late.sent(1, 1.002, alone=False, held=True)  # whom it waited for has come
    late.computed(1, 0.010, -0.005, 1.01, decodes_only=True)
    assert late.lead_s == FIRST_LEAD_S
    late.sent(2, 1.0171, alone=False, held=True)
    late.computed(2, 0.010, -0.005, 1.02, decodes_only=True)
    assert late.lead_s > FIRST_LEAD_S
