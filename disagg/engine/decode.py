"""The decode engine: receives KV, decodes in one continuous batch, and says token by token what came out.

Events in, instructions out; no I/O, no clock, no torch. One leg goes through here so:

    StartLeg -> waiting for Announce -> waiting for pages, slots, ring -> binding -> granted -> pieces land
             -> complete (and first tokens here) -> running, one token a step -> LegEnd -> pages freed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import astuple

from disagg.engine.facts import EngineFacts
from disagg.engine.finish import finish_of
from disagg.engine.instructions import DialLink, DropLink, Instruction, Tally, ToLane, ToLink, ToRouter, ToWorkers
from disagg.engine.rings import RingState, RingTable
from disagg.engine.steps import PlanPipeline, Slots
from disagg.memory.pages import LegPages, PageAllocator
from disagg.messages import link as m
from disagg.messages.lane import (
    AddPeer,
    Beat,
    Bind,
    Bound,
    ExpectPiece,
    Landing,
    LaneReport,
    PeerAdded,
    PeerRemoved,
    RemovePeer,
    Unbind,
    Unbound,
)
from disagg.messages.legs import AbortLeg, LegEnd, LegTokens, LoadReport, Outcome, ServerState, StartLeg, TimelineEvent
from disagg.messages.mirror import MirrorEncoder
from disagg.messages.plan import Run, SampledToken, SamplerStart, SequenceStart, StepResult
from disagg.scheduler.policies import Candidate, decode_only
from disagg.staging.arena import locate
from disagg.staging.pieces import piece_bytes
from disagg.staging.slices import HeadSlice, head_slices
from disagg.transfer.session import ReceiveSession, ReceiveState
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

MAX_TIMELINE = 256
MAX_EARLY_ANNOUNCES = 4096
MAX_CLOSED = 8192  # keys remembered after a leg's end
WANT_AFTER_S = 1.0  # after SentAll, with nothing landing
MAX_WANTS = 3


@dataclass(slots=True)
class _Sequence:
    """One choice that decodes."""

    leg: _Leg
    seq_id: int
    choice: int
    slot: int
    outputs: int  # outputs accepted by this engine or before it
    scheduled: int  # outputs that plans so far will have produced
    last_plan: int = -1
    done: bool = False


@dataclass(slots=True)
class _Leg:
    """One leg from StartLeg until its last resource is free."""

    router: int
    start: StartLeg
    session: ReceiveSession
    received_s: float
    received_unix_s: float
    deadline_s: float
    link: int | None = None
    link_attempted: bool = False
    pages: LegPages | None = None
    slots: tuple[int, ...] = ()
    sequences: list[_Sequence] = field(default_factory=list)
    last_plan: int = -1
    ended: bool = False
    dropped_choices: set[int] = field(default_factory=set)
    announced_unix_s: float = 0.0
    announced_s: float = 0.0
    granted_s: float = 0.0
    granted_unix_s: float = 0.0
    complete_unix_s: float = 0.0
    progress_s: float = 0.0
    abort_plan: int | None = None
    timeline: list[TimelineEvent] = field(default_factory=list)

    @property
    def key(self) -> LegKey:
        return self.start.key

    @property
    def num_tokens(self) -> int:
        return len(self.start.token_ids)

    @property
    def base(self) -> int:
        """Output index of the first token that this attempt produces."""
        return len(self.start.token_ids) - self.start.num_prompt


@dataclass(slots=True)
class _Link:
    """A link to one prefill server's incarnation."""

    number: int
    hello: m.LinkHello
    slices: tuple[tuple[HeadSlice, ...], ...]  # by layer group
    early: dict[LegKey, int] = field(default_factory=dict)  # announced before the router's leg came: num_tokens
    early_tokens: dict[LegKey, m.FirstTokens] = field(default_factory=dict)


class DecodeEngine:
    """See the module. Methods take `now_s` (monotonic) and, where the timeline wants it, `now_unix_s`."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.pages = PageAllocator(facts.num_pages)
        self.slots = Slots(facts.max_slots)
        self.pipeline = PlanPipeline(facts.tp)
        self.encoder = MirrorEncoder()
        self.tally = Tally()
        self.rings = RingTable(facts.arena_bytes, facts.segment_bytes, facts.link_segments, facts.tp, facts.link_idle_s)
        self._legs: dict[LegKey, _Leg] = {}  # in order of arrival
        self._running: dict[int, _Sequence] = {}  # decoding and not done
        self._by_seq: dict[int, _Sequence] = {}  # everything that a plan in flight may name
        self._links: dict[int, _Link] = {}
        self._closed: dict[LegKey, None] = {}  # recently, oldest first: announces that come late are refused
        self._next_seq_id = 0
        self._out: list[Instruction] = []

    # ---- what the server calls

    def start_leg(self, router: int, start: StartLeg, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A router dispatches a leg. Answered at once by LegEnd if it can never run here, or if too many wait."""
        if start.key in self._legs:
            return []
        session = ReceiveSession(len(start.token_ids), tuple(len(g.layers) for g in self.facts.groups), ())
        leg = _Leg(router, start, session, now_s, now_unix_s, now_s + start.deadline_s)
        refusal = self._refusal(start)
        if refusal:
            self._end(leg, Outcome.REFUSED, refusal)
            return self._take()
        if sum(not leg.sequences for leg in self._legs.values()) >= self.facts.max_waiting:
            self._end(leg, Outcome.GIVEN_BACK, "too many legs are waiting already")
            return self._take()
        self._legs[start.key] = leg
        for number, link in self._links.items():
            if (link.hello.name, link.hello.incarnation) == (start.peer.name, start.peer.incarnation):
                self._attach(leg, number, now_s, now_unix_s)
        if leg.link is None and not leg.ended:
            self._out.append(DialLink(start.peer))
        self._grant_waiting(now_s, now_unix_s)
        return self._take()

    def abort_leg(self, abort: AbortLeg, now_s: float) -> list[Instruction]:
        """A router wants nothing more of this leg, or of one of its choices."""
        leg = self._legs.get(abort.key)
        if leg is None or leg.ended:
            return self._take()
        self.tally.aborts += 1
        if abort.choice is not None:
            leg.dropped_choices.add(abort.choice)
            for sequence in leg.sequences:
                if sequence.choice == abort.choice:
                    self._stop(sequence)
            if not leg.sequences or not all(sequence.done for sequence in leg.sequences):
                return self._take()
        self._close(leg, Outcome.ABORTED, "aborted by the router")
        return self._take()

    def end_router(self, router: int, reason: str) -> list[Instruction]:
        for leg in [leg for leg in self._legs.values() if leg.router == router and not leg.ended]:
            self._close(leg, Outcome.ABORTED, reason)
        return self._take()

    def end_all(self, outcome: Outcome, reason: str) -> list[Instruction]:
        for leg in [leg for leg in self._legs.values() if not leg.ended]:
            self._close(leg, outcome, reason)
        return self._take()

    def schedule(self, now_s: float, now_unix_s: float) -> list[Instruction]:
        """Grant what fits, then send plans until two are in flight or nothing is left to do."""
        self._grant_waiting(now_s, now_unix_s)
        while self.pipeline.has_room and self._schedule_one(now_s):
            pass
        return self._take()

    def step_done(self, result: StepResult, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A rank has computed a plan."""
        complete = self.pipeline.report(result)
        if complete is None:
            return []
        plan, report = complete
        self.tally.observe("step", report.compute_s)
        if plan.runs:
            self.tally.steps += 1
        for token in report.sampled:
            self._sampled(self._by_seq[token.seq_id], token, plan.plan_no, now_unix_s)
        self._reap_all()
        return self._take()

    def link_up(self, number: int, hello: m.LinkHello, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A prefill server answered our dial. Raises SliceError if the two TP sizes cannot exchange heads."""
        slices = tuple(head_slices(hello.tp, self.facts.tp, group.kv_heads) for group in self.facts.groups)
        self._links[number] = _Link(number, hello, slices)
        self.rings.add(number)
        for rank in hello.ranks:
            self._out.append(ToLane(None, AddPeer(number, rank.rank, rank.metadata, 0, 0)))
        for leg in list(self._legs.values()):
            if leg.link is None and leg.start.peer.name == hello.name and not leg.ended:
                if leg.start.peer.incarnation == hello.incarnation:
                    self._attach(leg, number, now_s, now_unix_s)
                else:
                    self._close(leg, Outcome.GIVEN_BACK, f"{hello.name} has restarted")
        return self._take()

    def dial_failed(self, name: str, incarnation: str, reason: str) -> list[Instruction]:
        """No link to that server could be made: the legs that need it are given back, not one of them having begun."""
        for leg in list(self._legs.values()):
            peer = leg.start.peer
            if leg.link is None and (peer.name, peer.incarnation) == (name, incarnation) and not leg.ended:
                self._close(leg, Outcome.GIVEN_BACK, reason)
        return self._take()

    def link_down(self, number: int, gone: bool, reason: str) -> list[Instruction]:
        """The link is lost for good. gone: its workers are known to have exited, so nothing can write to its ring."""
        link = self._links.pop(number, None)
        if link is None:
            return []
        self.rings.remove(number, gone)
        self._out.append(ToLane(None, RemovePeer(number)))
        for leg in [leg for leg in self._legs.values() if leg.link == number]:
            if leg.session.open and not leg.ended:
                self._close(leg, Outcome.PEER_LOST, reason)
            self._settle(leg)
        self._reap_all()
        return self._take()

    def peer_gone(self, number: int) -> None:
        """The workers behind a lost link have exited at last: their segments come back."""
        self.rings.gone(number)

    def link_message(self, number: int, message: m.LinkMessage, now_s: float, now_unix_s: float) -> list[Instruction]:
        """Raises ProtocolError for what no prefill engine may say; the server then drops the link."""
        link = self._links.get(number)
        if link is None:
            return []
        match message:
            case m.Announce():
                leg = self._leg_of(link, message.key)
                if leg is not None:
                    self._announced(leg, message.num_tokens, now_s, now_unix_s)
                elif message.key in self._closed or len(link.early) >= MAX_EARLY_ANNOUNCES:
                    self._out.append(ToLink(number, m.Revoke(message.key, "not wanted")))
                else:
                    link.early[message.key] = message.num_tokens
            case m.OfferPieces():
                self._offered(link, message, now_s)
            case m.FirstTokens():
                leg = self._leg_of(link, message.key)
                if leg is not None:
                    self._first_tokens(leg, message, now_s, now_unix_s)
                elif message.key in link.early:
                    link.early_tokens[message.key] = message
            case m.SentAll():
                leg = self._leg_of(link, message.key)
                if leg is not None and leg.session.state is ReceiveState.RECEIVING:
                    leg.session.sent_all = True
                    leg.progress_s = now_s
                else:
                    self._peer_quiet(link, message.key)
            case m.Withdraw():
                self._forget_early(link, message.key)
                leg = self._leg_of(link, message.key)
                if leg is not None and not leg.ended and leg.session.open:
                    self._close(leg, Outcome.PEER_LOST, f"prefill gave it up: {message.reason}")
                self._peer_quiet(link, message.key)
            case m.Drained():
                self._peer_quiet(link, message.key)
            case m.RingClosed():
                if self.rings.links[number].state is not RingState.CLOSING:
                    raise ProtocolError("prefill closed a ring that it was not asked for")
                self.rings.closed(number)
            case _:
                raise ProtocolError(f"a prefill server may not send {type(message).__name__}")
        self._grant_waiting(now_s, now_unix_s)
        self._reap_all()
        return self._take()

    def lane_report(self, rank: int, message: LaneReport, now_s: float, now_unix_s: float) -> list[Instruction]:
        match message:
            case Bound():
                leg = self._legs.get(message.key)
                if leg is not None and leg.session.bound(rank):
                    self._grant(leg, now_s, now_unix_s)
            case Landing():
                self._landed(rank, message, now_s, now_unix_s)
            case Unbound():
                leg = self._legs.get(message.key)
                if leg is not None:
                    leg.session.unbound(rank)
                    self._settle(leg)
            case PeerAdded():
                if message.error and message.link in self._links:
                    self._out.append(DropLink(message.link, message.error))
            case PeerRemoved() | Beat():
                pass
            case _:
                raise ProtocolError(f"a decode worker may not report {type(message).__name__}")
        self._grant_waiting(now_s, now_unix_s)
        self._reap_all()
        return self._take()

    def tick(self, now_s: float, now_unix_s: float) -> list[Instruction]:
        """Rings that idle go back; transfers that stand still are asked for, then given up; backstop deadlines."""
        for leg in [leg for leg in self._legs.values() if not leg.ended]:
            if now_s > leg.deadline_s + 5.0:
                self._close(leg, Outcome.ABORTED, "the request's deadline passed")
            elif leg.session.state is ReceiveState.RECEIVING:
                self._watch(leg, now_s)
        busy = {
            leg.link
            for leg in self._legs.values()
            if leg.link is not None and leg.session.state in (ReceiveState.BINDING, ReceiveState.RECEIVING)
        }
        for number in self.rings.closable(now_s, busy):
            self._out.append(ToLink(number, m.CloseRing(self.rings.links[number].ring_no)))
        self._grant_waiting(now_s, now_unix_s)
        self._reap_all()
        return self._take()

    def load(self, state: ServerState) -> LoadReport:
        return LoadReport(
            state=state,
            running=len(self._running),
            waiting=sum(not leg.sequences and not leg.ended for leg in self._legs.values()),
            pages_used=self.pages.used,
            pages_free=self.pages.free,
            pages_evictable=self.pages.evictable,
            pages_total=self.pages.total,
        )

    @property
    def idle(self) -> bool:
        return not self._legs

    @property
    def max_tokens_in_pool(self) -> int:
        return self.facts.num_pages * self.facts.page_tokens

    def arena_bytes(self) -> tuple[int, int, int]:
        """(free, leased, quarantined), of each rank."""
        arena = self.rings.arena
        return arena.free_bytes, arena.leased_bytes, arena.quarantined_bytes

    def dump(self) -> dict[str, object]:
        """For a person: every leg, link, lease and plan in flight."""
        return {
            "legs": {
                str(leg.key): {
                    "session": leg.session.state.value,
                    "tokens": leg.num_tokens,
                    "missing": [astuple(piece) for piece in leg.session.missing()[:8]],
                    "first_tokens": len(leg.session.first_tokens),
                    "sequences": {s.seq_id: {"outputs": s.outputs, "done": s.done} for s in leg.sequences},
                    "link": leg.link,
                    "ended": leg.ended,
                }
                for leg in self._legs.values()
            },
            "links": {
                number: {
                    "peer": link.hello.name,
                    "incarnation": link.hello.incarnation,
                    "ring": ring.state.value,
                    "segments": list(ring.lease.segments) if ring.lease else [],
                    "live entries": len(ring.live),
                    "watermarks": list(ring.watermarks),
                    "early announces": len(link.early),
                }
                for number, link in self._links.items()
                for ring in [self.rings.links[number]]
            },
            "quarantined links": list(self.rings.quarantined_links),
            "plans in flight": [plan.plan_no for plan in self.pipeline.in_flight],
            "pages": {"free": self.pages.free, "used": self.pages.used, "total": self.pages.total},
            "arena bytes": dict(zip(("free", "leased", "quarantined"), self.arena_bytes(), strict=True)),
        }

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self.pages.check_integrity()
        self.rings.arena.check_integrity()
        held: set[int] = set()
        for leg in self._legs.values():
            if leg.pages is not None:
                mine = {page for i in range(len(leg.pages.own)) for page in leg.pages.table(i)}
                assert not mine & held, "two legs hold one page"
                held |= mine
        assert len(held) == self.pages.used, "pages of legs and used pages differ"
        assert sum(len(leg.slots) for leg in self._legs.values()) == self.slots.total - self.slots.free
        for ring in self.rings.links.values():
            for rank_ring in ring.rings:
                rank_ring.check_integrity()
            assert sum(len(rank_ring.live) for rank_ring in ring.rings) == len(ring.live)

    # ---- before the grant

    def _refusal(self, start: StartLeg) -> str:
        tokens = len(start.token_ids)
        if tokens == 0 or start.num_prompt > tokens or not start.choices:
            return "a leg needs at least one token and one choice"
        if tokens >= self.facts.max_model_len:
            return f"{tokens} tokens leave no room within the model's {self.facts.max_model_len}"
        needed = LegPages.count(tokens, self._total_tokens(start), len(start.choices), self.facts.page_tokens)
        if needed > self.pages.total:
            return (
                f"prompt and max_tokens of all choices need {needed} KV pages of {self.facts.page_tokens} tokens; "
                f"the decode server has {self.pages.total}"
            )
        if len(start.choices) > self.facts.max_slots:
            return f"{len(start.choices)} choices are more than the server's {self.facts.max_slots} slots"
        return ""

    def _total_tokens(self, start: StartLeg) -> int:
        """Tokens whose KV a choice may come to hold (the last output's is never written)."""
        return max(len(start.token_ids), min(start.num_prompt + start.params.max_tokens, self.facts.max_model_len) - 1)

    def _attach(self, leg: _Leg, number: int, now_s: float, now_unix_s: float) -> None:
        link = self._links[number]
        leg.link = number
        leg.session.slices = tuple(sum(s.dst_rank == rank for s in link.slices[0]) for rank in range(self.facts.tp))
        announced = link.early.pop(leg.key, None)
        tokens = link.early_tokens.pop(leg.key, None)
        try:
            if announced is not None:
                self._announced(leg, announced, now_s, now_unix_s)
            if tokens is not None and not leg.ended:
                self._first_tokens(leg, tokens, now_s, now_unix_s)
        except ProtocolError as error:  # the link's fault, whoever calls: this may be a router's StartLeg
            self._out.append(DropLink(number, str(error)))

    def _leg_of(self, link: _Link, key: LegKey) -> _Leg | None:
        leg = self._legs.get(key)
        return leg if leg is not None and leg.link == link.number else None

    def _forget_early(self, link: _Link, key: LegKey) -> None:
        link.early.pop(key, None)
        link.early_tokens.pop(key, None)

    def _announced(self, leg: _Leg, num_tokens: int, now_s: float, now_unix_s: float) -> None:
        if leg.ended:
            assert leg.link is not None
            self._out.append(ToLink(leg.link, m.Revoke(leg.key, "not wanted any more")))
            return
        leg.session.announce(num_tokens)
        leg.announced_s, leg.announced_unix_s = now_s, now_unix_s
        leg.timeline.append(TimelineEvent("queued", leg.received_unix_s, now_unix_s))

    def _grant_waiting(self, now_s: float, now_unix_s: float) -> None:
        """Pages, then slots, then a ring: all or nothing, oldest first; nobody overtakes."""
        queued = [leg for leg in self._legs.values() if leg.session.state is ReceiveState.QUEUED]
        self.rings.keep_wishes({leg.link for leg in queued if leg.link is not None})
        for leg in queued:
            assert leg.link is not None
            link = self._links[leg.link]
            peer = f"{link.hello.name}/{link.hello.incarnation}"
            if self.rings.shut_out(leg.link, peer):
                reason = f"no ring for {link.hello.name}: too much of the arena is quarantined for lost links"
                self._close(leg, Outcome.GIVEN_BACK, reason)
                continue
            choices = len(leg.start.choices)
            total = self._total_tokens(leg.start)
            needed = LegPages.count(leg.num_tokens, total, choices, self.facts.page_tokens)
            if needed > self.pages.free or choices > self.slots.free:
                return
            if not self.rings.open(leg.link, peer, now_s):
                continue  # another link's legs need not wait for this one's segments
            self._tell_ring(link)
            leg.pages = LegPages.allocate(self.pages, leg.num_tokens, total, choices, self.facts.page_tokens)
            slots = self.slots.take(choices)
            assert leg.pages is not None
            assert slots is not None
            leg.slots = slots
            leg.session.bind(hit_tokens=0)
            leg.progress_s = now_s
            self._out.append(ToLane(None, Bind(leg.key, leg.pages.table(0))))

    def _tell_ring(self, link: _Link) -> None:
        ring = self.rings.links[link.number]
        if ring.told:
            return
        assert ring.lease is not None
        ring.told = ring.watermarks
        offsets = tuple(segment * ring.lease.segment_bytes for segment in ring.lease.segments)
        for rank in range(self.facts.tp):
            self._out.append(ToLink(link.number, m.OpenRing(ring.ring_no, rank, ring.lease.segment_bytes, offsets)))

    def _grant(self, leg: _Leg, now_s: float, now_unix_s: float) -> None:
        assert leg.link is not None
        leg.granted_s = leg.progress_s = now_s
        leg.granted_unix_s = now_unix_s
        leg.timeline.append(TimelineEvent("grant", leg.announced_unix_s, now_unix_s))
        self.tally.observe("grant_wait", now_s - leg.announced_s)
        self._out.append(ToLink(leg.link, m.Grant(leg.key, leg.session.hit_tokens)))

    # ---- the transfer

    def _offered(self, link: _Link, message: m.OfferPieces, now_s: float) -> None:
        leg = self._leg_of(link, message.key)
        if leg is None:
            return
        ring = self.rings.links[link.number]
        entries = []
        for piece_no, piece in leg.session.offer(message.first_piece_no, message.pieces):
            group = self.facts.groups[piece.group]
            for part in link.slices[piece.group]:
                nbytes = piece_bytes(piece, part.heads, group.head_dim, group.dtype_bytes)
                try:
                    entry_id, entry = ring.assign(leg.key, piece_no, part.dst_rank, nbytes)
                except ValueError as error:
                    raise ProtocolError(f"{piece} was offered: {error}") from error
                assert ring.lease is not None
                entries.append(
                    m.Entry(
                        entry_id=entry_id,
                        piece_no=piece_no,
                        src_rank=part.src_rank,
                        dst_rank=part.dst_rank,
                        src_head_start=part.src_head_start,
                        heads=part.heads,
                        position=entry.position,
                        nbytes=nbytes,
                    )
                )
                self._out.append(
                    ToLane(
                        part.dst_rank,
                        ExpectPiece(
                            link=link.number,
                            entry_id=entry_id,
                            key=leg.key,
                            piece=piece,
                            src_incarnation=link.hello.incarnation,
                            dst_incarnation=self.facts.incarnation,
                            src_rank=part.src_rank,
                            dst_rank=part.dst_rank,
                            dst_head_start=part.dst_head_start,
                            heads=part.heads,
                            arena_offset=locate(ring.lease, entry.position % ring.lease.nbytes),
                            nbytes=nbytes,
                        ),
                    )
                )
        if entries:
            leg.progress_s = now_s
            self._out.append(ToLink(link.number, m.AssignEntries(leg.key, ring.ring_no, tuple(entries))))
            self._tell_watermarks(link.number)

    def _tell_watermarks(self, number: int) -> None:
        ring = self.rings.links[number]
        if ring.rings and ring.watermarks != ring.told:
            ring.told = ring.watermarks
            self._out.append(ToLink(number, m.Watermarks(ring.ring_no, ring.told)))

    def _landed(self, rank: int, message: Landing, now_s: float, now_unix_s: float) -> None:
        ring = self.rings.links.get(message.link)
        live = ring.free(message.entry_id) if ring is not None else None
        if live is not None:
            self._tell_watermarks(message.link)
        leg = self._legs.get(message.key)
        if leg is None or leg.link != message.link or live is None:
            return
        if not message.ok:
            if message.reason == "checksum":
                self.tally.checksum_failures += 1
            if not leg.ended and leg.session.state is ReceiveState.RECEIVING:
                self._close(leg, Outcome.BAD_TRANSFER, f"a piece failed its {message.reason} check")
            return
        self.tally.pieces_landed += 1
        self.tally.payload_bytes_received += message.payload_bytes
        leg.progress_s = now_s
        if leg.session.state is ReceiveState.RECEIVING:
            if len(leg.timeline) < MAX_TIMELINE:
                at = message.landed_unix_s
                leg.timeline.append(TimelineEvent("piece", at - message.scatter_s, at, f"rank {rank}"))
            leg.session.landed(live.piece_no, rank)
            self._try_complete(leg, now_s, now_unix_s)

    def _first_tokens(self, leg: _Leg, message: m.FirstTokens, now_s: float, now_unix_s: float) -> None:
        if leg.ended or leg.session.first_tokens:
            return
        if tuple(token.choice for token in message.tokens) != leg.start.choices:
            raise ProtocolError(f"first tokens came for choices {[t.choice for t in message.tokens]} of {leg.key}")
        leg.session.first_tokens = message.tokens
        self._try_complete(leg, now_s, now_unix_s)

    def _try_complete(self, leg: _Leg, now_s: float, now_unix_s: float) -> None:
        ever_received = leg.session.state is ReceiveState.RECEIVING
        if not leg.session.try_complete():
            return
        if leg.session.sent_all:
            # Prefill will not say so again, and an entry may be left whose notification was lost.
            leg.session.peer_quiet = True
        assert leg.link is not None
        leg.complete_unix_s = now_unix_s
        if ever_received:
            leg.timeline.append(TimelineEvent("transfer", leg.granted_unix_s, now_unix_s))
            self.tally.observe("transfer", now_s - leg.granted_s)
        self._out.append(ToLink(leg.link, m.Complete(leg.key)))
        for token in leg.session.first_tokens:
            logprobs = (token.logprobs,) if token.logprobs is not None else ()
            self._tell(leg, LegTokens(leg.key, token.choice, leg.base, (token.token_id,), logprobs, token.finish))
        self._unbind(leg)
        if all(token.finish or token.choice in leg.dropped_choices for token in leg.session.first_tokens):
            self._end(leg, Outcome.DONE, "", now_unix_s)
        else:
            self._fork(leg)

    def _fork(self, leg: _Leg) -> None:
        """Start a sequence for every choice that goes on; they share the pages that are full of the trunk."""
        assert leg.pages is not None
        self.encoder.copy_pages(leg.pages.copies)
        for index, token in enumerate(leg.session.first_tokens):
            if token.finish or token.choice in leg.dropped_choices:
                continue
            sequence = _Sequence(
                leg, self._next_seq_id, token.choice, leg.slots[index], outputs=leg.base + 1, scheduled=leg.base + 1
            )
            self._next_seq_id += 1
            leg.sequences.append(sequence)
            self._running[sequence.seq_id] = self._by_seq[sequence.seq_id] = sequence
            self.encoder.start(
                SequenceStart(
                    seq_id=sequence.seq_id,
                    token_ids=(*leg.start.token_ids, token.token_id),
                    num_prompt=leg.start.num_prompt,
                    computed=leg.num_tokens,
                    pages=leg.pages.table(index),
                    params=leg.start.params,
                    samplers=(SamplerStart(sequence.slot, token.choice),),
                )
            )
        if leg.pages.copies:
            leg.last_plan = self.encoder.next_plan_no  # the plan that copies the partial page

    def _watch(self, leg: _Leg, now_s: float) -> None:
        """A transfer that stands still: ask for what is missing, at last give it up."""
        idle_s = now_s - leg.progress_s
        assert leg.link is not None
        if leg.session.sent_all and idle_s > WANT_AFTER_S and not leg.session.covered:
            if leg.session.wants_sent >= MAX_WANTS:
                self._close(leg, Outcome.BAD_TRANSFER, "pieces were sent and never arrived")
                return
            leg.session.wants_sent += 1
            leg.session.sent_all = False
            leg.progress_s = now_s
            self._out.append(ToLink(leg.link, m.WantPieces(leg.key, leg.session.missing())))
        elif idle_s > self.facts.progress_s:
            self._close(leg, Outcome.PEER_LOST, f"its transfer made no progress for {self.facts.progress_s:g} s")

    def _peer_quiet(self, link: _Link, key: LegKey) -> None:
        """Prefill has nothing of this leg under way. Its entries are free once our ranks look at none of them either."""
        leg = self._leg_of(link, key)
        if leg is None:
            self.rings.links[link.number].free_leg(key)
            self._tell_watermarks(link.number)
        else:
            leg.session.peer_quiet = True
            self._settle(leg)

    def _unbind(self, leg: _Leg) -> None:
        if leg.session.ever_bound:
            self._out.append(ToLane(None, Unbind(leg.key)))
        self._settle(leg)

    def _settle(self, leg: _Leg) -> None:
        """Once our ranks have let go of the leg's pages, it is closed; once prefill is quiet too, so are its entries."""
        if not leg.session.all_unbound:
            return
        if leg.session.state in (ReceiveState.COMPLETE, ReceiveState.LEAVING):
            leg.session.quiet()
        if leg.session.peer_quiet and leg.session.state is ReceiveState.CLOSED and leg.link in self._links:
            self.rings.links[leg.link].free_leg(leg.key)
            self._tell_watermarks(leg.link)

    # ---- decoding

    def _schedule_one(self, now_s: float) -> bool:
        candidates = tuple(
            Candidate(s.seq_id, 0)
            for s in self._running.values()
            if s.scheduled < min(s.leg.start.params.max_tokens, self.facts.max_model_len - s.leg.start.num_prompt)
        )
        step = decode_only(candidates, self.facts.max_slots)
        if not step.runs and not self.encoder.has_housekeeping:
            return False
        plan = self.encoder.encode([Run(run.seq_id, run.num_tokens, run.sample) for run in step.runs])
        self.pipeline.sent(plan, now_s)
        self._out.append(ToWorkers(plan))
        for run in step.runs:
            sequence = self._running[run.seq_id]
            sequence.scheduled += 1
            sequence.last_plan = sequence.leg.last_plan = plan.plan_no
        return True

    def _sampled(self, sequence: _Sequence, token: SampledToken, plan_no: int, now_unix_s: float) -> None:
        leg = sequence.leg
        if sequence.done:
            self.tally.discarded_tokens += 1
            if leg.abort_plan is not None:
                self.tally.max_steps_after_abort = max(self.tally.max_steps_after_abort, plan_no - leg.abort_plan)
            return
        self.tally.decode_tokens += 1
        index, sequence.outputs = sequence.outputs, sequence.outputs + 1
        tokens_left = self.facts.max_model_len - leg.start.num_prompt - sequence.outputs
        finish = finish_of(token.token_id, index, leg.start.params, self.facts.eos_token_ids, tokens_left)
        logprobs = (token.logprobs,) if token.logprobs is not None else ()
        self._tell(leg, LegTokens(leg.key, token.choice, index, (token.token_id,), logprobs, finish))
        if finish is not None:
            self._stop(sequence)
            if all(s.done for s in leg.sequences):
                self._end(leg, Outcome.DONE, "", now_unix_s)

    def _stop(self, sequence: _Sequence) -> None:
        if not sequence.done:
            sequence.done = True
            self._running.pop(sequence.seq_id, None)
            self.encoder.end(sequence.seq_id)

    # ---- the end of a leg

    def _close(self, leg: _Leg, outcome: Outcome, reason: str) -> None:
        """End a leg early. Its resources follow once no plan, no rank and no writer names them."""
        if leg.abort_plan is None:
            leg.abort_plan = self.pipeline.reported
        for sequence in leg.sequences:
            self._stop(sequence)
        announced = leg.session.state is not ReceiveState.WAITING
        if leg.session.abandon():
            if outcome in (Outcome.BAD_TRANSFER, Outcome.PEER_LOST):
                self.tally.transfer_failures[outcome.value] += 1
            if leg.link in self._links and announced:
                self._out.append(ToLink(leg.link, m.Revoke(leg.key, reason)))
            self._unbind(leg)
        self._end(leg, outcome, reason)
        self._reap(leg)

    def _end(self, leg: _Leg, outcome: Outcome, reason: str, now_unix_s: float = 0.0) -> None:
        if leg.ended:
            return
        leg.ended = True
        if leg.complete_unix_s and now_unix_s:
            leg.timeline.append(TimelineEvent("decode", leg.complete_unix_s, now_unix_s))
        self.tally.legs[outcome.value] += 1
        self._tell(leg, LegEnd(leg.key, outcome, reason, tuple(leg.timeline)))

    def _reap_all(self) -> None:
        for leg in [leg for leg in self._legs.values() if leg.ended]:
            self._reap(leg)

    def _reap(self, leg: _Leg) -> None:
        if not leg.ended or leg.session.state is not ReceiveState.CLOSED:
            return
        if leg.last_plan > self.pipeline.reported or self._legs.pop(leg.key, None) is None:
            return
        self._closed[leg.key] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        for sequence in leg.sequences:
            del self._by_seq[sequence.seq_id]
        if leg.pages is not None:
            for index in range(len(leg.pages.own)):
                self.pages.release(leg.pages.table(index))
        self.slots.give(leg.slots)

    def _tell(self, leg: _Leg, message: LegTokens | LegEnd) -> None:
        if isinstance(message, LegEnd) or not leg.ended:
            self._out.append(ToRouter(leg.router, message))

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
