"""Pieces, what the KV of a leg is cut into between two servers, and slices, what of a piece goes from one rank to another.

    Piece        layers x tokens of a layer group                what prefill offers and decode wants
    HeadSlice    adjacent heads, on one rank and on another      follows from the two TP sizes (staging/slices)
    RankSlice    a leg's piece, and the heads of it that go      what one ring entry holds, to the engines, to both workers
                 from one incarnation's rank to another's        and to the checksum (staging/identity)

Knows numbers and names; nothing of bytes, pages or rings.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.types.ids import LegKey


class Piece(Struct, frozen=True, array_like=True, order=True):
    """A rectangle of a layer group: layers [layer_start, layer_stop) of its list, token positions [token_start, token_stop).

    In a state group a leg's states stand where tokens do: 0 is the state after its last token, 1 the last checkpoint.
    """

    group: int
    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int

    def __post_init__(self) -> None:
        if self.group < 0 or not 0 <= self.layer_start < self.layer_stop or not 0 <= self.token_start < self.token_stop:
            raise ValueError(f"{self} is no piece: it needs a group, and at least one layer and one token")

    @property
    def layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def tokens(self) -> int:
        return self.token_stop - self.token_start

    def overlaps(self, other: Piece) -> bool:
        """Some layer of some token is in both."""
        return (
            self.group == other.group
            and max(self.layer_start, other.layer_start) < min(self.layer_stop, other.layer_stop)
            and max(self.token_start, other.token_start) < min(self.token_stop, other.token_stop)
        )


class HeadSlice(Struct, frozen=True, array_like=True):
    """`heads` adjacent heads that one rank sends to another, numbered within each rank's own heads.

    There is at most one between two ranks of two TP sizes: who knows the ranks knows the heads.
    """

    src_rank: int
    dst_rank: int
    src_head_start: int
    dst_head_start: int
    heads: int


class RankSlice(Struct, frozen=True, array_like=True):
    """Of one piece of one leg, the heads that one rank sends to another.

    Each side makes it from what it believes itself. The two may differ, and then what lands does not verify.
    """

    key: LegKey
    piece: Piece
    head_slice: HeadSlice
    src_incarnation: str
    dst_incarnation: str
