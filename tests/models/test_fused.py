"""Fused modules compute what transformers' own do, each fusion alone and all together, and hold no weight twice.

In Triton's interpreter; with `TRITON_INTERPRET=0`, on a CUDA device (see tests/conftest).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm, LlamaRotaryEmbedding

from disagg.config.tree import Fusion, ModelConfig
from disagg.messages.control import Computation
from disagg.models.batch import ForwardBatch
from disagg.models.fused import ends
from disagg.models.fused.ends import FusedEnds, FusedHead, FusedRotation, rotation_table
from disagg.models.fused.modules import FusedLayer, FusedMLP, FusedRMSNorm, Sum
from disagg.models.fused.passes import FUSIONS, fuse
from disagg.models.loader import load
from disagg.models.model import PagedModel
from disagg.models.products import launch as products
from disagg.models.products.choice import FewRows
from disagg.models.ranks import Ranks
from disagg.models.sharding import VocabParallelLinear
from tests.models.driver import Driver
from tests.models.ranks import RankPool
from tests.models.reference import generate
from tests.models.test_parity import assert_same, prompts_of
from tests.models.tiny import make_tiny

DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
SHAPES = ((2, 64), (9, 5), (13, 64))
OUTPUTS = 3
# What of a family's three layers is replaced. Anything else runs as transformers has it.
_COUNTED = ("norm", "gate_up", "qkv", "residual", "few_rows", "rotation", "ends")
FAMILIES = {
    name: dict(zip(_COUNTED, counts, strict=True))
    for name, counts in {
        "llama": (7, 3, 3, 3, 3, 1, 1),
        "mistral": (7, 3, 3, 3, 3, 1, 1),
        "qwen2": (7, 3, 3, 3, 3, 1, 1),  # biases
        "qwen3": (13, 3, 3, 3, 3, 1, 1),  # norms of heads
        "gemma": (7, 3, 3, 3, 3, 1, 1),  # norms with an offset, GELU by tanh
        "gemma2": (13, 3, 0, 0, 0, 1, 0),  # softcaps; four norms a layer
        "ernie4_5": (7, 3, 0, 3, 0, 0, 1),  # rotates neighbours
        "smollm3": (7, 3, 0, 3, 0, 1, 1),  # some layers do not rotate
        "granite": (7, 3, 3, 0, 0, 1, 0),  # multiplied residuals and logits
        "mixtral": (7, 0, 3, 0, 0, 1, 0),  # experts
        "glm": (7, 0, 0, 3, 0, 1, 1),  # rotates half of a head
        "gpt_neox": (0, 0, 0, 0, 0, 1, 0),
    }.items()
}


def fused_model(model_dir: Path, fusions: tuple[str, ...], dtype: str = "float32") -> tuple[PagedModel, dict[str, int]]:
    """On the CPU, too, where a worker fuses nothing."""
    loaded = load(model_dir, dtype, DEVICE)
    whole = [layer for layer, place in loaded.places.attention.items() if place.writes]
    counts = fuse(loaded.module, fusions, whole, loaded.max_model_len)
    model = PagedModel(loaded, Ranks(), Computation(fusions=()))
    model._ends = FusedEnds(loaded.module)
    return model, counts


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
    fuse(module, FUSIONS, (0, 1, 2), 64)
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


ROTATING = ("llama", "qwen2", "gemma", "glm", "gpt_neox", "granite_swa", "phi3", "qwen3_next")


@pytest.mark.parametrize("family", ROTATING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_those_of_transformers_to_the_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    module = load(tmp_path, "float32", DEVICE).module.to(dtype)
    positions = torch.tensor([[0, 99, 3, 3, 98, 1, 57]], device=DEVICE)
    like = torch.empty(1, 1, dtype=dtype, device=DEVICE)
    plain = {
        name: part(like, positions)
        for name, part in module.named_modules()
        if type(part).__name__.endswith("RotaryEmbedding")
    }
    assert plain and fuse(module, ("rotation",), (), 100)["rotation"] == len(plain)
    for name, right in plain.items():
        part = module.get_submodule(name)
        assert isinstance(part, FusedRotation)
        got = part(like, positions)
        assert all(torch.equal(*pair) and pair[0].dtype == dtype for pair in zip(got, right, strict=True))
        (row,) = (each[:, 4:5] for each in got[:1])
        assert torch.equal(part(like, positions[:, 4:5])[0], row)


@pytest.mark.parametrize(
    ("rope", "looked_up"),
    [
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, True),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            True,
        ),
        ({"rope_type": "dynamic", "factor": 4.0}, False),
    ],
)
def test_only_rotations_that_depend_on_the_position_alone_are_looked_up(rope: dict[str, Any], looked_up: bool) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope}
    )
    parent = torch.nn.Module()
    parent.rotary = rotation = LlamaRotaryEmbedding(config).to(DEVICE)
    parent.dtype = torch.float32
    positions, like = torch.tensor([[127, 0, 64]], device=DEVICE), torch.empty(1, device=DEVICE)
    right = rotation(like, positions)
    assert fuse(parent, ("rotation",), (), 128) == {"rotation": int(looked_up)}  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(rotation(like, positions), right, strict=True))


def test_a_rotation_that_would_take_too_much_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4)).to(DEVICE)
    assert rotation_table(rotation, 5000, torch.float32).shape == (5000, 2, 8)
    monkeypatch.setattr(ends, "MOST_TABLE_BYTES", 5000 * 2 * 8 * 4 - 1)
    assert rotation_table(rotation, 5000, torch.float32) is None


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_tokens_of_the_step_before_are_taken_in_one_launch(rows: int) -> None:
    known, before = torch.randint(0, 1 << 40, (2, rows), device=DEVICE)
    before[-1] = -1  # where there was none
    carried = torch.randint(-1, rows, (rows,), device=DEVICE)
    for each in (carried, torch.full_like(carried, -1), carried.clamp(min=0), None):
        batch = ForwardBatch(known, known, known, (), None, known, (), each, before)
        assert torch.equal(ends.token_ids(batch), batch.token_ids())
        assert (batch.token_ids() >= 0).all()


class InPlaceDriver(Driver):
    """Wants logits in a tensor of its own."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        batch = batch.on(self.model.device)
        plain = self.model.forward(batch, self.pool)
        out = torch.full_like(plain, torch.nan)
        logits = self.model.forward(batch, self.pool, logits_out=out)
        assert logits.data_ptr() == out.data_ptr() and torch.equal(out, plain)
        return logits


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_logits_are_written_where_they_are_wanted(family: str, tmp_path: Path) -> None:
    """Also where the output layer is not fused, since something is done with logits behind it."""
    make_tiny(family, tmp_path)
    model, counts = fused_model(tmp_path, ("ends",))
    prompts = prompts_of(SHAPES)
    driver = InPlaceDriver(model, num_large=len(model.groups) * 40, page_tokens=4)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts, SHAPES, strict=True)]
    driver.run(sequences, OUTPUTS)
    for sequence, answer in zip(sequences, generate(tmp_path, prompts, OUTPUTS, DEVICE), strict=True):
        assert_same(family, sequence.outputs, sequence.logits, answer)
    heads = [part for part in model._loaded.module.modules() if isinstance(part, FusedHead)]
    assert len(heads) == counts["ends"] and all(head.out is None for head in heads)


def test_as_many_rows_of_logits_as_there_are_rows_may_be_others(tmp_path: Path) -> None:
    """As of steps of both phases that are captured: rows of no sequence stand behind both."""
    make_tiny("llama", tmp_path)
    model, _ = fused_model(tmp_path, ("ends",))
    driver = InPlaceDriver(model, num_large=len(model.groups) * 40, page_tokens=4)
    batch, _ = driver.host_batch_of([driver.sequence(prompt, 64) for prompt in prompts_of(((3, 64), (2, 64)))])
    rows = torch.tensor([2, 4, 0, 0, 0])
    plain = model.forward(replace(batch, logits_rows=torch.arange(5)).on(model.device), driver.pool)
    wanted = model.forward(replace(batch, logits_rows=rows).on(model.device), driver.pool)
    torch.testing.assert_close(wanted, plain[rows.to(model.device)])


def head_of_a_rank(ranks: Ranks) -> tuple[torch.Tensor, bool]:
    """Logits of three rows, and whether they are where they were wanted."""
    weight = torch.arange(12 * 8.0).view(12, 8)
    head: Any = torch.nn.Linear(8, 12, bias=False)
    head.weight = torch.nn.Parameter(weight.chunk(ranks.size)[ranks.rank])
    head.__class__ = VocabParallelLinear
    head.ranks, head.vocab_size = ranks, 12
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(
            LlamaConfig(hidden_size=8, num_hidden_layers=0, num_attention_heads=1, vocab_size=12)
        )
    module.lm_head = head
    assert fuse(module, ("ends",), (), 64) == {"ends": 1}
    hidden = torch.arange(24.0).view(1, 3, 8)
    assert torch.equal(head(hidden)[0], hidden[0] @ weight.T)
    head.out = torch.full((3, 12), torch.nan)
    logits = head(hidden)
    return logits, logits.data_ptr() == head.out.data_ptr()


@torch.inference_mode()
def test_logits_of_several_ranks_are_joined_where_they_are_wanted(rank_pool: RankPool) -> None:
    weight, hidden = torch.arange(12 * 8.0).view(12, 8), torch.arange(24.0).view(1, 3, 8)
    for logits, there in rank_pool.run(3, head_of_a_rank):
        assert there and torch.equal(logits, hidden @ weight.T)


def test_settings_name_every_fusion() -> None:
    assert get_args(Fusion) == FUSIONS
    assert FUSIONS == ModelConfig().fusions == Computation().fusions


def test_merged_weights_are_not_held_twice(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path)
    module = load(tmp_path, "float32", DEVICE).module
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    storages = sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in before.values()}.values())
    fuse(module, FUSIONS, (0, 1, 2), 64)
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
    assert fuse(fuse_alone, ("norm",), (), 0) == {"norm": 1}  # type: ignore[arg-type]
    assert isinstance(norm, FusedRMSNorm)
    got_total, got = norm.normed(Sum(residual, addend))
    assert torch.equal(got_total, total)
    # bfloat16: one unit in the last place, where the sum of squares was added up in another order
    torch.testing.assert_close(got, right, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
