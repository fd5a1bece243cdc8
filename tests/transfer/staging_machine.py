"""Arena, rings and sessions of several links together, against memory with an owner per byte.

Links of a decode server with two ranks, each to a prefill server of one. Messages of a link come once and in order;
writes go in two halves and their notifications come in any order or never; legs are given up, links are lost, and those
whose fate is unknown go on writing until their peer is gone. No byte that is live is ever overwritten; when things are
left to themselves, every transfer ends and nothing is held any more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.engine.handoff.ring_table import RingState, RingTable
from disagg.messages import link as m
from disagg.staging.arena import locate
from disagg.staging.pieces import group_piece_bytes
from disagg.staging.ring import RingEntry, RingWriterView
from disagg.transfer.session import MAX_WANTS, Offer, ReceiveSession, SendSession
from disagg.transfer.states import ReceiveState, SendState
from disagg.types.ids import LegKey
from tests.transfer.staging_links import GROUP, LINK_SEGMENTS, PEERS, RANKS, SEGMENT, SEGMENTS, Flight, Leg, Link, cut


class Staging(RuleBasedStateMachine):
    steps: ClassVar[int] = 0  # of all runs

    @initialize()
    def begin(self) -> None:
        self.rings = RingTable(SEGMENTS * SEGMENT, SEGMENT, LINK_SEGMENTS, RANKS, idle_s=1.0)
        self.owners: list[list[int | None]] = [[None] * (SEGMENTS * SEGMENT) for _ in range(RANKS)]
        self.whole: dict[int, range] = {}  # written and not yet scattered: where each entry's bytes lie
        self.links: list[Link] = []
        self.flights: list[Flight] = []
        self.flying: list[tuple[Link, Leg, m.Entry]] = []  # notifications
        self.now_s = 0.0
        self.requests = itertools.count()
        for peer in PEERS:
            self.dial(peer)

    def dial(self, peer: str) -> None:
        link = Link(len(self.links), peer)
        self.links.append(link)
        self.rings.add(link.number)

    @property
    def live(self) -> list[Link]:
        return [link for link in self.links if link.up]

    def legs(self, *states: ReceiveState) -> list[tuple[Link, Leg]]:
        return [(link, leg) for link in self.live for leg in link.legs.values() if leg.receive.state in states]

    # ---- what can happen by itself

    def actions(self) -> list[Callable[[], None]]:
        """In a fixed order, so that a drawn number means the same again."""
        out: list[Callable[[], None]] = []
        for link in self.live:
            if link.to_prefill:
                out.append(lambda link=link: self.prefill_hears(link))  # type: ignore[misc]
            if link.to_decode:
                out.append(lambda link=link: self.decode_hears(link))  # type: ignore[misc]
            for rank, pending in enumerate(link.pending):
                if pending and link.views[rank].may_write(_entry(pending[0][1].entry)):
                    out.append(lambda link=link, rank=rank: self.start_write(link, rank))  # type: ignore[misc]
            for leg in link.legs.values():
                if leg.scheduled < leg.send.num_tokens and leg.send.state in (SendState.WAITING, SendState.SENDING):
                    out.append(lambda link=link, leg=leg: self.chunk(link, leg))  # type: ignore[misc]
                if leg.receive.state in (ReceiveState.COMPLETE, ReceiveState.LEAVING):
                    out.append(lambda link=link, leg=leg: self.unbound(link, leg))  # type: ignore[misc]
        out += [lambda flight=flight: self.advance(flight) for flight in self.flights]  # type: ignore[misc]
        out += [lambda flying=flying: self.notified(flying) for flying in self.flying]  # type: ignore[misc]
        return out

    @rule(picks=st.lists(st.integers(0, 63), min_size=1, max_size=40))
    def things_happen(self, picks: list[int]) -> None:
        for pick in picks:
            if actions := self.actions():
                actions[pick % len(actions)]()
                self.it_all_adds_up()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def a_leg_begins(self, data: st.DataObject, tokens: int) -> None:
        link = data.draw(st.sampled_from(self.live))
        key = LegKey(str(next(self.requests)), 0, 0)
        leg = Leg(key, SendSession(tokens, (GROUP,), (0,)), ReceiveSession(tokens, (GROUP,), ((1,) * RANKS,)))
        leg.receive.announce(tokens)
        link.legs[key] = leg

    @precondition(lambda self: self.legs(ReceiveState.QUEUED))
    @rule(data=st.data())
    def decode_grants(self, data: st.DataObject) -> None:
        legs = self.legs(ReceiveState.QUEUED)
        self.grant(*legs[data.draw(st.integers(0, len(legs) - 1))])

    @precondition(lambda self: self.legs(ReceiveState.QUEUED, ReceiveState.RECEIVING))
    @rule(data=st.data())
    def decode_gives_a_leg_up(self, data: st.DataObject) -> None:
        legs = self.legs(ReceiveState.QUEUED, ReceiveState.RECEIVING)
        self.abandon(*legs[data.draw(st.integers(0, len(legs) - 1))])

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def a_notification_is_lost(self, data: st.DataObject) -> None:
        self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))

    @precondition(lambda self: self.live and len(self.links) < 12)
    @rule(data=st.data(), gone=st.booleans())
    def a_link_is_lost(self, data: st.DataObject, gone: bool) -> None:
        link = data.draw(st.sampled_from(self.live))
        self.lose(link, gone)
        self.dial(link.peer)

    @precondition(lambda self: self.rings.quarantined_links)
    @rule(data=st.data())
    def a_lost_peer_exits(self, data: st.DataObject) -> None:
        self.exits(self.links[data.draw(st.sampled_from(self.rings.quarantined_links))])

    def quiet_links(self) -> list[int]:
        """Lost links that hold segments, though their prefill has ended what it had begun."""
        writing = {flight.link.number for flight in self.flights}
        return [number for number in self.rings.quarantined_links if number not in writing]

    @precondition(lambda self: self.quiet_links())
    @rule(data=st.data())
    def a_lost_peer_says_that_it_is_quiet(self, data: st.DataObject) -> None:
        self.rings.quiet(data.draw(st.sampled_from(self.quiet_links())))

    @rule(seconds=st.sampled_from((0.1, 0.6, 1.1)))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        busy = {link.number for link, _ in self.legs(ReceiveState.BINDING, ReceiveState.RECEIVING)}
        self.rings.keep_wishes({link.number for link, _ in self.legs(ReceiveState.QUEUED)})
        for number in self.rings.closable(self.now_s, busy):
            self.links[number].to_prefill.append(m.CloseRing(self.rings.links[number].ring_no))
        for link, leg in self.legs(ReceiveState.RECEIVING):
            under_way = any(of is leg for _, of, _ in self.flying)
            if leg.receive.sent_all and not under_way and not leg.receive.covered:
                if leg.receive.wants_sent == MAX_WANTS:
                    self.abandon(link, leg)
                else:
                    live = self.rings.links[link.number].live.items()
                    self.forget(link, [entry_id for entry_id, entry in live if entry.key == leg.key])
                    link.to_prefill.append(m.WantPieces(leg.key, leg.receive.ask_again()))
        for link in self.live:
            ring = self.rings.links[link.number]
            if doubtful := ring.doubtful(self.now_s):
                link.to_prefill.append(m.AskWritten(ring.ring_no, doubtful))

    # ---- decode

    def grant(self, link: Link, leg: Leg) -> None:
        if self.rings.blocked_by_quarantine(link.number, link.peer):
            self.abandon(link, leg)
            return
        if not self.rings.open(link.number, link.peer, self.now_s):
            return
        ring = self.rings.links[link.number]
        if not ring.told:
            ring.told = ring.watermarks
            assert ring.lease is not None
            offsets = tuple(segment * SEGMENT for segment in ring.lease.segments)
            link.to_prefill += [m.OpenRing(ring.ring_no, rank, SEGMENT, offsets) for rank in range(RANKS)]
        leg.receive.bind((0,))
        for rank in range(RANKS):
            leg.receive.bound(rank)
        link.to_prefill.append(m.Grant(leg.key, (0,)))

    def decode_hears(self, link: Link) -> None:
        message = link.to_decode.popleft()
        ring = self.rings.links[link.number]
        if isinstance(message, m.RingClosed):
            assert ring.state is RingState.CLOSING
            assert not any(flight.link is link for flight in self.flights), "it says it is quiet, and writes"
            self.rings.closed(link.number)
            return
        if isinstance(message, m.Written):
            assert message.ring_no == ring.ring_no
            self.forget(link, [entry_id for entry_id in message.entry_ids if entry_id in ring.live])
            return
        leg = link.legs.get(message.key)  # type: ignore[union-attr]
        match message:
            case m.OfferPieces():
                assert leg is not None
                entries = []
                for piece_no, piece in leg.receive.offer(message.first_piece_no, message.pieces):
                    for rank in range(RANKS):
                        nbytes = group_piece_bytes(piece, 1, GROUP)
                        entry_id, entry = ring.assign(leg.key, piece_no, rank, nbytes, self.now_s)
                        entries.append(m.Entry(entry_id, piece_no, 0, rank, 0, 1, entry.ring_byte, nbytes))
                if entries:
                    link.to_prefill.append(m.AssignEntries(leg.key, ring.ring_no, tuple(entries)))
                    self.tell_watermarks(link)
            case m.SentAll():
                if leg is not None and leg.receive.state is ReceiveState.RECEIVING:
                    leg.receive.sent_all = True
                else:
                    self.peer_quiet(link, leg)
            case m.Drained():
                self.peer_quiet(link, leg)

    def forget(self, link: Link, entry_ids: list[int]) -> None:
        """Ranks wait for these no longer, whether their notifications are lost or late."""
        for entry_id in entry_ids:
            self.rings.links[link.number].free(entry_id)
            self.whole.pop(entry_id, None)
        self.tell_watermarks(link)

    def abandon(self, link: Link, leg: Leg) -> None:
        if leg.receive.abandon():
            link.to_prefill.append(m.Revoke(leg.key, ""))

    def unbound(self, link: Link, leg: Leg) -> None:
        """No rank looks at this leg's entries any more."""
        leg.ranks_unbound = True
        leg.receive.quiet()
        if leg.receive.sent_all:
            leg.receive.peer_quiet = True
        self.settle(link, leg)

    def peer_quiet(self, link: Link, leg: Leg | None) -> None:
        """Nothing of this leg is under way from prefill, and nothing will be."""
        if leg is not None:
            leg.receive.peer_quiet = True
            self.settle(link, leg)

    def settle(self, link: Link, leg: Leg) -> None:
        if leg.ranks_unbound and leg.receive.peer_quiet:
            for entry_id, live in self.rings.links[link.number].live.items():
                if live.key == leg.key:
                    self.whole.pop(entry_id, None)
            self.rings.links[link.number].free_leg(leg.key)
            self.tell_watermarks(link)
            if leg.send.state is SendState.CLOSED:
                del link.legs[leg.key]

    def tell_watermarks(self, link: Link) -> None:
        ring = self.rings.links[link.number]
        if ring.rings and ring.watermarks != ring.told:
            ring.told = ring.watermarks
            link.to_prefill.append(m.Watermarks(ring.ring_no, ring.told))

    def notified(self, flying: tuple[Link, Leg, m.Entry]) -> None:
        self.flying.remove(flying)
        link, leg, entry = flying
        ring = self.rings.links.get(link.number)
        live = ring.free(entry.entry_id) if ring is not None else None
        if live is None:
            return
        place = self.whole.pop(entry.entry_id, None)
        assert place is not None, f"{entry} is left of a leg that is over"
        for byte in place:
            owner = self.owners[entry.dst_rank][byte]
            assert owner == entry.entry_id, f"a live byte of {entry} was overwritten by entry {owner}"
        self.tell_watermarks(link)
        leg.receive.landed(entry.piece_no, entry.dst_rank)
        leg.receive.first_tokens = (m.FirstToken(0, 5, None, None),)
        if leg.receive.try_complete():
            link.to_prefill.append(m.Complete(leg.key))

    # ---- prefill

    def prefill_hears(self, link: Link) -> None:
        message = link.to_prefill.popleft()
        match message:
            case m.OpenRing():
                if message.ring_no != link.ring_no:
                    link.ring_no, link.closing = message.ring_no, False
                    link.offsets = message.segment_offsets
                    link.views = [RingWriterView(SEGMENT * len(link.offsets)) for _ in range(RANKS)]
                    link.pending = [deque() for _ in range(RANKS)]
            case m.CloseRing():
                link.closing = True
                self.close_if_quiet(link)
            case m.AskWritten():
                to_come = {write.entry.entry_id for pending in link.pending for _, write in pending}
                to_come |= {flight.entry.entry_id for flight in self.flights if flight.link is link}
                written = tuple(entry_id for entry_id in message.entry_ids if entry_id not in to_come)
                link.to_decode.append(m.Written(message.ring_no, written))
            case m.Watermarks():
                for view, ring_byte in zip(link.views, message.ring_bytes, strict=True):
                    view.update(ring_byte)
            case _:
                self.leg_message(link, link.legs[message.key], message)  # type: ignore[union-attr]

    def leg_message(self, link: Link, leg: Leg, message: m.LinkMessage) -> None:
        match message:
            case m.Grant():
                self.offer(link, leg, leg.send.grant(message.wants, (RANKS,), cut))
            case m.WantPieces():
                self.offer(link, leg, leg.send.want(message.pieces, cut))
            case m.AssignEntries():
                for write in leg.send.assign(message.entries):
                    link.pending[write.entry.dst_rank].append((leg, write))
            case m.Complete():
                if leg.send.complete() is SendState.DROPPING:
                    self.drop(link, leg)
            case m.Revoke():
                if leg.send.give_up():
                    self.drop(link, leg)
                elif leg.send.state is SendState.CLOSED:
                    link.to_decode.append(m.Drained(leg.key))
        if leg.send.state is SendState.CLOSED and leg.ranks_unbound and leg.receive.peer_quiet:
            link.legs.pop(leg.key, None)

    def offer(self, link: Link, leg: Leg, offer: Offer | None) -> None:
        if offer is not None:
            link.to_decode.append(m.OfferPieces(leg.key, offer.first_piece_no, offer.pieces))
        elif leg.send.finish_if_sent():
            link.to_decode.append(m.SentAll(leg.key, leg.send.num_pieces))

    def chunk(self, link: Link, leg: Leg) -> None:
        start, leg.scheduled = leg.scheduled, min(leg.scheduled + 11, leg.send.num_tokens)
        self.offer(link, leg, leg.send.chunk(start, leg.scheduled, 0, cut))

    def start_write(self, link: Link, rank: int) -> None:
        leg, write = link.pending[rank].popleft()
        if leg.send.state is not SendState.SENDING:
            self.close_if_quiet(link)
            return
        entry = write.entry
        segment, within = divmod(entry.ring_byte % (SEGMENT * len(link.offsets)), SEGMENT)
        self.flights.append(Flight(link, leg, entry, link.ring_no, link.offsets[segment] + within))

    def advance(self, flight: Flight) -> None:
        entry = flight.entry
        middle = entry.nbytes // 2
        part = range(middle, entry.nbytes) if flight.half else range(middle)
        for byte in part:
            owner = self.owners[entry.dst_rank][flight.at + byte]
            at = self.whole.get(owner) if owner is not None else None
            assert at is None or owner == entry.entry_id, (
                f"{entry} overwrites entry {owner}, which waits to be scattered"
            )
            self.owners[entry.dst_rank][flight.at + byte] = entry.entry_id
        if not flight.half:
            flight.half = True
            return
        self.flights.remove(flight)
        link = flight.link
        ring = self.rings.links.get(link.number)
        if ring is not None and entry.entry_id in ring.live:
            assert ring.lease is not None
            assert locate(ring.lease, entry.ring_byte % ring.lease.nbytes) == flight.at, (
                "both sides mean the same bytes"
            )
            self.whole[entry.entry_id] = range(flight.at, flight.at + entry.nbytes)
        self.flying.append((link, flight.leg, entry))
        if not link.up:
            return
        if flight.leg.send.sent(entry.entry_id):
            link.to_decode.append(m.SentAll(flight.leg.key, flight.leg.send.num_pieces))
        self.report_dropped(link, flight.leg)
        self.close_if_quiet(link)

    def drop(self, link: Link, leg: Leg) -> None:
        """Nothing new is begun; what is under way goes on to its end, and then decode is told."""
        for rank, pending in enumerate(link.pending):
            link.pending[rank] = deque(item for item in pending if item[0] is not leg)
        self.report_dropped(link, leg)
        self.close_if_quiet(link)

    def report_dropped(self, link: Link, leg: Leg) -> None:
        if leg.send.state is SendState.DROPPING and not any(flight.leg is leg for flight in self.flights):
            leg.send.dropped()
            link.to_decode.append(m.Drained(leg.key))

    def close_if_quiet(self, link: Link) -> None:
        if link.closing and not any(link.pending) and not any(flight.link is link for flight in self.flights):
            link.closing = False
            link.to_decode.append(m.RingClosed(link.ring_no))

    # ---- the end of a link

    def lose(self, link: Link, gone: bool) -> None:
        for entry_id in self.rings.links[link.number].live:
            self.whole.pop(entry_id, None)
        link.up = False
        link.legs.clear()
        link.to_prefill.clear()
        link.to_decode.clear()
        quarantined = self.rings.remove(link.number, gone)
        if gone:
            self.exits(link)
        elif not quarantined:
            assert not any(flight.link is link for flight in self.flights), "it writes, and nothing is kept from others"

    def exits(self, link: Link) -> None:
        link.gone = True
        self.flights = [flight for flight in self.flights if flight.link is not link]
        self.rings.quiet(link.number)

    # ---- what always holds

    @invariant()
    def it_all_adds_up(self) -> None:
        type(self).steps += 1
        if not hasattr(self, "rings"):
            return
        self.rings.arena.check_integrity()
        for ring in self.rings.links.values():
            for rank_ring in ring.rings:
                rank_ring.check_integrity()
            assert sum(len(rank_ring.live) for rank_ring in ring.rings) == len(ring.live)

    def teardown(self) -> None:
        """Left alone, everything ends: no leg, no live entry, no segment is left, and none is owed."""
        if not hasattr(self, "rings"):
            return
        for link in [link for link in self.links if not link.up and not link.gone]:
            self.exits(link)
        for _ in range(100):
            while actions := self.actions():
                actions[0]()
            if not any(link.legs for link in self.live) and not self.rings.arena.leased_bytes:
                break
            for link, leg in self.legs(ReceiveState.QUEUED):
                self.grant(link, leg)
            self.time_passes(1.1)
        for link in self.live:
            assert not link.legs, f"a transfer never ends: {link.legs}"
            assert not self.rings.links[link.number].live, "an entry is left, and pins the watermark"
        assert self.rings.arena.free_bytes == self.rings.arena.arena_bytes, "segments leaked"


def _entry(entry: m.Entry) -> RingEntry:
    return RingEntry(entry.ring_byte, entry.nbytes)
