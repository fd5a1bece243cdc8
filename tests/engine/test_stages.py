"""A mixed server's engine with pipeline stages: plans in flight, computed stage by stage, say what one stage says.

Every stage is a simulated rank with pages of cells (sim_pages), so that a page given away too early is an assertion.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Instruction
from disagg.messages.layout import LayerGroup
from disagg.messages.legs import Outcome, StartLeg
from disagg.messages.plan import StepResult
from disagg.messages.sequence_diff import KnownSequences
from disagg.scheduler.pipeline import plans_in_flight
from disagg.scheduler.policies import POLICIES
from tests.engine.lone_engine import FULL, PARAMS, STATE, WINDOW, facts, outcomes, plans, said, start
from tests.engine.lone_mixed import Mixed
from tests.engine.sim_model import reference
from tests.engine.sim_pages import SimPages
from tests.engine.sim_server import Server, Worker
from tests.scheduler.mixed_policies import MIXED_POLICIES

GROUPS = ((FULL,), (WINDOW,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE))


class Rank(Worker):
    """A worker that only computes. All ranks keep all layers here: what is looked at is what they are told."""

    def __init__(self, facts: EngineFacts, rank: int) -> None:
        self.server, self.rank = (
            cast(Server, SimpleNamespace(facts=facts, name="mixed", world=SimpleNamespace(compute_s=0.001))),
            rank,
        )
        self.plans, self.results, self.known = deque(), deque(), KnownSequences()
        self.computed_plan, self.slots = -1, {}
        self.pages = SimPages(facts, f"rank {rank}")


class Staged(Mixed):
    """Plans reach every rank at once; a stage computes one when the stage before it has."""

    def __init__(self, facts: EngineFacts, rng: random.Random) -> None:
        super().__init__(facts)
        self.facts = facts
        self.ranks = [Rank(facts, rank) for rank in range(facts.ranks)]
        self.rng = rng
        self.most_in_flight = self.most_plans_of_one = 0
        self.told: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: list[Outcome] = []

    def do(self, out: list[Instruction]) -> list[Instruction]:
        out = super().do(out)
        for plan in plans(out):
            for rank in self.ranks:
                rank.plans.append(plan)
        in_flight = self.engine.pipeline.in_flight
        runs: dict[int, list[bool]] = defaultdict(list)
        for plan in in_flight:
            for run in plan.runs:
                runs[run.seq_id].append(run.sample)
        if self.facts.pp > 1:
            assert not any(any(samples[:-1]) for samples in runs.values()), "its next token is not known"
        self.most_plans_of_one = max(self.most_plans_of_one, *map(len, runs.values()), 0, 0)
        assert len(in_flight) <= plans_in_flight(self.facts.pp)
        self.most_in_flight = max(self.most_in_flight, len(in_flight))
        self.ended += outcomes(out)
        for name, choice, index, token in said(out):
            assert index == len(self.told[name, choice])
            self.told[name, choice].append(token)
        return out

    def turn(self) -> bool:
        """Some rank that can computes its next plan, and says so. False if none can."""
        able = [rank for rank in self.ranks if rank.plans and self._arrived(rank)]
        if not able:
            return False
        rank = self.rng.choice(able)
        rank.compute()
        self.now_s += self.rng.random() / 100
        self.do(self.engine.step_done(self._result(rank), self.now))
        return True

    def _result(self, rank: Rank) -> StepResult:
        return replace(rank.results.popleft(), compute_s=0.001)

    def _arrived(self, rank: Rank) -> bool:
        before = rank.rank - self.facts.tp
        return before < 0 or self.ranks[before].computed_plan >= rank.plans[0].plan_no


def some_facts(rng: random.Random, policy: str, groups: tuple[LayerGroup, ...]) -> EngineFacts:
    return facts(
        *groups,
        num_large=rng.choice((40, 60, 200)),
        policy=policy,
        max_model_len=60,
        chunk_tokens=60 if POLICIES[policy].whole_prompts else rng.choice((5, 8, 16)),
        max_slots=6 + 3,
        max_running=6,
        max_waiting=100,
        spare_tokens=rng.choice((0, 4)),
        lookahead_tokens=rng.choice((0, 8, 60)),
        tp=rng.choice((1, 1, 2)),
        pp=rng.choice((1, 2, 2, 3, 4)),
    )


def some_leg(rng: random.Random, number: int) -> StartLeg:
    params = replace(PARAMS, max_tokens=rng.randint(1, 25), n=rng.choice((1, 1, 2, 3)), ignore_eos=True, seed=number)
    tokens = rng.choice((1, 3, 4, 5, 8, 9, 17, 30))
    return start(f"r{number}", tokens, params.n, params, first_token=rng.randrange(2000))


@pytest.mark.parametrize("policy", MIXED_POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_stages_say_what_one_stage_says(policy: str, seed: int) -> None:
    rng = random.Random(f"stages {policy} {seed}")
    staged = Staged(some_facts(rng, policy, rng.choice(GROUPS)), rng)
    waiting = [some_leg(rng, number) for number in range(14)]
    legs = list(waiting)
    for _ in range(20_000):
        if waiting and rng.random() < 0.1:
            staged.start(waiting.pop(0))
        elif not staged.turn():
            staged.now_s += 0.05
            staged.do([])
            if not waiting and not staged.engine.pipeline.in_flight and staged.engine.idle:
                break
    assert staged.ended == [Outcome.DONE] * len(legs) and staged.used == 0 and staged.engine.idle
    for leg in legs:
        for choice in leg.choices:
            assert tuple(staged.told[leg.key.request_id, choice]) == reference(leg.token_ids, choice, leg.params, 60)


def test_what_decodes_is_shared_evenly_among_as_many_plans_as_there_are_stages() -> None:
    rng = random.Random(0)
    staged = Staged(facts(num_large=400, max_model_len=200, max_running=16, max_slots=32, chunk_tokens=64, pp=4), rng)
    for number in range(10):
        params = replace(PARAMS, max_tokens=100, ignore_eos=True)
        staged.start(start(f"r{number}", 3, 1, params, first_token=100 * number))
    for _ in range(400):
        staged.turn()
    sizes = [len(plan.runs) for plan in staged.engine.pipeline.in_flight]
    assert len(sizes) == 4 and max(sizes) == 3 and sum(sizes) >= 9


def test_a_prompt_that_is_alone_has_a_chunk_in_every_stage() -> None:
    staged = Staged(facts(num_large=400, max_model_len=400, chunk_tokens=16, pp=3), random.Random(3))
    staged.start(start("long", 200, 1, replace(PARAMS, max_tokens=3, ignore_eos=True)))
    while staged.turn():
        pass
    assert staged.most_plans_of_one == 3 and staged.ended == [Outcome.DONE]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_an_aborted_leg_is_computed_in_as_many_steps_as_were_under_way(pp: int) -> None:
    staged = Staged(facts(num_large=400, max_model_len=400, chunk_tokens=16, pp=pp), random.Random(3))
    leg = start("long", 300, 1, replace(PARAMS, max_tokens=3, ignore_eos=True))
    staged.start(leg)
    assert len(staged.engine.pipeline.in_flight) == plans_in_flight(pp)
    staged.abort(leg)
    while staged.turn():
        pass
    counted = staged.engine.counters.max_steps_after_abort
    assert counted == max(2, pp), "what operators are told of disagg_steps_after_abort"


def test_bubbles_and_computing_are_counted_by_stage() -> None:
    staged = Staged(facts(num_large=40, max_model_len=60, pp=2), random.Random(1))
    staged.start(start("alone", 6, 1, replace(PARAMS, max_tokens=9, ignore_eos=True)))
    while staged.turn():
        pass
    seconds = staged.engine.counters.stage_seconds
    plans_computed = staged.ranks[0].computed_plan + 1
    for stage in range(2):
        assert seconds["busy", stage] == pytest.approx(0.001 * plans_computed)
        assert seconds["bubble", stage] == pytest.approx(staged.now_s - 0.001 * plans_computed), "one plan at a time"


def test_chunks_behind_many_tokens_are_shorter_where_stages_wait_for_each_other() -> None:
    """Steps whose time is tokens and what they attend to: chunks of one prompt come to cost the same."""

    class Timed(Staged):
        def do(self, out: list[Instruction]) -> list[Instruction]:
            out = super().do(out)
            self.chunks = [*getattr(self, "chunks", ()), *(run.num_tokens for plan in plans(out) for run in plan.runs)]
            return out

        def _result(self, rank: Rank) -> StepResult:
            (plan,) = (plan for plan in self.engine.pipeline.in_flight if plan.plan_no == rank.computed_plan)
            seconds = 1e-6
            for run in plan.runs:
                sequence = self.engine.sequence(run.seq_id)
                assert sequence is not None
                seconds += run.num_tokens * (1 + (sequence.computed + run.num_tokens / 2) / 100) / 1000
            return replace(rank.results.popleft(), compute_s=seconds)

    def chunks(pp: int) -> list[int]:
        timed = Timed(facts(num_large=400, max_model_len=1500, chunk_tokens=64, pp=pp), random.Random(2))
        timed.start(start("long", 1200, 1, replace(PARAMS, max_tokens=1)))
        while timed.turn():
            pass
        return timed.chunks

    assert set(chunks(1)[:-1]) == {64}
    learned = chunks(2)[8:-1]
    assert learned == sorted(learned, reverse=True) and learned[0] > 2 * learned[-1]
