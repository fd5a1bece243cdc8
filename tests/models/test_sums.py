"""Sums of ranks that are part of products and norms: against float64, and models that make them against whole ones.

In Triton's interpreter ranks are processes that map each other's files; with `TRITON_INTERPRET=0` each has a CUDA device, and
what is captured is tried, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.messages.control import Computation
from disagg.models.fused.modules import FusedLayer, Sum
from disagg.models.fused.passes import FUSIONS, fuse
from disagg.models.fused.sum_times import SumTimes, limit, measure, rows_that_pay, slowest
from disagg.models.loader import load
from disagg.models.model import PagedModel
from disagg.models.products import launch as products
from disagg.models.products.choice import FewRows
from disagg.models.products.launch import Norm, Scaled, add_one
from disagg.models.ranks import Ranks
from disagg.models.sums.shared import EMPTY_BYTE, MOST_SENT_BYTES, SLOTS, SharedRows, most_rows, share_rows
from tests.models.driver import Driver
from tests.models.norms import fused_norm
from tests.models.ranks import RankPool
from tests.models.test_graphs import GraphDriver
from tests.models.test_parity import prompts_of
from tests.models.tiny import make_tiny

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
ERRORS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
WAIT_S = 60.0
ROUNDS = 200 if ON_GPU else 4
SHAPES = ((2, 64), (7, 5))
OUTPUTS = 2
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def device_of(ranks: Ranks) -> torch.device:
    if not ON_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def pool_for(rank_pool: RankPool, tp: int) -> RankPool:
    if ON_GPU and torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    return rank_pool


@cache
def on_device(meeting: Path, rank: int, size: int) -> Ranks:
    """The pool's own ranks meet over the host."""
    ranks = Ranks(rank, size)
    ranks.connect(meeting, device_of(ranks), WAIT_S, WAIT_S)
    return ranks


def shared_by(ranks: Ranks, meeting: Path, width: int, itemsize: int) -> SharedRows:
    if ON_GPU:
        shared = share_rows(ranks, width, itemsize, device_of(ranks))
        assert shared is not None
        return shared
    rows = 64
    shape = (SLOTS, ranks.size, rows * width * itemsize)
    files = [meeting.with_name(f"{meeting.name}-memory-{rank}") for rank in range(ranks.size)]
    files[ranks.rank].write_bytes(bytes([EMPTY_BYTE]) * (shape[0] * shape[1] * shape[2]))
    ranks.all_have(True, torch.device("cpu"))
    memory = [torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8) for file in files]
    return SharedRows(ranks, [each.view(shape) for each in memory], rows)


# ---- kernels


def parts_of(rank: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """What a rank has of the sum of that number."""
    draw = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(shape, generator=draw, dtype=torch.float32) * 10.0 ** (number % 3 - 1)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double().cpu() - right).norm() / right.norm())


@dataclass(frozen=True)
class Summed:
    worst: float  # error
    bits: list[Tensor]  # of what came out
    left: int  # elements of the memory that are not empty


@torch.inference_mode()
def norm_sums(alone: Ranks, meeting: Path, dtype: torch.dtype, rows: int, parts: int, width: int) -> Summed:
    """One sum after the other, each normed, without anything between them that waits for other ranks."""
    ranks = on_device(meeting, alone.rank, alone.size)
    device = device_of(ranks)
    shared = shared_by(ranks, meeting, width, dtype.itemsize)
    norm = fused_norm(parts_of(9, 9, (width,)).to(device, dtype))
    residual = parts_of(8, 8, (1, rows, width)).to(device, dtype)
    bits, worst = [], 0.0
    for number in range(ROUNDS):
        shape = (parts, rows, width)
        mine = parts_of(ranks.rank, number, shape).to(device, torch.float32 if parts > 1 else dtype)
        total, normed = norm.normed(Sum(residual, mine, shared.slot(number % 2)))
        wholes = [parts_of(rank, number, shape) for rank in range(ranks.size)]
        wholes = [each if parts > 1 else each.to(dtype) for each in wholes]
        right = torch.stack([each.double().sum(0) for each in wholes]).sum(0) + residual.double().cpu()
        of_norm = right * torch.rsqrt(right.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double().cpu()
        worst = max(worst, error(total, right), error(normed, of_norm))
        bits.append(torch.cat([total, normed]).cpu())
    return Summed(worst, bits, int((shared._memory[ranks.rank] != EMPTY_BYTE).sum()))


def check(found: list[Summed], dtype: torch.dtype) -> None:
    for each in found:
        assert each.worst < ERRORS[dtype]
        assert each.left == 0
        assert all(torch.equal(*pair) for pair in zip(each.bits, found[0].bits, strict=True)), "ranks differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tp", "rows", "parts", "width"), [(2, 1, 1, 64), (2, 5, 4, 80), (2, 17, 2, 512), (3, 3, 1, 37), (4, 7, 2, 64)]
)
def test_a_norm_of_a_sum_of_ranks_is_that_of_float64(
    rank_pool: RankPool, tp: int, rows: int, parts: int, width: int, dtype: torch.dtype
) -> None:
    pool = pool_for(rank_pool, tp)
    check(pool.run(tp, norm_sums, pool.meeting(), dtype, rows, parts, width), dtype)


@torch.inference_mode()
def product_sums(alone: Ranks, meeting: Path, dtype: torch.dtype, columns: int, depth: int) -> Summed:
    """As norm_sums, of one row, in the product that makes it; each rank has a part of the depth."""
    ranks = on_device(meeting, alone.rank, alone.size)
    device = device_of(ranks)
    shared = shared_by(ranks, meeting, columns, dtype.itemsize)
    weights = [(parts_of(7, rank, (columns, depth)) / depth**0.5).to(dtype) for rank in range(ranks.size)]
    weight = weights[ranks.rank].to(device)
    bias = parts_of(6, 6, (columns,)).to(device, dtype)
    residual = parts_of(5, 5, (1, columns)).to(device, dtype)
    norm = Norm(parts_of(9, 9, (columns,)).to(device, dtype), 1e-5, False)
    bits, worst = [], 0.0
    for number in range(ROUNDS):
        rows = [parts_of(rank, number, (1, depth)).to(dtype) for rank in range(ranks.size)]
        own_bias = bias if ranks.rank == 0 else None
        summed = add_one(rows[ranks.rank].to(device), weight, own_bias, residual, norm, shared.slot(number % 2))
        assert isinstance(summed, Scaled)
        right = residual.double().cpu() + bias.double().cpu()
        for row, each in zip(rows, weights, strict=True):
            right = right + row.double() @ each.double().T
        squares = right.square().sum()
        worst = max(worst, error(summed.row, right), error(summed.scaled, right * norm.weight.double().cpu()))
        worst = max(worst, abs(float(summed.squares.double().sum().cpu() / squares) - 1))
        bits.append(torch.cat([summed.row, summed.scaled]).cpu())
    return Summed(worst, bits, int((shared._memory[ranks.rank] != EMPTY_BYTE).sum()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tp", "columns", "depth"), [(2, 64, 64), (2, 36, 80), (2, 256, 1152), (3, 8, 4096)])
def test_a_product_of_one_row_is_summed_over_ranks(
    rank_pool: RankPool, tp: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    pool = pool_for(rank_pool, tp)
    check(pool.run(tp, product_sums, pool.meeting(), dtype, columns, depth), dtype)


@torch.inference_mode()
def no_numbers(alone: Ranks, meeting: Path) -> list[bool]:
    """A NaN of the bits that stand for what has not arrived."""
    ranks = on_device(meeting, alone.rank, alone.size)
    device = device_of(ranks)
    shared = shared_by(ranks, meeting, 64, 4)
    norm = fused_norm(torch.ones(64, device=device))
    mine = torch.zeros(1, 2, 64, device=device)
    if ranks.rank == 1:
        mine[0, 1].view(torch.int32)[3] = -1
    total, _ = norm.normed(Sum(torch.ones(1, 2, 64, device=device), mine, shared.slot(0)))
    return [bool(total[0, 0].eq(1).all()), bool(total[0, 1, 3].isnan()), int(total.isnan().sum()) == 1]


def test_a_number_that_is_none_arrives_as_one(rank_pool: RankPool) -> None:
    pool = pool_for(rank_pool, 2)
    assert pool.run(2, no_numbers, pool.meeting()) == [[True] * 3] * 2


# ---- up to how many rows


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=8))
def test_rows_pay_up_to_where_an_own_sum_is_the_slower_one(times: list[tuple[int, int]]) -> None:
    found = [SumTimes(1 << number, float(own), float(theirs)) for number, (own, theirs) in enumerate(times)]
    most = rows_that_pay(found)
    assert all(each.own_s <= each.collective_s for each in found if each.rows <= most)
    beyond = [each for each in found if each.rows > most]
    assert not beyond or beyond[0].own_s > beyond[0].collective_s


def test_all_ranks_take_the_slowest_of_them() -> None:
    said = [[SumTimes(1, 1.0, 4.0), SumTimes(8, 5.0, 5.0)], [SumTimes(1, 3.0, 2.0), SumTimes(8, 4.0, 6.0)]]
    assert slowest(said) == (SumTimes(1, 3.0, 4.0), SumTimes(8, 5.0, 6.0))
    assert slowest([[], []]) == ()


@torch.inference_mode()
def timed(alone: Ranks, meeting: Path, slow_s: float) -> tuple[tuple[SumTimes, ...], int, int, int]:
    """slow_s: what a collective takes longer on the last rank. Also how many rows are summed so, at first and then, and what is
    left in the memory."""
    ranks = on_device(meeting, alone.rank, alone.size)
    shared = shared_by(ranks, meeting, 64, 4)
    norm = fused_norm(torch.ones(64, device=device_of(ranks)))
    whole = ranks.sum

    def slowly(part: Tensor) -> Tensor:
        time.sleep(slow_s if ranks.rank == ranks.size - 1 and part.numel() > 1 else 0)
        return whole(part)

    ranks.sum = slowly  # type: ignore[method-assign]
    try:
        found = measure(norm, ranks, shared, (1, 4, shared.most_rows + 1), 2 if ON_GPU else 1)
        before = shared.most_rows
        if not ON_GPU:
            limit(norm, ranks, shared, (1,), 1)
    finally:
        ranks.sum = whole  # type: ignore[method-assign]
    return found, before, shared.most_rows, int((shared._memory[ranks.rank] != EMPTY_BYTE).sum())


def test_ranks_measure_the_same_and_sum_themselves_what_pays(rank_pool: RankPool) -> None:
    pool = pool_for(rank_pool, 2)
    runs = pool.run(2, timed, pool.meeting(), 0.0 if ON_GPU else 0.5)  # which no sum in the interpreter takes
    found, before, after, left = runs[0]
    assert runs == [runs[0]] * 2, "ranks differ"
    assert [each.rows for each in found] == [1, 4] and all(each.own_s > 0 and each.collective_s > 0 for each in found)
    assert left == 0
    if not ON_GPU:
        assert all(each.collective_s > 0.5 for each in found)
        assert (before, after) == (64, 1)


# ---- models


@dataclass(frozen=True)
class Run:
    logits: Tensor  # of every output, of every prompt in turn
    tokens: list[list[int]]
    layers: int  # that make sums of their own
    paths: set[str]


@contextmanager
def small_products() -> Iterator[None]:
    """By small tiles and in float32, which no product of a real model has."""
    before = products.few_rows, products.HALF_DTYPES

    def small(rows: int, columns: int, depth: int, *, gated: bool, in_parts: bool) -> FewRows | None:
        if columns % 16 or depth % 16:
            return None
        parts = 2 if in_parts and depth % 32 == 0 else 1
        return FewRows(max(16, 1 << (rows - 1).bit_length()), 16, 16, parts, 4, 1)

    products.few_rows, products.HALF_DTYPES = small, (torch.float32,)
    try:
        yield
    finally:
        products.few_rows, products.HALF_DTYPES = before


def compute(alone: Ranks, meeting: Path, model_dir: Path, dtype: str, fusions: tuple[str, ...], graphs: bool) -> Run:
    ranks = on_device(meeting, alone.rank, alone.size) if alone.size > 1 else alone
    device = device_of(ranks)
    if ON_GPU:
        model = PagedModel.load(model_dir, dtype, str(device), ranks, Computation(fusions=fusions))
        model.share_sums()
    else:  # where a worker fuses nothing
        loaded = load(model_dir, dtype, "cpu", ranks)
        fuse(loaded.module, fusions, list(loaded.places.attention), loaded.max_model_len)
        model = PagedModel(loaded, ranks, Computation(fusions=()))
        if ranks.size > 1 and "rank_sums" in fusions:
            ranks.shared = shared_by(ranks, meeting, loaded.module.config.hidden_size, 4)
    layers = [part for part in model._loaded.module.modules() if isinstance(part, FusedLayer)]
    paths: set[str] = set()
    for layer in layers:
        for name in ("_one_row", "_few_rows"):
            setattr(layer, name, noting(paths, name, getattr(layer, name)))
    driver = GraphDriver(model, 4, max_rows=8) if graphs else Driver(model, len(model.groups) * 40, 4)
    sequences = [driver.sequence(prompt, chunk) for prompt, (_, chunk) in zip(prompts_of(SHAPES), SHAPES, strict=True)]
    driver.run(sequences, OUTPUTS)
    driver.run(sequences[:1], OUTPUTS + 2)
    return Run(
        torch.stack([row for sequence in sequences for row in sequence.logits]),
        [sequence.outputs for sequence in sequences],
        sum(layer.ranks is not None for layer in layers),
        paths,
    )


def noting(paths: set[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        paths.add(name)
        return call(*arguments)

    return noted


def compute_small(alone: Ranks, meeting: Path, model_dir: Path) -> Run:
    with small_products():
        return compute(alone, meeting, model_dir, "float32", FUSIONS, False)


@pytest.mark.skipif(ON_GPU, reason="tiles of a GPU's products are not that small")
@pytest.mark.parametrize(
    ("family", "tp", "fields"),
    [
        ("llama", 2, {}),
        pytest.param("llama", 4, {"attention_bias": True, "mlp_bias": True}, marks=pytest.mark.long),
        pytest.param("gemma", 2, {}, marks=pytest.mark.long),
    ],
)
def test_models_whose_layers_sum_by_themselves_answer_as_whole_ones(
    rank_pool: RankPool, family: str, tp: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    make_tiny(family, tmp_path, **fields)
    whole = compute(Ranks(), tmp_path, tmp_path, "float32", (), False)
    runs = rank_pool.run(tp, compute_small, rank_pool.meeting(), tmp_path)
    for run in runs:
        assert run.layers == 3 and run.paths == {"_one_row", "_few_rows"}
        assert error(run.logits, whole.logits.double()) < 1e-5
        assert run.tokens == whole.tokens
        assert torch.equal(run.logits, runs[0].logits), "ranks differ"


@pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [False, True])
def test_ranks_on_gpus_sum_as_nccl_does(rank_pool: RankPool, dtype: str, graphs: bool, tmp_path: Path) -> None:
    pool = pool_for(rank_pool, 2)
    make_tiny("llama", tmp_path, **WIDE)
    whole = compute(Ranks(), tmp_path, tmp_path, "float32", (), False)
    plain, *_ = pool.run(2, compute, pool.meeting(), tmp_path, dtype, (), graphs)
    runs = pool.run(2, compute, pool.meeting(), tmp_path, dtype, FUSIONS, graphs)
    right = whole.logits.double()
    print(f"{dtype}: NCCL {error(plain.logits, right):.1e}, own sums {error(runs[0].logits, right):.1e}")
    for run in runs:
        assert run.layers == 3 and run.paths == {"_one_row", "_few_rows"}
        if dtype == "float32":
            assert error(run.logits, right) < 1e-5 and run.tokens == whole.tokens
        assert torch.equal(run.logits, runs[0].logits), "ranks differ"


# ---- what is shared


def share_on_cpu(ranks: Ranks) -> tuple[bool, list[bytes]]:
    told = ranks.exchange(bytes([ranks.rank]) * (2 + ranks.rank), 8, torch.device("cpu"))
    return share_rows(ranks, 64, 4, torch.device("cpu")) is None, told


def test_ranks_that_cannot_map_each_others_memory_do_without(rank_pool: RankPool) -> None:
    assert rank_pool.run(3, share_on_cpu) == [(True, [b"\0\0", b"\1\1\1", b"\2\2\2\2"])] * 3


@given(st.integers(1, 16), st.integers(1, 65536), st.sampled_from([2, 4]))
def test_sums_of_so_many_rows_send_no_more_than_pays(ranks: int, width: int, itemsize: int) -> None:
    rows = most_rows(ranks, width, itemsize)
    assert rows == 0 or (2 <= ranks <= 8 and rows >= 2)
    assert rows * (ranks - 1) * width * itemsize <= MOST_SENT_BYTES


def test_what_large_models_sum_themselves() -> None:
    assert [most_rows(ranks, 4096, 2) for ranks in (1, 2, 4, 8, 9)] == [0, 768, 256, 108, 0]
    assert most_rows(2, 8192, 2) == 384 and most_rows(2, 64, 4) == 1024


ALONE = """
import torch
from disagg.models.fused.modules import FusedRMSNorm, Sum
from disagg.models.ranks import Ranks
from disagg.models.sums.shared import EMPTY_BYTE, SLOTS, SharedRows

ranks, device = Ranks(0, 2), torch.device("cuda")
ranks.collective_s = 0.05
memory = [torch.full((SLOTS, 2, 4 * 64 * 4), EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(2)]
norm = torch.nn.Module()
norm.weight, norm.eps = torch.nn.Parameter(torch.ones(64, device=device)), 1e-5
norm.__class__, norm.eps_name, norm.offset = FusedRMSNorm, "eps", False
rows = torch.ones(1, 4, 64, device=device)
norm.normed(Sum(rows, rows, SharedRows(ranks, memory, 4).slot(0)))
print("launched", flush=True)
torch.cuda.synchronize()
print("summed", flush=True)
"""


@pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
def test_a_rank_that_waits_for_one_that_is_gone_fails(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "launched\n" and done.returncode != 0
    assert "CUDA error" in done.stderr, done.stderr[-3000:]


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from disagg.models.fused.kernels import _rms_norm
from disagg.models.products.kernels import _one_row

SUM = {"RANK": 1, "RANKS": 3, "ON_GPU": True, "OVERLAP": True, "ADD": True, "OFFSET": False}
NORM = {"SIZE": 4096, "BLOCK": 4096, "PARTS": 4, **SUM}
ONE = {"N": 4096, "K": 2048, "BLOCK_N": 4, "BLOCK_K": 1024, "UNROLL": 1, "WHOLE": True, "SQUARES": 0, "GATE": 0, **SUM}
for kernel, bits, warps, constants in (
    (_rms_norm, "*i16", 8, NORM), (_one_row, "*i32", 4, {**ONE, "BIAS": False, "SCALE": True})
):
    types = {name: "*bf16" for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    types |= {name: "i32" for name in ("x_row", "x_part", "residual_row", "area", "most_polls") if name in types}
    types |= {"eps": "fp32", "slots": (bits,) * 3} | {name: "*fp32" for name in ("squares", "squares_out") if name in types}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, places, {})
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps, "launch_pdl": True})
    assert "ld.volatile.global" in made.asm["ptx"] and "trap" in made.asm["ptx"]
"""


@pytest.mark.long
def test_kernels_with_sums_in_them_compile_for_a_gpu(tmp_path: Path) -> None:
    """Which the interpreter does not say: a loop over what another GPU writes is more than some versions of Triton take."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
