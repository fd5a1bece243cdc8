"""The largest step is as large as steps can be, for every kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from disagg.models.batch import ForwardBatch
from disagg.models.model import PagedModel
from disagg.models.pool import Pool
from disagg.worker import profile
from disagg.worker.executor import Executor
from disagg.worker.profile import (
    MOST_BESIDE_TORCH,
    MOST_OF_A_GRAPH_BESIDE_TORCH,
    MOST_OF_GRAPHS_BESIDE_TORCH,
    largest_step,
    own_captured_bytes,
    own_peak_bytes,
)
from tests.models.tiny import make_tiny


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "jamba"])
def test_the_largest_step_has_a_chunk_and_every_slot_at_the_models_limit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PagedModel.load(make_tiny(family, tmp_path, max_position_embeddings=200), "float32", "cpu")
    seen: list[tuple[ForwardBatch, Pool]] = []
    forward = PagedModel.forward

    def spy(self: PagedModel, batch: ForwardBatch, pool: Pool, hidden: None) -> torch.Tensor:
        seen.append((batch, pool))
        return forward(self, batch, pool)

    monkeypatch.setattr(PagedModel, "forward", spy)
    sampled = largest_step(model, chunk_tokens=48, max_slots=5)
    ((batch, pool),) = seen
    (prefill,) = batch.prefills
    assert (prefill.num_tokens, prefill.total_tokens) == (48, 200)
    assert batch.decodes is not None and batch.decodes.lengths.tolist() == [200] * 5
    assert sampled.token_ids.shape == (5,)
    assert sampled.top_ids is not None and sampled.top_ids.shape == (5, 20)
    assert pool.num_large == len(model.groups)


def test_a_chunk_longer_than_any_sequence_is_cut_to_it(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("llama", tmp_path, max_position_embeddings=40), "float32", "cpu")
    assert largest_step(model, chunk_tokens=64, max_slots=1).token_ids.shape == (1,)


def test_memory_is_not_measured_on_cpu(tmp_path: Path) -> None:
    executor = Executor(rank=0)
    executor.load(make_tiny("llama", tmp_path), "float32", "cpu", threads=1)
    assert executor.profile(chunk_tokens=1 << 20, max_slots=1 << 20) == (0, 0)


def test_what_others_have_on_the_device_is_not_counted_as_ours() -> None:
    context, other = 600 << 20, 60 << 30
    assert own_peak_bytes(5 << 30, context) == (5 << 30) + context
    assert own_peak_bytes(5 << 30, context + other) == (5 << 30) + MOST_BESIDE_TORCH


def test_what_others_take_or_free_while_graphs_are_captured_is_not_counted_as_ours() -> None:
    graphs, driver, other = 900 << 20, 200 << 20, 15 << 30
    assert own_captured_bytes(graphs, graphs + driver) == graphs + driver
    assert own_captured_bytes(graphs, graphs + driver + other) == graphs + MOST_OF_GRAPHS_BESIDE_TORCH
    assert own_captured_bytes(graphs, graphs + driver - other) == graphs


class Device:
    """What stands for one: graphs of so many bytes are captured on it, by torch and by the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch_bytes = self.driver_bytes = 0
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        free = lambda device: (1 << 36) - self.torch_bytes - self.driver_bytes  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free(device), 1 << 36))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.torch_bytes)


class Graphs:
    """The largest takes most, the others what the driver keeps of each. Whatever comes beside is somebody else's."""

    variants = (1, 2, 4, 8)

    def __init__(self, device: Device, beside: int = 0, fails: bool = False) -> None:
        self._device, self._beside, self._fails = device, beside, fails
        device.torch_bytes += 1000  # inputs

    def capture(self, variants: Sequence[int]) -> None:
        if self._fails:
            raise RuntimeError("it looks at the device")
        for variant in variants:
            self._device.torch_bytes += 5000 if variant == 8 else 0
            self._device.driver_bytes += 300 + self._beside


@pytest.mark.parametrize(
    ("beside", "fails", "held"),
    [
        (0, False, 1000 + 5000 + 4 * 300),
        (60 << 30, False, 6000 + MOST_OF_GRAPHS_BESIDE_TORCH + 3 * MOST_OF_A_GRAPH_BESIDE_TORCH),
        (0, True, 0),
    ],
)
def test_what_graphs_will_hold_is_told_from_the_two_largest(
    beside: int, fails: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    assert profile._bytes_of(lambda: Graphs(device, beside, fails), torch.device("cpu")) == held
