"""Steps that are launched before the ones before them are collected answer as steps one after the other do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from disagg.messages.plan import Run, SamplerStart, SequenceStart, StepResult, WorkerPlan
from disagg.types.sampling import SamplingParams
from disagg.worker.batch import UNKNOWN
from disagg.worker.executor import Executor, Launched
from tests.models.reference import generate
from tests.models.tiny import make_tiny
from tests.worker.test_executor import PROMPT, T, executor_of, pages_of, prefill_plans

OUTPUTS = 6


def plans_of(executor: Executor) -> list[WorkerPlan]:
    """PROMPT in chunks, then one token a step."""
    plans = prefill_plans(executor)
    for plan_no, position in enumerate(range(len(PROMPT), len(PROMPT) + OUTPUTS - 1), len(plans)):
        pages = pages_of(executor, [position // T]) if position % T == 0 else ()
        plans.append(WorkerPlan(plan_no, runs=(Run(0, 1, True, pages),)))
    return plans


def run_ahead(executor: Executor, plans: list[WorkerPlan]) -> list[StepResult]:
    """Every step is launched before the one before it is collected, as a worker does on a GPU."""
    results: list[StepResult] = []
    under_way: Launched | None = None
    for plan in plans:
        launched = executor.launch(plan)
        if under_way is not None:
            results.append(executor.collect(under_way))
        under_way = launched
    assert under_way is not None
    return [*results, executor.collect(under_way)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "jamba"])
def test_a_token_need_not_be_on_the_host_for_the_next_step(family: str, tmp_path: Path) -> None:
    (answer,) = generate(make_tiny(family, tmp_path), [PROMPT], OUTPUTS)
    executor = executor_of(tmp_path)
    executor.overlaps = True
    results = run_ahead(executor, plans_of(executor))
    assert [result.plan_no for result in results] == list(range(len(results)))
    assert [sampled.token_id for result in results for sampled in result.sampled] == answer.outputs
    (sequence,) = executor._known.sequences.values()
    assert UNKNOWN not in sequence.tokens and sequence.tokens == PROMPT + answer.outputs


def test_sequences_join_and_leave_between_steps_that_overlap(tmp_path: Path) -> None:
    """One has its token on the host and one has not; one leaves while its last step runs."""
    make_tiny("llama", tmp_path)
    second_prompt = PROMPT[:9]
    first, second = generate(tmp_path, [PROMPT, second_prompt], OUTPUTS)
    executor = executor_of(tmp_path)
    executor.overlaps = True
    plans = prefill_plans(executor)
    start = len(plans)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    tables = plans[0].starts[0].tables
    other = SequenceStart(1, tuple(second_prompt), len(second_prompt), 0, tables, params, (SamplerStart(1, 0),))

    def run(sequence: int, position: int, count: int = 1) -> Run:
        offset = 20 if sequence else 0
        last = position + count - 1
        fresh = range(-(-position // T), last // T + 1)
        return Run(sequence, count, True, pages_of(executor, [offset + page for page in fresh]) if fresh else ())

    at = len(PROMPT)
    plans += [
        WorkerPlan(start, starts=(other,), runs=(run(1, 0, len(second_prompt)), run(0, at))),
        WorkerPlan(start + 1, runs=(run(1, 9), run(0, at + 1))),
        WorkerPlan(start + 2, runs=(run(0, at + 2),)),  # the second one waits: its token is on the host when it goes on
        WorkerPlan(start + 3, runs=(run(0, at + 3), run(1, 10))),
        WorkerPlan(start + 4, ends=(0,), runs=(run(1, 11),)),
    ]
    results = run_ahead(executor, plans)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for result in results:
        for sampled in result.sampled:
            tokens[sampled.seq_id].append(sampled.token_id)
    assert tokens[0] == first.outputs[:5]
    assert tokens[1] == second.outputs[:4]


def test_what_a_step_took_begins_when_the_one_before_it_was_over(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    executor = executor_of(tmp_path)
    executor.overlaps = True
    results = run_ahead(executor, plans_of(executor))
    for before, after in itertools.pairwise(results):
        assert after.started_unix_s >= before.started_unix_s
        assert after.compute_s >= 0
    assert sum(result.compute_s for result in results) <= results[-1].ended_unix_s - results[0].started_unix_s + 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_are_read_when_a_slow_device_has_copied_them(overlaps: bool, tmp_path: Path) -> None:
    (answer,) = generate(make_tiny("llama", tmp_path), [PROMPT], OUTPUTS, "cuda")
    executor = executor_of(tmp_path, device="cuda:0")
    executor.overlaps = overlaps
    tokens = []
    for plan in plans_of(executor):
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms
        tokens += [sampled.token_id for sampled in executor.run(plan).sampled]
    assert tokens == answer.outputs
