"""Several ranks run ahead of the host together: what one samples, the next step of each finds on its device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages.layout import GroupPages
from disagg.messages.plan import NO_TOKEN, Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.models.ranks import Ranks
from disagg.types.sampling import SamplingParams
from disagg.worker.batch import UNKNOWN
from disagg.worker.executor import Executor
from tests.models.ranks import RankPool
from tests.models.reference import generate
from tests.models.tiny import make_tiny
from tests.worker.test_executor import CHUNKS, PROMPT, T, pages_of
from tests.worker.test_pipeline import plans_of, run_ahead

OUTPUTS = 6
SECOND_PROMPT = PROMPT[:9]


def executor_of(ranks: Ranks, model_dir: Path, meeting: Path) -> Executor:
    executor = Executor(ranks.rank, ranks.size)
    executor.load(model_dir, "float32", "cpu", threads=1)
    executor.connect(meeting, 30.0, 30.0)
    layout = pool_layout([spec_of(group, T) for group in executor.groups], T, T, PageSizing.MAX)
    executor.make_pool(64, layout.large_bytes, layout.strides, T, max_slots=4)
    return executor


def ahead(ranks: Ranks, model_dir: Path, meeting: Path) -> tuple[list[int], list[int]]:
    """What this rank reports as sampled, and what tokens it knows in the end."""
    executor = executor_of(ranks, model_dir, meeting)
    executor.overlaps = True
    results = run_ahead(executor, plans_of(executor))
    (sequence,) = executor._known.sequences.values()
    return [sampled.token_id for result in results for sampled in result.sampled], sequence.tokens


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_ranks_answer_as_one_though_no_token_is_on_the_host_yet(
    family: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    (answer,) = generate(make_tiny(family, tmp_path), [PROMPT], OUTPUTS)
    first, second = rank_pool.run(2, ahead, tmp_path, rank_pool.meeting())
    assert first == (answer.outputs, PROMPT + answer.outputs)
    assert second == ([], PROMPT + answer.outputs)


def mixed_plans(executor: Executor) -> list[WorkerPlan]:
    """Two sequences: one sampled with log-probabilities, one greedy that pauses for a step, and is the first to leave."""
    sampled = SamplingParams(max_tokens=100, temperature=0.8, seed=3, logprobs=2)
    greedy = SamplingParams(max_tokens=100, temperature=0.0)
    tables = (GroupPages(0, ()),) * len(executor.groups)
    starts = (
        SequenceStart(0, tuple(PROMPT), len(PROMPT), 0, tables, sampled, (SamplerStart(0, 0),)),
        SequenceStart(1, tuple(SECOND_PROMPT), len(SECOND_PROMPT), 0, tables, greedy, (SamplerStart(1, 0),)),
    )
    done = [0, 0]

    def run(sequence: int, count: int = 1) -> Run:
        begin, end = done[sequence], done[sequence] + count
        done[sequence] = end
        fresh = [20 * sequence + page for page in range(-(-begin // T), (end - 1) // T + 1)]
        whole = end >= len((PROMPT, SECOND_PROMPT)[sequence])
        return Run(sequence, count, whole, pages_of(executor, fresh) if fresh else ())

    first, second = len(PROMPT), len(SECOND_PROMPT)
    steps = [
        (run(0, first),),
        (run(1, second), run(0)),
        (run(1), run(0)),
        (run(0),),
        (run(0), run(1)),
        (run(0), run(1)),
        (run(0),),
    ]
    return [
        WorkerPlan(no, starts=(starts[no],) if no < 2 else (), ends=(1,) if no == 6 else (), runs=runs)
        for no, runs in enumerate(steps)
    ]


def several(ranks: Ranks, model_dir: Path, meeting: Path, overlaps: bool) -> list[tuple[int, int, object]]:
    """What this rank reports, in order."""
    executor = executor_of(ranks, model_dir, meeting)
    executor.overlaps = overlaps
    plans = mixed_plans(executor)
    results = run_ahead(executor, plans) if overlaps else [executor.run(plan) for plan in plans]
    assert all(UNKNOWN not in sequence.tokens for sequence in executor._known.sequences.values())
    return [(each.seq_id, each.token_id, each.logprobs) for result in results for each in result.sampled]


def test_sequences_join_pause_and_leave_while_ranks_run_ahead(rank_pool: RankPool, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    one_by_one = rank_pool.run(2, several, tmp_path, rank_pool.meeting(), False)
    run_ahead_of = rank_pool.run(2, several, tmp_path, rank_pool.meeting(), True)
    assert run_ahead_of == one_by_one
    assert len(one_by_one[0]) == 11 and not one_by_one[1]


def spoiled(ranks: Ranks, model_dir: Path, meeting: Path) -> tuple[list[int], int]:
    """Of a prompt whose logits are no numbers: what this rank reports, and of how many steps."""
    executor = executor_of(ranks, model_dir, meeting)
    executor.overlaps = True
    forward = executor.model.forward
    executor.model.forward = lambda *args, **kwargs: forward(*args, **kwargs).fill_(torch.nan)  # type: ignore[method-assign]
    results = run_ahead(executor, plans_of(executor))
    return [sampled.token_id for result in results for sampled in result.sampled], len(results)


def test_a_row_without_a_token_has_none_on_any_rank_and_stops_nobody(rank_pool: RankPool, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    first, second = rank_pool.run(2, spoiled, tmp_path, rank_pool.meeting())
    steps = len(CHUNKS) + OUTPUTS - 1
    assert first == ([NO_TOKEN] * OUTPUTS, steps) and second == ([], steps)
