"""What a decode server's engine is: KV is received from servers that it dials, and the choices of each prompt go on: here, or,
if the server drains, on another one, which dials this one for their KV. Of a prompt that it has cached but for a few tokens it
computes these itself, where the router says so.
"""

from __future__ import annotations

from disagg.engine.choices import Choices
from disagg.engine.core import Core, Sharing
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.send import Sender
from disagg.engine.legs import Stage
from disagg.engine.moves import Moves
from disagg.engine.pool import answer_fits
from disagg.engine.prompts import Prompts
from disagg.messages.legs import StartLeg
from disagg.server.role import ServerRole
from disagg.types.ids import Role


def decode_engine(facts: EngineFacts) -> Engine:
    step_tokens = facts.scheduling.max_slots + facts.scheduling.chunk_tokens
    core = Core(facts, Sharing("decode", "decode_only", step_tokens, answer_fits, late_plans=True))
    choices = Choices(core)
    receiver, sender = Receiver(core, choices), Sender(core)
    moves = Moves(core, choices, sender)
    prompts = Prompts(core, (choices,), facts.scheduling.local_prefill_tokens)

    def route(start: StartLeg) -> tuple[Stage, ...]:
        if start.moves_attempt:
            return (sender, moves)
        return (prompts, choices, moves) if start.local_prefill else (choices, receiver, moves)

    stages = (prompts, choices, receiver, sender, moves)
    return Engine(core, stages, route=route, dialled=receiver, accepted=sender)


DECODE = ServerRole(
    role=Role.DECODE,
    engine=decode_engine,
    receives=True,
    sends=True,
    small_steps=True,
    hands_over=True,
)
