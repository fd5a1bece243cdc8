"""What is remembered within a bound. Pure."""

from __future__ import annotations

from typing import Any


def forget_oldest(remembered: dict[Any, Any], most: int) -> None:
    """Takes away what was put in first, until at most so many are left."""
    while len(remembered) > most:
        del remembered[next(iter(remembered))]
