"""The decode engine: receives KV, decodes in one continuous batch, and says token by token what came out.

Events in, instructions out; no I/O, no clock, no torch. One leg goes through here so:

    StartLeg -> waiting for Announce -> waiting for pages, a slot, ring -> binding -> granted -> pieces land
             -> complete (and first tokens here) -> sequences join the batch -> LegEnd -> pages freed

A grant covers the prompt, less what the prefix cache holds, and some output; while it decodes, a sequence takes pages as
it grows. Each choice has a slot of its own: a grant takes one, and more for its other choices as far as others leave them;
the rest of them wait and join one by one. A choice has *begun* when it has its slot, and is not heard of before.

Who waits is served so: first those that have begun and gave way for want of pages (engine/batch), oldest first; while there
are any, nothing new begins. Then grants and choices that have not begun, tenant by tenant in turns (scheduler/fairness),
and only if those that have begun can go on beside them for `facts.lookahead_tokens` (engine/growth). Nobody gives way to
what has not begun.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from msgspec.structs import astuple

from disagg.engine.batch import DecodeBatch, Phase, Sequence
from disagg.engine.facts import EngineFacts
from disagg.engine.finish import finish_of
from disagg.engine.growth import after_grant, grown_to, running_on
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
from disagg.scheduler.admission import Growing
from disagg.scheduler.fairness import FairQueue
from disagg.transfer.session import CHECKPOINT, MAX_WANTS, NUM_STATES, ReceiveSession, ReceiveState
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_CHOICES, MAX_LOGPROBS

MAX_TIMELINE = 256
MAX_EARLY_ANNOUNCES = 4096
MAX_CLOSED = 8192  # keys remembered after a leg's end
WANT_AFTER_S = 1.0  # after SentAll, with nothing landing
FIRST_CHOICES_SHARE = 8  # one slot in so many is for the first choice of a request
TURN_TOKENS = 16  # a sequence that joined the batch makes at least so many before it gives way to an older one


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
    slots: tuple[int, ...] = ()  # until the sequences have them: of the choices that begin at once
    age: int = -1  # which grant it was
    told: set[int] = field(default_factory=set)  # choices whose first token the router has from here
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
    def tenant(self) -> str:
        """A router that does not say whose its legs are is a tenant."""
        return self.start.tenant or f"router {self.router}"

    @property
    def waits(self) -> bool:
        """It has no sequence yet, and may get one."""
        return not self.sequences and not self.ended


class _Try(enum.Enum):
    """How trying to grant a leg went."""

    GRANTED = "granted"
    NOT_NOW = "not now"  # for a reason of its own: others need not wait for it
    TOO_LITTLE = "too little"  # pages or a slot: nobody may overtake it


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
        self._queued: FairQueue[_Leg | Sequence] = FairQueue()  # announced without a grant; choices without a slot
        self._wishes: dict[int, int] = {}  # by link: legs of it that are queued
        self._ending: dict[LegKey, _Leg] = {}  # ended, and not all free
        self._links: dict[int, _Link] = {}
        self._closed: dict[LegKey, None] = {}  # recently, oldest first: announces that come late are refused
        self._grants = 0
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
        choices = sum(isinstance(each, Sequence) for each in self._queued)
        waiting = sum(leg.waits for leg in self._legs.values()) + len(self.batch.parked) + choices
        return self.pool.load(state, running=len(self.batch.running), waiting=waiting)

    def parked(self, now_s: float) -> tuple[int, float]:
        """How many sequences gave way and have not gone on, and for how long the longest of them."""
        parked = self.batch.parked
        return len(parked), max((now_s - sequence.parked_s for sequence in parked), default=0.0)

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
        for each in self._queued:
            if isinstance(each, Sequence):
                assert each.phase is Phase.WAITING and each.pages is None
            else:
                assert each.session.state is ReceiveState.QUEUED and not each.slots
        queued = [each.link for each in self._queued if isinstance(each, _Leg)]
        assert self._wishes == {link: queued.count(link) for link in queued}
        assert all(leg.ended for leg in self._ending.values())
        for ring in self.rings.table.links.values():
            for rank_ring in ring.rings:
                rank_ring.check_integrity()
            assert sum(len(rank_ring.live) for rank_ring in ring.rings) == len(ring.live)

    # ---- before the grant

    def _refusal(self, start: StartLeg) -> str:
        facts = self.facts
        wrong = refusal(start, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size)
        if wrong:
            return wrong
        tokens = len(start.token_ids)
        choices = len(start.choices)
        if not self._fits_alone(self.pool.kv, self._total_tokens(start), tokens):
            return (
                f"prompt and max_tokens come to {self._total_tokens(start)} tokens for each of {choices} choices; the "
                f"decode server has KV memory for {self.pool.longest_alone} tokens of one"
            )
        return ""

    def _fits_alone(self, kv: KvMemory, total_tokens: int, shared_tokens: int = 0) -> bool:
        """One choice can grow to its end, and be computed again up to there, when nothing else holds pages."""
        grown = kv.large_pages_to_decode(shared_tokens, total_tokens, 1)
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
        assert leg.link is not None
        self._queued.append(leg.tenant, leg, leg.num_tokens + self._outputs(leg))
        self._wishes[leg.link] = self._wishes.get(leg.link, 0) + 1
        leg.announced_s, leg.announced_unix_s = now_s, now_unix_s
        leg.timeline.append(TimelineEvent("queued", leg.received_unix_s, now_unix_s))

    def _outputs(self, leg: _Leg) -> int:
        """What one choice of it costs its tenant beside the prompt: tokens for which it may keep its slot, as far as that
        is looked at.
        """
        return max(1, min(leg.start.params.max_tokens, self.facts.lookahead_tokens))

    def _unqueue(self, leg: _Leg, cost: float | None = None) -> None:
        """If it waits for a grant. cost: of what it was granted, None if it was not."""
        if leg not in self._queued:
            return
        if cost is None:
            self._queued.remove(leg)
        else:
            self._queued.take(leg, cost)
        assert leg.link is not None
        self._wishes[leg.link] -= 1
        if not self._wishes[leg.link]:
            del self._wishes[leg.link]

    def _grant_waiting(self, now_s: float, now_unix_s: float) -> None:
        """Those that have begun go on, oldest first; then others begin, tenant by tenant. Nobody overtakes one who waits for
        pages or a slot. See the module.
        """
        self.rings.table.keep_wishes(set(self._wishes))
        if self.batch.short:
            return
        while self.batch.parked:
            oldest = self.batch.parked[0]
            if not self.batch.resume(oldest, now_s):
                if now_s - oldest.parked_s >= self.facts.preempt_after_s:
                    self.batch.give_way("age", TURN_TOKENS, to_arrival=oldest.arrival)
                return
        for each in self._queued:
            if not self.slots.free:
                return
            if isinstance(each, Sequence):
                if self._slots_for_more <= 0:
                    continue  # the last ones are for requests that have none
                if not self._begin(each, now_s):
                    return
            elif self._try_grant(each, now_s) is _Try.TOO_LITTLE:
                return

    @property
    def _slots_for_more(self) -> int:
        """Free slots that second and further choices of a request may take: were they all, whoever asks next would wait for the
        end of somebody else's 64 choices, which come to it all at once.
        """
        return self.slots.free - self.facts.max_slots // FIRST_CHOICES_SHARE

    def _begin(self, sequence: Sequence, now_s: float) -> bool:
        """A choice that has waited for its slot joins: it computes from the prefix cache on, like one that gave way."""
        leg = self._legs[sequence.key]
        shared = sequence.shared_tokens if any(s.pages is not None for s in leg.sequences) else 0
        steps = sequence.limit - len(sequence.tokens)
        new = Growing(steps, shared - len(sequence.tokens), sequence.limit - 1 - sequence.shared_tokens)
        if sequence.too_little_at == self.pool.kv.releases:
            return False
        if not self._enough([new], sequence.limit):
            sequence.too_little_at = self.pool.kv.releases
            return False
        if not self.batch.resume(sequence, now_s):
            return False
        self._queued.take(sequence)
        self._say_first(leg, sequence.choice)
        return True

    def _enough(self, new: list[Growing], limit: int) -> bool:
        """All that have begun, and these of up to `limit` tokens each, can go on together for as long as is looked ahead."""
        growing = [running_on(s) for s in self.batch.running.values()]
        limits = [s.limit for s in self.batch.running.values()]
        for leg in self._legs.values():
            if leg.slots and not leg.ended and leg.pages is not None:
                growing += self._granted(leg, len(leg.slots))
                limits += [self._total_tokens(leg.start) + 1] * len(leg.slots)
        if not growing and not self.pool.kv.allocator.used_large:
            return True
        growth = grown_to(self.facts, [*growing, *new], [*limits, *[limit] * len(new)])
        return self.pool.kv.allocator.used_large + growth <= self.facts.num_large

    def _granted(self, leg: _Leg, choices: int) -> list[Growing]:
        shared = leg.num_tokens if choices > 1 else leg.cached_tokens
        total, page_tokens = self._total_tokens(leg.start), self.facts.page_tokens
        return [after_grant(leg.num_tokens, total, self._spare(leg), shared, page_tokens)] * choices

    def _spare(self, leg: _Leg) -> int:
        return min(self.facts.spare_tokens, self._total_tokens(leg.start) - leg.num_tokens)

    def _receive(self, leg: _Leg, choices: int) -> SequencePages | None:
        """Pages for a grant of so many choices. One that is alone gets them, whatever it may come to need."""
        alone = not self.pool.kv.allocator.used_large

        def enough() -> bool:
            return alone or self._enough(self._granted(leg, choices), self._total_tokens(leg.start) + 1)

        clock = self.pipeline.clock
        return self.pool.kv.receive(leg.hashes, leg.num_tokens, self._spare(leg), choices, clock, enough)

    def _try_grant(self, leg: _Leg, now_s: float) -> _Try:
        assert leg.link is not None
        if self.rings.shut_out(leg.link):
            name = self._links[leg.link].hello.name
            reason = f"no ring for {name}: too much of the arena is quarantined for lost links"
            self._close(leg, Outcome.GIVEN_BACK, reason)
            return _Try.NOT_NOW
        if not self.rings.open(leg.link, now_s):
            return _Try.NOT_NOW  # another link's legs need not wait for this one's segments
        kv = self.pool.kv
        if not self.slots.free or leg.too_little_at == kv.releases:
            return _Try.TOO_LITTLE
        if not leg.root:
            leg.root, leg.hashes = self.pool.prefix(leg.start)
        # Tenants that wait leave each other their parts of the free slots; what is left over goes choice by choice.
        choices = max(1, min(len(leg.start.choices), self._slots_for_more // self._queued.num_tenants))
        pages = self._receive(leg, choices)
        if pages is None and choices > 1:
            choices = 1
            pages = self._receive(leg, choices)
        if pages is None:
            leg.too_little_at = kv.releases
            return _Try.TOO_LITTLE
        slots = self.slots.take(choices)
        assert slots is not None
        self.pool.taken(pages)
        leg.pages, leg.slots, leg.cached_tokens = pages, slots, pages.hit_tokens
        leg.age, self._grants = self._grants, self._grants + 1
        self._unqueue(leg, leg.num_tokens + choices * self._outputs(leg))
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
        choices = len(leg.slots) if len(leg.slots) < len(leg.start.choices) else 0
        self._out.append(ToLink(leg.link, m.Grant(leg.key, leg.session.wants, choices)))

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
        self._unqueue(leg)
        if leg.session.sent_all:
            # Prefill will not say so again, and an entry may be left whose notification was lost.
            leg.session.peer_quiet = True
        assert leg.link is not None
        leg.complete_unix_s = now_unix_s
        if ever_received:
            leg.timeline.append(TimelineEvent("transfer", leg.granted_unix_s, now_unix_s))
            self.tally.observe("transfer", now_s - leg.granted_s)
        self._out.append(ToLink(leg.link, m.Complete(leg.key)))
        going_on = self._going_on(leg)
        beginning = {token.choice for token in going_on[: len(leg.slots)]}
        for token in leg.session.first_tokens:
            if token.finish or token.choice in beginning:
                self._say_first(leg, token.choice)
        self._unbind(leg)
        if not going_on:
            self._end(leg, Outcome.DONE, "", now_unix_s)
        elif leg.session.wants_sent and not leg.session.all_unbound:
            leg.forks_unbound = True  # a piece that was asked for twice may land once more; then nothing may run yet
        else:
            self._fork(leg)

    def _going_on(self, leg: _Leg) -> list[m.FirstToken]:
        """Of the choices that go on after their first tokens."""
        return [t for t in leg.session.first_tokens if not t.finish and t.choice not in leg.dropped_choices]

    def _say_first(self, leg: _Leg, choice: int) -> None:
        if choice not in leg.told:
            leg.told.add(choice)
            token = next(token for token in leg.session.first_tokens if token.choice == choice)
            logprobs = (token.logprobs,) if token.logprobs is not None else ()
            self._tell(leg, LegTokens(leg.key, choice, leg.base, (token.token_id,), logprobs, token.finish))

    def _fork(self, leg: _Leg) -> None:
        """A sequence for every choice that goes on. As many as the grant has slots for begin now, and share the pages that are
        full of the trunk; the others wait for slots of their own.
        """
        assert leg.pages is not None
        leg.pages.landed(leg.num_tokens, leg.hashes, self.pipeline.clock)
        tokens = self._going_on(leg) or list(leg.session.first_tokens[:1])  # all dropped: one ends at once
        leg.sequences = [self._sequence(leg, number, token) for number, token in enumerate(tokens)]
        beginning = leg.sequences[: len(leg.slots)]
        forks, copies = leg.pages.fork(len(beginning))
        for sequence, pages, slot in zip(beginning, forks, leg.slots, strict=False):
            sequence.pages, sequence.slot = pages, slot
            sequence.shared_tokens = leg.num_tokens if len(beginning) > 1 else leg.cached_tokens
            self.batch.join(sequence)
            sequence.bound = not leg.session.all_unbound
        self.batch.copy_pages(beginning, copies)
        self.slots.give(leg.slots[len(beginning) :])
        leg.slots = ()
        for sequence in leg.sequences[len(beginning) :]:
            sequence.phase, sequence.bound = Phase.WAITING, False
            self._queued.append(leg.tenant, sequence, self._outputs(leg))
        for sequence in beginning:
            if sequence.choice in leg.dropped_choices:
                self._stop(sequence)
            else:
                self._say_first(leg, sequence.choice)

    def _sequence(self, leg: _Leg, number: int, token: m.FirstToken) -> Sequence:
        start = leg.start
        return Sequence(
            key=leg.key,
            choice=token.choice,
            arrival=leg.age * MAX_CHOICES + number,
            tokens=[*start.token_ids, token.token_id],
            num_prompt=start.num_prompt,
            limit=start.num_prompt + min(start.params.max_tokens, self.facts.max_model_len - start.num_prompt),
            params=start.params,
            root=leg.root,
            hashes=list(leg.hashes),
            pages=None,
            slot=-1,
            computed=leg.num_tokens,
            shared_tokens=leg.num_tokens // self.facts.page_tokens * self.facts.page_tokens,
        )

    def _stop(self, sequence: Sequence) -> None:
        self._queued.discard(sequence)
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
            self._stop(sequence)
        self._unqueue(leg)
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
