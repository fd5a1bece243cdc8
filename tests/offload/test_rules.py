"""What is settled before anything is offloaded: strides, the kinds that can be stored, and whose reports count."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.memory.groups import GroupSpec
from disagg.memory.layout import pool_layout
from disagg.messages.layout import GroupKind
from disagg.messages.stored import MAX_PAGES
from disagg.offload.acks import Acks
from disagg.offload.rules import offload_rules
from disagg.types.errors import ProtocolError
from tests.offload.world import PAGE_TOKENS, layout_of


@pytest.mark.parametrize(
    ("model", "wanted", "stride"),
    [("full", 0, 1), ("full", 1, 1), ("full", 9, 4), ("full", 8, 4), ("everything", 0, 2), ("everything", 9, 4)],
)
def test_a_stride_is_whole_pages_or_checkpoints_and_one_at_least(model: str, wanted: int, stride: int) -> None:
    assert offload_rules(layout_of(model), wanted).stride == stride


@pytest.mark.parametrize("model", ["full", "everything"])
def test_no_stride_is_longer_than_what_storage_takes_at_once(model: str) -> None:
    """Ranks refuse more, and end: a prompt that is long enough would end them again and again."""
    rules = offload_rules(layout_of(model), 1 << 30)
    prompt_end = rules.prompt_end(PAGE_TOKENS * (3 * MAX_PAGES + 10))
    at = 0
    while at < prompt_end + 2 * MAX_PAGES:
        stop = rules.cut(at, prompt_end)
        assert at < stop <= at + MAX_PAGES and stop % rules.unit == 0
        at = stop


def test_checkpoints_too_far_apart_to_be_stored_are_refused() -> None:
    layout = layout_of("everything")
    layout = replace(layout, checkpoint_tokens=layout.page_tokens * (MAX_PAGES + 1))
    with pytest.raises(ValueError, match="checkpoints are 4097 pages"):
        offload_rules(layout, 8)


@pytest.mark.parametrize(
    "spec", [GroupSpec("x", GroupKind.IMAGE, 8), GroupSpec("x", GroupKind.BUDGET, 8, budget_tokens=4)]
)
def test_a_kind_that_cannot_be_stored_is_refused(spec: GroupSpec) -> None:
    with pytest.raises(ValueError, match="cannot be offloaded"):
        offload_rules(pool_layout((spec,), 2, 4), 8)


def test_acks_are_the_least_over_the_ranks_and_reports_of_what_there_is_not_are_refused() -> None:
    acks = Acks(2)
    assert [acks.issue() for _ in range(4)] == [1, 2, 3, 4]
    assert list(acks.report(0, 3, failed=[2])) == []
    assert list(acks.report(1, 2)) == [1, 2]
    assert (acks.take_failed(1), acks.take_failed(2)) == (False, True)
    assert list(acks.report(1, 4)) == [3]
    assert list(acks.report(0, 1)) == []
    for rank, last, failed in ((2, 1, ()), (-1, 1, ()), (0, 5, ()), (0, -1, ()), (0, 4, (5,))):
        with pytest.raises(ProtocolError):
            acks.report(rank, last, failed)
    assert list(acks.report(0, 4)) == [4]
