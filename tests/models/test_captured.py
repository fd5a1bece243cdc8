"""Fused modules in captured decode steps, against plain ones launched one by one: every fusion, graphs on and off, two dtypes.

    TRITON_INTERPRET=0 python -m pytest tests/models/test_captured.py        # all of a GPU's decode steps, in one command

All are given the same tokens, whatever they would say themselves, so one logit tie does not hide what comes behind it. In
bfloat16 a fused model may be as far from float32's logits as the plain one, and half as much again. Without a GPU all fusions
together are tried in float32, with what stands for a graph there (test_graphs); test_fused tries each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disagg.models.batch import ForwardBatch
from disagg.models.fused import ends, passes
from disagg.models.fused.passes import FUSIONS
from tests.models.driver import Driver
from tests.models.test_fused import fused_model
from tests.models.test_graphs import ON_GPU, GraphDriver, interpreted
from tests.models.test_parity import prompts_of
from tests.models.tiny import VOCAB_SIZE, make_tiny

SHAPES = ((3, 64), (9, 64), (20, 64), (33, 64), (15, 64))
STEPS = 4
PAGE_TOKENS = 4
FAMILIES = ("llama", "qwen3", "gemma")
SETS = {
    "plain": (),
    **{
        name: tuple(each for each in FUSIONS if each == name or each in needed)
        for name, needed in {
            "norm": (),
            "residual": ("norm",),
            "gate_up": (),
            "qkv": ("norm",),
            "few_rows": ("norm", "residual", "gate_up", "qkv"),
            "rotation": (),
            "ends": (),
        }.items()
    },
    "all": FUSIONS,
}
MORE_THAN_PLAIN = 1.5  # times the plain model's error in bfloat16
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-3}  # of logits, where only the order of additions differs

__all__ = ["interpreted"]  # a fixture


class Replaying(GraphDriver):
    """Of equal logits, of which bfloat16 has many, any place of the maximum is right."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if not self.graphs.captured(batch):
            return Driver.forward(self, batch)
        self.replayed += 1
        logits, first = self.graphs.forward(batch)
        assert torch.equal(logits.gather(1, first[:, None])[:, 0], logits.max(-1).values)
        return logits.clone()


def logits_of(driver: Driver) -> torch.Tensor:
    """[steps, sequences, vocab] float64, each step behind the same tokens."""
    prompts = prompts_of(SHAPES)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB_SIZE, (STEPS, len(prompts)), generator=draw).tolist()
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, SHAPES, strict=True)]
    for step in tokens:
        driver.step(sequences)
        for sequence, token in zip(sequences, step, strict=True):
            sequence.known.tokens[-1] = token
    assert all(len(sequence.logits) == STEPS for sequence in sequences)
    return torch.stack([torch.stack(sequence.logits) for sequence in sequences], 1).double()


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return ((got - right).norm() / right.norm()).item()


def eager(model_dir: Path, dtype: str, fusions: tuple[str, ...]) -> torch.Tensor:
    model, _ = fused_model(model_dir, fusions, dtype)
    return logits_of(Driver(model, num_large=len(model.groups) * 60, page_tokens=PAGE_TOKENS))


def captured(model_dir: Path, dtype: str, fusions: tuple[str, ...]) -> torch.Tensor:
    model, _ = fused_model(model_dir, fusions, dtype)
    driver = Replaying(model, PAGE_TOKENS, max_rows=8)
    found = logits_of(driver)
    assert driver.replayed == STEPS - 1
    return found


ONLY_ON_GPU = pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
CASES = [
    pytest.param(
        *(dtype, family, name),
        marks=[pytest.mark.long] if (dtype, family, name) == ("float32", "llama", "all") else [ONLY_ON_GPU],
    )
    for dtype in ("float32", "bfloat16")
    for family in FAMILIES
    for name in SETS
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dtype", "family", "fusions"), CASES)
def test_captured_steps_say_what_plain_ones_do(dtype: str, family: str, fusions: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    right = eager(tmp_path, "float32", ())
    plain = eager(tmp_path, dtype, ())
    launched, replayed = eager(tmp_path, dtype, SETS[fusions]), captured(tmp_path, dtype, SETS[fusions])
    allowed = MORE_THAN_PLAIN * error(plain, right) + ROUNDING[dtype]
    found = {"launched": error(launched, right), "replayed": error(replayed, right)}
    apart = error(replayed, launched)
    print(f"{family} {dtype} {fusions}: plain {error(plain, right):.2e}, {found}, graph against none {apart:.2e}")
    assert max(found.values()) <= allowed, f"{found}, of at most {allowed:.2e}"
    assert apart <= allowed


def test_a_wrong_rotation_would_be_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one position."""
    make_tiny("llama", tmp_path)
    right = eager(tmp_path, "float32", ())
    whole = ends.rotation_table
    monkeypatch.setattr(passes, "rotation_table", lambda *of: whole(*of).roll(1, 0).contiguous())
    assert error(eager(tmp_path, "float32", ("rotation",)), right) > 100 * ROUNDING["float32"]


def test_every_fusion_is_tried() -> None:
    assert {"plain", "all", *FUSIONS} == {*SETS, "rank_sums"}  # which test_sums tries, on several ranks
