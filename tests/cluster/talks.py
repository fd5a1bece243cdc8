"""Conversations of several turns, held with a cluster as clients hold them, and what transformers says to each turn.

A cache salt tells apart those that say the same: nothing is shared between salts, so one computation of the reference serves
for any number of conversations.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.cluster import reference
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE

REQUEST_S = 120.0
Talk = tuple[reference.Answer, ...]  # turn by turn; each prompt is all that was said before, and something new


@dataclass(frozen=True)
class Heard:
    """One turn. first_s: until its first token; silence_s: the longest time between two of its tokens, and to its end."""

    token_ids: list[int]
    cached_tokens: int
    first_s: float
    silence_s: float


def make_talks(model: Path, seed: object, prompts: Sequence[int], turns: int, outputs: int, said: int) -> list[Talk]:
    """One talk for each length of a first prompt; in later turns `said` tokens are new."""
    draw = random.Random(str(seed))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(count))

    asked = [tokens(count) for count in prompts]
    by_turn = []
    for _ in range(turns):
        by_turn.append(reference.compute(model, asked, outputs))
        asked = [(*answer.prompt, *answer.outputs, *tokens(said)) for answer in by_turn[-1]]
    return list(zip(*by_turn, strict=True))


def hold(cluster: Cluster, talks: Sequence[Talk], salt: str) -> list[Heard]:
    """All talks at once, turn by turn. Whatever is not what transformers says, or no answer at all, is an error."""
    with ThreadPoolExecutor(len(talks)) as pool:
        held = [pool.submit(lambda talk: [ask(cluster, turn, salt) for turn in talk], talk) for talk in talks]
        return [heard for each in held for heard in each.result()]


def ask(cluster: Cluster, turn: reference.Answer, salt: str) -> Heard:
    """One turn, as a stream."""
    token_ids: list[int] = []
    heard_s = [time.monotonic()]
    cached = -1
    fields = {"max_tokens": len(turn.outputs), "ignore_eos": True, "cache_salt": salt}
    usage = {"stream_options": {"include_usage": True}}
    for event in cluster.stream(list(turn.prompt), REQUEST_S, **fields, **usage):
        new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        if new:
            token_ids += new
            heard_s.append(time.monotonic())
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    heard_s.append(time.monotonic())
    assert len(token_ids) == len(turn.outputs), f"{len(token_ids)} of {len(turn.outputs)} tokens came"
    _, _, wrong = reference.compare(turn, token_ids)
    assert not wrong, f"{salt}, after {len(turn.prompt)} tokens: {wrong}"
    gaps = [b - a for a, b in pairwise(heard_s)]
    return Heard(token_ids, cached, gaps[0], max(gaps[1:]))
