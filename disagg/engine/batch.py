"""The sequences that run: which of them the next step computes, which gave way for want of pages, and what plans named.

    join ──> running ──────── no page left ────────> leaving ──> parked
              │  ^ ^                                               │
              │  │ └──── pages again: computed from the prefix ────┘
              │  │       cache on, and a slot        waiting (for its first slot)
              │  └──────────────────────────────────────┘
              ├──── stop ──> leaving ──> gone
              └──── keep ──> leaving ──> gone        a prompt that is computed: its pages stay for its transfer
                    part                             or for the choices that go on here
                    hold                             a choice that goes on elsewhere

What a step computes is a policy's choice (scheduler/policies), named by the engine's role. Only want of pages makes a
sequence give way, never want of slots. Who has been parked longest by *age*, the order in which answers began, goes on
first, and if it waits for long, younger ones give way to it.

A sequence that leaves keeps its pages and its slots until the last plan that names it has reported, and no transfer uses
them. What a parked one has computed is not lost while its pages stay in the prefix cache; the rest is computed again, in
chunks beside the others' steps. Every token it has is known by then, so it says none twice, and noise depends on (seed,
choice, output index) alone, so it says what it would have said.

Knows sequences, pages, slots and plans; nothing of legs, links or routers.
"""

from __future__ import annotations

import bisect
from collections import Counter

from disagg.engine.facts import SchedulingFacts
from disagg.engine.instructions import Counters
from disagg.engine.load import Urgency
from disagg.engine.sequences import SOON_TOKENS, Sequence, State
from disagg.engine.steps import PlanPipeline, Slots
from disagg.engine.tiers import Tiers
from disagg.memory.kv_memory import KvMemory
from disagg.memory.sequence import SequencePages
from disagg.messages.plan import PageCopy, Run, SamplerStart, SequenceStart, StepResult, WorkerPlan
from disagg.messages.sequence_diff import DiffEncoder
from disagg.scheduler.budget import Budget, of_tokens
from disagg.scheduler.fairness import Shares, prompt_turn
from disagg.scheduler.pipeline import decode_share
from disagg.scheduler.policies import POLICIES, PREEMPTION, Candidate, Phase, Running, StepState
from disagg.scheduler.step_times import StepTimes, ToldTimes


class Batch:
    """See the module. `plan` and `report` for each step; `settle` whenever pages may have come free."""

    def __init__(
        self,
        facts: SchedulingFacts,
        checkpoint_tokens: int,
        memory: KvMemory,
        pipeline: PlanPipeline,
        counters: Counters,
        policy: str,
        step_tokens: int,
        tiers: Tiers | None = None,
    ) -> None:
        """checkpoint_tokens: see MemoryFacts. policy: a key of scheduler.policies.POLICIES. step_tokens: of one step, at most.
        tiers: if there are any.
        """
        self._facts = facts
        self._page_tokens = memory.layout.page_tokens
        self._checkpoint_tokens = checkpoint_tokens
        self._memory = memory
        self._counters = counters
        self._policy = POLICIES[policy]
        self._most = of_tokens(step_tokens)
        self._times = StepTimes()
        self._told = ToldTimes()
        self.budget_tokens = step_tokens  # of the step that was planned last, where attention costs nothing
        self._last: Phase | None = None  # what the last step was for
        self._prompt_tokens: Counter[str] = Counter()  # that steps were given so far, by tenants that have prompts here
        self._tiers = tiers
        self.slots = Slots(facts.max_slots)
        self._stages = pipeline.stages
        self.pipeline = pipeline
        self._encoder = DiffEncoder()
        self.running: dict[int, Sequence] = {}  # by seq_id, in the order in which they joined
        self.parked: list[Sequence] = []  # oldest first
        self._named: dict[int, Sequence] = {}  # by seq_id: all that a plan in flight may name, or a transfer uses
        self._leaving: list[Sequence] = []
        self._shares = Shares()  # of the prompts' tokens in steps, by tenant
        self._next_seq_id = 0
        self._lacking: list[Sequence] = []  # that had no page for their next tokens at the last plan

    # ---- who is in the batch

    @property
    def room(self) -> int:
        """How many more may run beside those that do."""
        return self._facts.max_running - len(self.running)

    @property
    def full(self) -> bool:
        return self.room <= 0

    @property
    def short(self) -> bool:
        """A running sequence lacks a page, or soon will: what comes free is for it first."""
        return bool(self._lacking)

    @property
    def closed(self) -> bool:
        """Its policy lets no prompt begin before all that has been in a step, and what goes on after it, is over."""
        if not self._policy.alone:
            return False
        begun = any(not s.is_prompt or s.last_plan >= 0 for s in self.running.values())
        return begun or bool(self.parked or self._leaving)

    @property
    def begins_partly(self) -> bool:
        """Its policy lets a prompt begin with pages for its first tokens only. What it has computed is not lost when it gives
        them back: it stays in the prefix cache while nobody needs them."""
        return self._policy.partly and self._memory.caching and not self._memory.keeps_back

    @property
    def reserves(self) -> bool:
        """Its policy takes pages for all that a request may come to have when it begins."""
        return self._policy.reserves

    def join(self, sequence: Sequence) -> None:
        """It runs from the next plan on; its pages hold `sequence.computed` tokens."""
        assert sequence.pages is not None
        sequence.seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        sequence.state = State.RUNNING
        sequence.position = sequence.computed
        sequence.promised = sequence.joined_tokens = len(sequence.tokens)
        sequence.turn = self._prompt_tokens[sequence.tenant] + sequence.remaining
        self.running[sequence.seq_id] = self._named[sequence.seq_id] = sequence
        if self._tiers is not None:
            self._tiers.offload.joined(sequence)
        self._encoder.start(
            SequenceStart(
                seq_id=sequence.seq_id,
                token_ids=tuple(sequence.tokens),
                num_prompt=sequence.num_prompt,
                computed=sequence.computed,
                tables=sequence.pages.tables(),
                params=sequence.params,
                samplers=tuple(map(SamplerStart, sequence.slots, sequence.choices)),
            )
        )

    def copy_pages(self, sequences: list[Sequence], copies: list[PageCopy]) -> None:
        """Before anything else runs; the pages of these sequences are named by the plan that copies."""
        if copies:
            self._encoder.copy_pages(copies)
            for sequence in sequences:
                sequence.last_plan = self._encoder.next_plan_no

    def stop(self, sequence: Sequence) -> None:
        """It needs nothing more; idempotent."""
        if sequence.state is State.RUNNING:
            self._leave(sequence)
        elif sequence.state is State.PARKED:
            self.parked.remove(sequence)
        sequence.state = State.DONE
        if self._tiers is not None:
            self._tiers.loads.forget(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Its logits are no numbers, so its KV may have been none before, in what it began with, too. Kept in the cache it would
        spoil whatever begins with it, and be used too often to be evicted.
        """
        self._memory.forget(sequence.hashes)
        if self._tiers is not None:
            self._tiers.loads.distrust(sequence.hashes)
        sequence.hashes, sequence.distrusted = [], True  # what has no name is not kept

    def keep(self, sequence: Sequence) -> None:
        """A prompt has been computed, and is not gone on with here: its pages stay until no transfer uses them."""
        self._end_prompt(sequence, goes_on=False)
        self._leave_pages(sequence)

    def stands_still(self, sequence: Sequence) -> bool:
        """It stops, every plan that names it has reported, and no rank writes to its pages: they have all but its last token."""
        return sequence.stops and sequence.last_plan <= self.pipeline.reported and not sequence.in_transfer

    def hold(self, sequence: Sequence) -> None:
        """One that stands still is not gone on with here: its pages stay until no transfer uses them."""
        assert self.stands_still(sequence) and sequence.computed == len(sequence.tokens) - 1
        sequence.in_transfer = sequence.handed_over = True
        self._leave_pages(sequence)

    def _leave_pages(self, sequence: Sequence) -> None:
        """It needs nothing more here but its pages, until no transfer uses them."""
        self._leave(sequence)
        self.slots.give(sequence.slots)  # the next plan ends the sequence before it starts another in these
        sequence.slots, sequence.state = (), State.DONE

    def part(self, sequence: Sequence) -> tuple[SequencePages, tuple[int, ...]]:
        """A prompt has been computed: its pages and slots are the caller's, for what goes on after it."""
        assert sequence.last_plan <= self.pipeline.reported and not sequence.in_transfer
        self._end_prompt(sequence, goes_on=True)
        del self.running[sequence.seq_id], self._named[sequence.seq_id]
        self._encoder.end(sequence.seq_id)
        pages, slots = sequence.pages, sequence.slots
        assert pages is not None
        sequence.pages, sequence.slots, sequence.state = None, (), State.DONE
        return pages, slots

    def _end_prompt(self, sequence: Sequence, *, goes_on: bool) -> None:
        assert sequence.is_prompt and sequence.pages is not None
        sequence.pages.end_prefill(sequence.hashes, self.pipeline.clock, goes_on=goes_on)
        sequence.pages.seal(sequence.computed, sequence.hashes)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        self._encoder.end(sequence.seq_id)
        self._leaving.append(sequence)

    def give_way(
        self, reason: str, outputs: int = 0, to_arrival: int = -1, *, pages: int = 1, alone: bool = True
    ) -> None:
        """Preempt running sequences by policy, until about so many pages come free, unless some are coming free anyway. A prompt
        that has begun with part of its pages goes before all of them.

        outputs: only one that has made so many tokens since it last joined, so that each turn brings it forward.
        to_arrival: only one that is younger. alone: even the only one that could.
        """
        could = [
            Running(s.seq_id, s.arrival, len(s.tokens), s.priority)
            for s in self.running.values()
            if not s.is_prompt and s.remaining and s.arrival > to_arrival and len(s.tokens) >= s.joined_tokens + outputs
        ]
        # How long a transfer uses what prompts and those that stop have left behind, nobody knows.
        coming = any(s.partly or not (s.is_prompt or s.stops) for s in self._leaving)
        if coming or self.end_partly(reason) or len(could) <= (0 if alone else 1):
            return
        if reason == "memory":
            pages -= sum(s.own_pages for s in self.running.values() if s.ends)
        while pages > 0:
            chosen = PREEMPTION[self._facts.preemption](tuple(could))
            could.remove(chosen)
            victim = self.running[chosen.seq_id]
            pages -= 1 + victim.own_pages  # it may have lacked one itself
            self._leave(victim)
            victim.state = State.GIVING_WAY
            self._counters.preemptions[reason] += 1
            if len(could) < 2:
                return

    def end_partly(self, reason: str) -> bool:
        """The prompt that has begun with part of its pages gives way; whose it is begins it again. Whether there is one."""
        found = next((s for s in self.running.values() if s.partly), None)
        if found is None:
            return False
        self.stop(found)
        self._counters.preemptions[reason] += 1
        return True

    def settle(self, now_s: float) -> None:
        """Free what sequences that left hold, once no plan and no transfer names it."""
        if not self._leaving:
            return
        waiting = []
        for sequence in self._leaving:
            if sequence.last_plan > self.pipeline.reported or sequence.in_transfer:
                waiting.append(sequence)
                continue
            assert sequence.pages is not None
            del self._named[sequence.seq_id]
            sequence.pages.seal(sequence.computed, sequence.hashes)
            sequence.pages.close(self.pipeline.clock)
            sequence.pages = None
            if self._tiers is not None:
                self._tiers.offload.left(sequence)
            self.slots.give(sequence.slots)
            sequence.slots = ()
            if sequence.state is State.GIVING_WAY:
                sequence.state = State.PARKED
                sequence.parked_s = now_s
                bisect.insort(self.parked, sequence, key=lambda each: each.arrival)
        self._leaving = waiting

    def resume(self, sequence: Sequence, now_s: float) -> bool:
        """One that is parked, or waits, joins if there are a slot and pages for all that it has, and some more."""
        memory, tokens = self._memory, len(sequence.tokens)
        if sequence.too_little_at == memory.releases or not self._brought_back(sequence, now_s):
            return False
        slots = self.slots.take(1)
        if slots is None:
            return False
        memory.extend_hashes(sequence.hashes, sequence.root, sequence.tokens)
        spare_tokens = sequence.limit if self._policy.reserves else max(self._facts.spare_tokens, SOON_TOKENS)
        total = min(tokens + spare_tokens, sequence.limit - 1)  # the last one's KV is never written
        pages = memory.open(sequence.hashes, tokens, total, self._facts.chunk_tokens, self.pipeline.clock)
        if self._tiers is not None:
            self._tiers.begins(sequence, pages.computed if pages is not None else 0)
        if pages is None:
            self.slots.give(slots)
            sequence.too_little_at = memory.releases
            return False
        self._counters.recomputed_tokens += tokens - 1 - pages.computed
        if sequence.state is State.PARKED:
            self.parked.remove(sequence)
            self._counters.observe("parked", now_s - sequence.parked_s)
        sequence.recomputes, sequence.begins = True, sequence.state is State.WAITING
        sequence.pages, sequence.slots, sequence.computed, sequence.last_plan = pages, slots, pages.computed, -1
        self.join(sequence)
        return True

    def _brought_back(self, sequence: Sequence, now_s: float) -> bool:
        """What the host and storage have of it is cached again, or is not worth waiting for."""
        if self._tiers is None:
            return True
        self._memory.extend_hashes(sequence.hashes, sequence.root, sequence.tokens)
        root, hashes, num_tokens = sequence.root, sequence.hashes, len(sequence.tokens)
        return self._tiers.loads.brought_back(
            sequence, sequence.salt, root, hashes, num_tokens, now_s, urgency=Urgency.FIRST
        )

    # ---- steps

    def plan(self) -> WorkerPlan | None:
        """The next step, sent; None when there is nothing to do or as many are in flight as may be."""
        if not self.pipeline.has_room:
            return None
        runs: list[Run] = []
        near = {each: None for each in self._lacking if each.state is State.RUNNING and not each.is_prompt}  # in order
        sat_out: list[Sequence] = []
        budget, tokens = self._budget(), 0
        self.budget_tokens = min(int(budget.cost), budget.most_tokens)
        state = StepState(budget, least_chunk=self._page_tokens, whole=self._policy.whole_prompts, last=self._last)
        self._last = None
        for run in self._policy.schedule(self._candidates(), state).runs:
            sequence = self.running[run.seq_id]
            phase, pages = sequence.phase, sequence.pages
            self._last = Phase.PREFILL if phase is Phase.PREFILL else self._last or Phase.DECODE
            assert pages is not None
            new_pages = pages.grow(sequence.position, sequence.position + run.num_tokens)
            if new_pages is None:
                # Of a prompt, all pages were reserved; those of a window may be held for a copy, for a moment.
                assert not sequence.is_prompt or (self._tiers is not None and self._tiers.held()), "reserved pages"
                sat_out.append(sequence)
                near.pop(sequence, None)
                self._counters.steps_sat_out += phase is Phase.DECODE
                continue
            if sequence.takes_turns:
                self._shares.charge(sequence.tenant, run.num_tokens)
                self._prompt_tokens[sequence.tenant] += run.num_tokens
            sequence.position += run.num_tokens
            sequence.promised += run.sample
            sequence.last_plan = self._encoder.next_plan_no
            runs.append(Run(run.seq_id, run.num_tokens, run.sample, new_pages, self._news(sequence, run.num_tokens)))
            tokens += run.num_tokens
            if phase is Phase.DECODE and sequence.position + SOON_TOKENS > pages.grown_tokens:
                near[sequence] = None
        self.budget_tokens = max(self.budget_tokens, tokens)  # some have a place in any case
        self._lacking = sat_out + [sequence for sequence in near if not sequence.set_aside()]
        plan = None
        if runs or self._encoder.has_housekeeping:
            plan = self._encoder.encode(runs)
            self.pipeline.sent(plan)
        if self.short:
            self.give_way("memory", pages=len(self._lacking), alone=bool(sat_out))
        return plan

    def join_step(self) -> WorkerPlan:
        """A plan in which nothing is computed here, sent: other ranks compute something."""
        plan = self._encoder.encode([])
        self.pipeline.sent(plan)
        return plan

    def _news(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Of the tokens scheduled last, those that workers know from no plan. A single stage has sampled them itself."""
        if self._stages == 1:
            return ()
        known = max(sequence.position - num_tokens, sequence.joined_tokens)
        return tuple(sequence.tokens[known : sequence.position])

    def _budget(self) -> Budget:
        """Of the next step: the tokens that it may have, or what takes as long as it should, once that is known. Where stages
        wait for each other, steps with as many tokens take equally long only if attention counts.
        """
        if self._facts.target_step_s:
            return self._times.budget(self._facts.target_step_s, self._most.most_tokens)
        return self._most if self._stages == 1 else self._times.even(self._most.most_tokens)

    def _candidates(self) -> tuple[Candidate, ...]:
        """What could run: choices in the order in which they joined, then prompts, of the tenant least served first, and of
        each tenant those first of which least is left, so that short ones do not wait for a long one: but for one that has
        let so many tokens of others go first as are left of it, and some for its priority (scheduler/fairness.prompt_turn).
        Choices that have not begun, and find their prompt cached no more, are among the prompts.
        """
        choices, prompts = [], []
        decodes_left = self._decode_share()
        for sequence in self.running.values():
            if (remaining := sequence.remaining) and not self._awaits_token(sequence):
                phase, position = sequence.phase, sequence.position
                decodes_left -= phase is Phase.DECODE
                if decodes_left < 0 and phase is Phase.DECODE:
                    continue  # there is another plan for it
                most = min(self._longest_run(position), sequence.room)
                if most <= 0:
                    continue  # it waits for pages
                candidate = Candidate(sequence.seq_id, phase, remaining, most, position)
                if sequence.takes_turns:
                    prompts.append((sequence, candidate))
                else:
                    choices.append(candidate)
        tenants = self._shares.order([sequence.tenant for sequence, _ in prompts])
        turns = {tenant: turn for turn, tenant in enumerate(tenants)}
        had = self._prompt_tokens
        if len(had) > 2 * len(self.running):
            here = {sequence.tenant for sequence in self.running.values()}
            had = self._prompt_tokens = Counter({tenant: tokens for tenant, tokens in had.items() if tenant in here})
        prompts.sort(key=lambda p: (turns[p[0].tenant], prompt_turn(p[0].turn, p[0].priority, had[p[0].tenant])))
        return (*choices, *(candidate for _, candidate in prompts))

    def others_first(self, prompt: Sequence) -> int:
        """Tokens of its tenant's other prompts that steps have had since it joined."""
        return self._prompt_tokens[prompt.tenant] - prompt.turn + prompt.remaining

    def _decode_share(self) -> int:
        """How many of those that decode the next step takes, so that there is as much to do for all plans in flight."""
        if self._stages == 1:
            return len(self.running)
        return decode_share(sum(s.phase is Phase.DECODE for s in self.running.values()), self._stages)

    def _awaits_token(self, sequence: Sequence) -> bool:
        """A plan in flight samples a token of it, which several stages hear of from the server. (A single one knows it.)"""
        return self._stages > 1 and sequence.promised > len(sequence.tokens)

    def _longest_run(self, position: int) -> int:
        """Tokens that a run from `position` on may have at most."""
        if not self._checkpoint_tokens:
            return self._facts.chunk_tokens
        return min(self._facts.chunk_tokens, self._checkpoint_tokens - position % self._checkpoint_tokens)

    def sequence(self, seq_id: int) -> Sequence | None:
        """That a plan in flight may name, or a transfer uses."""
        return self._named.get(seq_id)

    def step_costs(self) -> tuple[float, float, float, int] | None:
        """As `ToldTimes.line`: what steps cost, for whoever plans."""
        return self._told.line

    def report(self, result: StepResult) -> tuple[WorkerPlan, StepResult] | None:
        """A rank has computed a plan. The plan and what it gave, once every rank has: what it made whole enters the prefix
        cache.
        """
        complete = self.pipeline.report(result)
        if complete is None:
            return None
        plan, result = complete
        if self._tiers is not None:
            self._tiers.loads.rates.computed(tuple(run.num_tokens for run in plan.runs), result.compute_s)
        learns = bool(self._facts.target_step_s or self._stages > 1)
        told = self._told.wants_one()
        if plan.runs and (learns or told):
            runs = [(self._named[run.seq_id].computed, run.num_tokens) for run in plan.runs]
            if learns:
                self._times.observe(runs, result.compute_s)
            if told:
                self._told.observe(runs, result.compute_s)
        for run in plan.runs:
            sequence = self._named[run.seq_id]
            sequence.computed += run.num_tokens
            if sequence.computed // self._page_tokens > len(sequence.hashes) and not sequence.distrusted:
                self._memory.extend_hashes(sequence.hashes, sequence.root, sequence.tokens)
            assert sequence.pages is not None
            sequence.pages.advance(sequence.computed, sequence.hashes, self.pipeline.clock)
            if run.sample and sequence.recomputes:
                sequence.recomputes = False
                sequence.pages.end_prefill(sequence.hashes, self.pipeline.clock, goes_on=True)
            if self._tiers is not None:
                self._tiers.offload.advanced(sequence, run.num_tokens)
        return complete

    # ---- what others need to know of it

    def holds_alone(self, sequence: Sequence) -> bool:
        """No other has pages here."""
        return all(s is sequence or s.pages is None for s in self._named.values())

    def pages(self) -> list[SequencePages]:
        """Of every sequence that holds any."""
        return [s.pages for s in self._named.values() if s.pages is not None]

    def held_slots(self) -> int:
        return sum(len(s.slots) for s in self._named.values())

    def longest_parked_s(self, now_s: float) -> float:
        """How long the sequence that gave way first has waited to go on."""
        return max((now_s - sequence.parked_s for sequence in self.parked), default=0.0)

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        assert self.held_slots() <= self.slots.total - self.slots.free
        assert all(s.state is State.RUNNING for s in self.running.values())
        assert not any(s.ends for s in self._leaving if s.state is State.GIVING_WAY), "who ends gives way to nobody"
        assert all(s.state is State.PARKED and s.pages is None for s in self.parked)
        assert set(self.running) | {s.seq_id for s in self._leaving} == set(self._named)
        for s in self.running.values():
            # A prompt that is all scheduled stays until its first tokens are here.
            assert s.computed <= s.position < s.promised <= max(s.limit, s.promised)
