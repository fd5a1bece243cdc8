"""The model of the simulated world: its layer groups, and what it says of a context."""

from __future__ import annotations

import hashlib
import random

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.types.sampling import SamplingParams

VOCAB, EOS = 24, 0
FULL = LayerGroup("full", (0, 1), 2, 1, "float32")
STATE = LayerGroup.of_states("state", (2,), (StatePart("conv", (2,), "float32"),))


def window(tokens: int) -> LayerGroup:
    return LayerGroup(f"window-{tokens}", (3, 4, 5), 2, 1, "float32", GroupKind.WINDOW, window=tokens)


def models(rng: random.Random) -> tuple[LayerGroup, ...]:
    """The layer groups of some model."""
    windowed = window(rng.choice((1, 2, 5, 13)))
    kinds = ((FULL,), (FULL,), (FULL, windowed), (windowed,), (FULL, STATE), (STATE,), (FULL, windowed, STATE))
    return rng.choice(kinds)


def next_token(token_ids: tuple[int, ...], choice: int, seed: int) -> int:
    """The model and the sampler in one: a function of everything that was attended over."""
    digest = hashlib.blake2b(repr((token_ids, choice, seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(prompt: tuple[int, ...], choice: int, params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """What a choice must come to, by the definition of its limits."""
    outputs: list[int] = []
    while True:
        outputs.append(next_token((*prompt, *outputs), choice, params.seed))
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        if len(outputs) > params.min_tokens and outputs[-1] in stops:
            return tuple(outputs)
        if len(outputs) >= params.max_tokens or len(prompt) + len(outputs) >= max_model_len:
            return tuple(outputs)
