"""The sequences that decode: which of them run, which gave way for want of pages, and what their plans named.

    join ──> running ──────── no page left ────────> leaving ──> parked
              │  ^ ^                                               │
              │  │ └──── pages again: computed from the prefix ────┘
              │  │       cache on, and a slot        waiting (for its first slot)
              │  └──────────────────────────────────────┘
              └──── stop ──> leaving ──> gone

Only want of pages makes a sequence give way, never want of slots. Who has been parked longest by *age*, the order in which
answers began, goes on first, and if it waits for long, younger ones give way to it.

A sequence that leaves keeps its pages and its slot until the last plan that names it has reported (and, just after a
transfer, until no rank has them bound). What a parked one has computed is not lost while its pages stay in the prefix
cache; the rest is computed again, in chunks beside the others' steps. Every token it has is known by then, so it says
none twice, and noise depends on (seed, choice, output index) alone, so it says what it would have said.

Knows sequences, pages, slots and plans; nothing of legs, links or routers.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, field

from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Tally
from disagg.engine.steps import PlanPipeline, Slots
from disagg.memory.sequence import KvMemory, SequencePages
from disagg.messages.mirror import MirrorEncoder
from disagg.messages.plan import PageCopy, Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.scheduler.policies import PREEMPTION, Candidate, Running, decode_only
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams


class Phase(enum.Enum):
    RUNNING = "running"
    GIVING_WAY = "giving way"  # no new plan names it; one in flight may
    PARKED = "parked"  # holds nothing
    WAITING = "waiting"  # has not begun, and holds nothing: other choices of its leg have
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice that decodes. tokens: prompt and outputs, as far as they are known here; limit: most it may have.
    arrival: its age, by the order in which answers began, and then by choice.

    position: tokens whose computation has been scheduled; promised: tokens that plans so far will have made known.
    """

    key: LegKey
    choice: int
    arrival: int
    tokens: list[int]
    num_prompt: int
    limit: int
    params: SamplingParams
    root: bytes
    hashes: list[bytes]
    pages: SequencePages | None
    slot: int
    seq_id: int = -1
    phase: Phase = Phase.RUNNING
    position: int = 0
    promised: int = 0
    computed: int = 0
    last_plan: int = -1
    bound: bool = True  # a rank may still scatter into its pages
    recomputes: bool = False  # its pages were reserved for chunks
    joined_tokens: int = 0  # how many it had when it last joined
    shared_tokens: int = 0  # of its first tokens, whose pages others may hold too
    parked_s: float = 0.0
    too_little_at: int = -1  # KvMemory.releases when there were too few pages to go on

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def remaining(self) -> int:
        """Tokens that can be scheduled: one while it decodes, more while it recomputes, none at its limit."""
        return self.promised - self.position if self.promised < self.limit else 0


@dataclass(slots=True)
class DecodeBatch:
    """See the module. `plan` and `reported` for each step; `settle` whenever pages may have come free."""

    facts: EngineFacts
    memory: KvMemory
    tally: Tally
    slots: Slots = field(init=False)
    pipeline: PlanPipeline = field(init=False)
    encoder: MirrorEncoder = field(init=False)
    running: dict[int, Sequence] = field(default_factory=dict)  # by seq_id, oldest first
    parked: list[Sequence] = field(default_factory=list)  # oldest first
    _named: dict[int, Sequence] = field(default_factory=dict)  # by seq_id: all that a plan in flight may name
    _leaving: list[Sequence] = field(default_factory=list)
    short: bool = False  # a running sequence lacked a page in the last plan: what comes free is for it first
    _next_seq_id: int = 0

    def __post_init__(self) -> None:
        self.slots = Slots(self.facts.max_slots)
        self.pipeline = PlanPipeline(self.facts.tp)
        self.encoder = MirrorEncoder()

    # ---- who is in the batch

    def join(self, sequence: Sequence) -> None:
        """It runs from the next plan on; its pages hold `sequence.computed` tokens."""
        assert sequence.pages is not None
        sequence.seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        sequence.phase = Phase.RUNNING
        sequence.position = sequence.computed
        sequence.promised = sequence.joined_tokens = len(sequence.tokens)
        self.running[sequence.seq_id] = self._named[sequence.seq_id] = sequence
        self.encoder.start(
            SequenceStart(
                seq_id=sequence.seq_id,
                token_ids=tuple(sequence.tokens),
                num_prompt=sequence.num_prompt,
                computed=sequence.computed,
                tables=sequence.pages.tables(),
                params=sequence.params,
                samplers=(SamplerStart(sequence.slot, sequence.choice),),
            )
        )

    def copy_pages(self, sequences: list[Sequence], copies: list[PageCopy]) -> None:
        """Before anything else runs; the pages of these sequences are named by the plan that copies."""
        if copies:
            self.encoder.copy_pages(copies)
            for sequence in sequences:
                sequence.last_plan = self.encoder.next_plan_no

    def stop(self, sequence: Sequence) -> None:
        """It needs nothing more; idempotent."""
        if sequence.phase is Phase.RUNNING:
            self._leave(sequence)
        elif sequence.phase is Phase.PARKED:
            self.parked.remove(sequence)
        sequence.phase = Phase.DONE

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        self.encoder.end(sequence.seq_id)
        self._leaving.append(sequence)

    def give_way(self, reason: str, outputs: int = 0, to_arrival: int = -1) -> None:
        """Preempt one running sequence by policy, unless pages are coming free anyway.

        outputs: only one that has made so many tokens since it last joined, so that each turn brings it forward.
        to_arrival: only one that is younger.
        """
        could = tuple(
            Running(s.seq_id, s.arrival, len(s.tokens))
            for s in self.running.values()
            if len(s.tokens) - s.joined_tokens >= outputs and s.arrival > to_arrival
        )
        if self._leaving or not could:
            return
        victim = self.running[PREEMPTION[self.facts.preemption](could).seq_id]
        self._leave(victim)
        victim.phase = Phase.GIVING_WAY
        self.tally.preemptions[reason] += 1

    def settle(self, now_s: float) -> None:
        """Free what sequences that left hold, once no plan and no rank names it."""
        if not self._leaving:
            return
        waiting = []
        for sequence in self._leaving:
            if sequence.last_plan > self.pipeline.reported or sequence.bound:
                waiting.append(sequence)
                continue
            assert sequence.pages is not None
            del self._named[sequence.seq_id]
            sequence.pages.seal(sequence.computed, sequence.hashes)
            sequence.pages.close(self.pipeline.clock)
            sequence.pages = None
            self.slots.give((sequence.slot,))
            if sequence.phase is Phase.GIVING_WAY:
                sequence.phase = Phase.PARKED
                sequence.parked_s = now_s
                bisect.insort(self.parked, sequence, key=lambda each: each.arrival)
        self._leaving = waiting

    def resume(self, sequence: Sequence, now_s: float) -> bool:
        """One that is parked, or waits, joins if there are a slot and pages for all that it has, and some more."""
        memory, tokens = self.memory, len(sequence.tokens)
        if sequence.too_little_at == memory.releases:
            return False
        slots = self.slots.take(1)
        if slots is None:
            return False
        memory.extend_hashes(sequence.hashes, sequence.root, sequence.tokens)
        total = min(tokens + self.facts.spare_tokens, sequence.limit - 1)  # the last one's KV is never written
        pages = memory.open(sequence.hashes, tokens, total, self.facts.chunk_tokens, self.pipeline.clock)
        if pages is None:
            self.slots.give(slots)
            sequence.too_little_at = memory.releases
            return False
        self.tally.recomputed_tokens += tokens - 1 - pages.computed
        if sequence.phase is Phase.PARKED:
            self.parked.remove(sequence)
            self.tally.observe("parked", now_s - sequence.parked_s)
        sequence.recomputes = True
        sequence.pages, sequence.slot, sequence.computed, sequence.last_plan = pages, slots[0], pages.computed, -1
        self.join(sequence)
        return True

    # ---- steps

    def plan(self, now_s: float) -> WorkerPlan | None:
        """The next step, sent; None when there is nothing to do or two are in flight."""
        if not self.pipeline.has_room:
            return None
        longest_run = self.facts.longest_run
        candidates = tuple(
            Candidate(s.seq_id, s.remaining, longest_run(s.position)) for s in self.running.values() if s.remaining
        )
        step = decode_only(candidates, self.facts.max_slots + self.facts.chunk_tokens)
        runs = []
        self.short = False
        for run in step.runs:
            sequence = self.running[run.seq_id]
            assert sequence.pages is not None
            new_pages = sequence.pages.grow(sequence.position, sequence.position + run.num_tokens)
            if new_pages is None:
                self.short = True  # it sits this step out
                continue
            sequence.position += run.num_tokens
            sequence.promised += run.sample
            sequence.last_plan = self.encoder.next_plan_no
            runs.append(Run(run.seq_id, run.num_tokens, run.sample, new_pages))
        plan = None
        if runs or self.encoder.has_housekeeping:
            plan = self.encoder.encode(runs)
            self.pipeline.sent(plan, now_s)
        if self.short:
            self.give_way("memory")
        return plan

    def named(self, seq_id: int) -> Sequence:
        return self._named[seq_id]

    def reported(self, plan: WorkerPlan) -> None:
        """Every rank has computed this plan, and its tokens are known: what it made whole enters the prefix cache."""
        page_tokens = self.facts.page_tokens
        for run in plan.runs:
            sequence = self._named[run.seq_id]
            sequence.computed += run.num_tokens
            if sequence.computed // page_tokens > len(sequence.hashes):
                self.memory.extend_hashes(sequence.hashes, sequence.root, sequence.tokens)
            assert sequence.pages is not None
            sequence.pages.advance(sequence.computed, sequence.hashes, self.pipeline.clock)
            if run.sample and sequence.recomputes:
                sequence.recomputes = False
                sequence.pages.end_prefill(sequence.hashes, self.pipeline.clock, goes_on=True)

    def pages(self) -> list[SequencePages]:
        """Of every sequence that holds any."""
        return [s.pages for s in self._named.values() if s.pages is not None]

    def held_slots(self) -> int:
        return len(self._named)

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        assert self.held_slots() <= self.slots.total - self.slots.free
        assert all(s.phase is Phase.RUNNING for s in self.running.values())
        assert all(s.phase is Phase.PARKED and s.pages is None for s in self.parked)
        assert set(self.running) | {s.seq_id for s in self._leaving} == set(self._named)
        for sequence in self.running.values():
            assert sequence.computed <= sequence.position < sequence.promised <= max(sequence.limit, sequence.promised)
