"""Whether a prompt should start now, or wait for another that computes what it begins with; and how much memory those that
decode will come to need. Pure; knows hashes, tokens and counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from msgspec import Struct

MOST_BEFORE_AWAITED = 16_384  # tokens of others that go before a prompt for which later ones still wait


def common_pages(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many pages two prompts share from the beginning. A hash names all tokens before it, too, so where two differ, all
    after them do.
    """
    shorter = min(len(one), len(other))
    return bisect.bisect_left(range(shorter), True, key=lambda at: one[at] != other[at])


def should_wait(
    common_tokens: int,
    cached_tokens: int,
    computed_tokens: int,
    last_tokens: int,
    step_tokens: int,
    others_first: int = 0,
) -> bool:
    """A prompt shares common_tokens with one that is being computed, began with cached_tokens of its own, has come to
    computed_tokens, offers all that they share when it has come to last_tokens, and has let others_first tokens of its tenant's
    others go first.

    What both lack is computed once if the later one waits, and twice if not. Whoever comes later may begin meanwhile, so waiting
    delays nobody else, and itself by the step in which the last result is on its way: a step's worth of tokens has to be saved.
    And it does not wait for one that is not urgent enough to go on: its own urgency would count for nothing.
    """
    goes_on = others_first <= max(last_tokens, MOST_BEFORE_AWAITED)
    return goes_on and computed_tokens < last_tokens and common_tokens - cached_tokens >= step_tokens


class Growing(Struct, frozen=True):
    """A sequence that decodes, or will from now on. steps: tokens that it may make still; room_tokens: of these, how many its
    pages have room for; own_tokens: that it will have in pages which come free when it ends, so not in those that others
    may share.
    """

    steps: int
    room_tokens: int
    own_tokens: int


def peak_growth(growing: Iterable[Growing], page_tokens: int, lookahead_tokens: int, lag_steps: int = 0) -> float:
    """Pages, beyond those that are held now, that these come to need at most within so many steps, if none ends early.
    lag_steps: how long one keeps its pages after its end, until its last steps have been reported.

        tokens   ┌ a          each makes a token a step, takes a page when its own are full, and gives back what it
              ┌──┘ └───┐      has when it reaches its limit: what counts is the highest point of the sum
           b ─┘        └──

    Never too few: each is counted with a whole page more than it may have begun.
    """
    events: list[tuple[int, int, int, int]] = []  # (step, ends after starts, tokens at once, change of tokens a step)
    for each in growing:
        last = min(each.steps, lookahead_tokens)
        starts = min(each.room_tokens, last)
        grown = last - starts
        if grown:
            events.append((starts, 0, page_tokens - 1, 1))
            events.append((last, 1, 0, -1))
        if each.steps + lag_steps <= lookahead_tokens:
            given = grown + (page_tokens - 1 if grown else 0)
            given = max(given, each.own_tokens // page_tokens * page_tokens)
            events.append((last + lag_steps, 2, -given, 0))
    events.sort()
    tokens = most = slope = before = 0
    for step, _, at_once, change in events:
        tokens += slope * (step - before)
        most = max(most, tokens)
        tokens, slope, before = tokens + at_once, slope + change, step
    return max(most, tokens) / page_tokens
