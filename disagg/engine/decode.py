"""The decode engine: receives KV, decodes in one continuous batch, and says token by token what came out.

Events in, instructions out; no I/O, no clock, no torch. One leg goes through here so:

    StartLeg -> waiting for Announce -> waiting for pages, slots, ring -> binding -> granted -> pieces land
             -> complete (and first tokens here) -> a sequence per choice in the batch -> LegEnd -> pages freed

A grant covers the prompt, less what the prefix cache holds, and some output; while it decodes, a sequence takes pages as
it grows. Who waits for pages, a grant or a sequence that gave way (engine/batch), is served in the order of waiting, and a
grant that has waited too long makes running sequences give way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from msgspec.structs import astuple

from disagg.engine.batch import DecodeBatch, Sequence
from disagg.engine.facts import EngineFacts
from disagg.engine.finish import finish_of
from disagg.engine.instructions import DialLink, DropLink, Instruction, Tally, ToLane, ToLink, ToRouter, ToWorkers
from disagg.engine.pool import EnginePool
from disagg.engine.refusal import refusal
from disagg.engine.ring_talk import RingTalk
from disagg.engine.steps import PlanPipeline, Slots
from disagg.memory.sequence import KvMemory, SequencePages
from disagg.messages import link as m
from disagg.messages.lane import (
    AddPeer,
    Beat,
    Bind,
    Bound,
    Landing,
    LaneReport,
    PeerAdded,
    PeerRemoved,
    RemovePeer,
    Unbind,
    Unbound,
)
from disagg.messages.legs import (
    AbortLeg,
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    ServerState,
    StartLeg,
    TimelineEvent,
)
from disagg.messages.plan import SampledToken, StepResult
from disagg.transfer.session import CHECKPOINT, MAX_WANTS, NUM_STATES, ReceiveSession, ReceiveState
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_CHOICES, MAX_LOGPROBS

MAX_TIMELINE = 256
MAX_EARLY_ANNOUNCES = 4096
MAX_CLOSED = 8192  # keys remembered after a leg's end
WANT_AFTER_S = 1.0  # after SentAll, with nothing landing
TURN_TOKENS = 16  # a sequence that joined the batch makes at least so many before it gives way to a grant


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
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of the trunk's full pages
    pages: SequencePages | None = None  # from the grant on, until they are let go or are the sequences' alone
    slots: tuple[int, ...] = ()  # until the sequences have them
    forks_unbound: bool = False  # its sequences begin when no rank has its pages bound any more
    cached_tokens: int = 0
    too_little_at: int = -1  # KvMemory.releases when there were too few pages for it
    sequences: list[Sequence] = field(default_factory=list)
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

    @property
    def waits(self) -> bool:
        """It has no sequence yet, and may get one."""
        return not self.sequences and not self.ended


class _Try(enum.Enum):
    """How trying to grant a leg went."""

    GRANTED = "granted"
    NOT_NOW = "not now"  # for a reason of its own: others need not wait for it
    TOO_LITTLE = "too little"  # pages or slots: nobody may overtake it


@dataclass(slots=True)
class _Link:
    """A link to one prefill server's incarnation."""

    number: int
    hello: m.LinkHello
    slices: tuple[tuple[int, ...], ...]  # of a piece: by layer group and rank
    early: dict[LegKey, int] = field(default_factory=dict)  # announced before the router's leg came: num_tokens
    early_tokens: dict[LegKey, m.FirstTokens] = field(default_factory=dict)


class DecodeEngine:
    """See the module. Methods take `now_s` (monotonic) and, where the timeline wants it, `now_unix_s`."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.tally = Tally()
        self.pool = EnginePool(facts, self.tally, self._fits_alone)
        self.batch = DecodeBatch(facts, self.pool.kv, self.tally)
        self._legs: dict[LegKey, _Leg] = {}  # in order of arrival
        self._queued: dict[LegKey, _Leg] = {}  # announced and without a grant, longest first
        self._ending: dict[LegKey, _Leg] = {}  # ended, and not all free
        self._links: dict[int, _Link] = {}
        self._closed: dict[LegKey, None] = {}  # recently, oldest first: announces that come late are refused
        self._arrivals = 0
        self._out: list[Instruction] = []
        self.rings = RingTalk(facts, self._out)

    @property
    def pipeline(self) -> PlanPipeline:
        return self.batch.pipeline

    @property
    def slots(self) -> Slots:
        return self.batch.slots

    # ---- what the server calls

    def start_leg(self, router: int, start: StartLeg, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A router dispatches a leg. Answered at once by LegEnd if it can never run here, or if too many wait."""
        if start.key in self._legs:
            return []
        session = ReceiveSession(len(start.token_ids), self.facts.groups, ())
        leg = _Leg(router, start, session, now_s, now_unix_s, now_s + start.deadline_s)
        wrong = self._refusal(start)
        if wrong:
            self._end(leg, Outcome.REFUSED, wrong)
            return self._take()
        if sum(leg.waits for leg in self._legs.values()) >= self.facts.max_waiting:
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
                    self.batch.stop(sequence)
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
        self.batch.settle(now_s)
        self._grant_waiting(now_s, now_unix_s)
        while (plan := self.batch.plan(now_s)) is not None:
            self._out.append(ToWorkers(plan))
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
            self._sampled(self.batch.named(token.seq_id), token, plan.plan_no, now_unix_s)
        self.batch.reported(plan)
        self.batch.settle(now_s)
        self._reap_all()
        return self._take()

    def link_up(self, number: int, hello: m.LinkHello, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A prefill server answered our dial. Raises SliceError if the two TP sizes cannot exchange heads."""
        self._links[number] = _Link(number, hello, self.rings.add(number, hello))
        for rank in hello.ranks:
            self._out.append(ToLane(None, AddPeer(number, rank.rank, rank.metadata, 0, 0, 0)))
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
        self.rings.quiet(number)

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
                self._check_tokens(message)
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
                self.rings.closed(number, message)
            case m.Written():
                self.rings.written(number, message)
            case m.QuietLinks():
                self.rings.quiet_links(number, message)
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
                    self._try_complete(leg, now_s, now_unix_s)  # everything may be in the prefix cache
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
        receiving = {key for key, leg in self._legs.items() if leg.session.state is ReceiveState.RECEIVING}
        for ring in self.rings.table.links.values():
            ring.watch(receiving, now_s)
        self.rings.ask_doubtful(now_s)
        for leg in [leg for leg in self._legs.values() if not leg.ended]:
            if now_s > leg.deadline_s + 5.0:
                self._close(leg, Outcome.ABORTED, "the request's deadline passed")
            elif leg.session.state is ReceiveState.RECEIVING:
                self._watch(leg, receiving, now_s)
        busy = {
            leg.link
            for leg in self._legs.values()
            if leg.link is not None and leg.session.state in (ReceiveState.BINDING, ReceiveState.RECEIVING)
        }
        self.rings.close_idle(busy, now_s)
        self._grant_waiting(now_s, now_unix_s)
        self._reap_all()
        return self._take()

    def load(self, state: ServerState) -> LoadReport:
        waiting = sum(leg.waits for leg in self._legs.values()) + len(self.batch.parked)
        return self.pool.load(state, running=len(self.batch.running), waiting=waiting)

    @property
    def idle(self) -> bool:
        return not self._legs

    @property
    def max_tokens_in_pool(self) -> int:
        """Tokens that a sequence may come to have when it is alone."""
        return self.pool.longest_alone

    def kv_snapshot(self) -> KvEvents:
        """Everything that is in the prefix cache."""
        return self.pool.snapshot()

    def arena_bytes(self) -> tuple[int, int, int]:
        """(free, leased, quarantined), of each rank."""
        arena = self.rings.table.arena
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
                    "sequences": {
                        s.choice: {"seq": s.seq_id, "phase": s.phase.value, "tokens": len(s.tokens)}
                        for s in leg.sequences
                    },
                    "cached tokens": leg.cached_tokens,
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
                for ring in [self.rings.table.links[number]]
            },
            "quarantined links": list(self.rings.table.quarantined_links),
            "plans in flight": [plan.plan_no for plan in self.pipeline.in_flight],
            "running": list(self.batch.running),
            "parked": [f"{s.key} choice {s.choice}" for s in self.batch.parked],
            "memory": self.pool.dump(),
            "arena bytes": dict(zip(("free", "leased", "quarantined"), self.arena_bytes(), strict=True)),
        }

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self.rings.table.arena.check_integrity()
        self.batch.check_integrity()
        landing = [leg.pages for leg in self._legs.values() if leg.pages is not None and not leg.sequences]
        self.pool.kv.check_integrity([*landing, *self.batch.pages()])
        legs_slots = sum(len(leg.slots) for leg in self._legs.values())
        assert legs_slots + self.batch.held_slots() == self.slots.total - self.slots.free, (
            "slots of legs and used slots"
        )
        assert all(leg.session.state is ReceiveState.QUEUED for leg in self._queued.values())
        assert all(leg.ended for leg in self._ending.values())
        for ring in self.rings.table.links.values():
            for rank_ring in ring.rings:
                rank_ring.check_integrity()
            assert sum(len(rank_ring.live) for rank_ring in ring.rings) == len(ring.live)

    # ---- before the grant

    def _refusal(self, start: StartLeg) -> str:
        facts = self.facts
        wrong = refusal(
            start, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size, max_slots=facts.max_slots
        )
        if wrong:
            return wrong
        tokens = len(start.token_ids)
        choices = len(start.choices)
        if not self._fits_alone(self.pool.kv, self._total_tokens(start), tokens, choices):
            return (
                f"prompt and max_tokens come to {self._total_tokens(start)} tokens for each of {choices} choices; the "
                f"decode server has KV memory for {self.pool.longest_alone} tokens of one"
            )
        return ""

    def _fits_alone(self, kv: KvMemory, total_tokens: int, shared_tokens: int = 0, choices: int = 1) -> bool:
        """It can grow to its end, and be computed again up to there, when nothing else holds pages."""
        grown = kv.large_pages_to_decode(shared_tokens, total_tokens, choices)
        return max(grown, kv.large_pages_to_prefill(total_tokens, self.facts.chunk_tokens)) <= self.facts.num_large

    def _total_tokens(self, start: StartLeg) -> int:
        """Tokens whose KV a choice may come to hold (the last output's is never written)."""
        return max(len(start.token_ids), min(start.num_prompt + start.params.max_tokens, self.facts.max_model_len) - 1)

    def _attach(self, leg: _Leg, number: int, now_s: float, now_unix_s: float) -> None:
        link = self._links[number]
        leg.link = number
        leg.session.slices = link.slices
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
        first = leg.session.state is ReceiveState.WAITING
        leg.session.announce(num_tokens)
        if not first:
            return
        self._queued[leg.key] = leg
        leg.announced_s, leg.announced_unix_s = now_s, now_unix_s
        leg.timeline.append(TimelineEvent("queued", leg.received_unix_s, now_unix_s))

    def _grant_waiting(self, now_s: float, now_unix_s: float) -> None:
        """A ring, pages and slots: all or nothing, in the order of waiting; nobody overtakes.

        Who gave way stands in the same queue. A grant that has waited too long goes first, and running sequences give way
        to it, since its KV holds pages of prefill all the while.
        """
        self.rings.table.keep_wishes({leg.link for leg in self._queued.values() if leg.link is not None})
        if self.batch.short or not (self._queued or self.batch.parked):
            return
        urgent = next(iter(self._queued.values()), None)
        if urgent is not None and now_s - urgent.announced_s < self.facts.preempt_after_s:
            urgent = None
        if urgent is not None and self._try_grant(urgent, now_s) is _Try.TOO_LITTLE:
            self.batch.give_way("grant", TURN_TOKENS)
            return
        waiting: list[_Leg | Sequence] = [*self._queued.values(), *self.batch.parked]
        for each in sorted(waiting, key=lambda w: w.announced_s if isinstance(w, _Leg) else w.parked_s):
            if isinstance(each, Sequence):
                if not self.batch.resume(each):
                    return
            elif self._try_grant(each, now_s) is _Try.TOO_LITTLE:
                return

    def _try_grant(self, leg: _Leg, now_s: float) -> _Try:
        assert leg.link is not None
        if self.rings.shut_out(leg.link):
            name = self._links[leg.link].hello.name
            reason = f"no ring for {name}: too much of the arena is quarantined for lost links"
            self._close(leg, Outcome.GIVEN_BACK, reason)
            return _Try.NOT_NOW
        if not self.rings.open(leg.link, now_s):
            return _Try.NOT_NOW  # another link's legs need not wait for this one's segments
        choices, kv = len(leg.start.choices), self.pool.kv
        if choices > self.slots.free or leg.too_little_at == kv.releases:
            return _Try.TOO_LITTLE
        if not leg.root:
            leg.root, leg.hashes = self.pool.prefix(leg.start)
        spare = min(self.facts.spare_tokens, self._total_tokens(leg.start) - leg.num_tokens)
        pages = kv.receive(leg.hashes, leg.num_tokens, spare, choices, self.pipeline.clock)
        if pages is None:
            leg.too_little_at = kv.releases
            return _Try.TOO_LITTLE
        slots = self.slots.take(choices)
        assert slots is not None
        self.pool.taken(pages)
        leg.pages, leg.slots, leg.cached_tokens = pages, slots, pages.hit_tokens
        del self._queued[leg.key]
        leg.session.bind(pages.wants, checkpoint=pages.has_checkpoint)
        leg.progress_s = now_s
        self._out.append(ToLane(None, Bind(leg.key, pages.landing(leg.num_tokens))))
        return _Try.GRANTED

    def _grant(self, leg: _Leg, now_s: float, now_unix_s: float) -> None:
        assert leg.link is not None
        leg.granted_s = leg.progress_s = now_s
        leg.granted_unix_s = now_unix_s
        leg.timeline.append(TimelineEvent("grant", leg.announced_unix_s, now_unix_s))
        self.tally.observe("grant_wait", now_s - leg.announced_s)
        self._out.append(ToLink(leg.link, m.Grant(leg.key, leg.session.wants)))

    # ---- the transfer

    def _offered(self, link: _Link, message: m.OfferPieces, now_s: float) -> None:
        leg = self._leg_of(link, message.key)
        if leg is None:
            return
        pieces = leg.session.offer(message.first_piece_no, message.pieces)
        if self.rings.assign(link.number, leg.key, pieces, now_s):
            leg.progress_s = now_s

    def _landed(self, rank: int, message: Landing, now_s: float, now_unix_s: float) -> None:
        live = self.rings.landed(message.link, message.entry_id)
        leg = self._legs.get(message.key)
        if leg is None or leg.link != message.link or live is None:
            return
        if message.reason == "lost":
            self.tally.lost_notifications += 1  # the piece is missing, and will be asked for
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

    def _check_tokens(self, message: m.FirstTokens) -> None:
        """Raises ProtocolError for more than a leg can have, and for tokens that the model does not know."""
        if len(message.tokens) > MAX_CHOICES:
            raise ProtocolError(f"first tokens came for {len(message.tokens)} choices; at most {MAX_CHOICES} can be")
        for token in message.tokens:
            if not 0 <= token.token_id < self.facts.vocab_size:
                raise ProtocolError(f"first token {token.token_id} is not among the model's {self.facts.vocab_size}")
            if token.logprobs is not None and len(token.logprobs.top) > MAX_LOGPROBS:
                raise ProtocolError(f"a first token has {len(token.logprobs.top)} logprobs; at most {MAX_LOGPROBS}")

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
        self._queued.pop(leg.key, None)
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
        elif leg.session.wants_sent and not leg.session.all_unbound:
            leg.forks_unbound = True  # a piece that was asked for twice may land once more; then nothing may run yet
        else:
            self._fork(leg)

    def _fork(self, leg: _Leg) -> None:
        """Start a sequence for every choice that goes on; they share the pages that are full of the trunk."""
        assert leg.pages is not None
        leg.pages.landed(leg.num_tokens, leg.hashes, self.pipeline.clock)
        forks, copies = leg.pages.fork(len(leg.start.choices))
        limit = leg.start.num_prompt + min(leg.start.params.max_tokens, self.facts.max_model_len - leg.start.num_prompt)
        for token, pages, slot in zip(leg.session.first_tokens, forks, leg.slots, strict=True):
            self._arrivals += 1
            sequence = Sequence(
                key=leg.key,
                choice=token.choice,
                arrival=self._arrivals,
                tokens=[*leg.start.token_ids, token.token_id],
                num_prompt=leg.start.num_prompt,
                limit=limit,
                params=leg.start.params,
                root=leg.root,
                hashes=list(leg.hashes),
                pages=pages,
                slot=slot,
                computed=leg.num_tokens,
            )
            leg.sequences.append(sequence)
            self.batch.join(sequence)
        self.batch.copy_pages(leg.sequences, copies)
        leg.slots = ()
        for sequence, token in zip(leg.sequences, leg.session.first_tokens, strict=True):
            sequence.bound = not leg.session.all_unbound
            if token.finish or token.choice in leg.dropped_choices:
                self.batch.stop(sequence)

    def _watch(self, leg: _Leg, receiving: set[LegKey], now_s: float) -> None:
        """A transfer that stands still: ask for what is missing, at last give it up."""
        idle_s = now_s - leg.progress_s
        assert leg.link is not None
        if leg.session.sent_all and idle_s > WANT_AFTER_S and not leg.session.covered:
            if leg.session.wants_sent >= MAX_WANTS:
                self._close(leg, Outcome.BAD_TRANSFER, "pieces were sent and never arrived")
                return
            leg.progress_s = now_s
            self.rings.forget_leg(leg.link, leg.key)
            self._out.append(ToLink(leg.link, m.WantPieces(leg.key, leg.session.ask_again())))
        elif self.rings.table.links[leg.link].idle_s(leg.key, leg.progress_s, receiving, now_s) > self.facts.progress_s:
            self._close(leg, Outcome.PEER_LOST, f"its transfer made no progress for {self.facts.progress_s:g} s")

    def _peer_quiet(self, link: _Link, key: LegKey) -> None:
        """Prefill has nothing of this leg under way. Its entries are free once our ranks look at none of them either."""
        leg = self._leg_of(link, key)
        if leg is None:
            self.rings.free_leg(link.number, key)
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
            self._unbound(leg)
        if leg.session.peer_quiet and leg.session.state is ReceiveState.CLOSED and leg.link in self._links:
            self.rings.free_leg(leg.link, leg.key)

    def _unbound(self, leg: _Leg) -> None:
        """No rank writes into the leg's pages any more. What landed enters the prefix cache, if it broke off too."""
        session, pages = leg.session, leg.pages
        if pages is None:
            return
        step = self.pipeline.clock
        checkpoint = all(
            session.landed_whole(g, self.facts.page_tokens, CHECKPOINT, NUM_STATES)
            for g, group in enumerate(self.facts.groups)
            if group.is_state
        )
        pages.take_checkpoint(leg.num_tokens, leg.hashes, checkpoint, step)
        if leg.forks_unbound and not leg.ended:
            self._fork(leg)
        if leg.sequences:
            for sequence in leg.sequences:
                sequence.bound = False
            leg.pages = None
            return
        ranges = [
            () if group.is_state else session.landed_whole(g, self.facts.page_tokens, session.wants[g], leg.num_tokens)
            for g, group in enumerate(self.facts.groups)
        ]
        pages.landed_partly(leg.num_tokens, leg.hashes, ranges)
        pages.close(step)
        leg.pages = None

    # ---- decoding

    def _sampled(self, sequence: Sequence, token: SampledToken, plan_no: int, now_unix_s: float) -> None:
        leg = self._legs[sequence.key]
        if sequence.done:
            self.tally.discarded_tokens += 1
            if leg.abort_plan is not None:
                self.tally.max_steps_after_abort = max(self.tally.max_steps_after_abort, plan_no - leg.abort_plan)
            return
        self.tally.decode_tokens += 1
        index = len(sequence.tokens) - sequence.num_prompt
        sequence.tokens.append(token.token_id)
        tokens_left = self.facts.max_model_len - len(sequence.tokens)
        finish = finish_of(token.token_id, index, leg.start.params, self.facts.eos_token_ids, tokens_left)
        logprobs = (token.logprobs,) if token.logprobs is not None else ()
        self._tell(leg, LegTokens(leg.key, token.choice, index, (token.token_id,), logprobs, finish))
        if finish is not None:
            self.batch.stop(sequence)
            if all(s.done for s in leg.sequences):
                self._end(leg, Outcome.DONE, "", now_unix_s)

    # ---- the end of a leg

    def _close(self, leg: _Leg, outcome: Outcome, reason: str) -> None:
        """End a leg early. Its resources follow once no plan, no rank and no writer names them."""
        if leg.abort_plan is None:
            leg.abort_plan = self.pipeline.reported
        for sequence in leg.sequences:
            self.batch.stop(sequence)
        self._queued.pop(leg.key, None)
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
        if leg.key in self._legs:
            self._ending[leg.key] = leg
        self._tell(leg, LegEnd(leg.key, outcome, reason, tuple(leg.timeline), leg.cached_tokens))

    def _reap_all(self) -> None:
        for leg in list(self._ending.values()):
            self._reap(leg)

    def _reap(self, leg: _Leg) -> None:
        if not leg.ended or leg.session.state is not ReceiveState.CLOSED:
            return
        if any(sequence.pages is not None for sequence in leg.sequences) or self._legs.pop(leg.key, None) is None:
            return
        del self._ending[leg.key]
        self._closed[leg.key] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self.slots.give(leg.slots)

    def _tell(self, leg: _Leg, message: LegTokens | LegEnd) -> None:
        if isinstance(message, LegEnd) or not leg.ended:
            self._out.append(ToRouter(leg.router, message))

    def _take(self) -> list[Instruction]:
        out = [*self._out, *self.pool.take_events()]
        self._out.clear()
        return out
