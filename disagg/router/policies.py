"""Orders servers for a request, by what a frozen view says of them. Pure.

A policy only ranks; which servers can be taken at all is decided in `placement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import ClassVar, Protocol

from msgspec import Struct

from disagg.messages.legs import LoadCosts, StorageState
from disagg.router.prefixes import NO_HIT, NO_PAGES, Hit, PromptPages, hit_of
from disagg.router.sessions import NOWHERE
from disagg.router.view import ServerView
from disagg.types.ids import Role

Rank = tuple[float, ...]

GRAIN_SHARE = 0.05  # of what a prompt costs if nothing of it is cached: smaller differences are none
STRANGE_SHARE = 0.1  # of a prompt: what it is worth to stay where the conversation was
SEQUENCE_S = 0.002  # that one more sequence in a decode batch costs all of them
HOST_SHARE, STORAGE_SHARE = 0.05, 0.2  # of computing a token: bringing one, before that was measured
TRANSFER_TOKEN_S = 5e-6  # of a token's KV, from prefill to decode: most of it beside computing


class RequestFacts(Struct, frozen=True):
    """What a policy may know of a request."""

    prefill_tokens: int  # to be computed by prefill
    total_tokens: int  # the most that decode has to hold
    choices: int = 1
    serial: int = 0  # which request of this router it is, from 0
    weights: str = ""  # of which tokens were accepted, so that only they may give the rest; empty while there are none
    draw: int = 0  # 32 random bits of its own
    pages: PromptPages = NO_PAGES  # names of the prompt's pages
    # 32 random bits of its router's, by which that one's turns differ from others'; 0: they begin with the first server.
    turns: int = 0
    session: frozenset[str] = NOWHERE  # servers that its conversation was sent to last
    first: bool = True  # it was not sent anywhere yet

    def strange(self, server: str) -> bool:
        """Its conversation was sent elsewhere."""
        return bool(self.session) and server not in self.session


def turn(index: int, count: int, facts: RequestFacts) -> int:
    """When a server's turn is, of so many; no two have the same."""
    return (index - first_turn(count, facts)) % count


def first_turn(count: int, facts: RequestFacts) -> int:
    """The index of whose turn it is, of so many. In each round everyone's is once, and where it begins is each router's own:
    routers that begin alike and hear the same requests at once do not go on together.
    """
    round_, at = divmod(facts.serial, count)
    return (at + _begins(facts.turns, round_)) % count if facts.turns else at


@lru_cache(256)  # each server of a view asks
def _begins(turns: int, round_: int) -> int:
    """Unlike a checksum's, no two routers' numbers have a difference that lasts."""
    return int.from_bytes(hashlib.blake2b(b"%d %d" % (turns, round_), digest_size=8).digest())


class Policy(Protocol):
    """Orders servers of one role for a request; the least is taken.

    uses_caches: asks what servers have of a prompt. two_when_stale: is to be asked about two of them only, drawn, while none of
    those that can be taken has been heard lately.
    """

    uses_caches: ClassVar[bool]
    two_when_stale: ClassVar[bool]

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank: ...

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank: ...

    def route_rank(self, prefill: Rank, decode: Rank) -> Rank:
        """Of both together, to compare a pair with a mixed server."""


class LeastLoaded:
    """Prefill by prompt tokens outstanding, decode by sequences per page that is or can be made free.

    A server's own report is up to a heartbeat old, and counts other routers' work; ours is exact, and counts only ours.
    The larger of the two is nearer to the truth.
    """

    uses_caches: ClassVar[bool] = False
    two_when_stale: ClassVar[bool] = False

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        assert server.load is not None
        others = max(0, server.load.waiting + server.load.running - server.outstanding_choices)
        return (float(server.outstanding_prompt_tokens + others * facts.prefill_tokens),)

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        assert server.load is not None
        return (_sequences_per_free(server, facts), float(-server.load.pages_total))

    def route_rank(self, prefill: Rank, decode: Rank) -> Rank:
        return (*prefill, *decode)


class RoundRobin:
    """Each in turn, by the request's serial number."""

    uses_caches: ClassVar[bool] = False
    two_when_stale: ClassVar[bool] = False

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        return (float(turn(index, count, facts)),)

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        return (float(turn(index, count, facts)),)

    def route_rank(self, prefill: Rank, decode: Rank) -> Rank:
        return (*prefill, *decode)


class KvAware:
    """By the seconds that a request is expected to take, in steps that no server is preferred within.

        prefill   (tokens that it computes for us + those of others' prompts + this prompt - what it has cached) at its speed, and
                  what it takes to bring of it what is on its host or in storage
        decode    sequences per free page, and the transfer of what it has neither cached nor on its host

    Servers that its conversation was not sent to before count as busier by a tenth of a prompt, or one sequence. So
    a prompt goes where its prefix is until waiting there costs more than computing it elsewhere; which then has it, too.
    """

    uses_caches: ClassVar[bool] = True
    two_when_stale: ClassVar[bool] = True

    def prefill_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        prompt_s = server.usual_speed.seconds(1, facts.prefill_tokens)
        grain_s = GRAIN_SHARE * prompt_s
        strange_s = STRANGE_SHARE * prompt_s * facts.strange(server.name)
        return (grain_s * int((prefill_s(server, facts) + strange_s) / grain_s),)

    def decode_rank(self, server: ServerView, index: int, count: int, facts: RequestFacts) -> Rank:
        assert server.load is not None
        moved = 0
        if server.role is Role.DECODE:
            moved = facts.prefill_tokens - hit(server, facts, facts.prefill_tokens).tokens
        sequences = _sequences_per_free(server, facts) + facts.strange(server.name)
        seconds = SEQUENCE_S * sequences + TRANSFER_TOKEN_S * moved
        return (seconds, float(-server.load.pages_total))

    def route_rank(self, prefill: Rank, decode: Rank) -> Rank:
        return (prefill[0] + decode[0], decode[1])


def prefill_s(server: ServerView, facts: RequestFacts) -> float:
    """Until a prompt that is sent now is computed."""
    return under_way_s(server) + own_s(server, facts)


def under_way_s(server: ServerView) -> float:
    """What the prompts take that it has."""
    ours_s = server.speed.seconds(server.outstanding_prompts, server.outstanding_prompt_tokens)
    return ours_s + server.others_prompts * server.speed.usual_s


def own_s(server: ServerView, facts: RequestFacts) -> float:
    """Until a prompt is computed that nothing is before. What is not cached but on the host or in storage is brought, or computed
    if that is faster."""
    found = hit(server, facts, facts.prefill_tokens - 1)
    brought_s = min(_load_s(server, found), server.speed.seconds(0, found.host + found.storage))
    return brought_s + server.speed.seconds(1, facts.prefill_tokens - found.tokens)


def hit(server: ServerView, facts: RequestFacts, at_most: int) -> Hit:
    """What a server has of the prompt, or is computing now; at most so much is of use to it."""
    rules = server.hello.prefix if server.hello is not None else None
    pages = facts.pages.of(rules)
    if rules is None or not pages:
        return NO_HIT
    # Prefill brings what is in storage; a decode server's share of that would be read twice, and is sent to it.
    reads = server.role is not Role.DECODE and server.load is not None and server.load.store is StorageState.OK
    tiers = (server.cached.groups, server.on_host.groups, server.stored.groups if reads else ())
    return hit_of(rules, tiers, pages, max(0, at_most), server.coming)


def _load_s(server: ServerView, found: Hit) -> float:
    """What it takes to bring what is not in the prefix cache; what was not measured is guessed from the speed of computing."""
    measured = server.load.loads if server.load is not None else None
    loads, computing_s = measured or LoadCosts(), server.usual_speed.token_s
    host_s = loads.host_token_s or HOST_SHARE * computing_s
    storage_s = loads.storage_token_s or STORAGE_SHARE * computing_s
    return (found.host + found.storage) * host_s + found.storage * storage_s


def _sequences_per_free(server: ServerView, facts: RequestFacts) -> float:
    load = server.load
    assert load is not None
    sequences = max(load.running + load.waiting, server.outstanding_choices)
    free_share = (load.pages_free + load.pages_evictable + 1) / (load.pages_total + 1)
    return (sequences + facts.choices) / free_share


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "kv_aware": KvAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
