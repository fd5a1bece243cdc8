"""Decode steps through the inputs of graphs answer as transformers does, in batches of every size.

On the CPU "replaying" is running the captured forward again, over the same tensors, with Triton's kernels in their
interpreter; with `TRITON_INTERPRET=0` it is a CUDA graph.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.models import mixed_graphs, prefill_graphs
from disagg.models.attention import calls, choice
from disagg.models.attention.choice import OFFERS
from disagg.models.attention.writer import TritonWriter
from disagg.models.batch import ForwardBatch
from disagg.models.captures import CapturedSteps, Captures, kinds
from disagg.models.graphs import (
    MOST_ROWS,
    Capturable,
    DecodeGraphs,
    GraphMemory,
    captured_or_none,
    sizes_up_to,
)
from disagg.models.mixed_graphs import MixedGraphs
from disagg.models.model import PagedModel
from disagg.models.prefill_graphs import MOST_CHUNK_ROWS, PrefillGraphs, sizes_for
from tests.models.driver import Driver, Sequence
from tests.models.reference import generate
from tests.models.test_parity import assert_same, prompts_of
from tests.models.tiny import make_tiny

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = ((3, 64), (9, 64), (20, 64), (33, 64), (15, 64))
OUTPUTS = 5


def tokens_of(model: PagedModel) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.int64, device=model.device)


class Rerun:
    """What stands for a graph where there is no GPU."""

    def __init__(self, run: Callable[[ForwardBatch], None], batch: ForwardBatch) -> None:
        self._run, self._batch = run, batch

    def replay(self) -> None:
        self._run(self._batch)


def capture(graphs: Capturable, reruns: Callable[[], dict[Any, Rerun]]) -> None:
    """By a GPU, or what stands for it, by variant."""
    if not ON_GPU:
        graphs._graphs = reruns()  # type: ignore[attr-defined]
        return
    try:
        graphs.capture(graphs.variants)
    except RuntimeError as error:
        pytest.skip(f"transformers' module cannot be captured: {error}")


class GraphDriver(Driver):
    """Decode steps go through graphs."""

    def __init__(self, model: PagedModel, page_tokens: int, max_rows: int) -> None:
        super().__init__(model, num_large=len(model.groups) * 60, page_tokens=page_tokens)
        self.graphs = DecodeGraphs(model, self.pool, max_rows, tokens_of(model))
        sizes, run = self.graphs._sizes, self.graphs._run
        capture(self.graphs, lambda: {size: Rerun(run, self.graphs._inputs.batch(size)) for size in sizes})
        self.replayed = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if not self.graphs.captured(batch):
            return super().forward(batch)
        self.replayed += 1
        logits, first = self.graphs.forward(batch)
        assert torch.equal(first, logits.argmax(-1))
        return logits.clone()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's backends, on the CPU too."""
    if ON_GPU:
        return
    offers = [
        replace(offer, capabilities=replace(offer.capabilities, devices=frozenset({"cpu"})))
        for offer in OFFERS
        if offer.name == "triton"
    ]
    monkeypatch.setattr(choice, "OFFERS", offers)
    monkeypatch.setattr(calls, "writer_of", TritonWriter)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gpt_oss", "gemma3n_text"))]
)
def test_steps_answer_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Sequences end one after the other, so batches of all sizes are met, and rows of no sequence beside them."""
    make_tiny(family, tmp_path)
    prompts = prompts_of(SHAPES)
    answers = generate(tmp_path, prompts, OUTPUTS, DEVICE)
    driver = GraphDriver(PagedModel.load(tmp_path, "float32", DEVICE), page_tokens=4, max_rows=4)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, SHAPES, strict=True)]
    driver.run(sequences, 1)
    for count in range(1, OUTPUTS):
        driver.step(sequences[count:])
    for index, (sequence, answer) in enumerate(zip(sequences, answers, strict=True)):
        got = len(sequence.outputs)
        assert_same(f"{family}, sequence {index}", sequence.outputs, sequence.logits, answer.first(got))
    assert driver.replayed == OUTPUTS - 1


class PrefillGraphDriver(Driver):
    """Chunks go through graphs."""

    def __init__(self, model: PagedModel, page_tokens: int) -> None:
        super().__init__(model, num_large=len(model.groups) * 60, page_tokens=page_tokens)
        self.graphs = PrefillGraphs(model, self.pool, MOST_CHUNK_ROWS)
        made = self.graphs
        capture(made, lambda: {each: Rerun(made.run, made.batch(*each)) for each in made.variants})
        self.replayed: list[tuple[int, int, int]] = []  # rows, runs, rows whose logits are wanted

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if not self.graphs.captured(batch):
            return super().forward(batch)
        self.replayed.append((batch.num_rows, len(batch.prefills), batch.logits_rows.shape[0]))
        return self.graphs.forward(batch)[0].clone()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gpt_oss"))]
)
def test_chunks_answer_as_transformers_does(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several runs, of all sizes, behind contexts and not; from some of them nothing is sampled."""
    make_tiny(family, tmp_path)
    monkeypatch.setattr(prefill_graphs, "SIZES", (16, 32, 64))
    monkeypatch.setattr(prefill_graphs, "SILENT_SIZES", (64,))
    shapes = ((3, 64), (9, 4), (20, 7), (33, 11), (70, 32), (41, 41))
    prompts = prompts_of(shapes)
    answers = generate(tmp_path, prompts, 2, DEVICE)
    driver = PrefillGraphDriver(PagedModel.load(tmp_path, "float32", DEVICE), page_tokens=4)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, shapes, strict=True)]
    for some in (sequences[:1], sequences[1:4], sequences[4:]):
        driver.run(some, 1)
    for index, (sequence, answer) in enumerate(zip(sequences, answers, strict=True)):
        assert_same(f"{family}, sequence {index}", sequence.outputs[:1], sequence.logits[:1], answer.first(1))
    rows, runs, sampled = (set(each) for each in zip(*driver.replayed, strict=True))
    assert min(rows) < 16 < max(rows) and {1, 3} <= runs and {0, 1} <= sampled, driver.replayed


class MixedGraphDriver(Driver):
    """Steps of both phases go through graphs."""

    def __init__(self, model: PagedModel, page_tokens: int, max_slots: int) -> None:
        super().__init__(model, num_large=len(model.groups) * 60, page_tokens=page_tokens)
        self.graphs = MixedGraphs(model, self.pool, max_slots, MOST_CHUNK_ROWS, tokens_of(model))
        made = self.graphs
        capture(made, lambda: {each: Rerun(made.run, made.batch(*each)) for each in made.variants})
        self.replayed: list[tuple[int, int, int, int]] = []  # rows, chunks, sequences that decode, rows of logits

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if not self.graphs.captured(batch):
            return super().forward(batch)
        assert batch.decodes is not None
        wanted = batch.logits_rows.shape[0]
        self.replayed.append((batch.num_rows, len(batch.prefills), batch.decodes.num_sequences, wanted))
        logits, first = self.graphs.forward(batch)
        assert torch.equal(first, logits.argmax(-1))
        return logits.clone()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "gpt_oss"))]
)
def test_steps_of_both_phases_answer_as_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come one after the other, in chunks of all sizes, to those that decode; from some chunks nothing is sampled."""
    make_tiny(family, tmp_path)
    monkeypatch.setattr(mixed_graphs, "SIZES", (16, 32, 64))
    monkeypatch.setattr(mixed_graphs, "FEW_LOGITS", 3)
    shapes = ((3, 64), (9, 4), (20, 7), (33, 11), (70, 32), (41, 41))
    prompts = prompts_of(shapes)
    answers = generate(tmp_path, prompts, 16, DEVICE)
    driver = MixedGraphDriver(PagedModel.load(tmp_path, "float32", DEVICE), page_tokens=4, max_slots=8)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, shapes, strict=True)]
    running: list[Sequence] = []
    for coming in (sequences[:1], sequences[1:3], sequences[3:4], sequences[4:]):
        running += coming
        while not all(sequence.decoding for sequence in coming):
            driver.step(running)
    driver.step(running)
    for index, (sequence, answer) in enumerate(zip(sequences, answers, strict=True)):
        got = len(sequence.outputs)
        assert_same(f"{family}, sequence {index}", sequence.outputs, sequence.logits, answer.first(got))
    rows, chunks, decodes, logits = (set(each) for each in zip(*driver.replayed, strict=True))
    assert min(rows) <= 16 < 32 < max(rows) and {1, 2} <= chunks and {1, 5} <= decodes, driver.replayed
    assert min(logits) <= 3 < max(logits), driver.replayed


@pytest.mark.usefixtures("interpreted")
def test_tokens_that_the_host_does_not_know_yet_are_carried_into_steps_of_both_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("llama", tmp_path)
    monkeypatch.setattr(mixed_graphs, "SIZES", (16, 32))
    driver = MixedGraphDriver(PagedModel.load(tmp_path, "float32", DEVICE), page_tokens=4, max_slots=4)
    first, second = (driver.sequence(prompt, 64) for prompt in prompts_of(((9, 64), (5, 64))))
    driver.step([first])
    batch, _ = driver.host_batch_of([first, second])
    right = driver.graphs.forward(batch)[0].clone()
    driver.graphs._tokens_before[2] = batch.input_ids[-1].item()
    carried = torch.full_like(batch.input_ids, -1)
    carried[-1] = 2
    ids = batch.input_ids.clone()
    ids[-1] = 0
    assert torch.equal(driver.graphs.forward(replace(batch, input_ids=ids, carried=carried))[0], right)
    assert torch.equal(driver.graphs.forward(batch)[0], right), "what was carried once is forgotten"


def test_sizes_waste_no_more_than_a_quarter() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(5) == [1, 2, 4, 5]
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    for most in (100, 256, 4096):
        sizes = sizes_up_to(most)
        assert sizes[-1] == min(most, MOST_ROWS)
        assert all(after <= before * 1.34 for before, after in pairwise(sizes) if before >= 24)


def test_what_cannot_be_captured_runs_without_graphs(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "llama")
    model = PagedModel.load(tmp_path / "llama", "float32", "cpu")
    assert not kinds(model, Driver(model, 8, 4).pool, 4, tokens_of(model), Captures(mixed=64))
    assert not model.may_be_captured, "torch's attention looks at lengths"


@pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("family", ["llama", "mixtral", "jamba"])
def test_whether_a_family_can_be_captured_or_not_it_is_served(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    model = PagedModel.load(tmp_path, "float32", DEVICE)
    driver = Driver(model, len(model.groups) * 60, 4)
    steps = CapturedSteps(kinds(model, driver.pool, 4, tokens_of(model), Captures()))
    print(family, "captured" if steps.decodes is not None else "not captured")
    prompts = prompts_of(SHAPES)
    sequences = [driver.sequence(prompt, 64) for prompt in prompts]
    driver.run(sequences, OUTPUTS)
    for sequence, answer in zip(sequences, generate(tmp_path, prompts, OUTPUTS, DEVICE), strict=True):
        assert_same(family, sequence.outputs, sequence.logits, answer)


def test_no_size_is_captured_that_no_step_needs() -> None:
    sizes = (64, 128, 256, 384)
    assert sizes_for(sizes, 128) == sizes[:2]
    assert sizes_for(sizes, 129) == sizes[:3]
    assert sizes_for(sizes, 1) == sizes[:1]
    assert sizes_for(sizes, 1000) == sizes


def test_the_largest_is_captured_first_and_each_is_run_once_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("wait"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: contextlib.nullcontext(ran.append("capture")))
    found = GraphMemory().capture_each([1, 2, 4], lambda size: size * 10, ran.append)  # type: ignore[arg-type, return-value]
    assert ran == [each for size in (40, 20, 10) for each in (size, "wait", "capture", size)]
    assert set(found) == {1, 2, 4} and len(set(map(id, found.values()))) == 3


def test_what_raises_while_it_is_captured_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Looks:
        variants = (1,)

        def capture(self, variants: object) -> None:
            raise RuntimeError("it looks at the device\nhere")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert captured_or_none(Looks(), "short chunks") is None
    assert caplog.messages == ["short chunks are launched one kernel at a time: it looks at the device"]
