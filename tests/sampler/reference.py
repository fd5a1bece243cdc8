"""One row at a time, in plain Python and numpy: what the sampler must choose. Shares no code with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from disagg.types.sampling import SamplingParams

M64 = (1 << 64) - 1
M32 = (1 << 32) - 1


def splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


def noise_bits(seed: int, choice: int, index: int, token_id: int) -> int:
    z = splitmix64(seed)
    z = splitmix64((z + (choice + 1) * 0xD1B54A32D192ED03) & M64)
    z = splitmix64((z + (index + 1) * 0x8CB92BA72F3D8DD7) & M64)
    return mix32(((mix32(token_id) ^ (z >> 32)) * ((z & M32) | 1)) & M32) & 0x7FFFFFFF


def gumbel(seed: int, choice: int, index: int, token_id: int) -> float:
    return -math.log(-math.log1p(-(noise_bits(seed, choice, index, token_id) + 0.5) / 2**31))


def edited(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int], eos: Sequence[int]
) -> np.ndarray:
    x = row.astype(np.float32).copy()
    if len(outputs) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            x[token] = -np.inf
    for token, bias in dict(params.logit_bias).items():
        x[token] += np.float32(bias)
    counts = Counter(outputs)
    repetition = np.float32(params.repetition_penalty)
    for token in sorted({*prompt, *outputs}):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        x[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        if counts[token]:
            x[token] -= np.float32(params.presence_penalty)
    return x


def survivors(x: np.ndarray, params: SamplingParams) -> tuple[list[int], dict[int, float]]:
    """Ids left by the filters, most likely first, and every id's scaled logit."""
    top = float(x.max())
    order = sorted(range(len(x)), key=lambda i: (-float(x[i]), i))
    scaled = {i: (float(x[i]) - top) / params.temperature for i in order}
    if params.min_p > 0.0:
        order = [i for i in order if scaled[i] >= math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        total = math.fsum(math.exp(scaled[i]) for i in order)
        kept, mass = [], 0.0
        for i in order:
            if mass >= params.top_p * total:
                break
            kept.append(i)
            mass += math.exp(scaled[i])
        order = kept
    return order, scaled


def choose(
    row: np.ndarray,
    params: SamplingParams,
    choice: int,
    prompt: Sequence[int],
    outputs: Sequence[int],
    eos: Sequence[int],
) -> int:
    x = edited(row, params, prompt, outputs, eos)
    if params.temperature == 0.0:
        return min(range(len(x)), key=lambda i: (-float(x[i]), i))
    order, scaled = survivors(x, params)
    return max(order, key=lambda i: scaled[i] + gumbel(params.seed, choice, len(outputs), i))
