"""What the stages of one engine share: its memory, its batch, its legs, and the instructions that they give."""

from __future__ import annotations

from msgspec import Struct

from disagg.engine.batch import Batch
from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import Counters, Instruction
from disagg.engine.legs import Legs
from disagg.engine.lookahead import Lookahead
from disagg.engine.passes import Passes
from disagg.engine.pool import EnginePool, Fits
from disagg.engine.steps import PlanPipeline
from disagg.engine.tiers import Tiers
from disagg.engine.turns import Turns
from disagg.scheduler.late_plans import LatePlans
from disagg.scheduler.pipeline import Bubbles
from disagg.scheduler.prefill_delayer import Gather, Limits, PrefillDelayer


class Sharing(Struct, frozen=True):
    """What a role decides of it."""

    role: str  # for messages to people
    policy: str  # a key of scheduler.policies.POLICIES
    step_tokens: int  # most tokens of one step
    fits_alone: Fits  # of any sequence that this role may have
    common_late_tokens: int = 0  # see memory.kv_memory.KvMemory
    late_plans: bool = False  # plans are held for whom is about to join


class Core:
    """See the module."""

    def __init__(self, facts: EngineFacts, sharing: Sharing, gather: Gather | None = None) -> None:
        """gather: from the data-parallel ranks of which this engine is one, where they step together: prompts may wait."""
        self.facts = facts
        self.role = sharing.role
        self.counters = Counters()
        self.bubbles = Bubbles(facts.pp)
        self.out: list[Instruction] = []
        self.pool = EnginePool(
            facts.model,
            facts.memory,
            facts.scheduling,
            facts.pp,
            self.counters,
            sharing.fits_alone,
            sharing.common_late_tokens,
        )
        kv = self.pool.kv
        self.tiers: Tiers | None = None
        if facts.offload is not None:
            self.tiers = Tiers(facts.offload, facts.tp, kv, self.counters, self.out, lambda: self.batch.pipeline.clock)
        self.batch = Batch(
            facts.scheduling,
            facts.memory.checkpoint_tokens,
            kv,
            PlanPipeline(facts.ranks, facts.pp, facts.sampling_rank),
            self.counters,
            sharing.policy,
            sharing.step_tokens,
            self.tiers,
        )
        self.legs = Legs(self.counters, self.batch.pipeline, self.out)
        self.turns = Turns(facts.scheduling, self.batch, self.legs)
        self.late = LatePlans() if sharing.late_plans else None
        self.lookahead = Lookahead(facts.scheduling.lookahead_tokens, kv, self.batch)
        delayer, scheduling = None, facts.scheduling
        if gather is not None and scheduling.prefill_delay_passes:
            limits = Limits(scheduling.prefill_delay_passes, scheduling.max_running, scheduling.prefill_delay_low_usage)
            delayer = PrefillDelayer(limits, gather)
        self.passes = Passes(delayer, self.batch, kv, self.counters)
