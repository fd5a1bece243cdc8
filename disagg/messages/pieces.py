"""Pieces: what the KV of a leg is cut into between two servers. Knows numbers only; nothing of bytes, pages or rings."""

from __future__ import annotations

from msgspec import Struct


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
