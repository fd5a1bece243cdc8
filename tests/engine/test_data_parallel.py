"""Data-parallel ranks of one server: who gets what, and that all step together where they have to, whatever comes."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.engine.data_parallel import CacheUnion, DataParallel
from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Instruction, PublishKv, ToRouter, ToWorkers
from disagg.engine.now import Now
from disagg.messages.legs import AbortLeg, KvEvents, LegEnd, LegTokens, Outcome, ServerState, StartLeg
from disagg.messages.plan import SampledToken, StepResult, WorkerPlan
from disagg.messages.sequence_diff import KnownSequences
from disagg.mixed_server.role import mixed_engines
from disagg.scheduler.policies import POLICIES
from tests.engine.lone_engine import facts
from tests.engine.lone_mixed import leg as leg_until_eos
from tests.engine.sim_model import next_token, reference
from tests.scheduler.mixed_policies import MIXED_POLICIES

ROUTER = 1


def leg(name: str, tokens: int, outputs: int, first_token: int = 1) -> StartLeg:
    """Of exactly so many outputs."""
    each = leg_until_eos(name, tokens, outputs, first_token)
    return replace(each, params=replace(each.params, ignore_eos=True))


class Ranks:
    """An engine of several ranks, and workers that compute what it plans. lockstep: a step is one of all ranks."""

    def __init__(self, ranks: int, lockstep: bool, **changes: object) -> None:
        usual: dict[str, object] = {"max_model_len": 4096, "max_slots": 4 + 63, "max_running": 4, "chunk_tokens": 64}
        self.facts: EngineFacts = facts(**{"num_large": 400, **usual, **changes})
        self.engine: DataParallel = mixed_engines(self.facts, ranks, lockstep)
        self.lockstep = lockstep
        self.now_s = 0.0
        self.plans: list[deque[WorkerPlan]] = [deque() for _ in range(ranks)]
        self.known = [KnownSequences() for _ in range(ranks)]
        self.cached: set[tuple[int, bytes]] = set()
        self.said: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[str, Outcome] = {}
        self.idle_steps = 0

    def do(self, out: list[Instruction]) -> None:
        out = [*out, *self.engine.schedule(Now(self.now_s))]
        sent = Counter[int]()
        for each in out:
            match each:
                case ToWorkers():
                    sent[each.plan.dp_rank] += 1
                    self.plans[each.plan.dp_rank].append(each.plan)
                case PublishKv():
                    assert not set(each.events.stored) & set(each.events.removed)
                    self.cached |= set(each.events.stored)
                    self.cached -= set(each.events.removed)
                case ToRouter():
                    self._hear(each)
        if self.lockstep:
            assert len({sent[rank] for rank in range(len(self.plans))}) == 1, f"plans of ranks: {sent}"
        self.engine.check_integrity()
        assert self.cached == set(self.engine.kv_snapshot().stored)

    def _hear(self, told: ToRouter) -> None:
        message = told.message
        assert told.router == ROUTER
        if isinstance(message, LegTokens):
            self.said.setdefault((message.key.request_id, message.choice), []).extend(message.token_ids)
        elif isinstance(message, LegEnd):
            assert message.key.request_id not in self.ended, "a leg ends once"
            self.ended[message.key.request_id] = message.outcome

    def start(self, each: StartLeg) -> int:
        """The rank that it went to."""
        self.do(self.engine.start_leg(ROUTER, each, Now(self.now_s)))
        at = [rank for rank, engine in enumerate(self.engine.ranks) if each.key in engine.core.legs]
        assert len(at) == 1
        return at[0]

    def compute(self, rank: int) -> None:
        """This rank reports its oldest plan."""
        plan = self.plans[rank].popleft()
        _, _, runs = self.known[rank].apply(plan)
        computed = sum(run.num_tokens for run in runs)
        if self.lockstep and plan.rows:
            assert len(plan.rows) == len(self.plans) and plan.rows[rank] == computed
            self.idle_steps += not runs
        else:
            assert not plan.rows and (not runs or not self.lockstep)
        sampled = []
        for run in runs:
            if not run.sample:
                continue
            tokens = tuple(run.sequence.tokens[: run.start + run.num_tokens])
            for sampler in run.sequence.samplers:
                token = next_token(tokens, sampler.choice, run.sequence.params.seed)
                sampled.append(SampledToken(run.sequence.seq_id, sampler.choice, token))
                if len(run.sequence.samplers) == 1:
                    run.sequence.tokens.append(token)
        self.now_s += 0.05
        result = StepResult(rank * self.facts.tp, plan.plan_no, tuple(sampled), 0.01, 1.0, 2.0)
        self.do(self.engine.step_done(result, Now(self.now_s)))

    def can_compute(self) -> list[int]:
        return [rank for rank, plans in enumerate(self.plans) if plans]

    def step(self) -> None:
        """Every rank reports its oldest plan."""
        for rank in self.can_compute():
            self.compute(rank)

    def until_idle(self) -> None:
        for _ in range(3000):
            if not self.can_compute():
                break
            self.step()
        assert self.engine.idle and not self.engine.computing


def counted(ranks: Ranks) -> list[dict[tuple[str, bool, str], int]]:
    """Of each rank, passes by what was decided in them."""
    found = []
    for engine in ranks.engine.ranks:
        passes = Counter[tuple[str, bool, str]]()
        for (estimate, allow, reason, _), count in engine.counters.prefill_delays.items():
            passes[estimate, allow, reason] += count
        found.append(dict(passes))
    return found


# ---- who gets what


def test_requests_go_to_the_rank_with_least_to_do() -> None:
    ranks = Ranks(3, lockstep=False)
    assert [ranks.start(leg(f"r{i}", 8, 20, first_token=100 * i + 1)) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    ranks.until_idle()
    assert set(ranks.ended.values()) == {Outcome.DONE} and len(ranks.ended) == 6


def test_a_request_goes_where_its_prefix_is_unless_that_rank_has_more_to_do_than_is_spared() -> None:
    ranks = Ranks(2, lockstep=False)
    first = ranks.start(leg("a", 41, 2))
    ranks.until_idle()
    other = 1 - first
    assert ranks.start(leg("new", 20, 2, first_token=900)) == other, "whose pool is empty"
    assert ranks.start(leg("again", 41, 2)) == first, "40 tokens are cached there"
    ranks.start(leg("x", 30, 60, first_token=2000))
    ranks.until_idle()
    ranks.start(leg("long", 10, 400, first_token=3000))
    busy = max(range(2), key=lambda at: ranks.engine._tokens[at])
    assert ranks.start(leg("once more", 41, 2)) == 1 - busy


def test_a_leg_that_is_there_already_begins_on_no_other_rank() -> None:
    ranks = Ranks(2, lockstep=False)
    each = leg("a", 8, 4)
    ranks.start(each)
    assert ranks.start(each) in (0, 1)
    assert sum(each.key in engine.core.legs for engine in ranks.engine.ranks) == 1
    ranks.until_idle()
    assert ranks.ended == {"a": Outcome.DONE}


def test_load_is_that_of_all_ranks_and_a_sequence_fits_one_pool() -> None:
    ranks = Ranks(2, lockstep=True)
    for i in range(3):
        ranks.start(leg(f"r{i}", 8, 20, first_token=100 * i + 1))
    load, alone = ranks.engine.load(ServerState.READY), ranks.engine.ranks[0].load(ServerState.READY)
    assert load.running + load.waiting == 3 and load.pages_total == 2 * alone.pages_total
    assert load.memory is not None
    assert load.memory.large_used == load.pages_used > alone.pages_used
    assert load.memory.groups[0].used_pages == sum(
        each.load(ServerState.READY).memory.groups[0].used_pages  # type: ignore[union-attr]
        for each in ranks.engine.ranks
    )
    assert ranks.engine.max_tokens_in_pool == ranks.engine.ranks[0].max_tokens_in_pool


PAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=60)


@given(changes=PAGES, cut=st.integers(1, 7))
def test_what_is_cached_on_any_rank_is_cached(changes: list[tuple[int, int, bool]], cut: int) -> None:
    """changes: (rank, page, stored or removed)."""
    union, held, heard = CacheUnion(), [set[int]() for _ in range(3)], set[tuple[int, bytes]]()
    for at in range(0, len(changes), cut):
        news = []
        for rank in range(3):
            before = set(held[rank])
            for who, page, stored in changes[at : at + cut]:
                if who == rank:
                    (held[rank].add if stored else held[rank].discard)(page)
            named = [
                tuple((0, bytes([page])) for page in pages) for pages in (held[rank] - before, before - held[rank])
            ]
            news.append(KvEvents(*named))
        events = union.told(news)
        assert not heard & set(events.stored) and set(events.removed) <= heard
        heard = heard - set(events.removed) | set(events.stored)
        assert heard == {(0, bytes([page])) for pages in held for page in pages} == set(union.snapshot().stored)


# ---- in lockstep


def test_a_rank_without_rows_has_an_empty_plan_in_each_step() -> None:
    ranks = Ranks(3, lockstep=True)
    at = ranks.start(leg("a", 8, 5))
    for _ in range(5):
        plans = [each[0] for each in ranks.plans]
        tokens = sum(run.num_tokens for run in plans[at].runs)
        rows = tuple(tokens if rank == at else 0 for rank in range(3)) if tokens else ()
        assert [plan.rows for plan in plans] == [rows] * 3
        assert not any(plan.runs for rank, plan in enumerate(plans) if rank != at)
        ranks.step()
    ranks.until_idle()
    assert ranks.ended == {"a": Outcome.DONE} and ranks.idle_steps == 2 * 5


def test_no_step_begins_before_every_rank_has_a_place_for_it() -> None:
    ranks = Ranks(2, lockstep=True)
    ranks.start(leg("a", 8, 50))
    while not all(len(plans) == 2 for plans in ranks.plans):
        ranks.step()
    ranks.compute(0)
    assert [len(plans) for plans in ranks.plans] == [1, 2], "rank 1 has two under way"
    ranks.compute(0)
    assert [len(plans) for plans in ranks.plans] == [0, 2]
    ranks.compute(1)
    assert [len(plans) for plans in ranks.plans] == [1, 2]


def test_ranks_of_a_dense_model_do_not_wait_for_each_other() -> None:
    ranks = Ranks(2, lockstep=False)
    at = ranks.start(leg("a", 8, 50))
    assert ranks.plans[at] and not ranks.plans[1 - at]
    other = ranks.start(leg("b", 8, 5, first_token=100))
    assert other == 1 - at
    while "b" not in ranks.ended:
        ranks.compute(other)
    assert "a" not in ranks.ended and not any(counted(ranks))


def test_a_prompt_that_waited_for_the_other_rank_is_recorded_with_its_passes_and_its_time() -> None:
    ranks = Ranks(2, lockstep=True, prefill_delay_passes=6)
    ranks.start(leg("x", 8, 400))
    for _ in range(10):
        ranks.step()
    for engine in ranks.engine.ranks:
        engine.counters.prefill_delays.clear()
        engine.counters.observations.clear()
    at = ranks.start(leg("new", 8, 3, first_token=900))
    for _ in range(12):
        ranks.step()
    for rank, engine in enumerate(ranks.engine.ranks):
        waits = {name: value for name, value in engine.counters.observations if name.startswith("prefill_delay")}
        if rank == at:
            assert waits["prefill_delay_passes"] == 5 and waits["prefill_delay_seconds"] > 0
        else:
            assert not waits, "none of its prompts has waited"
        assert (
            engine.counters.prefill_delays["mixed", False, "delay", False]
            + engine.counters.prefill_delays["mixed", False, "delay", True]
            == 5
        )
        assert engine.counters.prefill_delays["mixed", True, "wait_timeout", rank == at] == 1


def test_a_prompt_that_is_alone_on_idle_ranks_waits_by_a_real_clock_and_is_counted_once() -> None:
    """Nobody decodes, so its passes follow each other at once: all of them at one moment, by the clock of events."""
    ticks = itertools.count(1)
    ranks = Ranks(2, lockstep=True, prefill_delay_passes=6)
    ranks.engine = mixed_engines(ranks.facts, 2, True, lambda: next(ticks) / 1000)
    at = ranks.start(leg("alone", 8, 3))
    assert ranks.plans[at][0].runs
    waits = [engine.counters.observations for engine in ranks.engine.ranks]
    passes, seconds = (each for each in waits[at] if each[0].startswith("prefill_delay"))
    assert passes == ("prefill_delay_passes", 5)
    assert seconds == ("prefill_delay_seconds", pytest.approx(0.005)), "five passes of a millisecond"
    assert not any(name.startswith("prefill_delay") for name, _ in waits[1 - at]), "it has had no prompt"
    ranks.until_idle()
    assert ranks.ended == {"alone": Outcome.DONE}


def test_later_chunks_are_executed_though_no_prompt_could_begin_or_another_one_waits() -> None:
    """As docs/operations.md says of disagg_prefill_delay_outcomes_total."""
    ranks = Ranks(2, lockstep=True, prefill_delay_passes=6)
    at = ranks.start(leg("long", 640, 3))
    for _ in range(3):
        ranks.step()
    outcomes = ranks.engine.ranks[at].counters.prefill_delays
    assert outcomes["none", True, "none", True] == 4, "chunks 2 to 5"
    assert ranks.start(leg("waits", 8, 3, first_token=9000)) != at
    for _ in range(3):
        ranks.step()
    assert outcomes["mixed", False, "delay", True] == 3
    ranks.until_idle()
    assert set(ranks.ended.values()) == {Outcome.DONE}


def test_an_idle_group_has_no_passes() -> None:
    ranks = Ranks(2, lockstep=True, prefill_delay_passes=6)
    for _ in range(5):
        ranks.do([])
    assert not any(counted(ranks)) and not any(ranks.plans)


def test_workers_that_are_lost_end_every_leg_on_every_rank() -> None:
    ranks = Ranks(2, lockstep=True, prefill_delay_passes=6)
    for i in range(9):
        ranks.start(leg(f"r{i}", 8, 20, first_token=100 * i + 1))
    ranks.step()
    ranks.do(ranks.engine.end_all(Outcome.WORKER_LOST, "rank 1 was killed"))
    assert ranks.ended == {f"r{i}": Outcome.WORKER_LOST for i in range(9)}


# ---- whatever comes


@pytest.mark.parametrize("policy", MIXED_POLICIES)
@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_to_which_rank_all_is_said_exactly_and_no_rank_disagrees(
    policy: str, lockstep: bool, seed: int
) -> None:
    rng = random.Random(f"ranks {policy} {lockstep} {seed}")
    most = rng.choice((1, 3, 6))
    ranks = Ranks(
        rng.choice((2, 3, 4)),
        lockstep,
        num_large=rng.choice((16, 24, 60)),
        policy=policy,
        max_model_len=60,
        chunk_tokens=60 if POLICIES[policy].whole_prompts else rng.choice((5, 8, 16)),
        max_slots=most + 3,
        max_running=most,
        max_waiting=100,
        spare_tokens=rng.choice((0, 4)),
        lookahead_tokens=rng.choice((0, 8, 60)),
        prefill_delay_passes=rng.choice((0, 2, 5, 30)),
        prefill_delay_low_usage=rng.choice((0.0, 0.3)),
    )
    waiting = [
        leg_until_eos(
            f"r{i}", rng.choice((1, 4, 5, 8, 17, 30)), rng.randint(1, 25), rng.randrange(5), rng.choice((1, 1, 2, 3))
        )
        for i in range(30)
    ]
    legs, aborted = list(waiting), set[str]()
    for _ in range(20_000):
        can = ranks.can_compute()
        if waiting and (not can or rng.random() < 0.15):
            ranks.start(waiting.pop(0))
        elif can and rng.random() < 0.01:
            started = [each for each in legs if each not in waiting and each.key.request_id not in ranks.ended]
            if started:
                gone = rng.choice(started)
                aborted.add(gone.key.request_id)
                ranks.do(ranks.engine.abort_leg(AbortLeg(gone.key)))
        elif can:
            ranks.compute(rng.choice(can))
        elif ranks.engine.idle:
            break
        else:  # who gave way may be waiting for time to pass
            ranks.now_s += 5.0
            ranks.do([])
    assert ranks.engine.idle and ranks.ended == {
        each.key.request_id: Outcome.ABORTED if each.key.request_id in aborted else Outcome.DONE for each in legs
    }
    for each in legs:
        for choice in each.choices:
            said = tuple(ranks.said.get((each.key.request_id, choice), ()))
            whole = reference(each.token_ids, choice, each.params, 60)
            assert said == whole[: len(said)]
            assert len(said) == len(whole) or each.key.request_id in aborted
    decided = counted(ranks)
    assert all(each == decided[0] for each in decided), "every rank has decided the same in every pass"
    assert bool(decided[0]) == (lockstep and ranks.facts.scheduling.prefill_delay_passes > 0)
