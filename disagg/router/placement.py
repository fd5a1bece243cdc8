"""Picks the servers for a request from a frozen view: a prefill and a decode server, or a mixed one, which is then a pair with
itself, as is a decode server that has almost all of the prompt cached. Pure; knows nothing of streams, and time is an argument.

Which servers can be taken at all (usable, fitting, large enough) is decided once, here; a policy ranks them. Open circuits,
`avoid` and staleness are wishes, not rules: a server to avoid is better than none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from msgspec import Struct

from disagg.messages.legs import PeerRef, ServerState, StartLeg
from disagg.messages.needs import understands
from disagg.router.policies import Policy, RequestFacts, first_turn, hit
from disagg.router.view import ClusterView, NoPair, NoPairReason, Pair, ServerView, Work
from disagg.types.ids import Role
from disagg.types.protocol import circles

DRAWN = 2  # servers, of those that nothing was heard of lately
LOCAL_SHARE = 4  # one token of so many of a prompt, at most, is computed by a decode server that has the others


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
    whole = [layout for layout in _layouts(view, facts.weights) if layout.mixed or (layout.prefill and layout.decode)]
    if not whole:
        return NoPair(_why_none(view, facts.weights))
    routes = [route for layout in whole for route in _best(layout, _Wanted(facts, policy, prefer_decode, avoid))]
    if not routes:
        return NoPair(NoPairReason.TOO_LARGE, limit_tokens=max(layout.limit for layout in whole))
    best = min(routes, key=lambda route: route.rank)
    return Pair(
        prefill=best.prefill.peer_ref,
        decode=best.decode.peer_ref,
        max_total_tokens=min(_length(best.prefill), _limit(best.decode)),
        weights=best.prefill.weights,
        hit_tokens=hit(best.prefill, facts, facts.prefill_tokens - 1).tokens if policy.uses_caches else 0,
        pages=facts.pages.of(best.prefill.hello.prefix) if best.prefill.hello is not None else (),
        local_prefill=best.prefill.role is Role.DECODE,
    )


def pick_target(
    view: ClusterView,
    facts: RequestFacts,
    policy: Policy,
    source: PeerRef,
    may: Callable[[ServerView], bool] = lambda server: True,
) -> Pair | None:
    """Where what goes on at `source`, or stands still there, can go on: the best other decode server that fits it.

    may: which of them can be taken.
    """
    sources = [s for s in view.servers if s.can_hand_over and s.peer_ref == source]
    if not sources:
        return None
    (at,) = sources
    targets = [
        server
        for server in view.of_role(Role.DECODE)
        if server.usable and server.alike(at) and server.name != source.name and facts.total_tokens <= _limit(server)
        if server.hello is not None and understands(server.hello, StartLeg, "moved") and may(server)
    ]
    if not targets:
        return None
    wanted = _Wanted(facts, policy, None, ())
    _, target = _least(wanted.asked(targets, None, Work.DECODE), wanted.decode_rank)
    return Pair(source, target.peer_ref, _limit(target), weights=at.weights, moves=True)


class _Wanted(Struct, frozen=True):
    """What `pick_pair` is asked."""

    facts: RequestFacts
    policy: Policy
    prefer_decode: PeerRef | None
    avoid: Collection[str]

    def prefill_rank(self, server: ServerView, index: int, servers: list[ServerView]) -> tuple[Any, ...]:
        rank = self.policy.prefill_rank(server, index, len(servers), self.facts)
        return self.wishes(server, None, Work.PREFILL), rank, self.turn(server, index, len(servers))

    def decode_rank(self, server: ServerView, index: int, servers: list[ServerView]) -> tuple[Any, ...]:
        rank = self.policy.decode_rank(server, index, len(servers), self.facts)
        return self.wishes(server, self.prefer_decode, Work.DECODE), rank, self.turn(server, index, len(servers))

    def mixed_rank(self, server: ServerView, index: int, servers: list[ServerView]) -> tuple[Any, ...]:
        _, rank, turn = self.decode_rank(server, index, servers)
        wishes = self.wishes(server, self.prefer_decode, *Work)
        prefill_rank = self.policy.prefill_rank(server, index, len(servers), self.facts)
        return wishes, self.policy.route_rank(prefill_rank, rank), turn

    def may_be_local(self, server: ServerView) -> bool:
        """A decode server has the prompt but for a few tokens, which it computes itself. Not for several choices: they would wait
        for a slot for each, where after a transfer they begin one by one."""
        facts, hello = self.facts, server.hello
        if not (facts.first and facts.choices == 1 and hello is not None and hello.local_prefill_tokens):
            return False
        most = min(hello.local_prefill_tokens, facts.prefill_tokens // LOCAL_SHARE)
        return facts.prefill_tokens - self.cached(server) <= most

    def cached(self, server: ServerView) -> int:
        """Tokens of the prompt, as far as they are of use there."""
        return hit(server, self.facts, self.facts.prefill_tokens - 1).tokens

    def wishes(self, server: ServerView, prefer: PeerRef | None, *works: Work) -> tuple[int, ...]:
        """Broken ones, the gravest first: not one that fails such work, the preferred one, not one to avoid, nor one that fell
        silent."""
        preferred = prefer is None or (server.name, server.peer_ref.incarnation) == (prefer.name, prefer.incarnation)
        fails = bool(server.circuits) and server.fails(*works)
        return fails, not preferred, server.name in self.avoid, not server.fresh

    def turn(self, server: ServerView, index: int, count: int) -> tuple[int, int]:
        """Ties stay where the conversation was, or take turns."""
        return self.facts.strange(server.name), (index - first_turn(count, self.facts)) % count

    def asked(self, servers: list[ServerView], prefer: PeerRef | None, *works: Work) -> list[ServerView]:
        """Those that the policy is asked about: all, or two of those that break the fewest wishes, if these are stale.

        What is known of them is known to other routers as well, who would all take the same one.
        """
        if not self.policy.two_when_stale or any(server.fresh for server in servers):
            return servers
        fewest = min(self.wishes(server, prefer, *works) for server in servers)
        servers = [server for server in servers if self.wishes(server, prefer, *works) == fewest]
        count = len(servers)
        if count <= DRAWN:
            return servers
        first, step = self.facts.draw % count, 1 + self.facts.draw // count % (count - 1)
        return [servers[first], servers[(first + step) % count]]


class _Route(Struct, frozen=True):
    """rank: broken wishes, then what the policy says of both servers, and whose turn it is."""

    rank: tuple[Any, ...]
    prefill: ServerView
    decode: ServerView


def _best(layout: _Layout, wanted: _Wanted) -> Iterator[_Route]:
    """The best pair, the best mixed server, and the best decode server alone, of those that can hold the request."""
    facts = wanted.facts
    prefills = [p for p in layout.prefill if facts.prefill_tokens <= _limit(p) and facts.total_tokens <= _length(p)]
    decodes = [d for d in layout.decode if facts.total_tokens <= _limit(d)]
    mixed = [m for m in layout.mixed if max(facts.prefill_tokens, facts.total_tokens) <= _limit(m)]
    # Where both are equally busy they take turns, too.
    routes = min(len(prefills), len(decodes)) + len(mixed) or 1
    mixed_turn = first_turn(routes, facts) < len(mixed)
    if prefills and decodes:
        (p_wishes, p_rank, _), prefill = _least(wanted.asked(prefills, None, Work.PREFILL), wanted.prefill_rank)
        (d_wishes, d_rank, _), decode = _least(
            wanted.asked(decodes, wanted.prefer_decode, Work.DECODE), wanted.decode_rank
        )
        wishes = tuple(a + b for a, b in zip(p_wishes, d_wishes, strict=True))
        yield _Route((wishes, wanted.policy.route_rank(p_rank, d_rank), mixed_turn), prefill, decode)
        yield from _local(decodes, wanted, wanted.cached(prefill))
    if mixed:
        (wishes, rank, _), server = _least(wanted.asked(mixed, wanted.prefer_decode, *Work), wanted.mixed_rank)
        yield _Route((wishes, rank, not mixed_turn), server, server)


def _local(decodes: list[ServerView], wanted: _Wanted, cached_tokens: int) -> Iterator[_Route]:
    """The best decode server that computes the rest of the prompt itself, if there is one: only what has more of it than the
    prefill server, with `cached_tokens`, that would otherwise compute it, or short questions behind a long beginning that all
    share would be computed beside what decodes. Among equals it comes first.
    """
    if not wanted.policy.uses_caches:
        return
    local = [d for d in decodes if wanted.may_be_local(d) and wanted.cached(d) > cached_tokens]
    if local:
        (wishes, rank, _), server = _least(wanted.asked(local, wanted.prefer_decode, Work.DECODE), wanted.mixed_rank)
        yield _Route((wishes, rank, -1), server, server)


def _least(
    servers: list[ServerView], rank: Callable[[ServerView, int, list[ServerView]], tuple[Any, ...]]
) -> tuple[tuple[Any, ...], ServerView]:
    """No two of them have the same rank, since no two have the same turn."""
    return min((rank(server, index, servers), server) for index, server in enumerate(servers))


def _layouts(view: ClusterView, weights: str) -> Iterable[_Layout]:
    """Usable servers that fit together. Where versions part them, one is in every layout with whose servers it speaks."""
    taken = [
        (server, server.hello)
        for server in view.servers
        if server.usable and server.hello is not None and weights in ("", server.weights)
    ]
    protocols = circles(hello.version for _, hello in taken)
    layouts: dict[tuple[int, str, str], _Layout] = {}
    for server, hello in taken:
        for protocol in protocols:
            if hello.version.oldest <= protocol <= hello.version.protocol:
                layout = layouts.setdefault((protocol, hello.fingerprint, hello.model), _Layout([], [], []))
                layout.of(server.role).append(server)
    return layouts.values()


class _Layout(Struct):
    """Servers that fit together, by role."""

    prefill: list[ServerView]
    decode: list[ServerView]
    mixed: list[ServerView]

    def of(self, role: Role) -> list[ServerView]:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}[role]

    @property
    def limit(self) -> int:
        """Tokens of the longest request that some pair, or a mixed server, can hold."""
        limit = max(map(_limit, self.mixed), default=0)
        if self.prefill and self.decode:
            pairs = (max(map(_length, self.prefill)), max(map(_limit, self.prefill)), max(map(_limit, self.decode)))
            limit = max(limit, min(pairs))
        return limit


def _length(server: ServerView) -> int:
    assert server.hello is not None
    return server.hello.max_model_len


def _limit(server: ServerView) -> int:
    assert server.hello is not None
    return min(server.hello.max_model_len, server.hello.max_tokens_in_pool)


def _why_none(view: ClusterView, weights: str) -> NoPairReason:
    """weights: as in RequestFacts."""
    roles = {server.role for server in view.servers}
    routes = _routes(roles)
    settled = bool(routes) and all(server.usable or server.mismatched for server in view.servers)
    if weights and routes and all(any(_all_have_others(view, role, weights) for role in route) for route in routes):
        return NoPairReason.OTHER_WEIGHTS
    if settled:
        mismatched = any(server.mismatched for server in view.servers)
        return NoPairReason.MISMATCH if mismatched else NoPairReason.NO_COMPATIBLE
    if any(view.state(server) is ServerState.LOADING for server in view.servers):
        return NoPairReason.LOADING
    return NoPairReason.EMPTY_POOL


def _routes(roles: Collection[Role]) -> list[tuple[Role, ...]]:
    """Roles that a request can pass through, of those that there are."""
    routes: list[tuple[Role, ...]] = [(Role.PREFILL, Role.DECODE), (Role.MIXED,)]
    return [route for route in routes if set(route) <= set(roles)]


def _all_have_others(view: ClusterView, role: Role, weights: str) -> bool:
    """Every server of a role is known to have other weights. One that loads, is lost or is refused may come with these again."""
    servers = view.of_role(role)
    known = (server.usable or (server.mismatched and not server.refused) for server in servers)
    return all(known) and all(server.weights != weights for server in servers)
