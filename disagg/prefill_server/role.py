"""What a prefill server's engine is: prompts are computed, and their KV is sent to whoever dials."""

from __future__ import annotations

from disagg.engine.core import Core, Sharing
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.send import Sender
from disagg.engine.pool import prompt_fits
from disagg.engine.prompts import Prompts
from disagg.memory.spans import PLANS_IN_FLIGHT
from disagg.server.role import ServerRole
from disagg.types.ids import Role
from disagg.types.sampling import MAX_CHOICES


def prefill_engine(facts: EngineFacts) -> Engine:
    chunk_tokens = facts.scheduling.chunk_tokens
    core = Core(facts, Sharing("prefill", "prefill_only", chunk_tokens, prompt_fits, PLANS_IN_FLIGHT * chunk_tokens))
    sender = Sender(core)
    return Engine(core, (Prompts(core, (sender,)), sender), accepted=sender)


PREFILL = ServerRole(
    role=Role.PREFILL,
    engine=prefill_engine,
    receives=False,
    sends=True,
    small_steps=False,
    # The first tokens of all choices of a request are sampled in one step: one with most of them fits beside any others.
    slots_beside=MAX_CHOICES - 1,
)
