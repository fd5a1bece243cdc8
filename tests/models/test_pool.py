"""A page is one contiguous byte range, laid out as the design says, and the pool's views agree about it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from disagg.messages.layout import LayerGroup
from disagg.models.pool import KvPool

GROUP = LayerGroup("full", layers=(0, 1, 2), kv_heads=2, head_dim=8, dtype="float32")
T = 4


def make_pool(num_pages: int = 6) -> KvPool:
    pool = KvPool.create(GROUP, num_pages, T, "cpu")
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def test_layer_group_counts_bytes() -> None:
    assert GROUP.bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert GROUP.page_bytes(T) == T * GROUP.bytes_per_token


@pytest.mark.parametrize("change", [{"layers": (1, 0)}, {"layers": ()}, {"kv_heads": 0}, {"dtype": "int8"}])
def test_layer_group_refuses_nonsense(change: dict) -> None:
    with pytest.raises(AssertionError):
        LayerGroup(**({"name": "full", "layers": (0,), "kv_heads": 1, "head_dim": 8, "dtype": "float32"} | change))


def test_layout_does_not_load_torch() -> None:
    code = "import sys, disagg.messages.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_page_bytes_hold_layers_then_kv_then_heads_then_tokens() -> None:
    pool = make_pool()
    page = pool.bytes[4].view(torch.float32).view(3, 2, 2, T, 8)
    for slot in range(3):
        assert torch.equal(pool.keys(slot)[4], page[slot, 0])
        assert torch.equal(pool.values(slot)[4], page[slot, 1])


def test_new_pool_is_zeros_and_writable_outside_inference_mode() -> None:
    with torch.inference_mode():
        pool = KvPool.create(GROUP, 2, T, "cpu")
    assert not pool.bytes.any()
    pool.bytes[1] = 7
    assert pool.kv[1].any()


def test_written_rows_are_where_the_views_say() -> None:
    pool = make_pool()
    pages, offsets = torch.tensor([5, 0, 5]), torch.tensor([3, 1, 0])
    keys, values = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    before = pool.kv.clone()
    pool.write(1, pool.row_index(pages, offsets), keys, values)
    for row, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
        assert torch.equal(pool.keys(1)[page, :, offset], keys[:, row])
        assert torch.equal(pool.values(1)[page, :, offset], values[:, row])
        before[page, 1, 0, :, offset] = keys[:, row]
        before[page, 1, 1, :, offset] = values[:, row]
    assert torch.equal(pool.kv, before)  # and nothing else changed


def test_gathered_units_are_the_pages_in_order() -> None:
    pool = make_pool()
    pages = torch.tensor([3, 0, 3, 5])
    for slot in range(3):
        units = torch.empty(2 * 2 * 4, T * 8)
        pool.gather(slot, pool.unit_index(pages), units)
        expected = pool.kv[pages, slot].permute(1, 2, 0, 3, 4)  # [K or V, heads, pages, tokens, dims]
        assert torch.equal(units.view(expected.shape), expected)


def test_copies_read_every_source_before_any_page_is_written() -> None:
    pool = make_pool()
    before = pool.bytes.clone()
    pool.copy_pages([(0, 1), (1, 2), (3, 0)])
    assert torch.equal(pool.bytes, before[[3, 0, 1, 3, 4, 5]])


def test_two_copies_into_one_page_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="same destination"):
        make_pool().copy_pages([(0, 2), (1, 2)])
