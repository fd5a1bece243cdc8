"""Arithmetic of pools: how large pages are cut."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.memory.groups import GroupSpec, spec_of
from disagg.memory.layout import PageSizing, pool_layout, stage_layout
from disagg.messages.layout import GroupKind, LayerGroup, StatePart

QUICK = settings(max_examples=300, derandomize=True, deadline=None)

SPECS = st.lists(
    st.builds(
        lambda number, units, align: GroupSpec(f"group{number}", GroupKind.FULL, units * align, align),
        st.integers(0, 9),
        st.integers(1, 200),
        st.sampled_from([1, 2, 16, 48, 256]),
    ),
    min_size=1,
    max_size=4,
)


@QUICK
@given(SPECS, st.sampled_from(list(PageSizing)))
def test_small_pages_fill_a_large_page_and_are_aligned(groups: list[GroupSpec], sizing: PageSizing) -> None:
    layout = pool_layout(groups, page_tokens=16, sizing=sizing)
    for group, per_large, stride in zip(layout.groups, layout.per_large, layout.strides, strict=True):
        assert per_large * stride == layout.large_bytes
        assert stride >= group.page_bytes
        assert stride % group.align_bytes == 0
        if sizing is PageSizing.MAX:
            parts = [n for n in range(per_large + 1, layout.large_bytes + 1) if layout.large_bytes % n == 0]
            assert not [
                n
                for n in parts
                if layout.large_bytes // n >= group.page_bytes and (layout.large_bytes // n) % group.align_bytes == 0
            ], "more small pages would fit"


@QUICK
@given(SPECS)
def test_the_least_common_multiple_loses_no_byte_or_says_why_it_is_not_taken(groups: list[GroupSpec]) -> None:
    layout = pool_layout(groups, page_tokens=16, max_small=128)
    if layout.sizing is PageSizing.LCM:
        assert layout.large_bytes == math.lcm(*(group.page_bytes for group in groups))
        assert max(layout.per_large) <= 128
        assert [layout.padding_bytes(g) for g in range(len(groups))] == [0] * len(groups)
        assert layout.reason == ""
    else:
        assert math.lcm(*(group.page_bytes for group in groups)) > 128 * min(group.page_bytes for group in groups)
        assert "128" in layout.reason


def test_84_small_pages_in_a_large_one_are_no_reason_to_waste_bytes() -> None:
    groups = (GroupSpec("attention", GroupKind.FULL, 84), GroupSpec("draft", GroupKind.FULL, 1))
    assert pool_layout(groups, page_tokens=16).per_large == (1, 84)


def test_a_multiple_beyond_the_limit_gives_way_to_the_largest_page() -> None:
    groups = (GroupSpec("target", GroupKind.FULL, 1000), GroupSpec("draft", GroupKind.FULL, 7))
    layout = pool_layout(groups, page_tokens=16)
    assert layout.sizing is PageSizing.MAX
    assert layout.large_bytes == 1000
    assert layout.per_large == (1, 125)  # 142 would fit, and 1000 has no divisor between
    assert layout.strides == (1000, 8)
    assert layout.padding_bytes(1) == 1
    assert layout.padding_bytes(1) / layout.strides[1] == 1 / 8
    assert layout.reason == (
        "The least common multiple of the page sizes, 7000 bytes, is 1000 pages of draft, and the limit is 128: "
        "large pages have the size of the largest page instead"
    )


def test_the_largest_page_grows_until_every_group_is_aligned() -> None:
    groups = (GroupSpec("states", GroupKind.STATE, 1008, 16), GroupSpec("attention", GroupKind.FULL, 640, 320))
    layout = pool_layout(groups, page_tokens=16, sizing=PageSizing.MAX)
    assert layout.large_bytes == 1280
    assert layout.per_large == (1, 2)


def test_checkpoints_lie_between_pages() -> None:
    groups = (GroupSpec("states", GroupKind.STATE, 1024),)
    assert pool_layout(groups, page_tokens=16, checkpoint_tokens=48).checkpoint_tokens == 48
    with pytest.raises(ValueError, match="checkpoint_tokens is 500; it must be a multiple of page_tokens, which is 16"):
        pool_layout(groups, page_tokens=16, checkpoint_tokens=500)


def test_pages_of_tokens_are_counted_whole() -> None:
    layout = pool_layout((GroupSpec("attention", GroupKind.FULL, 64),), page_tokens=16)
    assert [layout.pages_for(0, tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_a_window_of_512_tokens_lets_a_token_attend_to_511_before_it() -> None:
    group = LayerGroup("window", (0, 2), 4, 64, "bfloat16", GroupKind.WINDOW, window=512)
    spec = spec_of(group, page_tokens=16)
    assert spec == GroupSpec("window", GroupKind.WINDOW, 2 * 2 * 4 * 64 * 2 * 16, 16 * 64 * 2, window_tokens=511)


def test_a_page_of_states_holds_one_state_whatever_the_page_tokens() -> None:
    parts = (StatePart("conv", (3, 4), "float32"), StatePart("ssm", (8, 2), "float32"))
    group = LayerGroup.of_states("states", (1, 3), parts)
    assert spec_of(group, page_tokens=16) == spec_of(group, page_tokens=64)
    assert spec_of(group, page_tokens=16).page_bytes == 2 * (48 + 64)


@pytest.mark.parametrize(
    ("kind", "settings_of_another_kind"),
    [(GroupKind.FULL, {"window_tokens": 4}), (GroupKind.WINDOW, {"budget_tokens": 4}), (GroupKind.BUDGET, {})],
)
def test_windows_and_budgets_belong_to_their_kinds(kind: GroupKind, settings_of_another_kind: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        GroupSpec("group", kind, 64, **settings_of_another_kind)


@QUICK
@given(st.data())
def test_a_stage_has_as_many_small_pages_in_a_large_one_as_the_whole_model(data: st.DataObject) -> None:
    """So that a page's number says the same on every stage, whichever layers it has of the group."""
    aligns = data.draw(st.lists(st.sampled_from([1, 2, 16, 48, 256]), min_size=1, max_size=4))
    layers = [data.draw(st.integers(1, 40)) for _ in aligns]
    heads = data.draw(st.integers(1, 8))

    def spec(number: int, count: int) -> GroupSpec:
        return GroupSpec(f"group{number}", GroupKind.FULL, count * heads * aligns[number], aligns[number])

    whole = pool_layout([spec(*each) for each in enumerate(layers)], page_tokens=16)
    shares = [data.draw(st.integers(0, count)) for count in layers]
    parts = [spec(number, share) if share else None for number, share in enumerate(shares)]
    if not any(parts):
        return
    stage = stage_layout(whole, parts)
    own = [number for number, part in enumerate(parts) if part is not None]
    assert stage.per_large == tuple(whole.per_large[number] for number in own)
    assert stage.groups == tuple(part for part in parts if part is not None)
    needed = max(count * part.page_bytes for part, count in zip(stage.groups, stage.per_large, strict=True))
    step = math.lcm(*(c * part.align_bytes for part, c in zip(stage.groups, stage.per_large, strict=True)))
    assert (
        needed
        <= stage.large_bytes
        < needed + step + max(part.align_bytes for part in stage.groups) * max(stage.per_large)
    )
    if parts == list(whole.groups) and whole.sizing is PageSizing.LCM:
        assert stage == whole
