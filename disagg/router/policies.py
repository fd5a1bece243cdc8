"""Orders servers for a request, by what a frozen view says of them. Pure.

A policy only ranks; which servers can be taken at all is decided in `placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from disagg.router.view import ServerView

Rank = tuple[float, ...]


class RequestFacts(Struct, frozen=True):
    """What a policy may know of a request. Tokens: to be computed by prefill; the most that decode has to hold.

    serial: which request of this router it is, from 0. weights: of which tokens were accepted, so that only they may give
    the rest; empty while there are none.
    """

    prefill_tokens: int
    total_tokens: int
    choices: int = 1
    serial: int = 0
    weights: str = ""


class Policy(Protocol):
    """Orders servers of one role for a request; the least is taken."""

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank: ...

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank: ...


class LeastLoaded:
    """Prefill by prompt tokens outstanding, decode by sequences per page that is or can be made free.

    A server's own report is up to a heartbeat old, and counts other routers' work; ours is exact, and counts only ours.
    The larger of the two is nearer to the truth.
    """

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        assert server.load is not None
        others = max(0, server.load.waiting + server.load.running - server.outstanding_choices)
        return (float(server.outstanding_prompt_tokens + others * facts.prefill_tokens),)

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        load = server.load
        assert load is not None
        sequences = max(load.running + load.waiting, server.outstanding_choices)
        free_share = (load.pages_free + load.pages_evictable + 1) / (load.pages_total + 1)
        return ((sequences + facts.choices) / free_share, float(-load.pages_total))


class RoundRobin:
    """Each in turn, by the request's serial number."""

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        return (float((index - facts.serial) % count),)

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        return (float((index - facts.serial) % count),)


POLICIES: Mapping[str, Callable[[], Policy]] = {"least_loaded": LeastLoaded, "round_robin": RoundRobin}
