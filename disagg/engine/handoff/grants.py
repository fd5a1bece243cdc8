"""Grants: who of the legs that prefill servers have announced gets pages, slots and a ring, all or nothing.

    wait (a turn in engine/turns) ──> pages, slots, ring ──> ranks bind the pages ──> Grant

A grant covers the prompt, less what the prefix cache holds, and some output; it takes a slot, and more for the leg's other
choices as far as others leave them. It is given only if those that have begun can go on beside it (engine/lookahead). Knows
what a leg needs and what is there; nothing of pieces or of what landed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from disagg.engine.choices import Choices
from disagg.engine.core import Core
from disagg.engine.handoff.receiving import Receiving
from disagg.engine.handoff.ring_owner import RingOwner
from disagg.engine.instructions import ToLink, ToTransfer
from disagg.engine.legs import Leg
from disagg.engine.load import Urgency
from disagg.engine.lookahead import Begun, after_grant
from disagg.engine.now import Now
from disagg.engine.turns import Begins, Turn
from disagg.memory.sequence import SequencePages
from disagg.messages import link as m
from disagg.messages.legs import Outcome, TimelineEvent
from disagg.messages.transfer import Bind
from disagg.transfer.states import ReceiveState


class Grants:
    """See the module."""

    def __init__(self, core: Core, choices: Choices, rings: RingOwner) -> None:
        self._facts = core.facts
        self._legs = core.legs
        self._pool = core.pool
        self._batch = core.batch
        self._turns = core.turns
        self._lookahead = core.lookahead
        self._counters = core.counters
        self._tiers = core.tiers
        self._out = core.out
        self._choices = choices
        self._rings = rings
        self._waiting: dict[int, int] = {}  # by link: legs of it that wait for a grant
        self._no_ring: set[int] = set()  # links that were found to have none to give since `begin`

    def begin(self) -> None:
        """Something may have happened: links may have got rings, and others may have no legs that wait for them any more."""
        self._no_ring.clear()
        self._rings.table.keep_wishes(set(self._waiting))

    def wait(self, transfer: Receiving) -> None:
        """It has been announced."""
        leg, link = transfer.leg, transfer.link
        assert link is not None
        transfer.turn = Turn(leg.tenant, partial(self._try, transfer), transfer)
        cost = leg.num_tokens + self._choices.cost(leg.start)
        self._turns.queue_of(leg.start).append(leg.tenant, transfer.turn, cost, leg.start.priority)
        self._waiting[link] = self._waiting.get(link, 0) + 1

    def leave(self, transfer: Receiving, cost: float | None = None) -> None:
        """Takes a leg out of the queue if it waits there. cost: of what it was granted; None if it got no grant."""
        turn, link = transfer.turn, transfer.link
        if turn is None:
            return
        if self._tiers is not None:
            self._tiers.loads.forget(transfer.key)
        if cost is None:
            self._turns.queue_of(transfer.leg.start).remove(turn)
        else:
            self._turns.queue_of(transfer.leg.start).take(turn, cost)
        transfer.turn = None
        assert link is not None
        self._waiting[link] -= 1
        if not self._waiting[link]:
            del self._waiting[link]

    def _try(self, transfer: Receiving, now: Now, urgency: Urgency) -> Begins:
        """Pages, slots and a ring, all or nothing; the grant leaves when every rank has bound the pages."""
        leg, link = transfer.leg, transfer.link
        assert link is not None
        if link in self._no_ring:
            return Begins.NOT_NOW
        if self._rings.blocked_by_quarantine(link):
            name = self._rings.peer_name(link)
            reason = f"no ring for {name}: too much of the arena is quarantined for lost links"
            self._legs.close(leg, Outcome.GIVEN_BACK, reason)
            return Begins.NOT_NOW
        if not self._rings.open(link, now.s):
            self._no_ring.add(link)
            return Begins.NOT_NOW  # another link's legs need not wait for this one's segments
        kv = self._pool.kv
        if transfer.too_little_at == kv.releases:
            return Begins.TOO_LITTLE
        if not transfer.root:
            transfer.root, transfer.hashes = self._pool.prefix(leg.start)
        if not self._brought_back(transfer, now, urgency):
            return Begins.NOT_NOW
        # Tenants that wait leave each other their parts of the free slots; what is left over goes choice by choice.
        tenants = self._turns.queue_of(leg.start).num_tenants
        choices = max(1, min(len(leg.start.choices), self._turns.slots_for_more // tenants))
        choices = self._lookahead.most_choices(choices, leg.num_tokens, self._choices.total_tokens(leg.start))
        pages = self._receive(transfer, choices)
        if pages is None and choices > 1:
            choices = 1
            pages = self._receive(transfer, choices)
        if pages is None:
            transfer.too_little_at = kv.releases
            return Begins.TOO_LITTLE
        slots = self._batch.slots.take(choices)
        assert slots is not None
        self._pool.taken(pages)
        transfer.pages, transfer.slots, leg.cached_tokens = pages, slots, pages.hit_tokens
        if self._tiers is not None:
            leg.brought_tokens = self._tiers.begins(leg.key, leg.cached_tokens)
        transfer.age = self._choices.next_age()
        self._lookahead.granted[leg.key] = self._begun(transfer, choices, leg.cached_tokens)
        self.leave(transfer, leg.num_tokens + choices * self._choices.cost(leg.start))
        transfer.session.bind(pages.wants, checkpoint=pages.has_checkpoint)
        transfer.progress_s = now.s
        self._out.append(ToTransfer(None, Bind(leg.key, pages.landing(leg.num_tokens))))
        return Begins.NOW

    def _brought_back(self, transfer: Receiving, now: Now, urgency: Urgency) -> bool:
        """What this server's host has of the prompt is cached again, so that it need not be sent. Storage is not asked: prefill
        has brought what is there, and sends it faster than it would be read twice.
        """
        if self._tiers is None:
            return True
        leg, salt = transfer.leg, transfer.leg.start.cache_salt
        return self._tiers.loads.brought_back(
            leg.key, salt, transfer.root, transfer.hashes, leg.num_tokens, now.s, storage=False, urgency=urgency
        )

    def _receive(self, transfer: Receiving, choices: int) -> SequencePages | None:
        """Pages for a grant of so many choices. One choice that is alone gets them, whatever it may come to need."""
        leg, alone = transfer.leg, self._lookahead.alone

        def enough() -> bool:
            begun = self._begun(transfer, choices, leg.cached_tokens)
            if choices > 1:
                return self._lookahead.enough(begun, alone=False, left_large=self._lookahead.large_for_first)
            return alone or self._lookahead.enough(begun)

        clock = self._batch.pipeline.clock
        moved = leg.start.moved
        return self._pool.kv.receive(
            transfer.hashes, leg.num_tokens, self._spare(leg), choices, clock, enough, moved=moved
        )

    def _begun(self, transfer: Receiving, choices: int, cached_tokens: int) -> Begun:
        """What a grant of so many choices comes to."""
        leg, page_tokens = transfer.leg, self._facts.memory.page_tokens
        shared = leg.num_tokens if choices > 1 else cached_tokens
        total = self._choices.total_tokens(leg.start)
        growing = after_grant(leg.num_tokens, total, self._spare(leg), shared, page_tokens)
        return Begun([growing] * choices, total + 1)

    def _spare(self, leg: Leg) -> int:
        """Tokens of output for which each choice has pages from the beginning."""
        return min(self._facts.scheduling.spare_tokens, self._choices.total_tokens(leg.start) - leg.num_tokens)

    def give(self, transfer: Receiving, now: Now) -> None:
        leg = transfer.leg
        assert transfer.link is not None
        transfer.granted, transfer.progress_s = now, now.s
        leg.timeline.append(TimelineEvent("grant", transfer.announced.unix_s, now.unix_s))
        self._counters.observe("grant_wait", now.s - transfer.announced.s)
        choices = len(transfer.slots) if len(transfer.slots) < len(leg.start.choices) else 0
        self._out.append(ToLink(transfer.link, m.Grant(leg.key, transfer.session.wants, choices)))

    def over(self, leg: Leg) -> None:
        """Its choices run, or never will: nothing is to be kept for them."""
        self._lookahead.granted.pop(leg.key, None)

    def check_integrity(self, transfers: Iterable[Receiving]) -> None:
        """What must hold between any two calls. transfers: all that there are."""
        by_key = {transfer.key: transfer for transfer in transfers}
        queued = [transfer for transfer in by_key.values() if transfer.turn is not None]
        for transfer in queued:
            assert transfer.turn is not None and transfer.turn in self._turns.queue_of(transfer.leg.start)
            assert transfer.session.state is ReceiveState.QUEUED and not transfer.slots
        links = [transfer.link for transfer in queued]
        assert self._waiting == {link: links.count(link) for link in links}
        for key in self._lookahead.granted.keys() & by_key.keys():  # others are of prompts that are computed here
            granted = by_key[key]
            assert granted.slots and granted.pages is not None and not granted.leg.ended
