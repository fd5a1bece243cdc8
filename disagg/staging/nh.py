"""NH over bytes in host memory: the sum that `staging/checksum` describes, of what is neither a piece nor a tensor too.

Knows bytes and seeds; nothing of what they are of.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # the three constants of splitmix64
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WORD_BYTES = 8

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
    """Where the key sequence begins: an identity, and how many bytes are summed."""
    return splitmix64(seed ^ payload_nbytes, 0)


def sum_words(words: npt.NDArray[np.uint64], payload_nbytes: int, seed: int) -> int:
    """64 bits, unsigned. words: [n], the payload and zero bytes up to a whole word. seed: an identity."""
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


def sum_bytes(data: bytes | bytearray | memoryview, seed: int) -> int:
    """The same of any bytes, wherever they lie; the last word is filled up with zeros."""
    view = memoryview(data)
    whole = len(view) // WORD_BYTES * WORD_BYTES
    words = np.frombuffer(view[:whole], dtype=np.uint8)
    if words.ctypes.data % WORD_BYTES:
        words = words.copy()
    rest = bytes(view[whole:])
    if not rest:
        return sum_words(words.view(np.uint64), len(view), seed)
    padded = np.frombuffer(rest.ljust(WORD_BYTES, b"\0"), dtype=np.uint64)
    return sum_words(np.concatenate((words.view(np.uint64), padded)), len(view), seed)
