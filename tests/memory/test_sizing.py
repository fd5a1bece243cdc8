"""How large the KV pool is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.memory.groups import spec_of
from disagg.memory.layout import PoolLayout, pool_layout
from disagg.memory.sizing import CPU_POOL_BYTES, size_pool
from disagg.messages.layout import LayerGroup

MIB = 1 << 20
PAGE_TOKENS = 16


def layout() -> PoolLayout:
    return pool_layout([spec_of(LayerGroup("full", (0, 1), 8, 128, "bfloat16"), PAGE_TOKENS)], PAGE_TOKENS, 512)


@settings(derandomize=True, deadline=None)
@given(
    total=st.integers(1 << 30, 1 << 38),
    used=st.floats(0, 0.5),
    staging=st.integers(0, 256 * MIB),
    utilization=st.floats(0.7, 1.0),
)
def test_a_measured_pool_leaves_room_for_the_step_staging_and_what_is_not_ours(
    total: int, used: float, staging: int, utilization: float
) -> None:
    peak = int(total * used * 0.5)
    large = layout().large_bytes
    size = size_pool(
        layout(), set_bytes=0, total_bytes=total, peak_bytes=peak, staging_bytes=staging, utilization=utilization
    )
    pool = size.num_large * large
    assert pool + peak + staging <= total * utilization < pool + large + peak + staging + 1


def test_a_size_that_was_set_or_is_the_default_is_taken_as_it_is() -> None:
    for set_bytes, total, pool in ((64 * MIB, 1 << 37, 64 * MIB), (0, 0, CPU_POOL_BYTES)):
        size = size_pool(
            layout(), set_bytes=set_bytes, total_bytes=total, peak_bytes=0, staging_bytes=1 << 30, utilization=0.9
        )
        assert size.num_large == pool // layout().large_bytes


def test_a_pool_without_room_for_one_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"-\d+ MiB for KV .* less the 900 MiB .* and 200 MiB for staging"):
        size_pool(
            layout(),
            set_bytes=0,
            total_bytes=1024 * MIB,
            peak_bytes=900 * MIB,
            staging_bytes=200 * MIB,
            utilization=0.9,
        )


def test_more_than_the_device_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="2048 MiB for KV, as configured, are more than the device has, 1024 MiB"):
        size_pool(layout(), set_bytes=2 << 30, total_bytes=1 << 30, peak_bytes=0, staging_bytes=0, utilization=0.9)


def test_a_pool_of_less_than_a_page_is_said_in_bytes() -> None:
    with pytest.raises(
        ValueError, match=r"65536 bytes for KV \(as configured\) do not hold one large page of \d+ bytes"
    ):
        size_pool(layout(), set_bytes=64 << 10, total_bytes=0, peak_bytes=0, staging_bytes=0, utilization=0.9)
