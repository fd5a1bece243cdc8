"""Choices: what goes on after a prompt, from the second token of each to its end.

    KV here (landed, or computed) ──> fork: a sequence for every choice that goes on ──> tokens, one a step ──> LegEnd
                                        └ a choice that has no slot yet waits, and begins when one is free

Each choice has a slot of its own. As many as there are slots for begin at once, and share the pages that are full of the
prompt; the others wait and join one by one, computing from the prefix cache on. A choice has *begun* when it has its slot,
and is not heard of before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.engine.core import Core
from disagg.engine.finish import finish_of
from disagg.engine.legs import Leg
from disagg.engine.lookahead import Begun
from disagg.engine.now import Now
from disagg.engine.onward import Onward
from disagg.engine.pool import answer_fits
from disagg.engine.sequences import Sequence, State
from disagg.engine.turns import Begins, Turn
from disagg.memory.sequence import SequencePages
from disagg.messages.legs import LegTokens, Outcome, StartLeg, TimelineEvent
from disagg.messages.link import FirstToken
from disagg.messages.plan import NO_TOKEN, SampledToken, StepResult, WorkerPlan
from disagg.scheduler.admission import Growing
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_CHOICES


class PromptKv(Struct, frozen=True):
    """A prompt's KV, in pages that are the choices' from now on."""

    pages: SequencePages
    slots: tuple[int, ...]  # of the choices that begin at once
    root: bytes
    hashes: list[bytes]
    age: int  # see Choices.next_age
    in_transfer: bool  # a rank may still write to the pages


@dataclass(slots=True, eq=False)
class Answer:
    """The choices of one leg."""

    leg: Leg
    sequences: list[Sequence] = field(default_factory=list)  # of those that go on, once the KV is here
    dropped: set[int] = field(default_factory=set)  # choices that the router wants nothing more of
    first_tokens: dict[int, FirstToken] = field(default_factory=dict)  # by choice, once all of them are here
    here_unix_s: float = 0.0  # when the prompt's KV was
    waiting: deque[Sequence] = field(default_factory=deque)  # choices that wait for their slots
    turn: Turn | None = None  # theirs, while there are any: who cannot begin is asked once, and not choice by choice
    held_back_at: int = -1  # KvMemory.releases when one of them would have left others too few pages

    def going_on(self) -> list[FirstToken]:
        """The first tokens of the choices that go on after them."""
        return [t for t in self.first_tokens.values() if not t.finish and t.choice not in self.dropped]


class Choices(Onward):
    """See the module."""

    begins_partly = True

    def __init__(self, core: Core) -> None:
        self._core = core
        self._facts = core.facts
        self._legs = core.legs
        self._batch = core.batch
        self._turns = core.turns
        self._lookahead = core.lookahead
        self._counters = core.counters
        self._answers: dict[LegKey, Answer] = {}
        self._ages = 0

    # ---- what the engine calls

    def refusal(self, start: StartLeg) -> str:
        total, chunk_tokens = self.total_tokens(start), self._facts.scheduling.chunk_tokens
        if answer_fits(self._core.pool.kv, total, chunk_tokens, len(start.token_ids)):
            return ""
        return (
            f"prompt and max_tokens come to {total} tokens for each of {len(start.choices)} choices; the "
            f"{self._core.role} server has KV memory for {self._core.pool.longest_alone} tokens of one"
        )

    def start(self, leg: Leg, now: Now) -> None:
        self._answers[leg.key] = Answer(leg)

    def drop_choice(self, leg: Leg, choice: int) -> bool:
        self._counters.aborts += 1
        answer = self._answers[leg.key]
        answer.dropped.add(choice)
        for sequence in answer.sequences:
            if sequence.choice == choice:
                self._stop(answer, sequence)
        return bool(answer.sequences) and all(sequence.done for sequence in answer.sequences)

    def close(self, leg: Leg, outcome: Outcome, reason: str) -> None:
        answer = self._answers[leg.key]
        self._lookahead.granted.pop(leg.key, None)
        for sequence in answer.sequences:
            self._stop(answer, sequence)

    def holds(self, leg: Leg) -> bool:
        return any(sequence.pages is not None for sequence in self._answers[leg.key].sequences)

    def forget(self, leg: Leg) -> None:
        del self._answers[leg.key]

    @property
    def waiting(self) -> int:
        return sum(len(answer.waiting) for answer in self._answers.values())

    def describe(self, leg: Leg) -> dict[str, object]:
        return {
            "sequences": {
                s.choice: {"seq": s.seq_id, "state": s.state.value, "tokens": len(s.tokens)}
                for s in self._answers[leg.key].sequences
            }
        }

    def check_integrity(self) -> None:
        for answer in self._answers.values():
            assert list(answer.waiting) == [s for s in answer.sequences if s.state is State.WAITING]
            assert all(sequence.pages is None for sequence in answer.waiting)
            assert (answer.turn is not None) == bool(answer.waiting)
            assert answer.turn is None or answer.turn in self._turns.queue_of(answer.leg.start)

    # ---- the prompt is here

    @property
    def may_admit(self) -> bool:
        return True

    def cost(self, start: StartLeg) -> int:
        """What one choice costs its tenant beside the prompt: tokens for which it may keep its slot, as far as that is looked
        at.
        """
        return max(1, min(start.params.max_tokens, self._facts.scheduling.lookahead_tokens))

    def total_tokens(self, start: StartLeg) -> int:
        """Tokens whose KV a choice may come to hold (the last output's is never written)."""
        most = min(start.num_prompt + start.params.max_tokens, self._facts.model.max_model_len)
        return max(len(start.token_ids), most - 1)

    def take_on(self, leg: Leg, pages: SequencePages, shared_tokens: int, *, alone: bool) -> bool:
        """One of its choices will go on in the same pages, if those that have begun can go on beside it."""
        total = self.total_tokens(leg.start)
        room = max(0, pages.room_tokens - leg.num_tokens)
        growing = Growing(total - leg.num_tokens, min(room, total - leg.num_tokens), total - shared_tokens)
        begun = Begun([growing], total + 1)
        if not self._lookahead.enough(begun, alone=alone):
            return False
        self._lookahead.granted[leg.key] = begun
        return True

    def scheduled(self, leg: Leg, sequence: Sequence, start: int, plan_no: int) -> None:
        """It is told of the whole prompt."""

    def prompt_done(self, leg: Leg, sequence: Sequence, tokens: tuple[FirstToken, ...], now: Now) -> None:
        """One choice begins in the prompt's pages; the others wait for slots, as they do after a transfer."""
        pages, slots = self._batch.part(sequence)
        self._lookahead.granted.pop(leg.key, None)
        self._batch.slots.give(slots[1:])
        kv = PromptKv(pages, slots[:1], sequence.root, sequence.hashes, self.next_age(), in_transfer=False)
        if self.kv_here(leg, tokens, len(kv.slots), now):
            self.begin(leg, kv)
        else:
            pages.close(self._batch.pipeline.clock)
            self._batch.slots.give(kv.slots)
            self.end(leg, now)

    def next_age(self) -> int:
        """In the order in which answers begin."""
        self._ages += 1
        return self._ages - 1

    def kv_here(self, leg: Leg, tokens: tuple[FirstToken, ...], num_slots: int, now: Now) -> bool:
        """The prompt's KV, its first tokens and num_slots slots are here. True if some choice goes on."""
        answer = self._answers[leg.key]
        answer.here_unix_s = now.unix_s
        answer.first_tokens = {token.choice: token for token in tokens}
        going_on = answer.going_on()
        beginning = {token.choice for token in going_on[:num_slots]}
        for token in tokens:
            if token.finish or token.choice in beginning:
                self._legs.tell_first(leg, token)
        return bool(going_on)

    def begun(self, leg: Leg) -> bool:
        """Its choices have the prompt's pages."""
        return bool(self._answers[leg.key].sequences)

    def begin(self, leg: Leg, kv: PromptKv) -> None:
        """A sequence for every choice that goes on. As many as there are slots for begin now."""
        answer = self._answers[leg.key]
        going_on = answer.going_on() or list(answer.first_tokens.values())[:1]  # all dropped: one ends at once
        answer.sequences = [self._sequence(leg, kv, number, token) for number, token in enumerate(going_on)]
        beginning = answer.sequences[: len(kv.slots)]
        forks, copies = kv.pages.fork(len(beginning))
        for sequence, pages, slot in zip(beginning, forks, kv.slots, strict=False):
            sequence.pages, sequence.slots = pages, (slot,)
            sequence.shared_tokens = leg.num_tokens if len(beginning) > 1 else leg.cached_tokens
            self._batch.join(sequence)
            sequence.in_transfer = kv.in_transfer
        self._batch.copy_pages(beginning, copies)
        self._batch.slots.give(kv.slots[len(beginning) :])
        self._wait(answer, answer.sequences[len(beginning) :])
        for sequence in beginning:
            if sequence.choice in answer.dropped:
                self._stop(answer, sequence)
            else:
                self._legs.tell_first(leg, answer.first_tokens[sequence.choice])
        if all(sequence.done for sequence in answer.sequences):  # dropped one by one, after the KV was here
            self._legs.abort(leg, "aborted by the router")

    def sequences(self, key: LegKey) -> tuple[Sequence, ...]:
        """Of the choices that go on, once the prompt's KV is here."""
        return tuple(self._answers[key].sequences)

    def let_go(self, leg: Leg) -> None:
        """No rank writes to its pages any more."""
        for sequence in self._answers[leg.key].sequences:
            if not sequence.handed_over:  # then what it holds is being sent, having landed long ago
                sequence.in_transfer = False

    def _sequence(self, leg: Leg, kv: PromptKv, number: int, token: FirstToken) -> Sequence:
        start, page_tokens = leg.start, self._facts.memory.page_tokens
        most = self._facts.model.max_model_len - start.num_prompt
        return Sequence(
            key=leg.key,
            tenant=leg.tenant,
            choices=(token.choice,),
            is_prompt=False,
            arrival=kv.age * MAX_CHOICES + number,
            priority=start.priority,
            tokens=[*start.token_ids, token.token_id],
            num_prompt=start.num_prompt,
            limit=start.num_prompt + min(start.params.max_tokens, most),
            params=start.params,
            root=kv.root,
            salt=start.cache_salt,
            hashes=list(kv.hashes),
            computed=leg.num_tokens,
            shared_tokens=leg.num_tokens // page_tokens * page_tokens,
        )

    # ---- choices that wait for their slots

    def _wait(self, answer: Answer, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        for sequence in sequences:
            sequence.state = State.WAITING
        answer.waiting.extend(sequences)
        leg = answer.leg
        answer.turn = turn = Turn(leg.tenant, lambda now, _: self._begin_one(answer, turn, now), answer)
        cost, priority = self.cost(leg.start), leg.start.priority
        self._turns.queue_of(leg.start).append(leg.tenant, turn, cost, priority, times=len(sequences))

    def _begin_one(self, answer: Answer, turn: Turn, now: Now) -> Begins:
        """The next one computes from the prefix cache on, like one that gave way."""
        sequence = answer.waiting[0]
        releases, due = self._core.pool.kv.releases, self._turns.is_due(turn)
        if not due and (self._turns.slots_for_more <= 0 or answer.held_back_at == releases):
            return Begins.NOT_NOW  # the last ones are for requests that have none
        shared = sequence.shared_tokens if any(s.pages is not None for s in answer.sequences) else 0
        steps = sequence.limit - len(sequence.tokens)
        growing = Growing(steps, shared - len(sequence.tokens), sequence.limit - 1 - sequence.shared_tokens)
        if sequence.too_little_at == releases:
            return Begins.TOO_LITTLE
        begun = Begun([growing], sequence.limit)
        if not due and not self._lookahead.enough(begun, left_large=self._lookahead.large_for_first):
            answer.held_back_at = releases
            return Begins.NOT_NOW
        if due and not self._lookahead.enough(begun):
            sequence.too_little_at = releases
            return Begins.TOO_LITTLE
        if not self._batch.resume(sequence, now.s):
            return Begins.TOO_LITTLE
        self._turns.queue_of(answer.leg.start).take(turn)
        answer.waiting.popleft()
        turn.overtaken = 0
        answer.turn = turn if answer.waiting else None
        leg = answer.leg
        self._legs.tell_first(leg, answer.first_tokens[sequence.choice])
        return Begins.NOW

    def _stop(self, answer: Answer, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            assert answer.turn is not None
            self._turns.queue_of(answer.leg.start).fewer(answer.turn)
            answer.waiting.remove(sequence)
            answer.turn = answer.turn if answer.waiting else None
        self._batch.stop(sequence)

    # ---- steps

    def computed(self, plan: WorkerPlan, report: StepResult, now: Now) -> None:
        for token in report.sampled:
            sequence = self._batch.sequence(token.seq_id)
            if sequence is not None and not sequence.is_prompt:
                self._sampled(self._answers[sequence.key], sequence, token, plan.plan_no, now)

    def _sampled(self, answer: Answer, sequence: Sequence, token: SampledToken, plan_no: int, now: Now) -> None:
        leg = answer.leg
        if sequence.done:
            self._counters.discarded_tokens += 1
            self._legs.late_step(leg, plan_no)
            return
        index = len(sequence.tokens) - sequence.num_prompt
        if token.token_id == NO_TOKEN:
            for each in answer.sequences:
                self._batch.distrust(each)
            self._legs.no_token(leg, index)
            return
        self._counters.decode_tokens += 1
        sequence.tokens.append(token.token_id)
        model = self._facts.model
        tokens_left = model.max_model_len - len(sequence.tokens)
        finish = finish_of(token.token_id, index, leg.start.params, model.eos_token_ids, tokens_left)
        logprobs = (token.logprobs,) if token.logprobs is not None else ()
        self._legs.tell(leg, LegTokens(leg.key, token.choice, index, (token.token_id,), logprobs, finish))
        if finish is not None:
            self._batch.stop(sequence)
            if all(s.done for s in answer.sequences):
                self.end(leg, now)

    def end(self, leg: Leg, now: Now, outcome: Outcome = Outcome.DONE) -> None:
        """Every choice has come to its end here."""
        answer = self._answers[leg.key]
        if answer.here_unix_s and now.unix_s and not leg.ended:
            leg.timeline.append(TimelineEvent("decode", answer.here_unix_s, now.unix_s))
        self._legs.end(leg, outcome)
