"""Chooses what one step computes: `schedule(state, budget) -> StepPlan`, pure, behind one registry of policies.

Knows sequences, tokens and the budget; nothing of pages (admission has seen to them), tensors, peers or time.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class Candidate(Struct, frozen=True):
    """A sequence that could run. remaining: prompt tokens still to be scheduled; 0 for one that decodes."""

    seq_id: int
    remaining: int


class StepRun(Struct, frozen=True):
    """Compute num_tokens of a sequence. sample: its last token's logits are wanted."""

    seq_id: int
    num_tokens: int
    sample: bool


class StepPlan(Struct, frozen=True):
    """The scheduler's decision for one step; prefill runs come first. Empty: nothing to do."""

    runs: tuple[StepRun, ...]

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)


Policy = Callable[[tuple[Candidate, ...], int], StepPlan]


def prefill_only(candidates: tuple[Candidate, ...], budget_tokens: int) -> StepPlan:
    """First come, first served: each prompt takes what is left of the token budget, the last one a part (a chunk)."""
    runs: list[StepRun] = []
    left = budget_tokens
    for candidate in candidates:
        if left == 0:
            break
        if candidate.remaining == 0:
            continue
        tokens = min(candidate.remaining, left)
        runs.append(StepRun(candidate.seq_id, tokens, sample=tokens == candidate.remaining))
        left -= tokens
    return StepPlan(tuple(runs))


def decode_only(candidates: tuple[Candidate, ...], budget_tokens: int) -> StepPlan:
    """Every running sequence, one token each, up to the budget, in order of arrival."""
    running = [c for c in candidates if c.remaining == 0]
    return StepPlan(tuple(StepRun(c.seq_id, 1, sample=True) for c in running[:budget_tokens]))


POLICIES: dict[str, Policy] = {"prefill_only": prefill_only, "decode_only": decode_only}
