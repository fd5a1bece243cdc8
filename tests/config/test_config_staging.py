"""Sizes of staging that the configuration leaves open."""

from __future__ import annotations

from typing import Literal

import pytest

from disagg.config.check import check_staging
from disagg.config.staging import size_staging
from disagg.config.tree import MIB, TransferConfig


@pytest.mark.parametrize(("device", "arena", "piece"), [("cpu", 64 * MIB, 4 * MIB), ("cuda", 1024 * MIB, 32 * MIB)])
def test_each_device_has_sizes_that_go_together(device: Literal["cpu", "cuda"], arena: int, piece: int) -> None:
    sized = size_staging(TransferConfig(), device)
    check_staging(sized, device)
    assert arena <= sized.arena_bytes < 1.01 * arena
    assert piece <= sized.gather_bytes < 1.01 * piece
    assert sized.segment_bytes // sized.gather_bytes == (1 if device == "cpu" else 4), "pieces fill segments"


def test_what_is_given_stays() -> None:
    given = TransferConfig(arena_bytes=32 * MIB, segment_bytes=2 * MIB, gather_bytes=MIB)
    assert size_staging(given, "cuda") == size_staging(given, "cpu") == given
