"""Whole numbers that several packages count with. Pure."""

from __future__ import annotations


def ceil_div(number: int, by: int) -> int:
    """How many of size `by` it takes to hold `number`."""
    return -(-number // by)


def round_up(number: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-number // to) * to
