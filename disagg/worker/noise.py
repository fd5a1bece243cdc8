"""Counter-based noise for Gumbel-max sampling. Knows keys and token ids; nothing of logits, batches or state.

The noise of one token is a pure function of (seed, choice, output index, token id), so a choice draws the same tokens
alone or in any batch, on any server, after a replay, and on any shard of the vocabulary.

Two levels, because 64-bit multiplies over [rows, vocabulary] are slow where tensors live:

    seed, choice, output index --splitmix64, on the host, once a row--> 64 bits = (k0, k1)
    token id --32-bit mix, once a token--> m;   bits = mix((m ^ k0) * (k1 | 1))      in wrapping int32

Quality: 31 bits a draw, so v lies in [2^-32, 1 - 2^-32] and Gumbel noise reaches 22.2; a token whose probability is
below about 1e-9 of the most likely one's is never or too seldom drawn. 63 bits of key: rows repeat by the birthday
bound only. Within a row draws are nearly without replacement from 2^32 (the map from token id to bits is a bijection
before the top bit is dropped), which no test at vocabulary sizes can see. The mixer is Wellons' lowbias32 (bias 0.17).
Not cryptographic.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 31
_LOW = (1 << _BITS) - 1


def row_keys(seeds: NDArray[np.uint64], choices: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int32]:
    """One key per row. seeds, choices, output indices: [R]; returns [R, 2], its second column odd."""
    z = _splitmix64(seeds)
    z = _splitmix64(z + (choices.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03))
    z = _splitmix64(z + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x8CB92BA72F3D8DD7))
    halves = np.stack([z >> np.uint64(32), (z & np.uint64(0xFFFFFFFF)) | np.uint64(1)], axis=-1)
    return halves.astype(np.uint32).view(np.int32)


def token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """31 random bits per token. keys: [R, 2] int32; token_ids: [C] for all rows, or [R, C]; returns [R, C] int32."""
    mixed = _mix32_(token_ids.to(torch.int32, copy=True))
    bits = (mixed ^ keys[:, :1]).mul_(keys[:, 1:])
    return _mix32_(bits).bitwise_and_(_LOW)


def exponentials(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise per token, [R, C] float64; minus its logarithm is Gumbel noise. Arguments as `token_bits`."""
    v = (token_bits(keys, token_ids).to(torch.float64) + 0.5) * 2.0**-_BITS
    return v.neg_().log1p_().neg_()


def approximate_exponentials(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`exponentials` in float32: within 1e-6 of it, relatively, wherever it is below 8; never 0, never infinite."""
    v = token_bits(keys, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-_BITS).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_()


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix32_(x: Tensor) -> Tensor:
    """lowbias32, in place. int32's >> copies the sign, so each shift is masked to be a logical one."""
    shifted = x >> 16  # one buffer for all three: fresh memory costs more than the arithmetic
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF)
    return x
