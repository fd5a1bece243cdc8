"""Picks a (prefill, decode) pair for a request from a frozen view. Pure; knows nothing of streams, and time is an argument.

Which servers can be taken at all (usable, fitting, large enough) is decided once, here; a policy ranks them. `avoid` and
staleness are wishes, not rules: a server to avoid is better than none.
"""

from __future__ import annotations

from collections.abc import Collection

from disagg.messages.legs import PeerRef, ServerState
from disagg.router.policies import Policy, RequestFacts
from disagg.router.view import ClusterView, NoPair, NoPairReason, Pair, ServerView
from disagg.types.ids import Role


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
