"""Chooses what one step computes: `schedule(candidates, state) -> StepPlan`, pure, behind one registry of policies.

                        one step                                    prompts          begins beside others
    sarathi             every decode, then chunks in what is left   in chunks        if those that decode can go on
    vllm                prompts alone, if there are any             whole            likewise
    simple_chunking     a chunk and decodes in turns                in chunks        likewise
    orca                every decode and prompts                    whole            if prompt + max_tokens is free
    faster_transformer  every prompt of a batch, then decodes       whole            never: when all others have ended
    prefill_only        prompts                                     in chunks        (prefill servers)
    decode_only         as sarathi                                  in chunks        (decode servers)

The first five are those of Sarathi-Serve (Agrawal et al., OSDI 2024), of which `sarathi` lets no decode wait for a prompt.
Knows sequences, tokens and the budget; of pages only how many tokens of a sequence have some (`Candidate.most`); nothing of
tensors, peers or time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

from msgspec import Struct

from disagg.scheduler.budget import Budget


class Phase(enum.Enum):
    """What a sequence's next run computes."""

    PREFILL = "prefill"  # tokens that are all known: a prompt, or what a preemption took
    DECODE = "decode"  # the token that was sampled last


class Candidate(Struct, frozen=True):
    """A sequence that could run."""

    seq_id: int
    phase: Phase
    remaining: int  # tokens that are known and not yet computed; the last one's logits are wanted
    most: int = 1 << 31  # tokens that one run may have: for which it has pages; runs of states stop at checkpoints
    start: int = 0  # tokens before those, to which they attend

    def fit(self, tokens: int) -> int:
        """Tokens of it that so many allow."""
        return max(0, min(self.remaining, tokens, self.most))


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


class StepState(Struct, frozen=True):
    """What a policy may know beside its candidates. least_chunk: tokens that prompts get in any case, whatever they cost, or
    they would stand still beside enough decodes. whole: a prompt that the budget does not pay for waits for the next step, but
    for the first one. last: what the step before this one was for.
    """

    budget: Budget
    least_chunk: int = 0
    whole: bool = False
    last: Phase | None = None

    def chunks(self, candidates: Iterable[Candidate], left: Budget | None = None) -> list[StepRun]:
        """Each takes what is left of the budget, in their order, the last one a part (a chunk)."""
        budget = self.budget if left is None else left
        least = self.least_chunk
        runs: list[StepRun] = []
        for candidate in candidates:
            tokens = max(budget.tokens_at(candidate.start), min(least, budget.most_tokens))
            tokens = candidate.fit(tokens)
            if self.whole and runs and tokens < candidate.fit(candidate.remaining):
                break
            if tokens > 0:
                runs.append(StepRun(candidate.seq_id, tokens, sample=tokens == candidate.remaining))
                budget = budget.less(budget.cost_of(candidate.start, tokens), tokens)
                least -= tokens
        return runs

    def decodes(self, candidates: Iterable[Candidate]) -> tuple[list[StepRun], Budget]:
        """A token of each, as far as the tokens of the budget go, and what is left of it. What they cost keeps none of them
        out: a sequence that decodes waits for nobody.
        """
        decodes = _of(candidates, Phase.DECODE)[: self.budget.most_tokens]
        cost = sum(self.budget.cost_of(each.start, 1) for each in decodes)
        return [StepRun(each.seq_id, 1, sample=True) for each in decodes], self.budget.less(cost, len(decodes))


Schedule = Callable[[tuple[Candidate, ...], StepState], StepPlan]


def prefill_only(candidates: tuple[Candidate, ...], state: StepState) -> StepPlan:
    """Chunks of all of them."""
    return StepPlan(tuple(state.chunks(candidates)))


def decodes_first(candidates: tuple[Candidate, ...], state: StepState) -> StepPlan:
    """Every decoding sequence, one token each, up to the budget, in their order. What is left of the budget goes to chunks of
    the others, so that they never stall the decodes (Sarathi-Serve).
    """
    decodes, left = state.decodes(candidates)
    return StepPlan((*decodes, *state.chunks(_of(candidates, Phase.PREFILL), left)))


def prompts_first(candidates: tuple[Candidate, ...], state: StepState) -> StepPlan:
    """Prompts alone, if there are any, and decodes wait for them; else decodes (vLLM before chunked prefill)."""
    prompts = state.chunks(_of(candidates, Phase.PREFILL))
    return StepPlan(tuple(prompts or state.decodes(candidates)[0]))


def in_turns(candidates: tuple[Candidate, ...], state: StepState) -> StepPlan:
    """A step of chunks, then one of decodes, as long as there are both."""
    decodes = state.decodes(candidates)[0]
    chunks = state.chunks(_of(candidates, Phase.PREFILL))
    first, then = (decodes, chunks) if state.last is Phase.PREFILL else (chunks, decodes)
    return StepPlan(tuple(first or then))


def _of(candidates: Iterable[Candidate], phase: Phase) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in candidates if candidate.phase is phase)


class Policy(Struct, frozen=True):
    """schedule: see the module. whole_prompts: a step has room for the longest one. reserves: pages for all that a request
    may come to have are taken when it begins. alone: nothing begins while a batch that began before is under way.
    partly: the first of the prompts for which there are too few pages begins with what is free.
    """

    schedule: Schedule
    whole_prompts: bool = False
    reserves: bool = False
    alone: bool = False
    partly: bool = False


POLICIES: dict[str, Policy] = {
    "sarathi": Policy(decodes_first, partly=True),
    "vllm": Policy(prompts_first, whole_prompts=True),
    "simple_chunking": Policy(in_turns, partly=True),
    "orca": Policy(decodes_first, whole_prompts=True, reserves=True),
    "faster_transformer": Policy(prompts_first, whole_prompts=True, reserves=True, alone=True),
    "prefill_only": Policy(prefill_only),
    "decode_only": Policy(decodes_first),
}


DEFAULT_MIXED = "sarathi"


class Running(Struct, frozen=True):
    """A sequence that could give way. arrival: rises with time; tokens: what would have to be computed again; priority: lower
    is more urgent.
    """

    seq_id: int
    arrival: int
    tokens: int
    priority: int = 0


Victim = Callable[[tuple[Running, ...]], Running]


def latest(running: tuple[Running, ...]) -> Running:
    """Of the least urgent, who came last gives way, so that whoever came first always ends (vLLM's choice)."""
    return max(running, key=lambda each: (each.priority, each.arrival))


def fewest_tokens(running: tuple[Running, ...]) -> Running:
    """Of the least urgent, who loses least gives way; among equals, who came last."""
    return min(running, key=lambda each: (-each.priority, each.tokens, -each.arrival))


PREEMPTION: dict[str, Victim] = {"latest": latest, "fewest_tokens": fewest_tokens}
