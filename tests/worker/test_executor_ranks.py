"""Several ranks' executors compute the same plans: one of them says what was sampled, and all of them know it."""

from __future__ import annotations

import random
from pathlib import Path

from disagg.memory.groups import spec_of
from disagg.memory.layout import plan_layout
from disagg.messages.layout import GroupPages
from disagg.messages.plan import Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.models.model import PagedModel
from disagg.models.ranks import Ranks
from disagg.types.sampling import SamplingParams
from disagg.worker.executor import Executor
from disagg.worker.profile import largest_step
from tests.models.ranks import RankPool
from tests.models.tiny import VOCAB_SIZE, make_tiny

T = 4
PROMPT = tuple(random.Random(5).randrange(VOCAB_SIZE) for _ in range(21))
CHUNKS = (16, 5, 1, 1, 1, 1)
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=7, logprobs=1)


def run(ranks: Ranks, model_dir: Path, meeting: Path) -> tuple[list[int], list[int], int]:
    """What this rank reports as sampled, what tokens it knows, and the bytes of its pool."""
    executor = Executor(ranks.rank, ranks.size)
    executor.load(model_dir, "float32", "cpu", threads=1)
    executor.connect(meeting, 30.0, 30.0)
    layout = plan_layout([spec_of(group, T) for group in executor.groups], T, T)
    pool_bytes = executor.make_pool(16, layout.large_bytes, layout.strides, T, max_slots=4)
    tables = (GroupPages(0, tuple(range(8))),)
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
