"""Fused modules compute what transformers' own do, each fusion alone and all together, and hold no weight twice.

In Triton's interpreter; with `TRITON_INTERPRET=0`, on a CUDA device (see tests/conftest).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from disagg.config.tree import Fusion, ModelConfig
from disagg.messages.control import Computation
from disagg.models.fused.modules import FusedLayer, FusedMLP, FusedRMSNorm, Sum
from disagg.models.fused.passes import FUSIONS, fuse
from disagg.models.loader import load
from disagg.models.model import PagedModel
from disagg.models.products import run as products
from disagg.models.products.choice import FewRows
from disagg.models.ranks import Ranks
from tests.models.driver import Driver
from tests.models.reference import generate
from tests.models.test_parity import assert_same, prompts_of
from tests.models.tiny import make_tiny

DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
SHAPES = ((2, 64), (9, 5), (13, 64))
OUTPUTS = 3
# What of a family's three layers is replaced. Anything else runs as transformers has it.
FAMILIES = {
    "llama": {"norm": 7, "gate_up": 3, "qkv": 3, "residual": 3, "few_rows": 3},
    "mistral": {"norm": 7, "gate_up": 3, "qkv": 3, "residual": 3, "few_rows": 3},
    "qwen2": {"norm": 7, "gate_up": 3, "qkv": 3, "residual": 3, "few_rows": 3},  # biases
    "qwen3": {"norm": 13, "gate_up": 3, "qkv": 3, "residual": 3, "few_rows": 3},  # norms of heads
    "gemma": {"norm": 7, "gate_up": 3, "qkv": 3, "residual": 3, "few_rows": 3},  # norms with an offset, GELU by tanh
    "gemma2": {"norm": 13, "gate_up": 3, "qkv": 0, "residual": 0, "few_rows": 0},  # softcaps; four norms a layer
    "ernie4_5": {"norm": 7, "gate_up": 3, "qkv": 0, "residual": 3, "few_rows": 0},  # rotates neighbours
    "smollm3": {"norm": 7, "gate_up": 3, "qkv": 0, "residual": 3, "few_rows": 0},  # some layers do not rotate
    "granite": {"norm": 7, "gate_up": 3, "qkv": 3, "residual": 0, "few_rows": 0},  # multiplied residuals
    "mixtral": {"norm": 7, "gate_up": 0, "qkv": 3, "residual": 0, "few_rows": 0},  # experts
    "glm": {"norm": 7, "gate_up": 0, "qkv": 0, "residual": 3, "few_rows": 0},  # rotates half of a head
    "gpt_neox": {"norm": 0, "gate_up": 0, "qkv": 0, "residual": 0, "few_rows": 0},
}


def fused_model(model_dir: Path, fusions: tuple[str, ...]) -> tuple[PagedModel, dict[str, int]]:
    """On the CPU, too, where a worker fuses nothing."""
    loaded = load(model_dir, "float32", DEVICE)
    whole = [layer for layer, slot in loaded.places.attention.items() if slot.writes]
    counts = fuse(loaded.module, fusions, whole)
    return PagedModel(loaded, Ranks(), Computation(fusions=())), counts


def assert_parity(model_dir: Path, model: PagedModel) -> None:
    prompts = prompts_of(SHAPES)
    driver = Driver(model, num_large=len(model.groups) * 40, page_tokens=4)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, SHAPES, strict=True)]
    driver.run(sequences, OUTPUTS)
    for sequence, answer in zip(sequences, generate(model_dir, prompts, OUTPUTS, DEVICE), strict=True):
        assert_same(f"prompt of {sequence.known.num_prompt}", sequence.outputs, sequence.logits, answer)


# Of each thing that sets families apart here, one is in the short part: what a norm is, and what is fused.
SHORT_LIST = ("qwen2", "qwen3", "gemma2", "glm", "gpt_neox")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT_LIST else pytest.mark.long) for name in FAMILIES]
)
def test_a_family_is_fused_as_far_as_its_modules_have_the_shape(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    model, counts = fused_model(tmp_path, FUSIONS)
    assert counts == FAMILIES[family]
    assert_parity(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_sums_are_handed_from_layer_to_layer(family: str, tmp_path: Path) -> None:
    """So the addition at a layer's end is part of the next one's norm."""
    make_tiny(family, tmp_path)
    module = load(tmp_path, "float32", DEVICE).module
    fuse(module, FUSIONS, (0, 1, 2))
    layers = [part for part in module.modules() if isinstance(part, FusedLayer)]
    assert len(layers) == 3 and all(layer.next_norm for layer in layers)
    assert layers[0].next_norm[0] is layers[1].input_layernorm and layers[2].next_norm[0] is module.base_model.norm


@pytest.mark.parametrize(
    "fusion", ["norm and residual", *(pytest.param(name, marks=pytest.mark.long) for name in FUSIONS)]
)
def test_each_fusion_is_a_switch(fusion: str, tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path)
    model, counts = fused_model(tmp_path, tuple(fusion.split(" and ")))
    wanted = {"qkv": {"qkv": 0}, "residual": {}, "few_rows": {}}.get(fusion)  # they need norms that were fused
    assert counts == (wanted if wanted is not None else {name: FAMILIES["qwen3"][name] for name in counts})
    assert_parity(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("parts", [1, 2])
def test_products_of_few_rows_answer_as_others_do(
    family: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By small tiles and in float32, which no product of a real model has: here they are found out if they are wrong."""
    made = []

    def small(rows: int, columns: int, depth: int, *, gated: bool, in_parts: bool) -> FewRows | None:
        padded = max(16, 1 << (rows - 1).bit_length())
        made.append((gated, in_parts))
        return FewRows(padded, 16, 16, parts if in_parts else 1, 4, 1)

    monkeypatch.setattr(products, "few_rows", small)
    monkeypatch.setattr(products, "HALF_DTYPES", (torch.float32,))
    make_tiny(family, tmp_path)
    model, _ = fused_model(tmp_path, FUSIONS)
    assert_parity(tmp_path, model)
    assert (True, False) in made and (False, False) in made
    assert (False, True) in made, "output and down projections have no biases here"


def test_settings_name_every_fusion() -> None:
    assert get_args(Fusion) == FUSIONS == ModelConfig().fusions == Computation().fusions


def test_merged_weights_are_not_held_twice(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path)
    module = load(tmp_path, "float32", DEVICE).module
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    storages = sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in before.values()}.values())
    fuse(module, FUSIONS, (0, 1, 2))
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in after.values()}
    assert sum(held.values()) <= storages
    for part in module.modules():
        if isinstance(part, FusedMLP):
            assert part.merged.untyped_storage().data_ptr() in held


@pytest.mark.parametrize("size", [16, 80, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_what_comes_before_it(size: int, dtype: torch.dtype) -> None:
    """With transformers' rounding: the sum in the model's dtype, then the norm."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bfloat16 off where a GPU rounds")
    norm = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    residual, addend = torch.randn(2, 1, 5, size, device=DEVICE).to(dtype)
    total = residual + addend
    right = norm(total)
    fuse_alone = torch.nn.Module()
    fuse_alone.norm = norm
    assert fuse(fuse_alone, ("norm",), ()) == {"norm": 1}  # type: ignore[arg-type]
    assert isinstance(norm, FusedRMSNorm)
    got_total, got = norm.normed(Sum(residual, addend))
    assert torch.equal(got_total, total)
    # bfloat16: one unit in the last place, where the sum of squares was added up in another order
    torch.testing.assert_close(got, right, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
