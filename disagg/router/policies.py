"""Picks a (prefill, decode) pair for a request from a frozen view. Pure; knows nothing of streams, and time is an argument.

A policy only ranks servers; which of them can be taken at all (usable, fitting, large enough) is decided once, here.
`avoid` and staleness are wishes, not rules: a server to avoid is better than none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from msgspec import Struct

from disagg.messages.legs import PeerRef, ServerState
from disagg.router.view import ClusterView, NoPair, NoPairReason, Pair, ServerView
from disagg.types.ids import Role
from disagg.types.sampling import SamplingParams

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


MAX_COST_TOKENS = 4096  # a request that asks for more costs its tenant no more


def queue_cost(prompt_tokens: int, params: SamplingParams) -> int:
    """What a request costs its tenant when it is dispatched: tokens that it may come to, as far as one says so. 0 is "as many as
    fit", and nobody comes to all of them.
    """
    asked = params.max_tokens or MAX_COST_TOKENS // 4
    return max(1, min(MAX_COST_TOKENS, prompt_tokens + params.n * asked))


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


def pick_pair(
    view: ClusterView,
    facts: RequestFacts,
    policy: Policy,
    prefer_decode: PeerRef | None = None,
    avoid: Collection[str] = (),
) -> Pair | NoPair:
    """The best pair that fits together and can hold the request, or why there is none.

    prefer_decode: whose prefix cache has what landed there of an attempt before; as another incarnation it has nothing.
    """
    layouts: dict[tuple[str, str], tuple[list[ServerView], list[ServerView]]] = {}
    for server in view.servers:
        if server.usable and server.hello is not None and facts.weights in ("", server.weights):
            layout = layouts.setdefault((server.hello.fingerprint, server.hello.model), ([], []))
            layout[server.role is Role.DECODE].append(server)
    whole = [(prefills, decodes) for prefills, decodes in layouts.values() if prefills and decodes]
    if not whole:
        return NoPair(_why_none(view, facts.weights))

    best: tuple[tuple[object, ...], ServerView, ServerView] | None = None
    for all_prefills, all_decodes in whole:
        prefills = [p for p in all_prefills if facts.prefill_tokens <= _limit(p) and facts.total_tokens <= _length(p)]
        decodes = [d for d in all_decodes if facts.total_tokens <= _limit(d)]
        if not prefills or not decodes:
            continue
        p_rank, prefill = min(
            ((_wishes(p, avoid, None), policy.prefill_rank(p, i, len(prefills), facts), _turn(i, prefills, facts)), p)
            for i, p in enumerate(prefills)
        )
        d_rank, decode = min(
            (
                (
                    _wishes(d, avoid, prefer_decode),
                    policy.decode_rank(d, i, len(decodes), facts),
                    _turn(i, decodes, facts),
                ),
                d,
            )
            for i, d in enumerate(decodes)
        )
        wishes = tuple(a + b for a, b in zip(p_rank[0], d_rank[0], strict=True))
        rank = (wishes, p_rank[1], d_rank[1])
        if best is None or rank < best[0]:
            best = (rank, prefill, decode)
    if best is None:
        limit = max(min(max(map(_length, p)), max(map(_limit, p)), max(map(_limit, d))) for p, d in whole)
        return NoPair(NoPairReason.TOO_LARGE, limit_tokens=limit)
    _, prefill, decode = best
    return Pair(
        prefill=prefill.peer_ref,
        decode=decode.peer_ref,
        max_total_tokens=min(_length(prefill), _limit(decode)),
        weights=prefill.weights,
    )


def _wishes(server: ServerView, avoid: Collection[str], prefer: PeerRef | None) -> tuple[int, int, int]:
    """Broken wishes, the gravest first: not the preferred one, one to avoid, one that fell silent."""
    preferred = prefer is None or (server.name, server.peer_ref.incarnation) == (prefer.name, prefer.incarnation)
    return (int(not preferred), int(server.name in avoid), int(not server.fresh))


def _turn(index: int, servers: list[ServerView], facts: RequestFacts) -> int:
    """Ties take turns; no two servers of a list have the same turn."""
    return (index - facts.serial) % len(servers)


def _length(server: ServerView) -> int:
    assert server.hello is not None
    return server.hello.max_model_len


def _limit(server: ServerView) -> int:
    assert server.hello is not None
    return min(server.hello.max_model_len, server.hello.max_tokens_in_pool)


def _why_none(view: ClusterView, weights: str) -> NoPairReason:
    """weights: as in RequestFacts."""
    roles = {server.role for server in view.servers}
    settled = len(roles) == len(Role) and all(server.usable or server.mismatched for server in view.servers)
    if weights and any(_all_have_others(view, role, weights) for role in roles):
        return NoPairReason.OTHER_WEIGHTS
    if settled:
        mismatched = any(server.mismatched for server in view.servers)
        return NoPairReason.MISMATCH if mismatched else NoPairReason.NO_COMPATIBLE
    if any(view.state(server) is ServerState.LOADING for server in view.servers):
        return NoPairReason.LOADING
    return NoPairReason.EMPTY_POOL


def _all_have_others(view: ClusterView, role: Role, weights: str) -> bool:
    """Every server of a role is known to have other weights. One that loads or is lost may come with these again."""
    servers = view.of_role(role)
    return all((server.usable or server.mismatched) and server.weights != weights for server in servers)
