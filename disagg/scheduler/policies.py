"""Chooses what one step computes: `schedule(state, budget) -> StepPlan`, pure, behind one registry of policies.

Knows sequences, tokens and the budget; nothing of pages (admission has seen to them), tensors, peers or time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from msgspec import Struct


class Phase(enum.Enum):
    PREFILL = "prefill"  # tokens that are all known: a prompt, or what a preemption took
    DECODE = "decode"  # the token that was sampled last


class Candidate(Struct, frozen=True):
    """A sequence that could run."""

    seq_id: int
    phase: Phase
    remaining: int  # tokens that are known and not yet computed; the last one's logits are wanted
    most: int = 1 << 31  # tokens that one run may have: of models with states, runs stop at checkpoints

    def fit(self, budget_tokens: int) -> int:
        """Tokens of it that the budget allows."""
        return min(self.remaining, budget_tokens, self.most)


class StepRun(Struct, frozen=True):
    """Compute num_tokens of a sequence. sample: its last token's logits are wanted."""

    seq_id: int
    num_tokens: int
    sample: bool


class StepPlan(Struct, frozen=True):
    """The scheduler's decision for one step. Empty: nothing to do."""

    runs: tuple[StepRun, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


Policy = Callable[[tuple[Candidate, ...], int], StepPlan]


def prefill_only(candidates: tuple[Candidate, ...], budget_tokens: int) -> StepPlan:
    """First come, first served: each prompt takes what is left of the token budget, the last one a part (a chunk)."""
    return StepPlan(tuple(_chunks(candidates, budget_tokens)))


def decode_only(candidates: tuple[Candidate, ...], budget_tokens: int) -> StepPlan:
    """Every decoding sequence, one token each, up to the budget, in order of arrival. What is left of the budget goes to
    those that compute again what a preemption took from them, so that they never stall the others (Sarathi-Serve).
    """
    decodes = [StepRun(c.seq_id, 1, sample=True) for c in candidates if c.phase is Phase.DECODE][:budget_tokens]
    recomputed = tuple(c for c in candidates if c.phase is Phase.PREFILL)
    return StepPlan((*decodes, *_chunks(recomputed, budget_tokens - len(decodes))))


def _chunks(candidates: tuple[Candidate, ...], budget_tokens: int) -> list[StepRun]:
    runs = []
    for candidate in candidates:
        tokens = candidate.fit(budget_tokens)
        if tokens > 0:
            runs.append(StepRun(candidate.seq_id, tokens, sample=tokens == candidate.remaining))
            budget_tokens -= tokens
    return runs


class Running(Struct, frozen=True):
    """A sequence that could give way. arrival: rises with time; tokens: what would have to be computed again."""

    seq_id: int
    arrival: int
    tokens: int


Victim = Callable[[tuple[Running, ...]], Running]


def latest(running: tuple[Running, ...]) -> Running:
    """Who came last gives way, so that whoever came first always ends (vLLM's choice)."""
    return max(running, key=lambda each: each.arrival)


def fewest_tokens(running: tuple[Running, ...]) -> Running:
    """Who loses least gives way; among equals, who came last."""
    return min(running, key=lambda each: (each.tokens, -each.arrival))


POLICIES: dict[str, Policy] = {"prefill_only": prefill_only, "decode_only": decode_only}
PREEMPTION: dict[str, Victim] = {"latest": latest, "fewest_tokens": fewest_tokens}
