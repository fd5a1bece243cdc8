"""Products of few rows against float64, with all that can be part of them, in Triton's interpreter; with
`TRITON_INTERPRET=0`, on a CUDA device."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from disagg.models.products.choice import LEAST_ROWS, MOST_PARTS, MOST_ROWS, FewRows, OneRow, few_rows, one_row
from disagg.models.products.launch import GELU_TANH, SILU, Norm, Scaled, add_one, launch_few, multiply_few, multiply_one

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def gated(both: Tensor, gate: int) -> Tensor:
    first, second = both.chunk(2, dim=-1)
    return (silu(first) if gate == SILU else gelu(first, approximate="tanh")) * second


SHAPES = [(64, 64), (37, 80), (256, 2304), (8, 4096)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize(("gate", "biased"), [(0, False), (0, True), (SILU, False), (GELU_TANH, True)])
def test_a_product_of_one_row_is_that_of_float64(
    columns: int, depth: int, gate: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(columns + depth)
    outputs = columns * (2 if gate else 1)
    row, weight = random(1, depth, dtype=dtype), random(outputs, depth, dtype=dtype) / depth**0.5
    bias = random(outputs, dtype=dtype) if biased else None
    got = multiply_one(row, weight.contiguous(), bias, gate=gate)
    right = row.double() @ weight.double().T
    if bias is not None:
        right = right + bias.double()
    assert got.shape == (1, columns) and got.dtype == dtype
    assert error(got, gated(right, gate) if gate else right) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_between_two_products_is_that_of_float64(
    columns: int, depth: int, offset: bool, dtype: torch.dtype
) -> None:
    """Half of it is part of the product before it, which adds a residual, and half of the one behind it."""
    torch.manual_seed(columns + depth)
    row, weight = random(1, depth, dtype=dtype), random(columns, depth, dtype=dtype) / depth**0.5
    residual, behind = random(1, columns, dtype=dtype), random(48, columns, dtype=dtype) / columns**0.5
    bias, norm = random(columns, dtype=dtype), Norm(random(columns, dtype=dtype), 1e-5, offset)
    summed = add_one(row, weight.contiguous(), bias, residual, norm)
    assert isinstance(summed, Scaled)
    got = multiply_one(summed, behind.contiguous())

    total = row.double() @ weight.double().T + bias.double() + residual.double()
    assert error(summed.row, total) < ERRORS[dtype]
    normed = total * torch.rsqrt(total.square().mean() + norm.eps) * (norm.weight.double() + (1 if offset else 0))
    assert error(got, normed @ behind.double().T) < 2 * ERRORS[dtype]
    assert torch.equal(add_one(row, weight.contiguous(), bias, residual, None), summed.row)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "weight"), [(3000.0, 40.0), (1e-3, 1e-2)])
def test_half_a_norm_holds_what_float16_does_not(size: float, weight: float) -> None:
    """A few dims of a model's rows are that large, and those of its first layers are that small."""
    torch.manual_seed(5)
    residual, behind = (random(1, 256, dtype=torch.float32) * size).half(), random(48, 256, dtype=torch.float16) / 16
    norm = Norm((random(256, dtype=torch.float32) * weight).half(), 1e-12, False)
    zeros = torch.zeros(256, 64, dtype=torch.float16, device=DEVICE)
    summed = add_one(zeros[:1], zeros, None, residual, norm)
    got = multiply_one(summed, behind)
    assert got.dtype == torch.float16
    total = residual.double()
    normed = total * torch.rsqrt(total.square().mean() + norm.eps) * norm.weight.double()
    assert error(got, normed @ behind.double().T) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "parts", "gate", "biased"),
    [(2, 1, 0, True), (5, 2, 0, False), (16, 4, 0, False), (20, 1, SILU, True), (33, 1, GELU_TANH, False)],
)
def test_a_product_of_few_rows_is_that_of_float64(
    rows: int, parts: int, gate: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    columns, depth = 32, 128
    outputs = columns * (2 if gate else 1)
    # Rows of a wider tensor, as a batch's may be.
    x, weight = random(rows, depth + 8, dtype=dtype)[:, :depth], random(outputs, depth, dtype=dtype) / depth**0.5
    bias = random(outputs, dtype=dtype) if biased else None
    padded = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    how = FewRows(padded, block_n=16, block_k=16, parts=parts, warps=4, stages=2)
    got = launch_few(how, x, weight.contiguous(), bias, gate)
    assert got.shape == (parts, rows, columns) and got.dtype == (torch.float32 if parts > 1 else dtype)
    right = x.double() @ weight.double().T
    if bias is not None:
        right = right + bias.double()
    assert error(got.double().sum(0), gated(right, gate) if gate else right) < ERRORS[dtype]


@pytest.mark.skipif(not ON_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("rows", [2, 9, 32, 40, 64])
@pytest.mark.parametrize(
    ("columns", "depth", "gate", "in_parts"),
    [(6144, 4096, 0, False), (4096, 4096, 0, True), (14336, 4096, SILU, False), (4096, 14336, 0, True)],
)
def test_what_is_chosen_for_a_large_model_fits_the_device(
    rows: int, columns: int, depth: int, gate: int, in_parts: bool
) -> None:
    x = random(rows, depth, dtype=torch.bfloat16)
    weight = random(columns * (2 if gate else 1), depth, dtype=torch.bfloat16) / depth**0.5
    got = multiply_few(x, weight, gate=gate, in_parts=in_parts)
    right = x.double() @ weight.double().T
    if got is not None:
        assert error(got.double().sum(0), gated(right, gate) if gate else right) < 1e-2


@given(st.integers(1, 300), st.integers(1, 40000), st.integers(1, 40000), st.booleans(), st.booleans())
def test_whatever_the_shape_tiles_are_whole_or_the_library_is_taken(
    rows: int, columns: int, depth: int, gate: bool, in_parts: bool
) -> None:
    alone = one_row(columns, depth, gated=gate, summed=in_parts)
    assert alone.block_k & (alone.block_k - 1) == 0 and 1 <= alone.unroll <= -(-depth // alone.block_k)
    how = few_rows(rows, columns, depth, gated=gate, in_parts=in_parts)
    if how is not None:
        assert 1 < rows <= how.rows <= MOST_ROWS
        assert columns % how.block_n == 0 and depth % (how.block_k * how.parts) == 0
        assert 1 <= how.parts <= (MOST_PARTS if in_parts else 1)
        tiles = (how.block_n * (2 if gate else 1) + how.rows) * how.block_k * 2 * how.stages
        assert tiles <= 227 * 1024, "bytes of shared memory of a multiprocessor"


def test_shapes_of_an_8b_model_have_the_kernels_that_were_measured() -> None:
    assert few_rows(32, 4096, 14336, gated=False, in_parts=True) == FewRows(32, 64, 128, 4, 4, 4)
    assert few_rows(32, 14336, 4096, gated=True, in_parts=False) == FewRows(32, 64, 128, 1, 4, 4)
    assert few_rows(32, 6144, 4096, gated=False, in_parts=False) == FewRows(32, 64, 128, 1, 4, 4)
    assert few_rows(64, 4096, 4096, gated=False, in_parts=True) == FewRows(64, 64, 128, 4, 4, 3)
    assert few_rows(64, 14336, 4096, gated=True, in_parts=False) == FewRows(64, 64, 64, 1, 4, 4)
    assert few_rows(64, 6144, 4096, gated=False, in_parts=False) is None
    assert few_rows(128, 4096, 4096, gated=False, in_parts=True) is None
    assert few_rows(128, 14336, 4096, gated=True, in_parts=False) == FewRows(128, 64, 64, 1, 4, 5)
    assert few_rows(127, 14336, 4096, gated=True, in_parts=False) is None
    assert one_row(6144, 4096, gated=False) == one_row(4096, 4096, gated=False) == OneRow(4, 2048, 8, 2)
    assert one_row(14336, 4096, gated=True) == one_row(4096, 14336, gated=False) == OneRow(4, 1024, 4, 4)


def test_so_have_those_of_one_of_its_ranks() -> None:
    assert few_rows(32, 3072, 4096, gated=False, in_parts=False) == FewRows(32, 16, 256, 1, 2, 4)
    assert few_rows(32, 7168, 4096, gated=True, in_parts=False) == FewRows(32, 64, 128, 1, 4, 4)
    assert few_rows(32, 4096, 2048, gated=False, in_parts=True) == FewRows(32, 64, 128, 4, 4, 4)
    assert few_rows(32, 4096, 1792, gated=False, in_parts=True) == FewRows(32, 64, 128, 2, 4, 4), "one of eight"
    assert one_row(3072, 4096, gated=False) == OneRow(4, 1024, 4, 4)
    assert one_row(4096, 2048, gated=False, summed=True) == OneRow(4, 1024, 4, 1)
    assert one_row(4096, 7168, gated=False, summed=True) == OneRow(4, 512, 2, 4)
