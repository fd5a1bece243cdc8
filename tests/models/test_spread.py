"""What arrives of a step goes to where graphs read it, in Triton's interpreter; with `TRITON_INTERPRET=0`, on a CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

from disagg.models.device import Uploads
from disagg.models.spread.launch import BLOCK, launch, spread

DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
SHAPES = (((1, 1),), ((3, BLOCK),), ((5, BLOCK + 1), (5, 2)), ((4, 7), (4, 700), (4, 1)))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("launched", [True, False])
def test_all_that_arrived_is_there_and_nothing_else_is_touched(
    shapes: tuple[tuple[int, int], ...], launched: bool
) -> None:
    torch.manual_seed(len(shapes))
    arrived = torch.randint(-9, 9, (7, 40), device=DEVICE)
    columns = torch.full((7, 40), 77, device=DEVICE)
    pages = [torch.randint(100, size=shape, device=DEVICE) for shape in shapes]
    tables = [torch.full((rows + 2, width + 3), 77, device=DEVICE) for rows, width in shapes]
    (launch if launched else spread)(arrived, columns, pages, tables)
    assert torch.equal(columns, arrived)
    for part, table in zip(pages, tables, strict=True):
        rows, width = part.shape
        assert torch.equal(table[:rows, :width], part)
        assert (table[rows:] == 77).all() and (table[:, width:] == 77).all()


def test_what_is_uploaded_arrives_whole_whatever_its_shape() -> None:
    values = [torch.arange(size).view(shape) for size, shape in ((1, (1, 1)), (12, (3, 4)), (7, (7,)))]
    there = Uploads(torch.device(DEVICE)).together(values)
    for value, part in zip(values, there, strict=True):
        assert part.device.type == DEVICE and torch.equal(part.cpu(), value)
