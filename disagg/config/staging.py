"""How large staging is where the configuration leaves it open. Pure.

A write costs the same beside its bytes, however many they are, so pieces should be long; and short enough for a few of them to
be under way at once. 32 MiB take a tenth of a millisecond over NVLink, 4 MiB some milliseconds between processes of one
machine. A link's two segments hold two pieces on a CPU and eight on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from disagg.config.tree import MIB, TransferConfig

PAGE_BYTES = 4096  # of the machine: what the transport registers starts and ends on these

Device = Literal["cpu", "cuda"]


class _Sizes(Struct, frozen=True):
    """Bytes."""

    arena: int
    segment: int
    gather: int


_GPU_PIECE = 32 * MIB + PAGE_BYTES  # rows of 32 MiB, and their checksum
_SIZES: Mapping[Device, _Sizes] = {
    "cpu": _Sizes(arena=64 * MIB, segment=4 * MIB, gather=4 * MIB),
    "cuda": _Sizes(arena=8 * 4 * _GPU_PIECE, segment=4 * _GPU_PIECE, gather=_GPU_PIECE),
}


def size_staging(transfer: TransferConfig, device: Device) -> TransferConfig:
    """The same, with the device's own sizes where they are 0. They may not go with those that are given: check_staging."""
    sizes = _SIZES[device]
    return replace(
        transfer,
        arena_bytes=transfer.arena_bytes or sizes.arena,
        segment_bytes=transfer.segment_bytes or sizes.segment,
        gather_bytes=transfer.gather_bytes or sizes.gather,
    )
