"""How large the pool is: what was set, or what a profiled worst step leaves of the device. Pure arithmetic."""

from __future__ import annotations

from msgspec import Struct

from disagg.memory.layout import PoolLayout

CPU_POOL_BYTES = 512 << 20


class PoolSize(Struct, frozen=True):
    """num_large pages of layout.large_bytes each. why: a sentence for the log."""

    num_large: int
    why: str


def size_pool(
    layout: PoolLayout, *, set_bytes: int, total_bytes: int, peak_bytes: int, staging_bytes: int, utilization: float
) -> PoolSize:
    """set_bytes: what the configuration says, or 0. total_bytes: of the device, or 0 where it is not measured (CPU);
    peak_bytes: the most that was in use during the largest step; staging_bytes: what the transfer will take. Raises
    ValueError if not one large page fits, or more was set than there is.
    """
    if total_bytes and set_bytes > total_bytes:
        raise ValueError(f"{_mib(set_bytes)} for KV, as configured, are more than the device has, {_mib(total_bytes)}")
    if set_bytes:
        pool_bytes, why = set_bytes, "as configured"
    elif not total_bytes:
        pool_bytes, why = CPU_POOL_BYTES, "the default on a CPU"
    else:
        pool_bytes = int(total_bytes * utilization) - peak_bytes - staging_bytes
        why = (
            f"{utilization:g} of the device's {_mib(total_bytes)} less the {_mib(peak_bytes)} that were in use during the "
            f"largest step and {_mib(staging_bytes)} for staging"
        )
    num_large = pool_bytes // layout.large_bytes
    if num_large < 1:
        raise ValueError(
            f"{_mib(pool_bytes)} for KV ({why}) do not hold one large page of {layout.large_bytes} bytes "
            f"({layout.page_tokens} tokens a page, sized by {layout.sizing.value})"
        )
    return PoolSize(num_large, f"{num_large} large pages of {layout.large_bytes} bytes, {_mib(pool_bytes)}: {why}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if abs(num_bytes) >= 10 << 20 else f"{num_bytes} bytes"
