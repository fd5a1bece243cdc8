"""A rank's host pool: cut as the GPU's, refused with both numbers, and not touched before it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disagg.types.errors import ConfigError
from disagg.worker import host_memory
from disagg.worker.host_memory import HostMemory, allocate_host
from tests.offload.pages import PAGE_TOKENS, SCOPES
from tests.worker.rank_pools import layout_of, pool_of


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_are_where_the_pool_of_the_gpu_has_them() -> None:
    layout, pool = layout_of(SCOPES["everything"], 1), pool_of(SCOPES["everything"], 1)
    storage = allocate_host(pool.bytes.numel(), pinned=False)
    host = HostMemory(pool.groups, storage, layout.strides, PAGE_TOKENS)
    storage.copy_(pool.bytes)
    for g, view in enumerate(pool.views):
        assert host.num_pages(g) == view.num_pages
        for page in range(view.num_pages):
            assert np.array_equal(host.page(g, page), view.bytes[page].numpy())


def test_what_was_never_used_takes_no_memory() -> None:
    nbytes = 1 << 30
    before = resident_bytes()
    storage = allocate_host(nbytes, pinned=False)
    layout, pool = layout_of(SCOPES["full"], 1), pool_of(SCOPES["full"], 1)
    host = HostMemory(
        pool.groups, storage[: nbytes // layout.large_bytes * layout.large_bytes], layout.strides, PAGE_TOKENS
    )
    host.page(0, host.num_pages(0) - 1)[:] = 1
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("pinned", [False, True])
def test_more_than_there_is_is_refused_with_both_numbers(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_most_bytes", lambda pinned: (1000, "this machine has"))
    with pytest.raises(ConfigError, match=r"offload.host_bytes: 1001 bytes .* this machine has, 1000 bytes"):
        allocate_host(1001, pinned)


def test_what_the_system_does_not_give_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_most_bytes", lambda pinned: (1 << 62, "this machine has"))
    with pytest.raises(ConfigError, match=rf"{1 << 60} bytes of host memory .* {1 << 62} bytes"):
        allocate_host(1 << 60, pinned=False)


def test_what_a_machine_has_is_known() -> None:
    most, what = host_memory._most_bytes(pinned=False)
    available, _ = host_memory._most_bytes(pinned=True)
    assert 1 << 28 < available <= most < 1 << 50
    assert what == "this machine has"
