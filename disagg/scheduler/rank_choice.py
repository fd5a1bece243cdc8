"""Which of a server's data-parallel ranks a request goes to. Pure; knows tokens and pages."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class RankState(Struct, frozen=True):
    """tokens: of prompts and answers that the rank has still to do, at most; hit_tokens: of the new one's, that its prefix cache
    has; empty_pages: large ones, in which nothing is cached.
    """

    tokens: int
    hit_tokens: int
    empty_pages: int


def pick_rank(ranks: Sequence[RankState]) -> int:
    """The one with least to do once it has this request, too: what it has cached it need not compute. Of several the one with the
    most empty pages, so that what is cached is spread over all pools.
    """
    return min(range(len(ranks)), key=lambda at: (ranks[at].tokens - ranks[at].hit_tokens, -ranks[at].empty_pages, at))
