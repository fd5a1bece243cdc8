"""Legs for an engine alone, and what its instructions say of one."""

from __future__ import annotations

from disagg.engine.instructions import Instruction
from disagg.messages.legs import LegEnd, StartLeg
from disagg.messages.plan import Run
from disagg.types.sampling import SamplingParams
from tests.engine.lone_engine import (
    P_REF,
    plans,
    said,
    start,
    to_router,
)

LONG = SamplingParams(max_tokens=40)
EIGHT = SamplingParams(max_tokens=8)


def leg_for_decode(name: str, tokens: int, first_token: int = 1, choices: int = 1, max_tokens: int = 8) -> StartLeg:
    return start(name, tokens, choices, SamplingParams(max_tokens=max_tokens), P_REF, first_token)


def runs_of(out: list[Instruction]) -> list[Run]:
    return [run for plan in plans(out) for run in plan.runs]


def end_of(out: list[Instruction]) -> LegEnd:
    (end,) = (message for message in to_router(out) if isinstance(message, LegEnd))
    return end


def indices(out: list[Instruction], name: str, choice: int = 0) -> list[int]:
    """Output indices that were told of one choice, in the order of telling."""
    return [index for request, of, index, _ in said(out) if (request, of) == (name, choice)]
