"""What a decode server's engine is: KV is received from servers that it dials, and the choices of each prompt go on."""

from __future__ import annotations

from disagg.engine.choices import Choices
from disagg.engine.core import Core, Sharing
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.receive import Receiver
from disagg.engine.pool import answer_fits
from disagg.server.role import ServerRole
from disagg.types.ids import Role


def decode_engine(facts: EngineFacts) -> Engine:
    step_tokens = facts.scheduling.max_slots + facts.scheduling.chunk_tokens
    core = Core(facts, Sharing("decode", "decode_only", step_tokens, answer_fits))
    choices = Choices(core)
    receiver = Receiver(core, choices)
    return Engine(core, (choices, receiver), dialled=receiver)


DECODE = ServerRole(
    role=Role.DECODE,
    engine=decode_engine,
    dials=True,
    receives=True,
    sends=False,
    small_steps=True,
)
