"""The identity of a slice, as the seed of its checksum.

What lands must be described by (request, attempt, number of the prefix, both incarnations, layer group, layer range, token
range, ranks), or it is dropped. Both sides compute the seed from what they themselves believe, so a stale slice of an earlier
request in the same place of the ring does not verify. Heads are not named: the ranks say which they are. Knows strings and
numbers only.
"""

from __future__ import annotations

import hashlib

from disagg.messages.pieces import RankSlice

_PERSON = b"disagg.piece.v1"  # changes when the encoding does


def identity_seed(slice: RankSlice) -> int:
    """64 bits, unsigned: blake2b of the fields, strings by length and UTF-8, numbers as 8 little-endian bytes."""
    key, piece, ranks = slice.key, slice.piece, slice.head_slice
    digest = hashlib.blake2b(digest_size=8, person=_PERSON)
    for text in (key.request_id, slice.src_incarnation, slice.dst_incarnation):
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    area = (piece.group, piece.layer_start, piece.layer_stop, piece.token_start, piece.token_stop)
    for number in (key.attempt, key.prefix_no, *area, ranks.src_rank, ranks.dst_rank):
        digest.update(number.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
