"""A page is one byte range, laid out page by page, and every group's view of the one pool agrees about it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from disagg.memory.layout import PageSizing
from disagg.messages.layout import GroupKind, LayerGroup, StatePart, state_offsets
from disagg.messages.plan import PageCopy
from disagg.models.pool import AttentionPages, Pool
from tests.models.pools import fill, make_pool

T = 4
FULL = LayerGroup("full", layers=(0, 1, 2), kv_heads=2, head_dim=8, dtype="float32")
NARROW = LayerGroup("window-16", (3, 5, 7), 1, 12, "float32", GroupKind.WINDOW, window=16)
HALF = LayerGroup("full", (0, 1), 1, 8, "bfloat16")
PARTS = (StatePart("conv", (6, 3), "bfloat16"), StatePart("ssm", (2, 3, 4), "float32"))
STATES = LayerGroup.of_states("states", (4, 6), PARTS)


def attention_pages(sizing: PageSizing) -> AttentionPages:
    """NARROW's view of a pool that is also FULL's. With MAX its pages of 1152 bytes are 1536 apart."""
    pool = make_pool((FULL, NARROW), 6, T, sizing)
    fill(pool)
    return pool.attention(1)


def test_layer_group_counts_bytes() -> None:
    assert FULL.bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert FULL.page_bytes(T) == T * FULL.bytes_per_token


@pytest.mark.parametrize("change", [{"layers": (1, 0)}, {"layers": ()}, {"kv_heads": 0}, {"dtype": "int8"}])
def test_layer_group_refuses_nonsense(change: dict) -> None:
    with pytest.raises(AssertionError):
        LayerGroup(**({"name": "full", "layers": (0,), "kv_heads": 1, "head_dim": 8, "dtype": "float32"} | change))


def test_layout_does_not_load_torch() -> None:
    code = "import sys, disagg.messages.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_small_page_is_at_its_number_times_the_stride() -> None:
    pool = Pool.create((FULL, NARROW), num_large=4, large_bytes=4608, strides=(2304, 1536), page_tokens=T, device="cpu")
    assert pool.bytes.shape == (4 * 4608,)
    assert [view.num_pages for view in pool.views] == [8, 12]
    for group, page, start in ((0, 5, 5 * 2304), (1, 7, 7 * 1536)):
        pool.bytes.zero_()
        pool.views[group].bytes[page] = 1
        touched = pool.bytes.nonzero().flatten().tolist()
        assert touched == list(range(start, start + pool.groups[group].page_bytes(T)))


def test_strides_that_do_not_fit_are_bugs() -> None:
    for large_bytes, strides in ((4608, (2304, 1600)), (4608, (1152, 1536)), (4640, (2320, 2320))):
        with pytest.raises(AssertionError):
            Pool.create((FULL, NARROW), 1, large_bytes, strides, T, "cpu")


@pytest.mark.parametrize("sizing", PageSizing)
def test_page_bytes_hold_layers_then_kv_then_heads_then_tokens(sizing: PageSizing) -> None:
    view = attention_pages(sizing)
    page = view.bytes[4].view(torch.float32).view(3, 2, 1, T, 12)
    for layer in range(3):
        assert torch.equal(view.keys(layer)[4], page[layer, 0])
        assert torch.equal(view.values(layer)[4], page[layer, 1])


def test_new_pool_is_zeros_and_writable_outside_inference_mode() -> None:
    with torch.inference_mode():
        pool = make_pool((FULL,), 2, T)
    assert not pool.bytes.any()
    pool.bytes[-1] = 7
    assert pool.attention(0).kv[1].any()


@pytest.mark.parametrize("sizing", PageSizing)
def test_written_rows_are_where_the_views_say(sizing: PageSizing) -> None:
    view = attention_pages(sizing)
    pages, offsets = torch.tensor([5, 0, 5]), torch.tensor([3, 1, 0])
    keys, values = torch.randn(2, 1, 3, 12)
    before = view.kv.clone()
    view.write(1, view.row_index(pages, offsets), keys, values)
    for row, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
        assert torch.equal(view.keys(1)[page, :, offset], keys[:, row])
        assert torch.equal(view.values(1)[page, :, offset], values[:, row])
        before[page, 1, 0, :, offset] = keys[:, row]
        before[page, 1, 1, :, offset] = values[:, row]
    assert torch.equal(view.kv, before)  # and nothing else changed


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("sizing", PageSizing)
def test_gathered_units_are_the_pages_in_order(sizing: PageSizing, group: int) -> None:
    pool = make_pool((FULL, NARROW), 6, T, sizing)
    fill(pool)
    view = pool.attention(group)
    heads, dim = view.group.kv_heads, view.group.head_dim
    pages = torch.tensor([3, 0, 3, view.num_pages - 1])
    for layer in range(len(view.group.layers)):
        units = torch.empty(2 * heads * 4, T * dim)
        view.gather(layer, view.head_page_index(pages), units)
        expected = view.kv[pages, layer].permute(1, 2, 0, 3, 4)  # [K or V, heads, pages, tokens, dims]
        assert torch.equal(units.view(expected.shape), expected)


def test_a_state_page_holds_layers_then_parts_at_their_offsets() -> None:
    pool = make_pool((FULL, STATES), 3, T, PageSizing.MAX)
    states = pool.states(1)
    offsets = state_offsets(PARTS)
    assert states.page_bytes == 2 * offsets[-1]
    for layer in range(2):
        for index, part in enumerate(states.parts(layer)):
            pool.bytes.zero_()
            assert part.shape == (states.num_pages, *PARTS[index].shape)
            part[1] = 1.5
            start = layer * offsets[-1] + offsets[index]
            content = states.bytes[1, start : start + PARTS[index].nbytes].view(part.dtype)
            assert content.eq(1.5).all()
            assert (
                pool.bytes.count_nonzero()
                == states.bytes[1].count_nonzero()
                == content.view(torch.uint8).count_nonzero()
            )


def test_copies_read_every_source_before_any_page_is_written() -> None:
    pool = make_pool((FULL, NARROW), 3, T)
    fill(pool)
    full, narrow = (view.bytes.clone() for view in pool.views)
    # FULL has three pages in a large page, NARROW four. FULL's page 0 is read, and lost to NARROW's page 0.
    pool.copy_pages([PageCopy(1, 4, 0), PageCopy(0, 0, 8), PageCopy(1, 5, 4)])
    assert torch.equal(pool.views[0].bytes[8], full[0])
    assert torch.equal(pool.views[1].bytes[0], narrow[4])
    assert torch.equal(pool.views[1].bytes[4], narrow[5])


def test_two_copies_into_one_page_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="same destination"):
        make_pool((FULL,), 3, T).copy_pages([PageCopy(0, 0, 2), PageCopy(0, 1, 2)])


def test_zeroed_pages_are_blank_and_no_other_is() -> None:
    pool = make_pool((FULL, NARROW), 4, T)
    pool.bytes.fill_(255)
    pool.zero_pages(1, [2, 5])
    pool.zero_pages(1, [])
    assert [page for page in range(pool.views[1].num_pages) if not pool.views[1].bytes[page].any()] == [2, 5]
    assert (pool.bytes == 0).sum() == 2 * pool.views[1].page_bytes


@pytest.mark.parametrize(
    ("groups", "mixed"),
    [((FULL,), False), ((FULL, NARROW), False), ((FULL, HALF), True), ((FULL, STATES), True), ((STATES,), True)],
)
def test_a_pool_is_mixed_when_not_all_of_it_is_one_dtype(groups: tuple[LayerGroup, ...], mixed: bool) -> None:
    assert make_pool(groups, 1, T, PageSizing.MAX).mixed == mixed


def test_states_of_the_attention_layers_dtype_do_not_mix_a_pool() -> None:
    states = LayerGroup.of_states("states", (4,), (StatePart("ssm", (2, 3), "float32"),))
    assert not make_pool((FULL, states), 1, T, PageSizing.MAX).mixed


def test_a_group_is_asked_for_as_what_it_is() -> None:
    pool = make_pool((FULL, STATES), 1, T, PageSizing.MAX)
    with pytest.raises(AssertionError, match="holds states"):
        pool.attention(1)
    with pytest.raises(AssertionError, match="holds no states"):
        pool.states(0)
