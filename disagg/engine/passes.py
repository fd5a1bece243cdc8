"""Passes of an engine, and whether prompts may begin in them, where that is negotiated (scheduler/prefill_delayer).

    begin ──> what waits begins, a prompt could begin? ──> may_prefill, the same for all of the pass
    end   ──> what came of it is counted, and whether another pass follows at once

A pass is a plan that can be sent: one of at most two in flight (with pipeline stages, of as many), which is the overlap that
delays rely on (what decodes goes on while prompts wait). While all are in flight there is no pass, and no prompt begins.
When prompts wait and nothing at all is computed, passes follow each other at once, so that nobody waits for steps that never
come: such a wait has as many passes as any, and takes as long as it takes to decide.

Ranks that one process schedules (engine/data_parallel) ask before they begin: `wanted` says whether a prompt could begin,
without that it does, and `state` what the rank says then.

Knows the batch, pages and the delayer; nothing of legs or peers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from disagg.engine.batch import Batch
from disagg.engine.instructions import Counters
from disagg.engine.now import Now
from disagg.memory.kv_memory import KvMemory
from disagg.messages.plan import WorkerPlan
from disagg.scheduler.prefill_delayer import LargestBatch, Outcome, PrefillDelayer, RankState, SinglePass

WINDOW_PASSES = 512  # that count for the largest batch of prompts

logger = logging.getLogger(__name__)


class Passes:
    """See the module. Without a delayer prompts run whenever they can."""

    def __init__(self, delayer: PrefillDelayer | None, batch: Batch, memory: KvMemory, counters: Counters) -> None:
        self._delayer = delayer
        self._batch = batch
        self._memory = memory
        self._counters = counters
        self._largest = LargestBatch(WINDOW_PASSES)
        self._pass: SinglePass | None = None  # that is under way
        self._pass_no = 0
        self._held_up = False  # the delay that lasts has held up a prompt of this rank
        self._now = Now(0.0)
        self._asks = False
        self._wanted = False

    @property
    def delays(self) -> bool:
        """Prompts may have to wait."""
        return self._delayer is not None

    @property
    def delayed(self) -> bool:
        """Some wait."""
        return self._delayer is not None and self._delayer.delay is not None

    def begin(self, now: Now) -> None:
        self._now = now
        if self._delayer is not None:
            self._pass = SinglePass(self._delayer, self.state, now.s) if self._batch.pipeline.has_room else None

    def wanted(self, begin: Callable[[], None]) -> bool:
        """Whether a prompt could begin now. begin: lets all begin that can, which is none of the prompts."""
        self._asks, self._wanted = True, False
        begin()
        self._asks = False
        return self._wanted

    def may_prefill(self) -> bool:
        """A prompt could begin; one that has begun goes on. Not to be asked if none could: others would wait for it."""
        if self._asks:
            self._wanted = True
            return False
        if self._delayer is None:
            return True
        return self._pass is not None and self._pass.may_prefill()

    def drop(self) -> None:
        """Nobody had anything to do: there was no pass."""
        self._pass = None

    def end(self, plan: WorkerPlan | None, *, computing: bool) -> bool:
        """What the pass sent. computing: here or on another rank, steps are under way. Whether another pass follows at once."""
        one, self._pass = self._pass, None
        if self._delayer is None or one is None:
            return plan is not None
        outcome = one.finalize(executed=plan is not None and self._has_prompts(plan))
        self._largest.add(self._pass_no, 0 if plan is None else self._prompts_begun(plan))
        self._pass_no += 1
        self._held_up |= one.asked and not outcome.verdict.allow
        self._record(outcome)
        return plan is not None or not (outcome.verdict.allow or computing)

    def dump(self) -> dict[str, object]:
        """For a person."""
        if self._delayer is None or self._delayer.delay is None:
            return {}
        return {"prompts wait for": f"{self._delayer.delay.passes} passes"}

    def state(self, prefillable: bool) -> RankState:
        """What this rank says of itself. Only where there is a delayer."""
        assert self._delayer is not None
        allocator = self._memory.allocator
        return self._delayer.limits.state(
            prefillable=prefillable,
            usage=allocator.used_large / allocator.num_large,
            running=sum(not sequence.is_prompt for sequence in self._batch.running.values()),
            largest_batch=self._largest.at(self._pass_no),
        )

    def _has_prompts(self, plan: WorkerPlan) -> bool:
        return any(self._is_prompt(run.seq_id) for run in plan.runs)

    def _prompts_begun(self, plan: WorkerPlan) -> int:
        return sum(self._is_prompt(start.seq_id) for start in plan.starts)

    def _is_prompt(self, seq_id: int) -> bool:
        sequence = self._batch.sequence(seq_id)
        return sequence is not None and sequence.is_prompt

    def _record(self, outcome: Outcome) -> None:
        verdict, delay = outcome.verdict, outcome.delay
        key = (verdict.estimate.value, verdict.allow, verdict.reason.value, outcome.executed)
        self._counters.prefill_delays[key] += 1
        if verdict.allow and self._held_up:
            assert delay is not None
            self._counters.observe("prefill_delay_passes", delay.passes)
            self._counters.observe("prefill_delay_seconds", self._now.s - delay.since_s)
            self._held_up = False
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "prompts of pass %d: %s, allow %s (%s), executed %s, after %d passes; rows %s",
                self._pass_no - 1,
                verdict.estimate.value,
                verdict.allow,
                verdict.reason.value,
                outcome.executed,
                0 if delay is None else delay.passes,
                [
                    (int(state.prefillable), int(state.force), state.running, state.largest_batch)
                    for state in outcome.states
                ],
            )
