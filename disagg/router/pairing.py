"""Who may be sent to servers now, and to which: the view and the policy put to the requests that wait. Sends nothing, and changes
no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from disagg.messages.legs import LegEnd, Outcome, PrefixRules
from disagg.router.admission import Expected, Queue, expected, refused, share_of
from disagg.router.fleet import Fleet
from disagg.router.live import Live
from disagg.router.moving import MOVES_AT_ONCE, Room, tokens_of
from disagg.router.outstanding import Outstanding, call_may_go, tenant_may_go
from disagg.router.placement import pick_pair, pick_target
from disagg.router.places import Places
from disagg.router.policies import Policy, RequestFacts
from disagg.router.sessions import Sessions
from disagg.router.view import NoPair, NoPairReason, Pair, Work
from disagg.types.ids import Role

CHUNK = "chunk"  # of a prompt, in what servers say of a leg's time


class Pairing:
    """Of one router."""

    def __init__(
        self, fleet: Fleet, policy: Policy, places: Places[Live], outstanding: Outstanding, shed_wait_s: float
    ) -> None:
        self.waiting_tokens = 0  # of the prompts in `places`
        self._shed_wait_s = shed_wait_s
        self._fleet = fleet
        self._policy = policy
        self._places = places
        self._outstanding = outstanding
        self._sessions = Sessions()
        self._room = Room()

    @property
    def ways(self) -> tuple[PrefixRules, ...]:
        """In which servers name pages, if the policy asks what they have of a prompt."""
        return self._fleet.ways() if self._policy.uses_caches else ()

    def pick(self, live: Live, now_s: float) -> Pair | NoPair:
        wish, view = live.wish, self._fleet.view()
        facts, asked = live.machine.facts, live.machine.asked
        if asked.session:
            facts = replace(facts, session=self._sessions.of(asked.tenant, asked.session, now_s))
        if wish is not None and wish.source is not None:
            room = partial(self._room.is_there, tokens_of(live.machine))
            target = pick_target(view, facts, self._policy, wish.source, room) or pick_target(
                view, facts, self._policy, wish.source
            )
            if target is not None:
                return target
        return pick_pair(
            view,
            facts,
            self._policy,
            prefer_decode=wish.prefer_decode if wish is not None else None,
            avoid=wish.avoid if wish is not None else (),
        )

    def why_refused(
        self, facts: RequestFacts, tenant: str, priority: int, in_time_s: float
    ) -> tuple[float, str] | None:
        """When to try again, and why, for a request that is not to be taken (`admission`)."""
        waiting = self._places.waiting
        found = expected(self._fleet.view(), facts, Queue(len(waiting), self.waiting_tokens))
        if found is None or refused(found, priority, in_time_s, self._shed_wait_s) is None:
            return None
        computing = self._outstanding.tenants(Work.PREFILL)
        there = waiting.tenants | computing.keys() | {tenant}
        all_, own = sum(computing.values()) + len(waiting), computing.get(tenant, 0) + waiting.count(tenant)
        fair = Expected(found.wait_s * share_of(own, all_, len(there)), found.compute_s)
        return refused(fair, priority, in_time_s, self._shed_wait_s)

    def next_ones(self) -> Iterator[Live]:
        """Of those that wait for a place, tenants in turns, who may take one. What has been given may be taken meanwhile."""
        prefills = self._num_prefills()
        for live in self._places.next_ones(lambda tenant: self._tenant_may_go(tenant, prefills)):
            if self._call_may_go(live, prefills):
                yield live
            else:
                self._places.waiting.passed_over(live)

    def attempted(self, live: Live, pair: Pair, now_s: float) -> None:
        """It is sent there."""
        asked = live.machine.asked
        self._sessions.note(asked.tenant, asked.session, pair.servers, now_s)

    def why_not(self, live: Live, now_s: float) -> Pair | NoPair:
        """What a request waits for; the pair that it would have now, if for nothing."""
        if live.dispatched:
            return self.pick(live, now_s)
        if self._places.free <= 0:
            return NoPair(NoPairReason.NO_PLACE)
        if not self._places.may_take(live.machine.asked.tenant):
            return NoPair(NoPairReason.NO_SHARE)
        prefills = self._num_prefills()
        if not (self._tenant_may_go(live.machine.asked.tenant, prefills) and self._call_may_go(live, prefills)):
            return NoPair(NoPairReason.COMPUTING)
        return self.pick(live, now_s)

    def to_move(self, lives: Iterable[Live]) -> Iterator[Live]:
        """Of decode servers that drain, what can go on elsewhere: what has not begun to answer at once, since that moves when it
        does; of the rest so much at once that nobody stands still for long. Where no other server has room for an answer it goes
        on where it is. What has been given may be driven meanwhile.
        """
        view = self._fleet.view()
        sources = {server.peer_ref for server in view.servers if server.hands_over}
        if not sources:
            return
        lives = list(lives)
        stopping = Counter(live.machine.stopping for live in lives)
        self._room.look(view, [live.machine for live in lives])
        for live in lives:
            machine, source = live.machine, live.machine.movable
            if source not in sources or (machine.answers and stopping[source.name] >= MOVES_AT_ONCE):
                continue
            tokens = tokens_of(machine)
            target = pick_target(view, machine.facts, self._policy, source, partial(self._room.is_there, tokens))
            if target is not None:
                self._room.give(target.decode.name, tokens)
                yield live
                stopping[source.name] += machine.answers

    def leg_ended(self, live: Live, name: str, end: LegEnd, now_s: float) -> None:
        """What a server says of a prompt that it computed, by its own clock. What a decode server computes itself, beside what it
        decodes, says nothing of those that compute prompts."""
        if live.machine.pair is not None and live.machine.pair.local_prefill:
            return
        chunks = [event for event in end.timeline if event.name == CHUNK]
        if end.outcome is Outcome.DONE and chunks and end.key.attempt == live.machine.attempt:
            tokens = len(live.machine.prompt_token_ids) - end.cached_tokens
            began_s = min(chunk.start_unix_s for chunk in chunks)
            self._fleet.speeds.ended(name, tokens, began_s, max(chunk.end_unix_s for chunk in chunks), now_s)

    def _call_may_go(self, live: Live, prefills: int) -> bool:
        call = live.machine.asked.call
        return not call or call_may_go(self._outstanding.of_call(call, Work.PREFILL), live.machine.params.n, prefills)

    def _tenant_may_go(self, tenant: str, prefills: int) -> bool:
        computing = self._outstanding.of_tenant(tenant, Work.PREFILL)
        return tenant_may_go(computing, self._places.others(tenant), prefills)

    def _num_prefills(self) -> int:
        """Servers that prompts can be sent to now."""
        return sum(server.usable and server.role is not Role.DECODE for server in self._fleet.view().servers)
