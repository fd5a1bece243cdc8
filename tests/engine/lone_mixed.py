"""A mixed engine alone."""

from __future__ import annotations

from msgspec.structs import replace

from disagg.engine.facts import EngineFacts
from disagg.messages.legs import StartLeg
from disagg.messages.plan import WorkerPlan
from disagg.mixed_server.role import mixed_engine
from tests.engine.lone_engine import PARAMS, Lone, facts, start

WIDE = {"max_model_len": 4096, "max_slots": 16 + 63, "max_running": 16}


class Mixed(Lone):
    """A mixed engine."""

    dials = False

    def __init__(self, facts: EngineFacts) -> None:
        super().__init__()
        self.engine = mixed_engine(facts)

    def decoding(self, *names: str, outputs: int = 50) -> list[StartLeg]:
        """Requests that have their first tokens."""
        legs = [leg(name, 3, outputs, first_token=1000 * at) for at, name in enumerate(names, 1)]
        for each in legs:
            self.start(each)
        while any(s.is_prompt for s in self.engine.core.batch.running.values()):
            self.compute()
        return legs

    def names(self, plan: WorkerPlan) -> dict[str, int]:
        """Tokens that a plan computes, by request."""
        sequences = {run.seq_id: self.engine.core.batch.sequence(run.seq_id) for run in plan.runs}
        return {
            sequence.key.request_id: run.num_tokens
            for run in plan.runs
            if (sequence := sequences[run.seq_id]) is not None
        }


def leg(name: str, tokens: int, outputs: int, first_token: int = 1, choices: int = 1) -> StartLeg:
    params = replace(PARAMS, max_tokens=outputs, n=choices)
    return start(name, tokens, choices, params, first_token=first_token)


def one_token_pages(num_large: int, chunk_tokens: int, **changes: object) -> EngineFacts:
    """Of pages that hold 4 tokens."""
    return facts(num_large=num_large, chunk_tokens=chunk_tokens, **{**WIDE, **changes})
