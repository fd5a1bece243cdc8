"""Prompts: which of them are admitted, what the steps make of them, and the first token of every choice.

    StartLeg ──> a turn (engine/turns) ──> pages, slots ──> chunks scheduled ──> first tokens ──> onward
                                            └ behind the longest prefix that is cached in every layer group

Tenants take turns: in being admitted, and chunk by chunk in being computed (scheduler/fairness). Whoever
waits for another's prefix lets the others go on; nobody overtakes one that waits for pages or slots. What is
computed enters the cache chunk by chunk, so that the next prompt finds it while this one still runs.

A prompt has pages for all of its tokens when it begins. Where a policy says so, one at a time begins with what is free, keeps
its place in the queue, and gets more when it is its turn (`_extend`): it begins in earnest, as it were, when it has all. Whoever
has begun, or comes before it in the queue, and lacks a page takes them back; then it begins again, behind what it left in the
prefix cache.

What becomes of the KV is somebody else's business (`Onward`): a transfer's, or that of the choices which go on here.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from disagg.engine.core import Core
from disagg.engine.finish import finish_of
from disagg.engine.legs import Leg, Stage
from disagg.engine.load import Urgency
from disagg.engine.now import Now
from disagg.engine.onward import Onward
from disagg.engine.pool import prompt_fits
from disagg.engine.sequences import Sequence
from disagg.engine.turns import Begins, Turn
from disagg.memory.sequence import SequencePages
from disagg.messages.legs import Outcome, StartLeg, TimelineEvent
from disagg.messages.link import FirstToken
from disagg.messages.plan import NO_TOKEN, Run, SampledToken, StepResult, WorkerPlan
from disagg.scheduler.admission import common_pages, should_wait
from disagg.types.ids import LegKey

LOADS_AHEAD = 4  # prompts at the head of the queue whose KV is looked for, and brought, before their turn


@dataclass(slots=True, eq=False)
class Prompt:
    """A leg's prompt, from its place in the queue to its first tokens."""

    leg: Leg
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of full pages
    too_little_at: int = -1  # KvMemory.releases when there were too few pages for it
    turn: Turn | None = None  # while it waits
    sequence: Sequence | None = None  # once it is admitted
    gave_way: Sequence | None = None  # that it was before, with part of the pages
    awaits: int = -1  # the seq_id of the one whose prefix it waits for


class Prompts(Stage):
    """See the module."""

    def __init__(self, core: Core, onward: tuple[Onward, ...], most_tokens: int | None = None) -> None:
        """most_tokens: of one prompt that are computed here; what has more that are not cached is given back. None: any."""
        self._most_tokens = most_tokens
        self._facts = core.facts.scheduling
        self._model = core.facts.model
        self._page_tokens = core.facts.memory.page_tokens
        self._core = core
        self._legs = core.legs
        self._pool = core.pool
        self._batch = core.batch
        self._counters = core.counters
        self._tiers = core.tiers
        self._onward = onward
        self._turns = core.turns
        self._waiting = 0
        self._prompts: dict[LegKey, Prompt] = {}
        self._by_seq: dict[int, Prompt] = {}  # admitted
        self._partly: Prompt | None = None  # has begun with part of its pages

    # ---- what the engine calls

    def refusal(self, start: StartLeg) -> str:
        tokens = len(start.token_ids)
        if not prompt_fits(self._pool.kv, tokens, self._facts.chunk_tokens):
            return (
                f"{tokens} prompt tokens do not fit the {self._core.role} server's KV pool of "
                f"{self._pool.longest_alone} tokens"
            )
        if len(start.choices) > self._facts.max_slots:
            return f"{len(start.choices)} choices are more than the server's {self._facts.max_slots} slots"
        return ""

    def make_room(self, leg: Leg) -> str:
        """If the queue is full, the youngest of whoever has most there is given back."""
        if self._waiting < self._facts.max_waiting:
            return ""
        other = self._turns.queue.displaced_by(
            leg.tenant, lambda turn: isinstance(turn.what, Prompt) and turn.what is not self._partly
        )
        if other is None:
            return f"{self._waiting} legs are waiting already"
        assert isinstance(other.what, Prompt)
        reason = f"{self._waiting} legs are waiting already, most of them its tenant's"
        self._legs.close(other.what.leg, Outcome.GIVEN_BACK, reason)
        return ""

    def start(self, leg: Leg, now: Now) -> None:
        """It waits here."""
        prompt = self._prompts[leg.key] = Prompt(leg)
        prompt.turn = Turn(leg.tenant, partial(self._try, prompt), prompt)
        cost = leg.num_tokens + self._onward_of(leg).cost(leg.start)
        self._turns.queue.append(leg.tenant, prompt.turn, cost, leg.start.priority)
        self._waiting += 1

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        prompt = self._prompts[leg.key]
        if prompt.turn is not None:
            self._turns.queue.remove(prompt.turn)
            self._waits_no_more(prompt)
        if self._tiers is not None:
            self._tiers.loads.forget(leg.key)
        if prompt is self._partly:
            self._partly = None
        if prompt.sequence is not None:
            self._batch.stop(prompt.sequence)

    def unbegun(self, leg: Leg) -> bool:
        prompt = self._prompts[leg.key]
        return prompt.turn is not None and prompt.sequence is None and prompt.gave_way is None

    def holds(self, leg: Leg) -> bool:
        return any(sequence.pages is not None for sequence in self._sequences(self._prompts[leg.key]))

    def forget(self, leg: Leg) -> None:
        for sequence in self._sequences(self._prompts.pop(leg.key)):
            del self._by_seq[sequence.seq_id]

    def _sequences(self, prompt: Prompt) -> list[Sequence]:
        return [sequence for sequence in (prompt.gave_way, prompt.sequence) if sequence is not None]

    def _waits_no_more(self, prompt: Prompt) -> None:
        prompt.turn = None
        self._waiting -= 1

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def queue(self) -> Iterator[Prompt]:
        """Those that wait, in the order in which they would be admitted if nothing came."""
        return (turn.what for turn in self._turns.queue if isinstance(turn.what, Prompt))

    def describe(self, leg: Leg) -> dict[str, object]:
        sequence = self._prompts[leg.key].sequence
        scheduled, computed = (sequence.position, sequence.computed) if sequence is not None else (0, 0)
        return {"scheduled": scheduled, "computed": computed}

    def dump(self) -> dict[str, object]:
        return {"waiting": [str(prompt.leg.key) for prompt in self.queue]}

    def check_integrity(self) -> None:
        waiting = [prompt for prompt in self._prompts.values() if prompt.turn is not None]
        for prompt in waiting:
            assert prompt.turn is not None and prompt.turn in self._turns.queue
            assert (prompt.sequence is not None) == (prompt is self._partly)
        assert len(waiting) == self._waiting
        assert sum(sequence.partly for sequence in self._batch.running.values()) <= 1
        assert all(self._batch.running[s].is_prompt == (s in self._by_seq) for s in self._batch.running)

    # ---- admission

    def schedule(self, now: Now) -> None:
        """What is kept elsewhere of those that come next is brought back before it is their turn."""
        if self._partly is not None:
            self._note_if_it_gave_way(self._partly)
        for prompt in islice(self.queue, LOADS_AHEAD if self._tiers is not None else 0):
            if prompt is not self._partly:
                self._brought_back(prompt, now, Urgency.AHEAD)

    def _try(self, prompt: Prompt, now: Now, urgency: Urgency) -> Begins:
        """Its turn has come."""
        if prompt is self._partly and not self._note_if_it_gave_way(prompt):
            return Begins.NOW if self._extend(prompt) else Begins.TOO_LITTLE
        if self._batch.full or not self._onward_of(prompt.leg).may_admit:
            return Begins.TOO_LITTLE
        if self._batch.slots.free < len(prompt.leg.start.choices):
            return Begins.TOO_LITTLE
        if not self._brought_back(prompt, now, urgency):
            return Begins.NOT_NOW
        if self._most_tokens is not None and self._given_back(prompt.leg, self._cached(prompt)):
            return Begins.NOT_NOW
        if self._batch.closed:
            return Begins.CLOSED
        if self._awaits_prefix(prompt):
            return Begins.AWAITS
        if prompt.too_little_at == self._pool.kv.releases:
            return Begins.TOO_LITTLE
        if not self._core.passes.may_prefill():
            return Begins.CLOSED
        if self._admit(prompt, now):
            return Begins.NOW
        if prompt.leg.ended:
            return Begins.NOT_NOW
        self._begin_partly(prompt, now)
        return Begins.TOO_LITTLE

    def _cached(self, prompt: Prompt) -> int:
        """Tokens."""
        self._hash(prompt)
        return self._pool.kv.lookup(prompt.hashes, prompt.leg.num_tokens)

    def _given_back(self, leg: Leg, cached_tokens: int) -> bool:
        """More than is computed here is not cached: then it is another server's."""
        rest = leg.num_tokens - cached_tokens
        if self._most_tokens is None or rest <= self._most_tokens:
            return False
        most = f"a {self._core.role} server computes at most {self._most_tokens} itself"
        self._legs.close(leg, Outcome.GIVEN_BACK, f"{rest} of {leg.num_tokens} tokens are not cached any more; {most}")
        return True

    def _brought_back(self, prompt: Prompt, now: Now, urgency: Urgency) -> bool:
        """What the host and storage have of it is cached again, or is not worth waiting for. Others may go on meanwhile."""
        if self._tiers is None:
            return True
        leg = prompt.leg
        self._hash(prompt)
        return self._tiers.loads.brought_back(
            leg.key, leg.start.cache_salt, prompt.root, prompt.hashes, leg.num_tokens, now.s, urgency=urgency
        )

    def _hash(self, prompt: Prompt) -> None:
        if not prompt.root:
            prompt.root, prompt.hashes = self._pool.prefix(prompt.leg.start)

    def _awaits_prefix(self, prompt: Prompt) -> bool:
        """Another prompt that is being computed begins with much of what this one would have to compute."""
        running = self._batch.running
        if prompt.awaits in running and self._awaits(prompt, running[prompt.awaits]):
            return True
        self._hash(prompt)
        prompt.awaits = next((s for s, other in running.items() if self._awaits(prompt, other)), -1)
        return prompt.awaits >= 0

    def _awaits(self, prompt: Prompt, other: Sequence) -> bool:
        if not other.is_prompt or other.partly:
            return False
        common = common_pages(other.hashes, prompt.hashes) * self._page_tokens
        last = len(other.tokens) if self._pool.kv.keeps_back else common
        cached = self._by_seq[other.seq_id].leg.cached_tokens
        # Behind one of its own tenant that is not less urgent it would be computed anyway.
        ahead = other.tenant == prompt.leg.tenant and other.priority <= prompt.leg.start.priority
        others_first = 0 if ahead else self._batch.others_first(other)
        return should_wait(common, cached, other.computed, last, self._facts.chunk_tokens, others_first)

    def _admit(self, prompt: Prompt, now: Now) -> bool:
        """The cached prefix, pages for all that has to be computed after it, and slots for every choice."""
        leg, kv, batch = prompt.leg, self._pool.kv, self._batch
        onward, tokens, alone = self._onward_of(leg), leg.num_tokens, not kv.allocator.used_large
        total = onward.total_tokens(leg.start) if batch.reserves else tokens
        pages = kv.open(prompt.hashes, tokens, total, self._facts.chunk_tokens, batch.pipeline.clock)
        if pages is not None and self._given_back(leg, pages.computed):
            pages.close(batch.pipeline.clock)
            return False
        if pages is not None and not onward.take_on(leg, pages, pages.computed, alone=alone):
            pages.close(batch.pipeline.clock)
            pages = None
        if pages is None:
            prompt.too_little_at = kv.releases
            return False
        self._join(prompt, pages, now)
        self._begun(prompt)
        return True

    def _begun(self, prompt: Prompt) -> None:
        """It has all of its pages."""
        assert prompt.sequence is not None and prompt.sequence.pages is not None and prompt.turn is not None
        self._pool.taken(prompt.sequence.pages)
        leg = prompt.leg
        computed = max(1, leg.num_tokens - leg.cached_tokens)  # what is cached, its tenant need not pay for
        self._turns.queue.take(prompt.turn, computed + self._onward_of(leg).cost(leg.start))
        self._waits_no_more(prompt)

    def _join(self, prompt: Prompt, pages: SequencePages, now: Now, *, partly: bool = False) -> None:
        """It runs in these pages."""
        leg = prompt.leg
        slots = self._batch.slots.take(len(leg.start.choices))
        assert slots is not None
        brought = self._tiers.begins(leg.key, pages.computed) if self._tiers is not None else {}
        if prompt.gave_way is None:
            leg.brought_tokens, leg.cached_tokens = brought, pages.computed
            self._counters.observe("queue", now.s - leg.received.s)
        sequence = prompt.sequence = Sequence(
            key=leg.key,
            tenant=leg.tenant,
            choices=leg.start.choices,
            is_prompt=True,
            arrival=-1,
            priority=leg.start.priority,
            tokens=list(leg.start.token_ids),
            num_prompt=leg.start.num_prompt,
            limit=leg.num_tokens + 1,
            params=leg.start.params,
            root=prompt.root,
            salt=leg.start.cache_salt,
            hashes=prompt.hashes,
            pages=pages,
            slots=slots,
            computed=pages.computed,
            shared_tokens=pages.computed,
            partly=partly,
        )
        self._batch.join(sequence)
        self._by_seq[sequence.seq_id] = prompt

    # ---- with part of the pages

    def _begin_partly(self, prompt: Prompt, now: Now) -> None:
        """Its place in the queue stays its own, and nobody overtakes it, until it has all. Once: it is not computed again and
        again for others to take its pages."""
        if self._partly is not None or prompt.gave_way is not None or not self._batch.begins_partly:
            return
        leg, kv, lookahead = prompt.leg, self._pool.kv, self._core.lookahead
        if not self._onward_of(leg).begins_partly:
            return
        clock, chunk_tokens = self._batch.pipeline.clock, self._facts.chunk_tokens
        pages = kv.open_partly(prompt.hashes, leg.num_tokens, chunk_tokens, clock, lambda: lookahead.spare_large)
        if pages is None:
            prompt.too_little_at = kv.releases  # which letting go of what it held of the cache has raised
            return
        assert prompt.turn is not None
        self._partly, prompt.turn.partly = prompt, True
        self._join(prompt, pages, now, partly=True)

    def _note_if_it_gave_way(self, prompt: Prompt) -> bool:
        sequence = prompt.sequence
        assert sequence is not None and prompt.turn is not None
        if sequence.done:
            prompt.gave_way, prompt.sequence, self._partly = sequence, None, None
            prompt.turn.partly = False
        return sequence.done

    def _extend(self, prompt: Prompt) -> bool:
        """More pages, if some are free beside what those that have begun will need. With all of them it begins in earnest."""
        leg, sequence, batch = prompt.leg, prompt.sequence, self._batch
        assert sequence is not None and sequence.pages is not None
        alone = batch.holds_alone(sequence) and not (self._tiers is not None and self._tiers.held())
        pages, shared = sequence.pages, sequence.shared_tokens
        if pages.room_tokens < leg.num_tokens:  # else there is no need to look ahead twice
            large = self._pool.kv.allocator.num_large if alone else self._core.lookahead.spare_large
            pages.extend(leg.num_tokens, large)
        whole = pages.room_tokens >= leg.num_tokens
        if whole and self._onward_of(leg).take_on(leg, pages, shared, alone=alone):
            sequence.partly = False
            self._partly = None
            self._begun(prompt)
            return True
        if alone:  # the rest cannot be had beside what it holds: it begins again, with the pool to itself
            batch.end_partly("memory")
        return False

    # ---- steps

    def planned(self, plan: WorkerPlan, now: Now) -> None:
        for run in plan.runs:
            prompt = self._by_seq.get(run.seq_id)
            if prompt is None:
                continue
            leg, sequence = prompt.leg, prompt.sequence
            assert sequence is not None
            start = sequence.position - run.num_tokens
            if start == leg.cached_tokens and prompt.gave_way is None:
                leg.timeline.append(TimelineEvent("queued", leg.received.unix_s, now.unix_s))
            self._onward_of(leg).scheduled(leg, sequence, start, plan.plan_no)

    def computed(self, plan: WorkerPlan, report: StepResult, now: Now) -> None:
        sampled: dict[int, list[SampledToken]] = {}
        for token in report.sampled:
            sampled.setdefault(token.seq_id, []).append(token)
        for run in plan.runs:
            prompt = self._by_seq.get(run.seq_id)
            if prompt is not None:
                self._counters.prefill_tokens += run.num_tokens
                self._chunk_done(prompt, run, plan, report)
                if run.sample and not prompt.leg.ended:
                    self._prompt_done(prompt, sampled.get(run.seq_id, []), report, now)

    def _chunk_done(self, prompt: Prompt, run: Run, plan: WorkerPlan, report: StepResult) -> None:
        leg, sequence = prompt.leg, self._batch.sequence(run.seq_id)
        assert sequence is not None
        detail = f"tokens {sequence.computed - run.num_tokens}-{sequence.computed}"
        leg.note_part(TimelineEvent("chunk", report.started_unix_s, report.ended_unix_s, detail))
        if leg.ended:
            self._legs.late_step(leg, plan.plan_no)

    def _prompt_done(self, prompt: Prompt, sampled: List[SampledToken], report: StepResult, now: Now) -> None:
        leg, sequence = prompt.leg, prompt.sequence
        assert sequence is not None
        assert len(sampled) == len(leg.start.choices)
        if any(token.token_id == NO_TOKEN for token in sampled):
            self._batch.distrust(sequence)
            self._legs.no_token(leg, leg.first_index)
            return
        tokens_left = self._model.max_model_len - leg.num_tokens - 1
        first = []
        for token in sampled:
            finish = finish_of(
                token.token_id, leg.first_index, leg.start.params, self._model.eos_token_ids, tokens_left
            )
            first.append(FirstToken(token.choice, token.token_id, token.logprobs, finish))
        leg.timeline.append(TimelineEvent("first_token", report.ended_unix_s, report.ended_unix_s))
        self._counters.observe("ttft", now.s - leg.received.s)
        self._onward_of(leg).prompt_done(leg, sequence, tuple(first), now)

    def _onward_of(self, leg: Leg) -> Onward:
        return next(onward for onward in self._onward if onward in leg.stages)
