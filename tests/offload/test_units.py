"""Writers partition every page exactly once, whatever their number, and readers of any number find their heads."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from disagg.messages.heads import SliceError, heads_per_rank
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.offload.units import cut_page, heads_of, unit_bytes, written_by
from tests.offload.joined import join_page

PAGE_TOKENS = 2


def allowed(tp: int, kv_heads: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


def groups_of(kv_heads: int) -> tuple[LayerGroup, ...]:
    return (
        LayerGroup("full", (0, 3), kv_heads, 2, "float32"),
        LayerGroup("window", (1,), kv_heads, 4, "bfloat16", GroupKind.WINDOW, window=7),
        LayerGroup("latent", (2,), 1, 6, "float16", planes=1),
        LayerGroup.of_states("state", (4, 5), (StatePart("conv", (3,), "float32"),)),
    )


EVERY_PAIR = [(tp, heads) for heads in range(1, 33) for tp in range(1, 65) if allowed(tp, heads)]


def test_every_unit_is_written_by_exactly_one_rank_for_every_tp_size_and_number_of_heads() -> None:
    for tp, kv_heads in EVERY_PAIR:
        for group in groups_of(kv_heads):
            if not group.is_state and not allowed(tp, group.kv_heads):
                continue
            written = [head for rank in range(tp) for head in written_by(rank, tp, group)]
            assert written == list(range(group.kv_heads)), f"{group.name}, {kv_heads} heads on {tp} ranks"
            for rank in range(tp):
                own = group.on_rank(tp)
                assert len(heads_of(rank, tp, group)) == own.kv_heads
                assert set(written_by(rank, tp, group)) <= set(heads_of(rank, tp, group))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_ranks_of_one_size_write_ranks_of_any_other_read(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    sizes = [tp for tp in range(1, 25) if allowed(tp, kv_heads)]
    writers, readers = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    group = data.draw(st.sampled_from([g for g in groups_of(kv_heads) if g.is_state or g.kv_heads == kv_heads]))
    whole = np.random.default_rng(kv_heads).integers(0, 256, group.page_bytes(PAGE_TOKENS), dtype=np.uint8)
    units = cut_page(whole, group, PAGE_TOKENS)
    stored: dict[int, np.ndarray] = {}
    for rank in range(writers):
        own = group.on_rank(writers)
        page = np.empty(own.page_bytes(PAGE_TOKENS), np.uint8)
        join_page([units[head] for head in heads_of(rank, writers, group)], own, PAGE_TOKENS, page)
        cut = cut_page(page, own, PAGE_TOKENS)
        held = heads_of(rank, writers, group)
        for head in written_by(rank, writers, group):
            assert head not in stored, "a unit is written twice"
            stored[head] = cut[head - held.start]
    layers = len(group.layers)
    expected = whole.reshape(layers, group.planes, group.kv_heads, -1)
    for rank in range(readers):
        own, held = group.on_rank(readers), heads_of(rank, readers, group)
        page = np.empty(own.page_bytes(PAGE_TOKENS), np.uint8)
        join_page([stored[head] for head in held], own, PAGE_TOKENS, page)
        shaped = page.reshape(layers, group.planes, own.kv_heads, -1)
        assert (shaped == expected[:, :, held.start : held.stop]).all()
    assert unit_bytes(group, PAGE_TOKENS) == unit_bytes(group.on_rank(readers), PAGE_TOKENS)


def test_a_tp_size_that_cannot_hold_the_heads_is_refused() -> None:
    with pytest.raises(SliceError):
        heads_of(0, 2, LayerGroup("full", (0,), 3, 2, "float32"))
    assert heads_per_rank(3, 3) == 1
