"""Several ranks' executors compute the same plans: one of them says what was sampled, and all of them know it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from disagg.memory.groups import spec_of
from disagg.memory.layout import pool_layout
from disagg.messages.layout import GroupPages
from disagg.messages.plan import NO_TOKEN, Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.models.model import PagedModel
from disagg.models.ranks import Ranks
from disagg.models.stage_links import StageLinks
from disagg.types.sampling import SamplingParams
from disagg.worker.executor import Executor
from disagg.worker.profile import largest_step
from tests.models.ranks import RankPool
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.worker.test_executor import overflowing

T = 4
PROMPT = tuple(random.Random(5).randrange(VOCAB_SIZE) for _ in range(21))
CHUNKS = (16, 5, 1, 1, 1, 1)
NUM_LARGE = 80
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=7, logprobs=1)


def tables_of(groups: int) -> tuple[GroupPages, ...]:
    """Pages that lie in large pages of their own, however many a large page has of them."""
    return tuple(GroupPages(0, tuple(range(64 * group, 64 * group + 8))) for group in range(groups))


def run(ranks: Ranks, model_dir: Path, meeting: Path) -> tuple[list[int], list[int], int]:
    """What this rank reports as sampled, what tokens it knows, and the bytes of its pool."""
    executor = Executor(ranks.rank, ranks.size)
    executor.load(model_dir, "float32", "cpu", threads=1)
    executor.connect(meeting, 30.0, 30.0)
    layout = pool_layout([spec_of(group, T) for group in executor.groups], T, T)
    pool_bytes = executor.make_pool(NUM_LARGE, layout.large_bytes, layout.strides, T, max_slots=4)
    tables = tables_of(len(executor.groups))
    start = SequenceStart(0, PROMPT, len(PROMPT), 0, tables, PARAMS, (SamplerStart(0, 0),))
    sampled = []
    for plan_no, tokens in enumerate(CHUNKS):
        plan = WorkerPlan(plan_no, starts=(start,) if plan_no == 0 else (), runs=(Run(0, tokens, plan_no > 0),))
        result = executor.run(plan)
        assert result.rank == ranks.rank
        sampled += [token.token_id for token in result.sampled]
    return sampled, executor._known.sequences[0].tokens[len(PROMPT) :], pool_bytes


def test_one_rank_reports_what_all_of_them_take(rank_pool: RankPool, tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "llama")
    tokens, known, whole_bytes = run(Ranks(), model_dir, tmp_path / "alone")
    assert tokens == known and len(tokens) == len(CHUNKS) - 1
    first, second = rank_pool.run(2, run, model_dir, rank_pool.meeting())
    assert first == (tokens, tokens, whole_bytes // 2)
    assert second == ([], tokens, whole_bytes // 2)


def profiled(ranks: Ranks, model_dir: Path) -> int:
    """Tokens that the largest step sampled on this rank."""
    sampled = largest_step(PagedModel.load(model_dir, "float32", "cpu", ranks), chunk_tokens=16, max_slots=3)
    return 0 if sampled is None else sampled.token_ids.shape[0]


def test_the_largest_step_runs_on_every_rank_and_samples_on_one(rank_pool: RankPool, tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path, max_position_embeddings=40)
    assert rank_pool.run(2, profiled, model_dir) == [3, 0]


def staged(ranks: Ranks, model_dir: Path, meeting: Path, tp: int, tokens: list[int]) -> tuple[list[int], list[int]]:
    """What this rank of several stages reports as sampled, and what tokens it knows. tokens: what plans say was sampled."""
    executor = Executor(ranks.rank, tp, pp=ranks.size // tp)
    executor.load(model_dir, "float32", "cpu", threads=1)
    executor.connect(meeting, 30.0, 30.0)
    layout = pool_layout([spec_of(group, T) for group in executor.groups], T, T)
    executor.make_pool(NUM_LARGE, layout.large_bytes, layout.strides, T, max_slots=4)
    tables = tables_of(len(executor.model.whole_groups))
    start = SequenceStart(0, PROMPT, len(PROMPT), 0, tables, PARAMS, (SamplerStart(0, 0),))
    sampled = []
    for plan_no, count in enumerate(CHUNKS):
        news = tuple(tokens[plan_no - 2 : plan_no - 1]) if plan_no > 1 else ()
        run = Run(0, count, plan_no > 0, token_ids=news)
        result = executor.run(WorkerPlan(plan_no, starts=(start,) if plan_no == 0 else (), runs=(run,)))
        assert result.rank == ranks.rank
        sampled += [token.token_id for token in result.sampled]
    ranks.sum(torch.zeros(1))  # nobody goes before all have what was sent to them
    return sampled, executor._known.sequences[0].tokens[len(PROMPT) :]


@pytest.mark.parametrize(("tp", "stages"), [(1, 2), (1, 3), (2, 2)])
def test_the_last_stage_says_what_one_stage_says_and_all_know_what_plans_told_them(
    rank_pool: RankPool, tmp_path: Path, tp: int, stages: int
) -> None:
    """The windows' layers and the full one's are in different stages."""
    model_dir = make_tiny("gemma3_text", tmp_path / "gemma3")
    tokens, _, _ = run(Ranks(), model_dir, tmp_path / "alone")
    answers = rank_pool.run(tp * stages, staged, model_dir, rank_pool.meeting(), tp, tokens)
    samples = tp * (stages - 1)
    assert [sampled for sampled, _ in answers] == [tokens if rank == samples else [] for rank in range(tp * stages)]
    assert all(known == tokens[:-1] for _, known in answers)


def poisoned(ranks: Ranks, model_dir: Path, meeting: Path) -> list[tuple[int, int]]:
    """What is sampled of a prompt that overflows in the first stage, and then of two that get its pages."""
    executor = Executor(ranks.rank, pp=ranks.size)
    executor.load(model_dir, "float32", "cpu", threads=1)
    executor.connect(meeting, 30.0, 30.0)
    layout = pool_layout([spec_of(group, T) for group in executor.groups], T, T)
    executor.make_pool(NUM_LARGE, layout.large_bytes, layout.strides, T, max_slots=4)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    prompts = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6))
    starts = tuple(
        SequenceStart(number, prompt, len(prompt), 0, (GroupPages(0, ()),), params, (SamplerStart(number, 0),))
        for number, prompt in enumerate(prompts)
    )
    pages = (((0, 1),), ((0, 1),), ((2, 3),))
    firsts = tuple(Run(number, len(prompts[number]), True, pages[number]) for number in range(3))
    seconds = tuple(Run(number, 1, True, token_ids=(9,)) for number in (1, 2))
    plans = (
        WorkerPlan(0, starts=starts[:1], runs=firsts[:1]),
        WorkerPlan(1, ends=(0,), starts=starts[1:], runs=firsts[1:]),
        WorkerPlan(2, runs=seconds),
    )
    sampled = [token for plan in plans for token in executor.run(plan).sampled]
    ranks.sum(torch.zeros(1))  # nobody goes before all have what was sent to them
    return [(token.seq_id, token.token_id) for token in sampled]


def test_no_stage_leaves_what_overflowed_to_who_gets_its_pages_next(rank_pool: RankPool, tmp_path: Path) -> None:
    """Only the last stage sees that a row has no token, and the pages of every stage have it."""
    overflowing(tmp_path, token_id=7)
    _, sampled = rank_pool.run(2, poisoned, tmp_path, rank_pool.meeting())
    assert [seq_id for seq_id, _ in sampled] == [0, 1, 2, 1, 2]
    assert [seq_id for seq_id, token_id in sampled if token_id == NO_TOKEN] == [0]


def profiled_stage(ranks: Ranks, model_dir: Path) -> int:
    links = StageLinks(ranks.rank, ranks.size)
    sampled = largest_step(PagedModel.load(model_dir, "float32", "cpu", links=links), chunk_tokens=16, max_slots=3)
    return 0 if sampled is None else sampled.token_ids.shape[0]


def test_the_largest_step_runs_on_every_stage_by_itself(rank_pool: RankPool, tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path, max_position_embeddings=40)
    assert rank_pool.run(2, profiled_stage, model_dir) == [0, 3]
