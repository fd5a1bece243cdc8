"""A worker's step: what plans do to the pool, and what comes out of the model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.memory.groups import spec_of
from disagg.memory.layout import PageSizing, pool_layout
from disagg.messages.layout import GroupPages
from disagg.messages.plan import NO_TOKEN, PageCopy, Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.types.errors import ConfigError
from disagg.types.sampling import SamplingParams
from disagg.worker.executor import Executor, gpu_index
from tests.models.reference import generate
from tests.models.tiny import VOCAB_SIZE, WINDOW, make_tiny

T = 4
PROMPT = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(37)]
CHUNKS = (16, 16, 5)


def executor_of(model_dir: Path, num_large: int = 64, device: str = "cpu") -> Executor:
    executor = Executor(rank=0)
    executor.load(model_dir, "float32", device, threads=1)
    layout = pool_layout([spec_of(group, T) for group in executor.groups], T, T, PageSizing.MAX)
    assert executor.make_pool(num_large, layout.large_bytes, layout.strides, T, max_slots=4) == (
        num_large * layout.large_bytes
    )
    return executor


def start_of(tables: tuple[GroupPages, ...], tokens: list[int], computed: int) -> SequenceStart:
    params = SamplingParams(max_tokens=100, temperature=0.0)
    return SequenceStart(0, tuple(tokens), len(PROMPT), computed, tables, params, (SamplerStart(0, 0),))


def pages_of(executor: Executor, page_nos: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Per group, the pages of those numbers: each the first of a large page of its own."""
    num_groups, pool = len(executor.groups), executor.pool
    return tuple(
        tuple((group + num_groups * page_no) * (view.num_pages // pool.num_large) for page_no in page_nos)
        for group, view in enumerate(pool.views)
    )


def prefill_plans(executor: Executor) -> list[WorkerPlan]:
    """PROMPT in CHUNKS, each chunk's pages appended when it runs."""
    plans, done = [], 0
    for plan_no, chunk in enumerate(CHUNKS):
        pages = pages_of(executor, range(-(-done // T), -(-(done + chunk) // T)))
        starts = (start_of((GroupPages(0, ()),) * len(pages), PROMPT, 0),) if plan_no == 0 else ()
        done += chunk
        plans.append(WorkerPlan(plan_no, starts=starts, runs=(Run(0, chunk, done == len(PROMPT), pages),)))
    return plans


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "jamba", "bamba", "falcon_h1", "mamba2"])
def test_chunks_and_steps_give_what_transformers_gives(family: str, tmp_path: Path) -> None:
    (answer,) = generate(make_tiny(family, tmp_path), [PROMPT], 6)
    executor = executor_of(tmp_path)
    plans = prefill_plans(executor)
    for plan_no, position in enumerate(range(len(PROMPT), len(PROMPT) + 5), len(plans)):
        pages = pages_of(executor, [position // T]) if position % T == 0 else ()
        plans.append(WorkerPlan(plan_no, runs=(Run(0, 1, True, pages),)))
    tokens = [sampled.token_id for plan in plans for sampled in executor.run(plan).sampled]
    assert tokens == answer.outputs


def test_a_sequence_that_starts_behind_a_window_needs_no_pages_before_it(tmp_path: Path) -> None:
    """As on a decode server: only what the window reaches was received."""
    (answer,) = generate(make_tiny("mistral", tmp_path), [PROMPT], 4)
    executor = executor_of(tmp_path)
    for plan in prefill_plans(executor):
        result = executor.run(plan)
    first = (len(PROMPT) + 1 - WINDOW) // T
    executor.pool.attention(0).kv[:first] = torch.nan
    executor.pool.attention(0).kv[60] = torch.nan
    tables = (GroupPages(first, (*range(first, -(-len(PROMPT) // T)), 50)),)
    start = start_of(tables, [*PROMPT, result.sampled[0].token_id], len(PROMPT))
    outputs = list(result.sampled)
    for plan_no in range(3, 6):
        starts = (start,) if plan_no == 3 else ()
        outputs += executor.run(
            WorkerPlan(plan_no, ends=(0,) if plan_no == 3 else (), starts=starts, runs=(Run(0, 1, True),))
        ).sampled
    assert [sampled.token_id for sampled in outputs] == answer.outputs


def test_new_pages_are_blank_where_groups_have_different_dtypes(tmp_path: Path) -> None:
    executor = executor_of(make_tiny("gemma3_text", tmp_path))
    executor.pool.bytes.fill_(255)  # NaN in every dtype
    executor.pool.mixed = True
    for plan in prefill_plans(executor):
        result = executor.run(plan)
    assert len(result.sampled) == 1
    for view, pages in zip(executor.pool.views, pages_of(executor, range(-(-len(PROMPT) // T))), strict=True):
        content = view.bytes[list(pages)]
        assert content.view(torch.float32).isfinite().all()
        view.bytes[list(pages)] = 255
    assert executor.pool.bytes.eq(255).all()  # and no other page was touched


def overflowing(model_dir: Path, token_id: int) -> Path:
    """A model whose first layer has infinite values of that token, and of no other one."""
    weights = load_file(make_tiny("llama", model_dir) / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][token_id] = 0
    weights["model.embed_tokens.weight"][token_id, 0] = 1
    weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = 3e38
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    return model_dir


def test_who_gets_pages_of_a_sequence_that_overflowed_does_not_notice(tmp_path: Path) -> None:
    """Attention reads whole pages, and zero times infinity is no number."""
    executor = executor_of(overflowing(tmp_path, token_id=7))
    tables, params = (GroupPages(0, ()),), SamplingParams(max_tokens=100, temperature=0.0)

    def start(number: int, tokens: list[int]) -> SequenceStart:
        return SequenceStart(number, tuple(tokens), len(tokens), 0, tables, params, (SamplerStart(number, 0),))

    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    (lost,) = executor.run(WorkerPlan(0, starts=(start(0, prompt),), runs=(Run(0, 8, True, ((0, 1),)),))).sampled
    assert lost.token_id == NO_TOKEN
    starts = (start(1, prompt[:5]), start(2, prompt[:6]))
    runs = (Run(1, 5, True, ((0, 1),)), Run(2, 6, True, ((2, 3),)))
    sampled = executor.run(WorkerPlan(1, ends=(0,), starts=starts, runs=runs)).sampled
    sampled += executor.run(WorkerPlan(2, runs=(Run(1, 1, True), Run(2, 1, True)))).sampled
    answers = generate(tmp_path, [prompt[:5], prompt[:6]], 2)
    found = [[each.token_id for each in sampled if each.seq_id == number] for number in (1, 2)]
    assert found == [answer.outputs for answer in answers]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3n_text", "jamba"])
def test_a_layer_is_said_to_be_written_when_the_plan_changes_nothing_more_of_it(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    executor = executor_of(tmp_path)
    pages = pages_of(executor, range(-(-len(PROMPT) // T)))
    places = {
        layer: (view, list(group_pages), slot)
        for view, group_pages in zip(executor.pool.views, pages, strict=True)
        if not view.group.is_state
        for slot, layer in enumerate(view.group.layers)
    }

    def content(layer: int) -> torch.Tensor:
        view, its_pages, slot = places[layer]
        layer_bytes = view.page_bytes // len(view.group.layers)
        return view.bytes[its_pages, slot * layer_bytes : (slot + 1) * layer_bytes]

    for plan in prefill_plans(executor):
        before = {layer: content(layer) for layer in places}
        seen: dict[int, torch.Tensor] = {}
        executor.run(plan, lambda layer, seen=seen: seen.update({layer: content(layer)}))
        assert list(seen) == sorted(places), "every layer with K and V of its own, in order"
        for layer, then in seen.items():
            assert torch.equal(then, content(layer))
            assert not torch.equal(then, before[layer])


def test_pages_are_copied_before_anything_runs_and_are_not_blanked(tmp_path: Path) -> None:
    (answer,) = generate(make_tiny("llama", tmp_path), [PROMPT], 3)
    executor = executor_of(tmp_path)
    executor.pool.mixed = True
    for plan in prefill_plans(executor):
        result = executor.run(plan)
    copies = tuple(PageCopy(0, page, page + 20) for page in range(10))
    start = start_of((GroupPages(0, tuple(range(20, 30))),), [*PROMPT, answer.outputs[0]], len(PROMPT))
    plan = WorkerPlan(3, ends=(0,), copies=copies, starts=(start,), runs=(Run(0, 1, True),))
    assert [sampled.token_id for sampled in (*result.sampled, *executor.run(plan).sampled)] == answer.outputs[:2]


@pytest.mark.parametrize(("num_gpus", "shown"), [(2, "has GPUs 0 to 1"), (0, "shows no GPU to torch")])
def test_a_gpu_that_is_not_there_is_refused_with_what_is(num_gpus: int, shown: str) -> None:
    assert [gpu_index(device, 2) for device in ("cuda", "cuda:0", "cuda:1")] == [0, 0, 1]
    with pytest.raises(ConfigError, match=f"placed on GPU 2 .* this machine {shown}"):
        gpu_index("cuda:2", num_gpus)


def test_a_rank_without_its_gpu_is_a_configuration_that_cannot_work(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="placed on GPU 0"):
        Executor(rank=0).load(make_tiny("llama", tmp_path), "float32", "cuda:0", threads=1)
