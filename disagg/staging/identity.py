"""The identity of a piece, as the seed of its checksum.

What lands must be described by (request, attempt, trunk, both incarnations, layer group, layer range, token range,
ranks), or it is dropped. Both sides compute the seed from what they themselves believe, so a stale piece of an earlier
request in the same place of the ring does not verify. Knows strings and numbers only.
"""

from __future__ import annotations

import hashlib

_PERSON = b"disagg.piece.v1"  # changes when the encoding does


def identity_seed(
    *,
    request_id: str,
    attempt: int,
    trunk: int,
    src_incarnation: str,
    dst_incarnation: str,
    group: int,
    layer_start: int,
    layer_stop: int,
    token_start: int,
    token_stop: int,
    src_rank: int,
    dst_rank: int,
) -> int:
    """64 bits, unsigned: blake2b of the fields, strings by length and UTF-8, numbers as 8 little-endian bytes."""
    digest = hashlib.blake2b(digest_size=8, person=_PERSON)
    for text in (request_id, src_incarnation, dst_incarnation):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    for number in (attempt, trunk, group, layer_start, layer_stop, token_start, token_stop, src_rank, dst_rank):
        digest.update(number.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
