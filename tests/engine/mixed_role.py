"""A role of both phases and of links, as a composition: a leg's peer says which of the phases it passes through here."""

from __future__ import annotations

from disagg.engine.choices import Choices
from disagg.engine.core import Core, Sharing
from disagg.engine.engine import Engine
from disagg.engine.facts import EngineFacts
from disagg.engine.handoff.receive import Receiver
from disagg.engine.handoff.send import Sender
from disagg.engine.legs import Stage
from disagg.engine.pool import answer_fits
from disagg.engine.prompts import Prompts
from disagg.messages.legs import PeerRef, StartLeg

NOBODY = PeerRef("", "", "")  # the peer of a leg that stays here from its first token to its last


def mixed_engine(facts: EngineFacts) -> Engine:
    """Peers whose names begin with D decode what is computed here; those with P compute what goes on here."""
    step_tokens = facts.scheduling.max_slots + facts.scheduling.chunk_tokens
    core = Core(facts, Sharing("mixed", facts.scheduling.policy or "decode_only", step_tokens, answer_fits))
    choices, sender = Choices(core), Sender(core)
    prompts, receiver = Prompts(core, (sender, choices)), Receiver(core, choices)
    routes: dict[str, tuple[Stage, ...]] = {"": (prompts, choices), "D": (prompts, sender), "P": (choices, receiver)}

    def route(start: StartLeg) -> tuple[Stage, ...]:
        return routes[start.peer.name[:1]]

    stages = (prompts, choices, sender, receiver)
    return Engine(core, stages, route=route, dialled=receiver, accepted=sender)
