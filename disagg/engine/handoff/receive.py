"""Receiving KV: what a decode engine and a prefill server say to each other about the prompts that go on here.

    StartLeg -> waiting for Announce -> waiting for pages, a slot, ring -> binding -> granted -> pieces land
             -> complete (and first tokens here) -> choices begin

Who is granted what: `grants`. Where pieces land: `ring_owner`. Knows links, transfers and what landed; nothing of steps.
"""

from __future__ import annotations

from msgspec.structs import astuple

from disagg.engine.choices import Choices, PromptKv
from disagg.engine.core import Core
from disagg.engine.handoff.grants import Grants
from disagg.engine.handoff.handoff import Handoff
from disagg.engine.handoff.lost_links import peer_of
from disagg.engine.handoff.receiving import ReceiveLink, Receiving
from disagg.engine.handoff.ring_owner import RingOwner
from disagg.engine.handoff.withdrawals import Withdrawals
from disagg.engine.instructions import DialLink, DropLink, ToLink, ToTransfer
from disagg.engine.legs import Leg
from disagg.engine.now import Now
from disagg.memory.sequence import SequencePages
from disagg.messages import link as m
from disagg.messages.legs import Outcome, TimelineEvent
from disagg.messages.transfer import (
    AddPeer,
    Bound,
    Landing,
    PeerAdded,
    PeerRemoved,
    RemovePeer,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.transfer.session import CHECKPOINT, MAX_WANTS, NUM_STATES, ReceiveSession
from disagg.transfer.states import ReceiveState
from disagg.types.bounded import forget_oldest
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_CHOICES, MAX_LOGPROBS

MAX_EARLY_ANNOUNCES = 4096
MAX_CLOSED = 8192  # keys remembered after a leg's end
WANT_AFTER_S = 1.0  # after SentAll, with nothing landing


class Receiver(Handoff):
    """See the module."""

    def __init__(self, core: Core, choices: Choices) -> None:
        self._facts = facts = core.facts
        self._legs = core.legs
        self._batch = core.batch
        self._counters = core.counters
        self._out = core.out
        self._choices = choices
        self.rings = RingOwner(facts.transfer, facts.model.groups, facts.tp, facts.incarnation, core.out)
        self._grants = Grants(core, choices, self.rings)
        self.transfers: dict[LegKey, Receiving] = {}
        self.links: dict[int, ReceiveLink] = {}
        self._early_withdrawals = Withdrawals()  # of legs that no router has told of yet
        self._closed: dict[LegKey, bool] = {}  # recently, oldest first, and if aborted: late announces are refused

    # ---- a leg

    def make_room(self, leg: Leg) -> str:
        return "too many legs are waiting already" if self.waiting >= self._facts.scheduling.max_waiting else ""

    @property
    def waiting(self) -> int:
        """Legs whose choices have not begun."""
        return sum(not t.leg.ended and not self._choices.begun(t.leg) for t in self.transfers.values())

    @property
    def expects(self) -> bool:
        """KV is on its way."""
        return any(transfer.session.state is ReceiveState.RECEIVING for transfer in self.transfers.values())

    def start(self, leg: Leg, now: Now) -> None:
        session = ReceiveSession(leg.num_tokens, self._facts.model.groups, ())
        transfer = self.transfers[leg.key] = Receiving(leg, session)
        peer = leg.start.peer
        if (withdraw := self._early_withdrawals.take(leg.key, peer_of(peer))) is not None:
            self._give_up(leg, withdraw)
            return
        for number, link in self.links.items():
            if peer_of(link.hello) == peer_of(peer):
                self._attach(transfer, number, now)
        if transfer.link is None and not leg.ended:
            self._out.append(DialLink(peer))

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        transfer = self.transfers[leg.key]
        session = transfer.session
        self._grants.leave(transfer)
        self._grants.over(leg)
        announced = session.state is not ReceiveState.WAITING
        if session.abandon():
            if outcome in (Outcome.BAD_TRANSFER, Outcome.PEER_LOST):
                self._counters.transfer_failures[outcome.value] += 1
                self._counters.from_peer(leg.start.peer.name).failures += 1
            if transfer.link in self.links and announced:
                assert transfer.link is not None
                self._out.append(ToLink(transfer.link, m.Revoke(leg.key, reason, leg.aborted)))
            self._unbind(transfer)

    def holds(self, leg: Leg) -> bool:
        return self.transfers[leg.key].session.state is not ReceiveState.CLOSED

    def forget(self, leg: Leg) -> None:
        transfer = self.transfers.pop(leg.key)
        self._batch.slots.give(transfer.slots)
        self._closed[leg.key] = leg.aborted
        forget_oldest(self._closed, MAX_CLOSED)

    def describe(self, leg: Leg) -> dict[str, object]:
        transfer = self.transfers[leg.key]
        return {
            "receiving": transfer.session.state.value,
            "link": transfer.link,
            "missing": [astuple(piece) for piece in transfer.session.missing()[:8]],
            "first_tokens": len(transfer.session.first_tokens),
        }

    def dump(self) -> dict[str, object]:
        return {
            "links to prefill servers": {
                number: {
                    "peer": link.hello.name,
                    "incarnation": link.hello.incarnation,
                    "early announces": len(link.early),
                    **self.rings.describe(number),
                }
                for number, link in self.links.items()
            },
            "quarantined links": list(self.rings.table.quarantined_links),
        }

    def pages(self) -> list[SequencePages]:
        """Of legs whose choices have not begun."""
        return [t.pages for t in self.transfers.values() if t.pages is not None and not self._choices.begun(t.leg)]

    def held_slots(self) -> int:
        return sum(len(transfer.slots) for transfer in self.transfers.values())

    def check_integrity(self) -> None:
        self.rings.check_integrity()
        self._grants.check_integrity(self.transfers.values())

    # ---- links

    def link_up(self, number: int, hello: m.LinkHello, now: Now) -> None:
        """A prefill server answered our dial."""
        self.links[number] = ReceiveLink(number, hello, self.rings.add(number, hello))
        for rank in hello.ranks:
            self._out.append(ToTransfer(None, AddPeer(number, rank.rank, rank.metadata, 0, 0, 0)))
        for transfer in list(self.transfers.values()):
            peer = transfer.leg.start.peer
            if transfer.link is None and peer.name == hello.name and not transfer.leg.ended:
                if peer.incarnation == hello.incarnation:
                    self._attach(transfer, number, now)
                else:
                    self._legs.close(transfer.leg, Outcome.GIVEN_BACK, f"{hello.name} has restarted")

    def dial_failed(self, name: str, incarnation: str, reason: str) -> None:
        """No link to that server could be made: the legs that need it are given back, not one of them having begun."""
        for transfer in list(self.transfers.values()):
            peer = transfer.leg.start.peer
            if transfer.link is None and peer_of(peer) == (name, incarnation):
                self._legs.close(transfer.leg, Outcome.GIVEN_BACK, reason)

    def peer_gone(self, number: int) -> None:
        """Its segments come back."""
        self.rings.quiet(number)

    def arena_bytes(self) -> tuple[int, int, int]:
        arena = self.rings.table.arena
        return arena.free_bytes, arena.leased_bytes, arena.quarantined_bytes

    def link_down(self, number: int, gone: bool, reason: str) -> None:
        link = self.links.pop(number, None)
        if link is None:
            return
        self.rings.remove(number, gone)
        self._out.append(ToTransfer(None, RemovePeer(number)))
        for transfer in [transfer for transfer in self.transfers.values() if transfer.link == number]:
            if transfer.session.open:  # what was never announced had not begun, as where the peer cannot be dialled
                begun = transfer.session.state is not ReceiveState.WAITING
                self._legs.close(transfer.leg, Outcome.PEER_LOST if begun else Outcome.GIVEN_BACK, reason)
            self._settle(transfer)

    def link_message(self, number: int, message: m.LinkMessage, now: Now) -> None:
        link = self.links.get(number)
        if link is None:
            return
        match message:
            case m.Announce():
                self._hear_announce(link, message, now)
            case m.OfferPieces():
                self._offered(link, message, now)
            case m.FirstTokens():
                self._check_tokens(message)
                transfer = self._of(link, message.key)
                if transfer is not None:
                    self._first_tokens(transfer, message, now)
                elif message.key in link.early:
                    link.early_tokens[message.key] = message
            case m.SentAll():
                transfer = self._of(link, message.key)
                if transfer is not None and transfer.session.state is ReceiveState.RECEIVING:
                    transfer.session.sent_all = True
                    transfer.progress_s = now.s
                else:
                    self._peer_quiet(link, message.key)
            case m.Withdraw():
                self._withdrawn(link, message)
                self._peer_quiet(link, message.key)
            case m.Drained():
                self._peer_quiet(link, message.key)
            case m.RingClosed():
                self.rings.closed(number, message)
            case m.Written():
                self.rings.written(number, message)
            case m.QuietLinks():
                self.rings.quiet_links(number, message)
            case _:
                raise ProtocolError(f"a prefill server may not send {type(message).__name__}")

    def transfer_event(self, rank: int, message: TransferEvent, now: Now) -> bool:
        match message:
            case Bound():
                transfer = self.transfers.get(message.key)
                if transfer is not None and transfer.session.bound(rank):
                    self._grants.give(transfer, now)
                    self._try_complete(transfer, now)  # everything may be in the prefix cache
            case Landing():
                self._landed(rank, message, now)
            case Unbound():
                transfer = self.transfers.get(message.key)
                if transfer is not None:
                    transfer.session.unbound(rank)
                    self._settle(transfer)
            case PeerAdded():
                if message.error and message.link in self.links:
                    self._out.append(DropLink(message.link, message.error))
            case PeerRemoved():
                pass
            case _:
                return False
        return True

    def _of(self, link: ReceiveLink, key: LegKey) -> Receiving | None:
        transfer = self.transfers.get(key)
        return transfer if transfer is not None and transfer.link == link.number else None

    # ---- time

    def schedule(self, now: Now) -> None:
        self._grants.begin()

    def tick(self, now: Now) -> None:
        """Rings that idle go back; transfers that stand still are asked for, then given up."""
        receiving = {t.key for t in self.transfers.values() if t.session.state is ReceiveState.RECEIVING}
        for ring in self.rings.table.links.values():
            ring.watch(receiving, now.s)
        self.rings.ask_doubtful(now.s)
        for transfer in list(self.transfers.values()):
            if not transfer.leg.ended and transfer.session.state is ReceiveState.RECEIVING:
                self._watch(transfer, receiving, now)
        under_way = (ReceiveState.BINDING, ReceiveState.RECEIVING)
        busy = {t.link for t in self.transfers.values() if t.link is not None and t.session.state in under_way}
        self.rings.close_idle(busy, now.s)

    def _watch(self, transfer: Receiving, receiving: set[LegKey], now: Now) -> None:
        """A transfer that stands still: ask for what is missing, at last give it up."""
        idle_s = now.s - transfer.progress_s
        link, session = transfer.link, transfer.session
        assert link is not None
        if session.sent_all and idle_s > WANT_AFTER_S and not session.covered:
            if session.wants_sent >= MAX_WANTS:
                self._legs.close(transfer.leg, Outcome.BAD_TRANSFER, "pieces were sent and never arrived")
                return
            transfer.progress_s = now.s
            self.rings.forget_leg(link, transfer.key)
            self._out.append(ToLink(link, m.WantPieces(transfer.key, session.ask_again())))
            return
        most_s = self._facts.transfer.progress_s
        if self.rings.table.links[link].idle_s(transfer.key, transfer.progress_s, receiving, now.s) > most_s:
            reason = f"its transfer made no progress for {most_s:g} s"
            self._legs.close(transfer.leg, Outcome.PEER_LOST, reason)

    # ---- before the grant

    def _attach(self, transfer: Receiving, number: int, now: Now) -> None:
        link = self.links[number]
        transfer.link = number
        transfer.session.slices = link.slices
        announced = link.early.pop(transfer.key, None)
        tokens = link.early_tokens.pop(transfer.key, None)
        try:
            if announced is not None:
                self._announced(transfer, announced, now)
            if tokens is not None and not transfer.leg.ended:
                self._first_tokens(transfer, tokens, now)
        except ProtocolError as error:  # the link's fault, whoever calls: this may be a router's StartLeg
            self._out.append(DropLink(number, str(error)))

    def _hear_announce(self, link: ReceiveLink, message: m.Announce, now: Now) -> None:
        transfer = self._of(link, message.key)
        if transfer is not None:
            self._announced(transfer, message.num_tokens, now)
        elif message.key in self._closed or len(link.early) >= MAX_EARLY_ANNOUNCES:
            aborted = self._closed.get(message.key, False)
            self._out.append(ToLink(link.number, m.Revoke(message.key, "not wanted", aborted)))
        else:
            link.early[message.key] = message.num_tokens

    def _announced(self, transfer: Receiving, num_tokens: int, now: Now) -> None:
        leg = transfer.leg
        assert transfer.link is not None
        if leg.ended:
            self._out.append(ToLink(transfer.link, m.Revoke(leg.key, "not wanted any more", leg.aborted)))
            return
        first = transfer.session.state is ReceiveState.WAITING
        transfer.session.announce(num_tokens)
        if not first:
            return
        self._grants.wait(transfer)
        transfer.announced = now
        leg.timeline.append(TimelineEvent("queued", leg.received.unix_s, now.unix_s))

    # ---- what prefill sends

    def _offered(self, link: ReceiveLink, message: m.OfferPieces, now: Now) -> None:
        transfer = self._of(link, message.key)
        if transfer is None:
            return
        pieces = transfer.session.offer(message.first_piece_no, message.pieces)
        if self.rings.assign(link.number, transfer.key, pieces, now.s):
            transfer.progress_s = now.s

    def _landed(self, rank: int, message: Landing, now: Now) -> None:
        live = self.rings.landed(message.link, message.entry_id)
        transfer = self.transfers.get(message.key)
        if transfer is None or transfer.link != message.link or live is None:
            return
        leg, session = transfer.leg, transfer.session
        if message.reason == "lost":
            self._counters.lost_notifications += 1  # the piece is missing, and will be asked for
            return
        if not message.ok:
            if message.reason == "checksum":
                self._counters.checksum_failures += 1
            if session.state is ReceiveState.RECEIVING:
                self._legs.close(leg, Outcome.BAD_TRANSFER, f"a piece failed its {message.reason} check")
            return
        self._counters.pieces_landed += 1
        self._counters.payload_bytes_received += message.payload_bytes
        self._counters.from_peer(leg.start.peer.name).payload_bytes += message.payload_bytes
        transfer.progress_s = now.s
        if session.state is ReceiveState.RECEIVING:
            at = message.landed_unix_s
            leg.note_part(TimelineEvent("piece", at - message.scatter_s, at, f"rank {rank}"))
            session.landed(live.piece_no, rank)
            self._try_complete(transfer, now)

    def _check_tokens(self, message: m.FirstTokens) -> None:
        """Raises ProtocolError for more than a leg can have, and for tokens that the model does not know."""
        vocab_size = self._facts.model.vocab_size
        if len(message.tokens) > MAX_CHOICES:
            raise ProtocolError(f"first tokens came for {len(message.tokens)} choices; at most {MAX_CHOICES} can be")
        for token in message.tokens:
            if not 0 <= token.token_id < vocab_size:
                raise ProtocolError(f"first token {token.token_id} is not among the model's {vocab_size}")
            if token.logprobs is not None and len(token.logprobs.top) > MAX_LOGPROBS:
                raise ProtocolError(f"a first token has {len(token.logprobs.top)} logprobs; at most {MAX_LOGPROBS}")

    def _first_tokens(self, transfer: Receiving, message: m.FirstTokens, now: Now) -> None:
        if transfer.leg.ended or transfer.session.first_tokens:
            return
        if tuple(token.choice for token in message.tokens) != transfer.leg.start.choices:
            choices = [token.choice for token in message.tokens]
            raise ProtocolError(f"first tokens came for choices {choices} of {transfer.key}")
        transfer.session.first_tokens = message.tokens
        self._try_complete(transfer, now)

    def _withdrawn(self, link: ReceiveLink, message: m.Withdraw) -> None:
        link.forget(message.key)
        transfer = self._of(link, message.key)
        if message.key not in self.transfers and message.key not in self._closed:
            self._early_withdrawals.note(peer_of(link.hello), message)
        if transfer is not None and transfer.session.open:
            self._give_up(transfer.leg, message)

    def _give_up(self, leg: Leg, withdraw: m.Withdraw) -> None:
        reason = f"prefill gave it up: {withdraw.reason}"
        if withdraw.aborted:
            self._legs.abort(leg, reason)
        else:
            self.transfers[leg.key].distrusted = True
            self._legs.close(leg, Outcome.PEER_LOST, reason)

    # ---- the end of a transfer

    def _try_complete(self, transfer: Receiving, now: Now) -> None:
        """Everything that was wanted is here, and the first tokens: the choices begin."""
        leg, session = transfer.leg, transfer.session
        ever_received = session.state is ReceiveState.RECEIVING
        if not session.try_complete():
            return
        self._grants.leave(transfer)
        if session.sent_all:
            # Prefill will not say so again, and an entry may be left whose notification was lost.
            session.peer_quiet = True
        assert transfer.link is not None
        if ever_received:
            leg.timeline.append(TimelineEvent("transfer", transfer.granted.unix_s, now.unix_s))
            self._counters.observe("transfer", now.s - transfer.granted.s)
            of_peer = self._counters.from_peer(leg.start.peer.name)
            of_peer.transfers += 1
            of_peer.seconds += now.s - transfer.granted.s
        self._out.append(ToLink(transfer.link, m.Complete(leg.key)))
        goes_on = self._choices.kv_here(leg, session.first_tokens, len(transfer.slots), now)
        self._unbind(transfer)
        if not goes_on:
            self._grants.over(leg)
            self._choices.end(leg, now)
        elif session.wants_sent and not session.all_unbound:
            transfer.begins_unbound = (
                True  # a piece that was asked for twice may land once more; then nothing may run yet
            )
        else:
            self._begin(transfer)

    def _begin(self, transfer: Receiving) -> None:
        leg = transfer.leg
        assert transfer.pages is not None
        self._grants.over(leg)
        transfer.pages.landed(leg.num_tokens, transfer.hashes, self._batch.pipeline.clock)
        slots, transfer.slots = transfer.slots, ()
        in_transfer = not transfer.session.all_unbound
        kv = PromptKv(transfer.pages, slots, transfer.root, transfer.hashes, transfer.age, in_transfer)
        self._choices.begin(leg, kv)

    def _peer_quiet(self, link: ReceiveLink, key: LegKey) -> None:
        """Prefill has nothing of this leg under way. Its entries are free once our ranks look at none of them either."""
        transfer = self._of(link, key)
        if transfer is None:
            self.rings.free_leg(link.number, key)
        else:
            transfer.session.peer_quiet = True
            self._settle(transfer)

    def _unbind(self, transfer: Receiving) -> None:
        if transfer.session.ever_bound:
            self._out.append(ToTransfer(None, Unbind(transfer.key, blank=transfer.distrusted)))
        self._settle(transfer)

    def _settle(self, transfer: Receiving) -> None:
        """Once our ranks have let go of the leg's pages, it is closed; once prefill is quiet too, so are its entries."""
        session = transfer.session
        if not session.all_unbound:
            return
        if session.state in (ReceiveState.COMPLETE, ReceiveState.LEAVING):
            session.quiet()
            self._unbound(transfer)
        if session.peer_quiet and session.state is ReceiveState.CLOSED and transfer.link in self.links:
            assert transfer.link is not None
            self.rings.free_leg(transfer.link, transfer.key)

    def _unbound(self, transfer: Receiving) -> None:
        """No rank writes into the leg's pages any more. What landed enters the prefix cache, if it broke off too."""
        leg, session, pages = transfer.leg, transfer.session, transfer.pages
        if pages is None:
            return
        groups, page_tokens = self._facts.model.groups, self._facts.memory.page_tokens
        step = self._batch.pipeline.clock
        trusted = not (transfer.distrusted or any(each.distrusted for each in self._choices.sequences(leg.key)))
        checkpoint = trusted and all(
            session.landed_whole(g, page_tokens, CHECKPOINT, NUM_STATES)
            for g, group in enumerate(groups)
            if group.is_state
        )
        pages.take_checkpoint(leg.num_tokens, transfer.hashes, checkpoint, step)
        if transfer.begins_unbound and not leg.ended:
            self._begin(transfer)
        transfer.pages = None
        if self._choices.begun(leg):
            self._choices.let_go(leg)
            return
        ranges = [
            () if group.is_state else session.landed_whole(g, page_tokens, session.wants[g], leg.num_tokens)
            for g, group in enumerate(groups)
        ]
        if trusted:
            pages.landed_partly(leg.num_tokens, transfer.hashes, ranges)
        pages.close(step)
