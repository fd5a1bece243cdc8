"""Ranks in lockstep whose prompts wait for each other, simulated: what it gains, and that everybody is answered."""

from __future__ import annotations

import pytest

from bench.prefill_delay import Result, simulate, some_requests


def simulated(ranks: int, passes: int, policy: str = "vllm", chunk_tokens: int = 8192) -> Result:
    requests = some_requests(ranks, 200, 0.0, seed=3)
    result = simulate(requests, policy, passes, chunk_tokens)
    assert result.tokens == sum(request.outputs for own in requests for request in own)
    return result


@pytest.mark.parametrize("policy", ["vllm", "sarathi"])
def test_four_ranks_answer_more_when_their_prompts_run_together(policy: str) -> None:
    without, delayed = simulated(4, 0, policy), simulated(4, 30, policy)
    assert delayed.tokens / delayed.seconds > 1.2 * without.tokens / without.seconds
    assert delayed.with_prompts < without.with_prompts / 2


def test_one_rank_gains_and_loses_little() -> None:
    without, delayed = simulated(1, 0), simulated(1, 30)
    assert delayed.tokens / delayed.seconds == pytest.approx(without.tokens / without.seconds, rel=0.1)
