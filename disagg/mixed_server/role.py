"""What a mixed server's engine is: prompts are computed, and their choices go on in the same pages, under any policy."""

from __future__ import annotations

from collections.abc import Callable

from disagg.config.steps import mixed_step_tokens
from disagg.engine.choices import Choices
from disagg.engine.core import Core, Sharing
from disagg.engine.data_parallel import DataParallel
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.engine.pool import answer_fits
from disagg.engine.prompts import Prompts
from disagg.scheduler.policies import DEFAULT_MIXED, POLICIES
from disagg.scheduler.prefill_delayer import Gather, Together
from disagg.server.role import ServerRole
from disagg.types.ids import Role
from disagg.types.sampling import MAX_CHOICES


def mixed_engine(facts: EngineFacts, gather: Gather | None = None) -> Engine:
    """gather: see engine.core.Core."""
    scheduling = facts.scheduling
    policy = scheduling.policy or DEFAULT_MIXED
    step_tokens = mixed_step_tokens(
        scheduling.chunk_tokens,
        scheduling.max_running,
        facts.memory.page_tokens,
        whole_prompts=POLICIES[policy].whole_prompts,
    )
    core = Core(facts, Sharing("mixed", policy, step_tokens, answer_fits), gather)
    choices = Choices(core)
    return Engine(core, (Prompts(core, (choices,)), choices))


def mixed_engines(
    facts: EngineFacts, ranks: int, lockstep: bool, clock: Callable[[], float] | None = None
) -> DataParallel:
    """lockstep: they share the experts of the model, so that all take part in each step. clock: see DataParallel."""
    together = Together(ranks) if lockstep else None
    return DataParallel(tuple(mixed_engine(facts, together) for _ in range(ranks)), together, clock)


MIXED = ServerRole(
    role=Role.MIXED,
    engine=mixed_engine,
    data_parallel=mixed_engines,
    receives=False,
    sends=False,
    small_steps=True,
    # As in a prefill server: the first tokens of all choices of a request are sampled in one step.
    slots_beside=MAX_CHOICES - 1,
)
