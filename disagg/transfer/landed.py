"""What may be done with a piece that has arrived, so that unverified bytes never replace verified ones. Pure.

A scatter on a GPU copies and sums in one pass: a piece that does not verify has been written all the same. That is
harmless where nothing had landed, and would be wrong KV where something had: pieces can be written twice, cut in two
ways (`WantPieces`), and whole pages of a transfer that broke off are cached. Hence, of the rows that a piece has:

    none has landed                 scatter it
    all have landed                 nothing is left to do: what is there has been verified
    some have landed                verify it first, and scatter it only if it is right
    some are being scattered now    wait for that

Knows slices of one leg; nothing of bytes, tensors or entries.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import Piece, RankSlice
from disagg.staging.pieces import Coverage
from disagg.types.arithmetic import ceil_div


class Arrival(enum.Enum):
    """What is to be done with rows whose bytes lie in the ring."""

    SCATTER = "scatter"  # nothing of them is in the pool
    NOTHING = "nothing"  # all of them are: they came twice
    VERIFY_FIRST = "verify first"  # some of them are, which bytes that are wrong must not replace
    WAIT = "wait"  # until the scatter of rows that they share has its verdict


class LandedRows:
    """The rows of one leg on one rank: landed, being scattered, or spoiled by a piece that did not verify.

    Two slices of a leg have the same heads of this rank or none in common: its source's and its destination's TP sizes do
    not change.
    """

    def __init__(self) -> None:
        self._landed: dict[int, Coverage] = {}  # by dst_head_start
        self._under_way: list[RankSlice] = []
        self._spoiled: list[RankSlice] = []

    @property
    def under_way(self) -> int:
        """How many scatters were begun and have not ended."""
        return len(self._under_way)

    def judge(self, rows: RankSlice) -> Arrival:
        if any(_overlap(rows, other) for other in self._under_way):
            return Arrival.WAIT
        missing = self._coverage(rows).missing([rows.piece])
        if missing == (rows.piece,):
            return Arrival.SCATTER
        return Arrival.VERIFY_FIRST if missing else Arrival.NOTHING

    def begin(self, rows: RankSlice) -> None:
        """A scatter of these rows has been asked for."""
        assert self.judge(rows) in (Arrival.SCATTER, Arrival.VERIFY_FIRST), f"{rows} must not be scattered now"
        self._under_way.append(rows)

    def end(self, rows: RankSlice, *, ok: bool) -> None:
        """The scatter has its verdict."""
        self._under_way.remove(rows)
        if ok:
            self._coverage(rows).add(rows.piece)
        else:
            self._spoiled.append(rows)

    def pages(self, groups: Sequence[LayerGroup], page_tokens: int) -> dict[int, tuple[int, ...]]:
        """Page numbers, by attention group, into which anything was written."""
        written: dict[int, set[int]] = {}
        for g, group in enumerate(groups):
            spans = [span for landed in self._landed.values() for span in landed.tokens(g)]
            spans += [
                (rows.piece.token_start, rows.piece.token_stop) for rows in self._spoiled if rows.piece.group == g
            ]
            for start, stop in () if group.is_state else spans:
                written.setdefault(g, set()).update(range(start // page_tokens, ceil_div(stop, page_tokens)))
        return {group: tuple(sorted(pages)) for group, pages in written.items()}

    def spoiled_pages(self, groups: Sequence[LayerGroup], page_tokens: int) -> dict[int, tuple[int, ...]]:
        """Page numbers, by attention group, in which bytes that never verified may be left.

        They may be any bytes, such as NaNs, which attention must not read even with weight zero. A page whose rows have all
        landed since is in order. States are written whole before anybody reads them.
        """
        spoiled: dict[int, set[int]] = {}
        for rows in self._spoiled:
            piece = rows.piece
            group = groups[piece.group]
            if group.is_state:
                continue
            for page in range(piece.token_start // page_tokens, ceil_div(piece.token_stop, page_tokens)):
                whole = Piece(piece.group, 0, len(group.layers), page * page_tokens, (page + 1) * page_tokens)
                if not self._coverage(rows).complete([whole]):
                    spoiled.setdefault(piece.group, set()).add(page)
        return {group: tuple(sorted(pages)) for group, pages in spoiled.items()}

    def _coverage(self, rows: RankSlice) -> Coverage:
        return self._landed.setdefault(rows.head_slice.dst_head_start, Coverage())


def _overlap(one: RankSlice, other: RankSlice) -> bool:
    """Some row of this rank is in both."""
    same_heads = one.head_slice.dst_head_start == other.head_slice.dst_head_start
    return same_heads and one.piece.overlaps(other.piece)
