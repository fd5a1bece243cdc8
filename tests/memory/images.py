"""In which order images are given up."""

from __future__ import annotations

import hashlib

RANK_BYTES = 2


def image_rank(image_hash: bytes, seed: bytes = b"") -> int:
    """What all pages of an image are released with as their prefix length, drawn by the seed: of images that were last used in
    one step, all pages of one go before any of the next.
    """
    return int.from_bytes(hashlib.blake2b(image_hash, key=seed, digest_size=RANK_BYTES).digest(), "little")
