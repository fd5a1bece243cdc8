"""Sending KV: what a prefill engine and a decode server say to each other about the prompts that are computed here.

    first chunk ── Announce ──> Grant ──> OfferPieces ──> AssignEntries ──> writes ──> SentAll ──> Complete
    first tokens ─ FirstTokens                                 └ when the ring has room

The first token of a choice is told to the router as soon as it is sampled and decode has granted the choice its slot: what
decode has no room for has not begun to answer, or it would fall silent after its first word for as long as others decode.
What decode lacks of a prefix that is cached here is sent all the same.

A leg's pages stay until nothing of it is being written. A link that is lost may have writes under way until every rank says
that it has removed the peer. Knows links, rings and transfers; nothing of who computes the prompts, or when.
"""

from __future__ import annotations

from disagg.engine.core import Core
from disagg.engine.handoff.fitting import Fitting, uncut
from disagg.engine.handoff.handoff import Handoff
from disagg.engine.handoff.lost_links import LostLinks, peer_of
from disagg.engine.handoff.send_link import SendLink
from disagg.engine.handoff.sending import Sending, first_held
from disagg.engine.handoff.withdrawals import Withdrawals
from disagg.engine.instructions import DropLink, ForgetLink, ToLink, ToTransfer
from disagg.engine.legs import Leg
from disagg.engine.now import Now
from disagg.engine.onward import Onward
from disagg.engine.sequences import Sequence
from disagg.memory.sequence import SequencePages
from disagg.memory.spans import pages_for
from disagg.messages import link as m
from disagg.messages.legs import Outcome, StartLeg
from disagg.messages.pieces import RankSlice
from disagg.messages.transfer import (
    AddPeer,
    DropSends,
    PeerAdded,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    TransferEvent,
)
from disagg.staging.pieces import group_piece_bytes
from disagg.staging.slices import head_turns
from disagg.transfer.session import MAX_PIECES, Cut, Offer, SendSession
from disagg.transfer.states import SendState
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

UNASKED = frozenset({Outcome.GIVEN_BACK, Outcome.REFUSED})  # ends after which no router waits for what decode says
COMPUTED = -1  # as the number of a plan: one that has long been computed


class Sender(Handoff, Onward):
    """See the module."""

    def __init__(self, core: Core) -> None:
        self._facts = facts = core.facts
        self._legs = core.legs
        self._pool = core.pool
        self._batch = core.batch
        self._counters = core.counters
        self._out = core.out
        self.transfers: dict[LegKey, Sending] = {}
        self._finished: dict[LegKey, Sending] = {}  # all scheduled, and not granted when last asked
        self.links: dict[int, SendLink] = {}
        self._untold = Withdrawals()
        self.lost_links = LostLinks(facts.tp)
        self._fitting = Fitting(
            facts.model.groups, facts.memory.page_tokens, facts.scheduling.chunk_tokens, facts.transfer.gather_bytes
        )

    # ---- a leg

    def start(self, leg: Leg, now: Now) -> None:
        groups = self._facts.model.groups
        held = first_held(groups, self._facts.memory.page_tokens, leg.start)
        session = SendSession(leg.num_tokens, groups, held)
        transfer = self.transfers[leg.key] = Sending(leg, session)
        peer = leg.start.peer
        for number, link in self.links.items():
            if peer_of(link.hello) == peer_of(peer):
                transfer.link = number

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        transfer = self.transfers[leg.key]
        if transfer.announced or not (leg.aborted or outcome in UNASKED):
            transfer.withdraw = m.Withdraw(leg.key, reason, leg.aborted)
        if transfer.session.give_up():
            if transfer.link in self.links:
                self._drop_sends(transfer)
            elif transfer.link not in self.lost_links:
                transfer.session.dropped()
            if transfer.link not in self.links:
                self._tell_later(transfer)
        self._let_go(transfer)

    def holds(self, leg: Leg) -> bool:
        return self.transfers[leg.key].session.state is not SendState.CLOSED

    def forget(self, leg: Leg) -> None:
        del self.transfers[leg.key]
        self._finished.pop(leg.key, None)

    def describe(self, leg: Leg) -> dict[str, object]:
        transfer = self.transfers[leg.key]
        return {
            "sending": transfer.session.state.value,
            "link": transfer.link,
            "announced": transfer.announced,
            "ranks dropping": sorted(transfer.dropping),
        }

    def dump(self) -> dict[str, object]:
        return {
            "links to decode servers": {
                link.number: {
                    "peer": link.hello.name,
                    "incarnation": link.hello.incarnation,
                    "writing": len(link.writing),
                    "rings": {
                        no: {
                            "watermarks": {rank: part.view.watermark for rank, part in ring.ranks.items()},
                            "closing": ring.closing,
                        }
                        for no, ring in link.rings.items()
                    },
                }
                for link in self.links.values()
            },
            "links being removed": self.lost_links.describe(),
        }

    # ---- the prompt, as it is computed

    @property
    def may_admit(self) -> bool:
        """Finished KV that no decode server has granted pages for is capped."""
        waiting = {key: each for key, each in self._finished.items() if each.session.state is SendState.WAITING}
        self._finished = waiting  # for each prompt that waits this is asked anew, so those are not looked at
        ungranted = sum(transfer.large_pages for transfer in waiting.values())
        return ungranted <= self._facts.scheduling.ungranted_share * self._facts.memory.num_large

    def cost(self, start: StartLeg) -> int:
        """Nothing beside the prompt: its choices go on elsewhere."""
        return 0

    def total_tokens(self, start: StartLeg) -> int:
        """Of the prompt alone."""
        return len(start.token_ids)

    def take_on(self, leg: Leg, pages: SequencePages, shared_tokens: int, *, alone: bool) -> bool:
        """What a transfer may need stays until the end."""
        pages.hold_for_sending(leg.num_tokens)
        return True

    def scheduled(self, leg: Leg, sequence: Sequence, start: int, plan_no: int) -> None:
        """A chunk of it is in a plan: what will be final with it can be offered."""
        transfer = self.transfers[leg.key]
        session, pages = transfer.session, sequence.pages
        assert pages is not None
        link = self.links.get(transfer.link) if transfer.link is not None else None
        cut = self._cut(link) if link is not None else uncut
        if transfer.sequence is None:
            transfer.sequence, sequence.in_transfer = sequence, True
            self._announce(transfer)
            if leg.cached_tokens:
                self._offer(transfer, session.hit(leg.cached_tokens, cut))
        if pages.has_checkpoint and not transfer.checkpoint_offered:
            transfer.checkpoint_offered = True
            self._offer(transfer, session.checkpoint(transfer.last_plan, cut))
        transfer.last_plan = plan_no
        if sequence.position == leg.num_tokens:
            chunk_tokens = self._facts.scheduling.chunk_tokens
            self._finished[leg.key] = transfer
            transfer.large_pages = self._pool.kv.large_pages_to_prefill(leg.num_tokens, chunk_tokens)
        self._offer(transfer, session.chunk(start, sequence.position, plan_no, cut))

    def prompt_done(self, leg: Leg, sequence: Sequence, tokens: tuple[m.FirstToken, ...], now: Now) -> None:
        transfer = self.transfers[leg.key]
        self._batch.keep(sequence)
        transfer.first_tokens = m.FirstTokens(leg.key, tokens)
        self._tell_first(transfer)
        if transfer.link is not None and transfer.announced:
            self._out.append(ToLink(transfer.link, transfer.first_tokens))
        if transfer.session.finish_if_sent():
            self._sent_all(transfer)

    def send_held(self, leg: Leg, sequence: Sequence) -> None:
        """A sequence that stands still has all of the leg's tokens in its pages, and one more, which the router knows."""
        transfer = self.transfers[leg.key]
        choices, token_id = leg.start.choices, sequence.tokens[-1]
        leg.told.update(choices)
        transfer.sequence = sequence
        tokens = tuple(m.FirstToken(choice, token_id, None, None) for choice in choices)
        transfer.first_tokens = m.FirstTokens(leg.key, tokens)
        transfer.session.chunk(0, leg.num_tokens, COMPUTED, uncut)  # to be offered with the grant
        self._announce(transfer)

    def _tell_first(self, transfer: Sending) -> None:
        """To the router, of those choices that decode has begun, and of those that end here."""
        if transfer.first_tokens is None:
            return
        beginning = transfer.leg.start.choices[: transfer.granted_choices]
        for token in transfer.first_tokens.tokens:
            if token.finish or token.choice in beginning:
                self._legs.tell_first(transfer.leg, token)

    def _announce(self, transfer: Sending) -> None:
        if transfer.link is None or transfer.announced or transfer.sequence is None or transfer.leg.ended:
            return
        transfer.announced = True
        self._out.append(ToLink(transfer.link, m.Announce(transfer.key, transfer.leg.num_tokens)))
        if transfer.first_tokens is not None:
            self._out.append(ToLink(transfer.link, transfer.first_tokens))

    def _offer(self, transfer: Sending, offer: Offer | None) -> None:
        if offer is not None and transfer.link is not None:
            self._out.append(ToLink(transfer.link, m.OfferPieces(transfer.key, offer.first_piece_no, offer.pieces)))

    def _cut(self, link: SendLink) -> Cut:
        segment_bytes = next((ring.segment_bytes for ring in link.rings.values()), None)
        return self._fitting.cut(link.widest, segment_bytes)

    def _too_many_pieces(self, link: SendLink, transfer: Sending) -> str:
        """Why the leg cannot be sent over this link, of whose ring only decode knows the segments before. Or nothing."""
        tokens = transfer.leg.num_tokens
        sizes = (ring.segment_bytes for ring in link.rings.values())
        return next((why for size in sizes if (why := self._fitting.too_many(link.widest, size, tokens))), "")

    def tick(self, now: Now) -> None:
        """Chunks that other prompts cut small may come to more pieces than was foreseen."""
        for transfer in list(self.transfers.values()):
            if transfer.session.too_many and not transfer.leg.ended:
                why = f"its chunks were cut into more than {MAX_PIECES} pieces"
                self._legs.close(transfer.leg, Outcome.PEER_LOST, why)

    # ---- links

    def link_up(self, number: int, hello: m.LinkHello, now: Now) -> None:
        """A decode server has dialled. Its ranks' agents are introduced to ours, and waiting legs find their link."""
        turns = tuple(head_turns(self._facts.tp, hello.tp, group.kv_heads) for group in self._facts.model.groups)
        self.links[number] = SendLink(number, hello, turns)
        for rank in hello.ranks:
            peer = AddPeer(
                link=number,
                peer_rank=rank.rank,
                metadata=rank.metadata,
                arena_address=rank.arena_address,
                arena_device=rank.arena_device,
                arena_bytes=rank.arena_bytes,
            )
            self._out.append(ToTransfer(None, peer))
        self._tell_quiet(number, self.lost_links.quiet(hello))
        self._out.extend(ToLink(number, withdraw) for withdraw in self._untold.take_all(peer_of(hello)))
        for transfer in list(self.transfers.values()):
            wanted = transfer.leg.start.peer
            if transfer.link is None and wanted.name == hello.name:
                if wanted.incarnation != hello.incarnation:
                    self._legs.close(transfer.leg, Outcome.PEER_LOST, f"{wanted.name} has restarted")
                    continue
                transfer.link = number
                self._announce(transfer)

    def link_down(self, number: int, gone: bool, reason: str) -> None:
        """Its legs end; their pages wait until no write is under way."""
        link = self.links.pop(number, None)
        if link is None:
            return
        self._out.append(ForgetLink(number))  # nothing here waits for a decode worker's exit
        self.lost_links.add(link)
        self._out.append(ToTransfer(None, RemovePeer(number)))
        for transfer in [transfer for transfer in self.transfers.values() if transfer.link == number]:
            if transfer.leg.ended:
                self._tell_later(transfer)  # its ranks had yet to say that nothing of it is under way
            self._legs.close(transfer.leg, Outcome.PEER_LOST, reason)

    def _tell_later(self, transfer: Sending) -> None:
        if transfer.withdraw is not None and not transfer.tell_drained:
            self._untold.note(peer_of(transfer.leg.start.peer), transfer.withdraw)

    def link_message(self, number: int, message: m.LinkMessage, now: Now) -> None:
        link = self.links.get(number)
        if link is None:
            return
        match message:
            case m.OpenRing():
                link.open_ring(message, self._fitting)
            case m.CloseRing():
                link.ring(message.ring_no).closing = True
                self._close_ring_if_quiet(link, message.ring_no)
            case m.Grant():
                self._grant(link, message)
            case m.AssignEntries():
                self._assign(link, message)
            case m.Watermarks():
                if link.update(message):
                    self._flush(link, message.ring_no)
            case m.AskWritten():
                if written := link.written(message):
                    self._out.append(ToLink(number, m.Written(message.ring_no, written)))
            case m.WantPieces():
                transfer = self._of(link, message.key)
                if transfer is not None:
                    self._offer(transfer, transfer.session.want(message.pieces, self._cut(link)))
            case m.Complete():
                self._complete(link, message.key)
            case m.Revoke():
                self._revoked(link, message)
            case _:
                raise ProtocolError(f"a decode server may not send {type(message).__name__}")

    def transfer_event(self, rank: int, message: TransferEvent, now: Now) -> bool:
        match message:
            case PieceSent():
                self._piece_sent(message)
            case PieceFailed():
                self._counters.transfer_failures["write failed"] += 1
                if message.link in self.links:
                    self._out.append(DropLink(message.link, message.reason))
            case SendsDropped():
                transfer = self.transfers.get(message.key)
                if transfer is not None:
                    transfer.dropping.discard(rank)
                    if not transfer.dropping:
                        self._dropped(transfer)
            case PeerRemoved():
                if (hello := self.lost_links.removed(message.link, rank, message.clean)) is not None:
                    self._quiet_at_last(message.link, hello)
            case PeerAdded():
                if message.error and message.link in self.links:
                    self._out.append(DropLink(message.link, message.error))
            case _:
                return False
        return True

    def _of(self, link: SendLink, key: LegKey) -> Sending | None:
        transfer = self.transfers.get(key)
        return transfer if transfer is not None and transfer.link == link.number else None

    # ---- rings

    def _flush(self, link: SendLink, ring_no: int) -> None:
        """Hand on the writes whose ring bytes are free, in order."""
        for ring in link.rings[ring_no].ranks.values():
            for rank_slice, write in ring.writable():
                entry, key, piece = write.entry, rank_slice.key, rank_slice.piece
                transfer = self.transfers.get(key)
                if transfer is None or transfer.session.state is not SendState.SENDING:
                    continue
                assert transfer.sequence is not None and transfer.sequence.pages is not None
                rows = self._facts.model.groups[piece.group].rows_per_page(self._facts.memory.page_tokens)
                first, stop = piece.token_start // rows, pages_for(piece.token_stop, rows)
                link.writing[entry.entry_id] = (key, ring_no)
                send = SendPiece(
                    link=link.number,
                    entry_id=entry.entry_id,
                    slice=rank_slice,
                    pages=transfer.sequence.pages.pages(piece.group, first, stop),
                    arena_offset=ring.locate(entry.ring_byte),
                    nbytes=entry.nbytes,
                    after_plan=write.after_plan,
                )
                self._out.append(ToTransfer(entry.src_rank, send))

    def _close_ring_if_quiet(self, link: SendLink, ring_no: int) -> None:
        if link.close_if_quiet(ring_no):
            self._out.append(ToLink(link.number, m.RingClosed(ring_no)))

    # ---- what decode says of a leg

    def _grant(self, link: SendLink, message: m.Grant) -> None:
        transfer = self._of(link, message.key)
        if transfer is None:
            # It ended here while the grant was on its way: nothing of it is under way.
            self._out.append(ToLink(link.number, m.Drained(message.key)))
            return
        if not transfer.announced:
            raise ProtocolError(f"{message.key} was granted before it was announced")
        if why := self._too_many_pieces(link, transfer):
            self._legs.close(transfer.leg, Outcome.PEER_LOST, why)  # with another decode server it may be possible
            return
        transfer.granted_choices = message.choices or len(transfer.leg.start.choices)
        self._tell_first(transfer)
        self._offer(transfer, transfer.session.grant(message.wants, link.num_slices, self._cut(link)))
        if transfer.first_tokens is not None and transfer.session.finish_if_sent():
            self._sent_all(transfer)

    def _assign(self, link: SendLink, message: m.AssignEntries) -> None:
        ring = link.take(message)
        transfer = self._of(link, message.key)
        if transfer is None:
            return  # given up; decode frees the entries when it hears Drained or Withdraw
        for write in transfer.session.assign(message.entries):
            entry, piece = write.entry, write.piece
            part = link.slice_of(piece, entry)
            if entry.nbytes != group_piece_bytes(piece, entry.heads, self._facts.model.groups[piece.group]):
                raise ProtocolError(f"{entry} is not as large as {piece}")
            rank_slice = RankSlice(transfer.key, piece, part, self._facts.incarnation, link.hello.incarnation)
            ring.ranks[entry.dst_rank].pending.append((rank_slice, write))
        self._flush(link, message.ring_no)

    def _complete(self, link: SendLink, key: LegKey) -> None:
        transfer = self._of(link, key)
        if transfer is None:
            return
        if not transfer.leg.ended and transfer.first_tokens is None:
            raise ProtocolError(f"decode says that {key} is complete before its first token")
        if transfer.sequence is not None and transfer.first_tokens is not None:
            # Decode keeps it while some choice goes on there, and lets go of it at once when none does.
            transfer.sequence.handed_over = any(token.finish is None for token in transfer.first_tokens.tokens)
        if transfer.session.complete() is SendState.DROPPING and not transfer.dropping:
            transfer.tell_drained = True
            self._drop_sends(transfer)
        self._let_go(transfer)
        self._legs.end(transfer.leg, Outcome.DONE)

    def _revoked(self, link: SendLink, message: m.Revoke) -> None:
        transfer = self._of(link, message.key)
        if transfer is None:
            self._out.append(ToLink(link.number, m.Drained(message.key)))
            return
        transfer.tell_drained = True
        if transfer.session.state is SendState.CLOSED:
            self._out.append(ToLink(link.number, m.Drained(message.key)))
        reason = f"decode gave it up: {message.reason}"
        if message.aborted:
            self._legs.abort(transfer.leg, reason)
        else:
            self._legs.close(transfer.leg, Outcome.PEER_LOST, reason)

    # ---- writes

    def _piece_sent(self, message: PieceSent) -> None:
        self._counters.pieces_sent += 1
        self._counters.payload_bytes_sent += message.nbytes
        link = self.links.get(message.link)
        if link is None:
            return
        _, ring_no = link.writing.pop(message.entry_id)
        transfer = self.transfers.get(message.key)
        if transfer is not None and transfer.session.sent(message.entry_id):
            self._sent_all(transfer)
        self._close_ring_if_quiet(link, ring_no)

    def _sent_all(self, transfer: Sending) -> None:
        assert transfer.link is not None
        self._out.append(ToLink(transfer.link, m.SentAll(transfer.key, transfer.session.num_pieces)))

    def _drop_sends(self, transfer: Sending) -> None:
        """Ask every rank to drop this leg's writes, and forget those that were not handed on."""
        assert transfer.link is not None
        transfer.dropping = set(range(self._facts.tp))
        self._out.append(ToTransfer(None, DropSends(transfer.link, transfer.key)))
        link = self.links.get(transfer.link)
        if link is not None:
            for ring in link.rings.values():
                ring.drop(transfer.key)

    def _dropped(self, transfer: Sending) -> None:
        """No write of this leg is under way any more."""
        key = transfer.key
        transfer.session.dropped()
        self._let_go(transfer)
        link = self.links.get(transfer.link) if transfer.link is not None else None
        if link is None:
            return
        rings = {ring_no for each, ring_no in link.writing.values() if each == key}
        link.forget(key)
        if transfer.tell_drained:
            self._out.append(ToLink(link.number, m.Drained(key)))
        elif transfer.withdraw is not None:
            self._out.append(ToLink(link.number, transfer.withdraw))
        for ring_no in rings | set(link.rings):
            self._close_ring_if_quiet(link, ring_no)

    def _let_go(self, transfer: Sending) -> None:
        """The pages are the batch's alone when nothing reads them any more."""
        if transfer.sequence is not None and transfer.session.state is SendState.CLOSED:
            transfer.sequence.in_transfer = False

    # ---- links that were lost

    def _quiet_at_last(self, number: int, hello: m.LinkHello) -> None:
        """No rank has anything of a lost link under way any more. Its peer may use that memory again, if nothing can come."""
        for transfer in [transfer for transfer in self.transfers.values() if transfer.link == number]:
            transfer.session.dropped()
            self._let_go(transfer)
        for link in self.links.values():
            if peer_of(link.hello) == peer_of(hello) and self.lost_links.is_quiet(hello):
                self._tell_quiet(link.number, (hello.generation,))

    def _tell_quiet(self, number: int, generations: tuple[str, ...]) -> None:
        if generations:
            self._out.append(ToLink(number, m.QuietLinks(generations)))
