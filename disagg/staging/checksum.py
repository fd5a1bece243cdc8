"""The checksum of a piece: NH over 64-bit words, with keys that only this piece has.

    sum over words i of ((lo_i + key_lo_i) mod 2^32) * ((hi_i + key_hi_i) mod 2^32)   mod 2^64

where lo and hi are the halves of word i (little-endian) and key_hi_i:key_lo_i = splitmix64(seed, i). The sum has no
order, so a kernel may reduce its parts in any order; yet words that change places, and sign flips that cancel out,
change it. The seed is the piece's identity with the payload's length mixed in. It finds accidents, not forgeries: an
error passes with a chance of about 2^-32.

This is the CPU implementation; the GPU kernels compute the same sum in their copying pass.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # the three constants of splitmix64
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

# Words per pass: all scratch of one pass fits in a level-2 cache, and numpy's cost per call is small beside its work.
_CHUNK_WORDS = 16384
_STEPS = np.arange(1, _CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
_LOW_HALF = np.uint64(0xFFFFFFFF)


def splitmix64(seed: int, counter: int) -> int:
    """Number `counter` of the sequence that begins after `seed`; 64 bits, unsigned."""
    z = (seed + (counter + 1) * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def key_seed(seed: int, payload_nbytes: int) -> int:
    """Where the key sequence of a piece begins: its identity, and how many bytes of it are rows."""
    return splitmix64(seed ^ payload_nbytes, 0)


def checksum(framed: torch.Tensor, payload_nbytes: int, seed: int) -> int:
    """64 bits, unsigned. `framed`: [words * 8] uint8, contiguous, 8-byte aligned: the payload and zero bytes
    up to a whole word. `seed`: the piece's identity (`identity_seed`)."""
    words: npt.NDArray[np.uint64] = framed.cpu().numpy().view(np.uint64)
    start = key_seed(seed, payload_nbytes)
    keys = np.empty(min(len(words), _CHUNK_WORDS), dtype=np.uint64)
    shifted = np.empty_like(keys)
    total = 0
    for first in range(0, len(words), _CHUNK_WORDS):
        part = words[first : first + _CHUNK_WORDS]
        key, tmp = keys[: len(part)], shifted[: len(part)]
        np.add(_STEPS[: len(part)], np.uint64((start + first * GOLDEN) & MASK), out=key)
        np.right_shift(key, np.uint64(30), out=tmp)
        np.bitwise_xor(key, tmp, out=key)
        np.multiply(key, np.uint64(MIX_1), out=key)
        np.right_shift(key, np.uint64(27), out=tmp)
        np.bitwise_xor(key, tmp, out=key)
        np.multiply(key, np.uint64(MIX_2), out=key)
        np.right_shift(key, np.uint64(31), out=tmp)
        np.bitwise_xor(key, tmp, out=key)
        halves = key.view(np.uint32)
        np.add(halves, part.view(np.uint32), out=halves)  # both sums of each word, each mod 2^32
        np.right_shift(key, np.uint64(32), out=tmp)
        np.bitwise_and(key, _LOW_HALF, out=key)
        total += int(np.einsum("i,i->", key, tmp))
    return total & MASK
