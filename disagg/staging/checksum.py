"""The checksum of a piece: NH over 64-bit words, with keys that only this piece has.

    sum over words i of ((lo_i + key_lo_i) mod 2^32) * ((hi_i + key_hi_i) mod 2^32)   mod 2^64

where lo and hi are the halves of word i (little-endian) and key_hi_i:key_lo_i = splitmix64(seed, i). The sum has no
order, so a kernel may reduce its parts in any order; yet words that change places, and sign flips that cancel out,
change it. The seed is the piece's identity with the payload's length mixed in. It finds accidents, not forgeries: an
error passes with a chance of about 2^-32.

The CPU's implementation is `staging/nh`; the GPU kernels compute the same sum in their copying pass.
"""

from __future__ import annotations

import numpy as np
import torch

from disagg.staging.nh import sum_words


def checksum(framed: torch.Tensor, payload_nbytes: int, seed: int) -> int:
    """64 bits, unsigned. `framed`: [words * 8] uint8, contiguous, 8-byte aligned: the payload and zero bytes
    up to a whole word. `seed`: the piece's identity (`identity_seed`)."""
    return sum_words(framed.cpu().numpy().view(np.uint64), payload_nbytes, seed)
