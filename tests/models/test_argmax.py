"""The first argmax of rows, in Triton's interpreter; with `TRITON_INTERPRET=0`, on a CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

from disagg.models.argmax import first as argmax

ON_GPU = os.environ["TRITON_INTERPRET"] == "0"
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize(("rows", "width"), [(1, 50000), (3, 4096), (2, 1), (7, 9000), (300, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_first_counts(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randint(-9, 9, (rows, width), device=DEVICE).to(dtype)
    if width > 1:
        x[:, width // 2] = -torch.inf
    right = torch.tensor([row.index(max(row)) for row in x.tolist()])
    got = torch.full((rows,), -1, device=DEVICE)
    argmax.launch(x, got)
    assert torch.equal(got.cpu(), right)


@pytest.mark.parametrize("width", [70, 9000, 50000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_with_what_is_no_number_has_no_first(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, width, device=DEVICE).to(dtype)
    right = x.argmax(-1)
    x[0, 0], x[1, -1], x[2, width // 2], x[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    x[4, 5], x[4, -3], x[5], x[6, 1] = torch.inf, torch.nan, torch.nan, -torch.inf
    right[:6] = -1
    right[6] = x[6].argmax()
    got = torch.empty(8, dtype=torch.int64, device=DEVICE)
    argmax.launch(x, got)
    assert torch.equal(got, right)
    assert torch.equal(argmax.checked(x.argmax(-1), x), right)


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 3000, device=DEVICE)
    got = torch.full((4,), -1, device=DEVICE)
    argmax.launch(wide[:, :2100], got)
    assert torch.equal(got, wide[:, :2100].argmax(-1))


def test_programs_fill_the_device_and_not_more() -> None:
    assert argmax.parts_of(1, 128256) == 32
    assert argmax.parts_of(256, 128256) == 8
    assert argmax.parts_of(4096, 128256) == 1
    assert argmax.parts_of(1, 32) == 1
