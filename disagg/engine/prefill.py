"""The prefill engine: computes prompts in chunks, samples the first token, and has KV written to decode servers.

Events in (a router's leg, a step's result, a message of a link, a report of a lane, the passing of time), instructions
out; no I/O, no clock, no torch. One leg goes through here so:

    StartLeg -> waiting -> admitted (pages, slots) -> chunks scheduled -> first token -> Complete from decode -> pages freed
                                     └ Announce        └ OfferPieces -> AssignEntries -> writes -> SentAll

A leg begins behind the longest prefix that is cached in every layer group; what it computes enters the cache chunk by
chunk, so that the next leg finds it while this one still runs. What decode lacks of a cached prefix is sent all the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.engine.facts import EngineFacts
from disagg.engine.finish import finish_of
from disagg.engine.instructions import DropLink, Instruction, Tally, ToLane, ToLink, ToRouter, ToWorkers
from disagg.engine.pool import EnginePool
from disagg.engine.refusal import refusal
from disagg.engine.steps import PlanPipeline, Slots
from disagg.memory.sequence import (
    PLANS_IN_FLIGHT,
    KvMemory,
    SequencePages,
    last_checkpoint,
    pages_for,
    window_start,
)
from disagg.messages import link as m
from disagg.messages.lane import (
    AddPeer,
    Beat,
    DropSends,
    LaneReport,
    PeerAdded,
    PeerRemoved,
    Piece,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
)
from disagg.messages.layout import GroupKind
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
from disagg.messages.mirror import MirrorEncoder
from disagg.messages.plan import Run, SampledToken, SamplerStart, SequenceStart, StepResult
from disagg.scheduler.admission import common_pages, should_wait
from disagg.scheduler.policies import Candidate, prefill_only
from disagg.staging.pieces import group_piece_bytes, most_group_pieces, split_group_piece
from disagg.staging.ring import ALIGNMENT_BYTES, RingEntry, RingWriterView, align
from disagg.staging.slices import HeadSlice, head_turns
from disagg.transfer.session import MAX_PIECES, NUM_STATES, Cut, Offer, SendSession, SendState, Write
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

MAX_TIMELINE = 256
MAX_ARENA_BYTES = 1 << 48  # no device has so much; a sum of such offsets stays within what the transfer agent takes
MAX_SEGMENTS = 1024  # of one ring
MAX_QUIET = 1024  # generations of lost links that are remembered


@dataclass(slots=True)
class _Leg:
    """One leg from StartLeg until its last resource is free."""

    router: int
    start: StartLeg
    session: SendSession
    received_s: float
    received_unix_s: float
    deadline_s: float
    link: int | None = None
    announced: bool = False
    seq_id: int | None = None
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of full pages
    pages: SequencePages | None = None
    hit_tokens: int = 0
    checkpoint: int = 0  # tokens after which its last checkpoint is taken; 0 for none
    checkpoint_told: bool = False
    large_pages: int = 0  # what it may come to hold
    too_little_at: int = -1  # KvMemory.releases when there were too few pages for it
    slots: tuple[int, ...] = ()
    scheduled: int = 0
    computed: int = 0
    last_plan: int = -1  # last plan that names its sequence
    first_tokens: m.FirstTokens | None = None
    ended: bool = False  # the router has its LegEnd
    dropping: set[int] = field(default_factory=set)  # ranks that have yet to say SendsDropped
    tell_drained: bool = False
    withdraw_reason: str = ""
    abort_plan: int | None = None
    started: bool = False
    timeline: list[TimelineEvent] = field(default_factory=list)

    @property
    def key(self) -> LegKey:
        return self.start.key

    @property
    def num_tokens(self) -> int:
        return len(self.start.token_ids)


@dataclass(slots=True)
class _Ring:
    """What this side knows of a ring: per decode rank a view of its watermark, and where its segments lie.

    heads: where the next entry may begin at the earliest, so that no two share a byte of one round.
    """

    segment_bytes: int
    offsets: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by decode rank
    views: dict[int, RingWriterView] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    pending: dict[int, deque[tuple[LegKey, Write]]] = field(default_factory=dict)  # not yet writable, by decode rank
    closing: bool = False

    def take(self, entry: m.Entry) -> None:
        """Decode has assigned an entry. Raises ProtocolError if it lies where no ring could put it."""
        view = self.views.get(entry.dst_rank)
        if view is None:
            raise ProtocolError(f"{entry} names a rank that is not there")
        head = self.heads[entry.dst_rank]
        if (
            entry.nbytes <= 0
            or entry.position % ALIGNMENT_BYTES
            or not head <= entry.position <= head + view.capacity_bytes
            or entry.position % self.segment_bytes + entry.nbytes > self.segment_bytes
        ):
            raise ProtocolError(f"{entry} does not follow position {head} in segments of {self.segment_bytes} bytes")
        self.heads[entry.dst_rank] = align(entry.position + entry.nbytes)

    def locate(self, rank: int, position: int) -> int:
        """Arena offset of a ring position."""
        offset = position % (len(self.offsets[rank]) * self.segment_bytes)
        segment, within = divmod(offset, self.segment_bytes)
        return self.offsets[rank][segment] + within


@dataclass(slots=True)
class _Link:
    """A link to one decode server's incarnation."""

    number: int
    hello: m.LinkHello
    turns: tuple[tuple[tuple[HeadSlice, ...], ...], ...]  # by layer group: head_turns
    rings: dict[int, _Ring] = field(default_factory=dict)  # by ring_no: none or one
    next_ring_no: int = 0
    next_entry_id: int = 0  # at least
    writing: dict[int, tuple[LegKey, int]] = field(default_factory=dict)  # entry_id -> (leg, ring_no)

    def widest(self, group: int) -> int:
        """Heads of the widest rank slice of a piece."""
        return max(part.heads for part in self.turns[group][0])

    def has_slice(self, group: int, entry: m.Entry) -> bool:
        """Some turn sends what this entry is for."""
        named = (entry.src_rank, entry.dst_rank, entry.src_head_start, entry.heads)
        return any(
            (part.src_rank, part.dst_rank, part.src_head_start, part.heads) == named
            for parts in self.turns[group]
            for part in parts
        )


@dataclass(slots=True)
class _LostLink:
    """A link that was lost, and of which something may be under way still."""

    hello: m.LinkHello
    ranks: set[int]  # that have yet to say PeerRemoved
    clean: bool = True  # no write has failed, so far as ranks have said


def _peer_of(hello: m.LinkHello) -> tuple[str, str]:
    """Who is at the other end."""
    return hello.name, hello.incarnation


class PrefillEngine:
    """See the module. Methods take `now_s` (monotonic) and, where the timeline wants it, `now_unix_s`."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.tally = Tally()
        self.pool = EnginePool(facts, self.tally, self._fits_alone, PLANS_IN_FLIGHT * facts.chunk_tokens)
        self.slots = Slots(facts.max_slots)
        self.pipeline = PlanPipeline(facts.tp)
        self.encoder = MirrorEncoder()
        self._legs: dict[LegKey, _Leg] = {}
        self._waiting: deque[_Leg] = deque()
        self._ending: dict[LegKey, _Leg] = {}  # ended, and not all free
        self._running: dict[int, _Leg] = {}  # by sequence: admitted, first token not yet sampled, not given up
        self._by_seq: dict[int, _Leg] = {}  # by sequence: everything that a plan in flight may name
        self._links: dict[int, _Link] = {}
        self._lost_links: dict[int, _LostLink] = {}
        self._quiet: dict[str, tuple[str, str]] = {}  # generations of lost links -> _peer_of; the oldest first
        self._next_seq_id = 0
        self._out: list[Instruction] = []

    # ---- what the server calls

    def start_leg(self, router: int, start: StartLeg, now_s: float, now_unix_s: float) -> list[Instruction]:
        """A router dispatches a leg. Answered at once by LegEnd if it can never run here, or if the queue is full."""
        if start.key in self._legs:
            return []
        leg = _Leg(
            router=router,
            start=start,
            session=SendSession(len(start.token_ids), self.facts.groups, self._first_held(len(start.token_ids))),
            received_s=now_s,
            received_unix_s=now_unix_s,
            deadline_s=now_s + start.deadline_s,
        )
        wrong = self._refusal(start)
        if wrong:
            self._end(leg, Outcome.REFUSED, wrong)
        elif len(self._waiting) >= self.facts.max_waiting:
            self._end(leg, Outcome.GIVEN_BACK, f"{len(self._waiting)} legs are waiting already")
        else:
            self._legs[start.key] = leg
            self._waiting.append(leg)
            for number, link in self._links.items():
                if (link.hello.name, link.hello.incarnation) == (start.peer.name, start.peer.incarnation):
                    leg.link = number
        return self._take()

    def abort_leg(self, abort: AbortLeg) -> list[Instruction]:
        """A router wants nothing more of this leg (a single choice is decode's business: prefill samples all at once)."""
        leg = self._legs.get(abort.key)
        if leg is not None and abort.choice is None:
            self.tally.aborts += 1
            self._close(leg, Outcome.ABORTED, "aborted by the router")
        return self._take()

    def end_router(self, router: int, reason: str) -> list[Instruction]:
        """A router's lease is over: abort its legs."""
        for leg in [leg for leg in self._legs.values() if leg.router == router]:
            self._close(leg, Outcome.ABORTED, reason)
        return self._take()

    def end_all(self, outcome: Outcome, reason: str) -> list[Instruction]:
        """Drain is over, or the workers are lost: every leg ends."""
        for leg in list(self._legs.values()):
            self._close(leg, outcome, reason)
        return self._take()

    def schedule(self, now_s: float, now_unix_s: float) -> list[Instruction]:
        """Admit what fits and send plans until two are in flight or nothing is left to do."""
        self._admit(now_s)
        while self.pipeline.has_room and self._schedule_one(now_s, now_unix_s):
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
        sampled: dict[int, list[SampledToken]] = {}
        for token in report.sampled:
            sampled.setdefault(token.seq_id, []).append(token)
        for run in plan.runs:
            self.tally.prefill_tokens += run.num_tokens
            leg = self._by_seq[run.seq_id]
            self._computed(leg, run, sampled.get(run.seq_id, []), plan.plan_no, report, now_s)
        self._reap_all()
        return self._take()

    def link_up(self, number: int, hello: m.LinkHello) -> list[Instruction]:
        """A decode server has dialled. Its ranks' agents are introduced to ours, and waiting legs find their link.

        Raises SliceError if the two TP sizes cannot exchange heads.
        """
        turns = tuple(head_turns(self.facts.tp, hello.tp, group.kv_heads) for group in self.facts.groups)
        self._links[number] = _Link(number, hello, turns)
        for rank in hello.ranks:
            self._out.append(
                ToLane(
                    None,
                    AddPeer(
                        link=number,
                        peer_rank=rank.rank,
                        metadata=rank.metadata,
                        arena_address=rank.arena_address,
                        arena_device=rank.arena_device,
                        arena_bytes=rank.arena_bytes,
                    ),
                )
            )
        self._tell_quiet(number, tuple(g for g, peer in self._quiet.items() if peer == _peer_of(hello)))
        for leg in list(self._legs.values()):
            peer = leg.start.peer
            if leg.link is None and peer.name == hello.name:
                if peer.incarnation != hello.incarnation:
                    self._close(leg, Outcome.PEER_LOST, f"{peer.name} has restarted")
                    continue
                leg.link = number
                self._announce(leg)
        return self._take()

    def link_down(self, number: int, reason: str) -> list[Instruction]:
        """The link is lost for good. Its legs end; their pages wait until no write is under way."""
        link = self._links.pop(number, None)
        if link is None:
            return []
        self._lost_links[number] = _LostLink(link.hello, set(range(self.facts.tp)))
        self._out.append(ToLane(None, RemovePeer(number)))
        for leg in [leg for leg in self._legs.values() if leg.link == number]:
            self._close(leg, Outcome.PEER_LOST, reason)
        return self._take()

    def link_message(self, number: int, message: m.LinkMessage, now_s: float) -> list[Instruction]:
        """Raises ProtocolError for what no decode engine may say; the server then drops the link."""
        link = self._links.get(number)
        if link is None:
            return []
        match message:
            case m.OpenRing():
                self._open_ring(link, message)
            case m.CloseRing():
                ring = self._ring(link, message.ring_no)
                ring.closing = True
                self._close_ring_if_quiet(link, message.ring_no)
            case m.Grant():
                self._grant(link, message)
            case m.AssignEntries():
                self._assign(link, message)
            case m.Watermarks():
                self._watermarks(link, message)
            case m.AskWritten():
                self._say_written(link, message)
            case m.WantPieces():
                leg = self._leg_of(link, message.key)
                if leg is not None:
                    self._offer(leg, leg.session.want(message.pieces, self._cut(link)))
            case m.Complete():
                self._complete(link, message.key)
            case m.Revoke():
                self._revoked(link, message)
            case _:
                raise ProtocolError(f"a decode server may not send {type(message).__name__}")
        self._reap_all()
        return self._take()

    def lane_report(self, rank: int, message: LaneReport, now_s: float) -> list[Instruction]:
        match message:
            case PieceSent():
                self._piece_sent(message)
            case PieceFailed():
                self.tally.transfer_failures["write failed"] += 1
                if message.link in self._links:
                    self._out.append(DropLink(message.link, message.reason))
            case SendsDropped():
                leg = self._legs.get(message.key)
                if leg is not None:
                    leg.dropping.discard(rank)
                    if not leg.dropping:
                        self._dropped(leg)
            case PeerRemoved():
                lost = self._lost_links.get(message.link)
                if lost is not None:
                    lost.ranks.discard(rank)
                    lost.clean &= message.clean
                    if not lost.ranks:
                        self._quiet_at_last(message.link)
            case PeerAdded():
                if message.error and message.link in self._links:
                    self._out.append(DropLink(message.link, message.error))
            case Beat():
                pass
            case _:
                raise ProtocolError(f"a prefill worker may not report {type(message).__name__}")
        self._reap_all()
        return self._take()

    def tick(self, now_s: float) -> list[Instruction]:
        """Backstop deadlines: the router's own come first."""
        for leg in [leg for leg in self._legs.values() if not leg.ended and now_s > leg.deadline_s + 5.0]:
            self._close(leg, Outcome.ABORTED, "the request's deadline passed")
        self._reap_all()
        return self._take()

    def load(self, state: ServerState) -> LoadReport:
        return self.pool.load(state, running=len(self._running), waiting=len(self._waiting))

    @property
    def idle(self) -> bool:
        return not self._legs

    @property
    def max_tokens_in_pool(self) -> int:
        """Tokens that a prompt may have when it is alone."""
        return self.pool.longest_alone

    def kv_snapshot(self) -> KvEvents:
        """Everything that is in the prefix cache."""
        return self.pool.snapshot()

    def arena_bytes(self) -> tuple[int, int, int]:
        """(free, leased, quarantined): a prefill server has no arena."""
        return 0, 0, 0

    def dump(self) -> dict[str, object]:
        """For a person: every leg, link and plan in flight."""
        return {
            "legs": {
                str(leg.key): {
                    "session": leg.session.state.value,
                    "tokens": leg.num_tokens,
                    "scheduled": leg.scheduled,
                    "computed": leg.computed,
                    "cached tokens": leg.hit_tokens,
                    "link": leg.link,
                    "announced": leg.announced,
                    "ended": leg.ended,
                    "ranks dropping": sorted(leg.dropping),
                }
                for leg in self._legs.values()
            },
            "waiting": [str(leg.key) for leg in self._waiting],
            "links": {
                link.number: {
                    "peer": link.hello.name,
                    "incarnation": link.hello.incarnation,
                    "writing": len(link.writing),
                    "rings": {
                        no: {"watermarks": {r: v.watermark for r, v in ring.views.items()}, "closing": ring.closing}
                        for no, ring in link.rings.items()
                    },
                }
                for link in self._links.values()
            },
            "links being removed": {number: sorted(lost.ranks) for number, lost in self._lost_links.items()},
            "plans in flight": [plan.plan_no for plan in self.pipeline.in_flight],
            "memory": self.pool.dump(),
        }

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self.pool.kv.check_integrity([leg.pages for leg in self._legs.values() if leg.pages is not None])
        assert sum(len(leg.slots) for leg in self._legs.values()) == self.slots.total - self.slots.free
        assert all(leg.key in self._legs for leg in self._waiting)
        assert all(leg.ended for leg in self._ending.values())

    # ---- admission and steps

    def _refusal(self, start: StartLeg) -> str:
        facts = self.facts
        wrong = refusal(
            start, max_model_len=facts.max_model_len, vocab_size=facts.vocab_size, max_slots=facts.max_slots
        )
        if wrong:
            return wrong
        tokens = len(start.token_ids)
        if not self._fits_alone(self.pool.kv, tokens):
            return f"{tokens} prompt tokens do not fit the prefill server's KV pool of {self.max_tokens_in_pool} tokens"
        return ""

    def _fits_alone(self, kv: KvMemory, num_tokens: int) -> bool:
        return kv.large_pages_to_prefill(num_tokens, self.facts.chunk_tokens) <= self.facts.num_large

    def _first_held(self, num_tokens: int) -> tuple[int, ...]:
        """Per layer group, the first token that pages still hold when so many have been computed."""
        return tuple(
            window_start(num_tokens, group.window - 1, self.facts.page_tokens) if group.kind is GroupKind.WINDOW else 0
            for group in self.facts.groups
        )

    def _admit(self, now_s: float) -> None:
        """Oldest first, all or nothing; finished KV that no decode server has granted pages for is capped."""
        ungranted = sum(
            leg.large_pages
            for leg in self._legs.values()
            if leg.session.state is SendState.WAITING and leg.pages is not None and leg.scheduled == leg.num_tokens
        )
        cap = self.facts.ungranted_share * self.facts.num_large
        while self._waiting and ungranted <= cap:
            leg = self._waiting[0]
            if self.slots.free < len(leg.start.choices) or not self._take_pages(leg):
                return
            slots = self.slots.take(len(leg.start.choices))
            assert slots is not None
            assert leg.pages is not None
            self._waiting.popleft()
            leg.slots = slots
            leg.seq_id = self._next_seq_id
            self._next_seq_id += 1
            leg.scheduled = leg.computed = leg.hit_tokens
            self._running[leg.seq_id] = self._by_seq[leg.seq_id] = leg
            self.encoder.start(
                SequenceStart(
                    seq_id=leg.seq_id,
                    token_ids=leg.start.token_ids,
                    num_prompt=leg.start.num_prompt,
                    computed=leg.hit_tokens,
                    tables=leg.pages.tables(),
                    params=leg.start.params,
                    samplers=tuple(map(SamplerStart, slots, leg.start.choices)),
                )
            )
            self.tally.observe("queue", now_s - leg.received_s)

    def _awaits_prefix(self, leg: _Leg) -> bool:
        """Another prompt that is being computed begins with much of what this one would have to compute."""
        for other in self._running.values():
            common = common_pages(other.hashes, leg.hashes) * self.facts.page_tokens
            last = other.num_tokens if self.pool.kv.keeps_back else common
            if should_wait(common, other.hit_tokens, other.computed, last, self.facts.chunk_tokens):
                return True
        return False

    def _take_pages(self, leg: _Leg) -> bool:
        """The cached prefix, and pages for all that has to be computed after it."""
        kv = self.pool.kv
        if leg.too_little_at == kv.releases:
            return False
        if not leg.root:
            leg.root, leg.hashes = self.pool.prefix(leg.start)
        if self._awaits_prefix(leg):
            return False
        tokens = leg.num_tokens
        pages = kv.open(leg.hashes, tokens, tokens, self.facts.chunk_tokens, self.pipeline.clock)
        if pages is None:
            leg.too_little_at = kv.releases
            return False
        pages.hold_for_sending(tokens)
        self.pool.taken(pages)
        leg.pages, leg.hit_tokens = pages, pages.computed
        leg.large_pages = kv.large_pages_to_prefill(leg.num_tokens, self.facts.chunk_tokens)
        if self.facts.checkpoint_tokens:
            leg.checkpoint = last_checkpoint(leg.num_tokens, self.facts.checkpoint_tokens)
        return True

    def _schedule_one(self, now_s: float, now_unix_s: float) -> bool:
        longest_run = self.facts.longest_run
        candidates = tuple(
            Candidate(seq_id, leg.num_tokens - leg.scheduled, longest_run(leg.scheduled))
            for seq_id, leg in self._running.items()
            if leg.scheduled < leg.num_tokens
        )
        runs = []
        for chunk in prefill_only(candidates, self.facts.chunk_tokens).runs:
            leg = self._running[chunk.seq_id]
            assert leg.pages is not None
            new_pages = leg.pages.grow(leg.scheduled, leg.scheduled + chunk.num_tokens)
            assert new_pages is not None, "pages for the whole prompt were reserved"
            runs.append(Run(chunk.seq_id, chunk.num_tokens, chunk.sample, new_pages))
        if not runs and not self.encoder.has_housekeeping:
            return False
        plan = self.encoder.encode(runs)
        self.pipeline.sent(plan, now_s)
        self._out.append(ToWorkers(plan))
        for run in runs:
            self._scheduled(self._running[run.seq_id], run.num_tokens, plan.plan_no, now_unix_s)
        return True

    def _scheduled(self, leg: _Leg, num_tokens: int, plan_no: int, now_unix_s: float) -> None:
        """A chunk of it is in a plan: what will be final with it can be offered."""
        assert leg.pages is not None
        link = self._links.get(leg.link) if leg.link is not None else None
        cut = self._cut(link) if link is not None else _uncut
        if not leg.started:
            leg.started = True
            leg.timeline.append(TimelineEvent("queued", leg.received_unix_s, now_unix_s))
            self._announce(leg)
            if leg.hit_tokens:
                self._offer(leg, leg.session.hit(leg.hit_tokens, cut))
        if leg.pages.has_checkpoint and not leg.checkpoint_told:
            leg.checkpoint_told = True
            self._offer(leg, leg.session.checkpoint(leg.last_plan, cut))
        start, leg.scheduled = leg.scheduled, leg.scheduled + num_tokens
        leg.last_plan = plan_no
        self._offer(leg, leg.session.chunk(start, leg.scheduled, plan_no, cut))

    def _computed(
        self, leg: _Leg, run: Run, sampled: list[SampledToken], plan_no: int, report: StepResult, now_s: float
    ) -> None:
        start, leg.computed = leg.computed, leg.computed + run.num_tokens
        assert leg.pages is not None
        leg.pages.advance(leg.computed, leg.hashes, self.pipeline.clock)
        if len(leg.timeline) < MAX_TIMELINE:
            detail = f"tokens {start}-{leg.computed}"
            leg.timeline.append(TimelineEvent("chunk", report.started_unix_s, report.ended_unix_s, detail))
        if leg.ended:
            if leg.abort_plan is not None:
                self.tally.max_steps_after_abort = max(self.tally.max_steps_after_abort, plan_no - leg.abort_plan)
            return
        if not run.sample:
            return
        assert leg.seq_id is not None
        assert len(sampled) == len(leg.start.choices)
        leg.pages.end_prefill(leg.hashes, self.pipeline.clock, goes_on=False)
        leg.pages.seal(leg.num_tokens, leg.hashes)
        del self._running[leg.seq_id]
        self.encoder.end(leg.seq_id)
        self.slots.give(leg.slots)  # the next plan ends the sequence before it starts another in these
        leg.slots = ()
        index = leg.num_tokens - leg.start.num_prompt
        tokens_left = self.facts.max_model_len - leg.num_tokens - 1
        first = []
        for token in sampled:
            finish = finish_of(token.token_id, index, leg.start.params, self.facts.eos_token_ids, tokens_left)
            first.append(m.FirstToken(token.choice, token.token_id, token.logprobs, finish))
            logprobs = (token.logprobs,) if token.logprobs is not None else ()
            self._tell(leg, LegTokens(leg.key, token.choice, index, (token.token_id,), logprobs, finish))
        leg.first_tokens = m.FirstTokens(leg.key, tuple(first))
        leg.timeline.append(TimelineEvent("first_token", report.ended_unix_s, report.ended_unix_s))
        self.tally.observe("ttft", now_s - leg.received_s)
        if leg.link is not None and leg.announced:
            self._out.append(ToLink(leg.link, leg.first_tokens))
        if leg.session.finish_if_sent():
            self._sent_all(leg)

    # ---- the transfer

    def _cut(self, link: _Link) -> Cut:
        """Cuts so that the widest rank slice of a piece fits a gather buffer here and a segment there."""
        entry_bytes = min([self.facts.gather_bytes, *(ring.segment_bytes for ring in link.rings.values())])

        def split(whole: Piece) -> tuple[Piece, ...]:
            group, widest = self.facts.groups[whole.group], link.widest(whole.group)
            return split_group_piece(whole, widest, group, entry_bytes, self.facts.page_tokens)

        return split

    def _announce(self, leg: _Leg) -> None:
        if leg.link is None or leg.announced or not leg.started or leg.ended:
            return
        leg.announced = True
        self._out.append(ToLink(leg.link, m.Announce(leg.key, leg.num_tokens)))
        if leg.first_tokens is not None:
            self._out.append(ToLink(leg.link, leg.first_tokens))

    def _offer(self, leg: _Leg, offer: Offer | None) -> None:
        if offer is not None and leg.link is not None:
            self._out.append(ToLink(leg.link, m.OfferPieces(leg.key, offer.first_piece_no, offer.pieces)))

    def _leg_of(self, link: _Link, key: LegKey) -> _Leg | None:
        leg = self._legs.get(key)
        return leg if leg is not None and leg.link == link.number else None

    def _ring(self, link: _Link, ring_no: int) -> _Ring:
        ring = link.rings.get(ring_no)
        if ring is None:
            raise ProtocolError(f"ring {ring_no} is not open on this link")
        return ring

    def _open_ring(self, link: _Link, message: m.OpenRing) -> None:
        rank, segment_bytes = message.dst_rank, message.segment_bytes
        segments = message.segment_offsets
        if not 0 <= rank < link.hello.tp or not 0 < len(segments) <= MAX_SEGMENTS or segment_bytes % ALIGNMENT_BYTES:
            raise ProtocolError(f"a ring of {len(segments)} segments of {segment_bytes} bytes on rank {rank} cannot be")
        if not all(0 <= offset <= MAX_ARENA_BYTES - segment_bytes for offset in segments):
            raise ProtocolError(f"a segment of {segment_bytes} bytes ends beyond what an arena may have")
        ring = link.rings.get(message.ring_no)
        if ring is None:
            if link.rings or message.ring_no < link.next_ring_no:
                raise ProtocolError(f"ring {message.ring_no} is opened while another one is open, or for a second time")
            self._check_segments(link, segment_bytes)
            ring = link.rings[message.ring_no] = _Ring(segment_bytes)
            link.next_ring_no = message.ring_no + 1
        elif rank in ring.views or segment_bytes != ring.segment_bytes or ring.closing:
            raise ProtocolError(f"ring {message.ring_no} is opened again on rank {rank}, or with other segments")
        ring.offsets[rank] = segments
        ring.views[rank] = RingWriterView(segment_bytes * len(segments))
        ring.heads[rank] = 0
        ring.pending[rank] = deque()

    def _check_segments(self, link: _Link, segment_bytes: int) -> None:
        """Raises ProtocolError if the longest prompt could not be cut into pieces that fit, or into too many."""
        tokens, entry_bytes = self.pool.longest_alone, min(segment_bytes, self.facts.gather_bytes)
        chunk = min(self.facts.chunk_tokens, tokens)

        def most(group: int, positions: int) -> int:
            layers = self.facts.groups[group]
            return most_group_pieces(positions, link.widest(group), layers, entry_bytes, self.facts.page_tokens)

        try:
            # What the cache holds is cut as a whole, what is computed chunk by chunk.
            pieces = sum(
                most(g, NUM_STATES) if group.is_state else most(g, tokens) + -(-tokens // chunk) * most(g, chunk)
                for g, group in enumerate(self.facts.groups)
            )
        except ValueError as error:
            raise ProtocolError(f"segments of {segment_bytes} bytes: {error}") from error
        if pieces > MAX_PIECES:
            raise ProtocolError(
                f"segments of {segment_bytes} bytes cut {tokens} tokens into {pieces} pieces; at most {MAX_PIECES} may be"
            )

    def _grant(self, link: _Link, message: m.Grant) -> None:
        leg = self._leg_of(link, message.key)
        if leg is None:
            # It ended here while the grant was on its way: nothing of it is under way.
            self._out.append(ToLink(link.number, m.Drained(message.key)))
            return
        if not leg.announced:
            raise ProtocolError(f"{message.key} was granted before it was announced")
        slices = tuple(len(turns[0]) for turns in link.turns)
        self._offer(leg, leg.session.grant(message.wants, slices, self._cut(link)))
        if leg.first_tokens is not None and leg.session.finish_if_sent():
            self._sent_all(leg)

    def _assign(self, link: _Link, message: m.AssignEntries) -> None:
        ring = self._ring(link, message.ring_no)
        for entry in message.entries:
            if entry.entry_id < link.next_entry_id:
                raise ProtocolError(f"{entry} was assigned before, or after a later one")
            link.next_entry_id = entry.entry_id + 1
            ring.take(entry)
        leg = self._leg_of(link, message.key)
        if leg is None:
            return  # given up; decode frees the entries when it hears Drained or Withdraw
        for write in leg.session.assign(message.entries):
            entry, piece = write.entry, write.piece
            if not link.has_slice(piece.group, entry):
                raise ProtocolError(f"{entry} is no rank slice of {piece}")
            if entry.nbytes != group_piece_bytes(piece, entry.heads, self.facts.groups[piece.group]):
                raise ProtocolError(f"{entry} is not as large as {piece}")
            ring.pending[entry.dst_rank].append((leg.key, write))
        self._flush(link, message.ring_no)

    def _watermarks(self, link: _Link, message: m.Watermarks) -> None:
        ring = link.rings.get(message.ring_no)
        if ring is None:
            return
        if len(message.positions) != link.hello.tp:
            raise ProtocolError(f"{len(message.positions)} watermarks came of {link.hello.tp} ranks")
        for rank, position in enumerate(message.positions):
            if rank in ring.views:
                if position > ring.heads[rank]:
                    raise ProtocolError(f"watermark {position} of rank {rank} is beyond entry {ring.heads[rank]}")
                ring.views[rank].update(position)
        self._flush(link, message.ring_no)

    def _say_written(self, link: _Link, message: m.AskWritten) -> None:
        ring = link.rings.get(message.ring_no)
        if ring is None:
            return
        to_come = {write.entry.entry_id for pending in ring.pending.values() for _, write in pending} | set(
            link.writing
        )
        written = tuple(e for e in message.entry_ids if e < link.next_entry_id and e not in to_come)
        if written:
            self._out.append(ToLink(link.number, m.Written(message.ring_no, written)))

    def _flush(self, link: _Link, ring_no: int) -> None:
        """Hand on the writes whose ring bytes are free, in order."""
        ring = link.rings[ring_no]
        for rank, pending in ring.pending.items():
            view = ring.views[rank]
            while pending:
                key, write = pending[0]
                entry = write.entry
                if not view.may_write(RingEntry(entry.position, entry.nbytes)):
                    break
                pending.popleft()
                leg = self._legs.get(key)
                if leg is None or leg.session.state is not SendState.SENDING:
                    continue
                assert leg.pages is not None
                rows = self.facts.groups[write.piece.group].rows_per_page(self.facts.page_tokens)
                first, stop = write.piece.token_start // rows, pages_for(write.piece.token_stop, rows)
                link.writing[entry.entry_id] = (key, ring_no)
                self._out.append(
                    ToLane(
                        entry.src_rank,
                        SendPiece(
                            link=link.number,
                            entry_id=entry.entry_id,
                            key=key,
                            piece=write.piece,
                            pages=leg.pages.pages(write.piece.group, first, stop),
                            src_incarnation=self.facts.incarnation,
                            dst_incarnation=link.hello.incarnation,
                            src_rank=entry.src_rank,
                            dst_rank=rank,
                            src_head_start=entry.src_head_start,
                            heads=entry.heads,
                            arena_offset=ring.locate(rank, entry.position),
                            nbytes=entry.nbytes,
                            after_plan=write.after_plan,
                        ),
                    )
                )

    def _piece_sent(self, message: PieceSent) -> None:
        self.tally.pieces_sent += 1
        self.tally.payload_bytes_sent += message.nbytes
        link = self._links.get(message.link)
        if link is None:
            return
        _, ring_no = link.writing.pop(message.entry_id)
        leg = self._legs.get(message.key)
        if leg is not None and leg.session.sent(message.entry_id):
            self._sent_all(leg)
        self._close_ring_if_quiet(link, ring_no)

    def _sent_all(self, leg: _Leg) -> None:
        assert leg.link is not None
        self._out.append(ToLink(leg.link, m.SentAll(leg.key, leg.session.num_pieces)))

    def _close_ring_if_quiet(self, link: _Link, ring_no: int) -> None:
        ring = link.rings.get(ring_no)
        if ring is None or not ring.closing or any(ring.pending.values()):
            return
        if any(number == ring_no for _, number in link.writing.values()):
            return
        del link.rings[ring_no]
        self._out.append(ToLink(link.number, m.RingClosed(ring_no)))

    def _complete(self, link: _Link, key: LegKey) -> None:
        leg = self._leg_of(link, key)
        if leg is None:
            return
        if not leg.ended and leg.first_tokens is None:
            raise ProtocolError(f"decode says that {key} is complete before its first token")
        if leg.session.complete() is SendState.DROPPING and not leg.dropping:
            leg.tell_drained = True
            self._drop_sends(leg)
        self._end(leg, Outcome.DONE, "")

    def _revoked(self, link: _Link, message: m.Revoke) -> None:
        leg = self._leg_of(link, message.key)
        if leg is None:
            self._out.append(ToLink(link.number, m.Drained(message.key)))
            return
        leg.tell_drained = True
        if leg.session.state is SendState.CLOSED:
            self._out.append(ToLink(link.number, m.Drained(message.key)))
        self._close(leg, Outcome.PEER_LOST, f"decode gave it up: {message.reason}")

    def _drop_sends(self, leg: _Leg) -> None:
        """Ask every rank to drop this leg's writes, and forget those that were not handed on."""
        assert leg.link is not None
        leg.dropping = set(range(self.facts.tp))
        self._out.append(ToLane(None, DropSends(leg.link, leg.key)))
        link = self._links.get(leg.link)
        if link is not None:
            for ring in link.rings.values():
                for rank, pending in ring.pending.items():
                    ring.pending[rank] = deque(item for item in pending if item[0] != leg.key)

    def _dropped(self, leg: _Leg) -> None:
        """No write of this leg is under way any more."""
        leg.session.dropped()
        link = self._links.get(leg.link) if leg.link is not None else None
        if link is None:
            return
        rings = {ring_no for key, ring_no in link.writing.values() if key == leg.key}
        link.writing = {entry: item for entry, item in link.writing.items() if item[0] != leg.key}
        if leg.tell_drained:
            self._out.append(ToLink(link.number, m.Drained(leg.key)))
        elif leg.announced:
            self._out.append(ToLink(link.number, m.Withdraw(leg.key, leg.withdraw_reason)))
        for ring_no in rings | set(link.rings):
            self._close_ring_if_quiet(link, ring_no)

    # ---- links that were lost

    def _quiet_at_last(self, number: int) -> None:
        """No rank has anything of a lost link under way any more. Its peer may use that memory again, unless a write failed:

        of such a one some bytes may be on their way (in a socket's buffers, say) for longer than anybody can tell.
        """
        lost = self._lost_links.pop(number)
        hello = lost.hello
        for leg in [leg for leg in self._legs.values() if leg.link == number]:
            leg.session.dropped()
        if not lost.clean:
            return
        self._quiet[hello.generation] = _peer_of(hello)
        if len(self._quiet) > MAX_QUIET:
            del self._quiet[next(iter(self._quiet))]
        for link in self._links.values():
            if _peer_of(link.hello) == _peer_of(hello):
                self._tell_quiet(link.number, (hello.generation,))

    def _tell_quiet(self, number: int, generations: tuple[str, ...]) -> None:
        if generations:
            self._out.append(ToLink(number, m.QuietLinks(generations)))

    # ---- the end of a leg

    def _close(self, leg: _Leg, outcome: Outcome, reason: str) -> None:
        """End a leg early. Its resources follow as soon as no plan and no write names them."""
        if leg.seq_id is None:
            if leg in self._waiting:
                self._waiting.remove(leg)
        elif self._running.pop(leg.seq_id, None) is not None:
            self.encoder.end(leg.seq_id)
        if leg.abort_plan is None:
            leg.abort_plan = self.pipeline.reported
        leg.withdraw_reason = reason
        if leg.session.give_up():
            if leg.link in self._links:
                self._drop_sends(leg)
            elif leg.link not in self._lost_links:
                leg.session.dropped()
        elif (
            leg.session.state is SendState.DROPPING and leg.link not in self._links and leg.link not in self._lost_links
        ):
            leg.session.dropped()
        self._end(leg, outcome, reason)
        self._reap(leg)

    def _end(self, leg: _Leg, outcome: Outcome, reason: str) -> None:
        if not leg.ended:
            leg.ended = True
            self.tally.legs[outcome.value] += 1
            if leg.key in self._legs:
                self._ending[leg.key] = leg
            self._tell(leg, LegEnd(leg.key, outcome, reason, tuple(leg.timeline), leg.hit_tokens))

    def _reap_all(self) -> None:
        for leg in list(self._ending.values()):
            self._reap(leg)

    def _reap(self, leg: _Leg) -> None:
        """Free what a leg holds once its last plan has been reported and nothing of it is being written."""
        if not leg.ended or leg.session.state is not SendState.CLOSED or leg.last_plan > self.pipeline.reported:
            return
        if self._legs.pop(leg.key, None) is None:
            return
        del self._ending[leg.key]
        if leg.seq_id is not None:
            del self._by_seq[leg.seq_id]
        if leg.pages is not None:
            leg.pages.close(self.pipeline.clock)
        self.slots.give(leg.slots)

    def _tell(self, leg: _Leg, message: LegTokens | LegEnd) -> None:
        self._out.append(ToRouter(leg.router, message))

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out + self.pool.take_events()


def _uncut(whole: Piece) -> tuple[Piece, ...]:
    """Before there is a link nothing is offered, so nothing needs to fit."""
    return (whole,)
