"""Whether a prompt should start now, or wait for another that computes what it begins with. Pure; knows hashes and tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def common_pages(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many pages two prompts share from the beginning. A hash names all tokens before it, too, so where two differ, all
    after them do.
    """
    shorter = min(len(one), len(other))
    return bisect.bisect_left(range(shorter), True, key=lambda position: one[position] != other[position])


def should_wait(
    common_tokens: int, cached_tokens: int, computed_tokens: int, last_tokens: int, step_tokens: int
) -> bool:
    """A prompt shares common_tokens with one that is being computed, began with cached_tokens of its own, has come to
    computed_tokens, and offers all that they share when it has come to last_tokens.

    What both lack is computed once if the later one waits, and twice if not. Prompts are computed in the order in which they
    come, so waiting delays nobody, but for the step in which the last result is on its way: a step's worth of tokens has
    to be saved.
    """
    return computed_tokens < last_tokens and common_tokens - cached_tokens >= step_tokens
