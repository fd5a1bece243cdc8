"""The moment at which something happens: an argument of every event, so that no decision reads a clock."""

from __future__ import annotations

from typing import NamedTuple


class Now(NamedTuple):
    """One moment by two clocks."""

    s: float  # monotonic: for what lasts
    unix_s: float = 0.0  # seconds since the epoch: for what is told to people


NEVER = Now(0.0)
