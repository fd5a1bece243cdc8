"""How rectangles of KV are cut into pieces that fit: a gather buffer here, and a segment of a ring there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import Piece
from disagg.staging.pieces import most_group_pieces, split_group_piece
from disagg.transfer.session import MAX_PIECES, NUM_STATES, Cut
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ProtocolError


class Fitting:
    """Looks at the widest rank slice of a piece: the others fit then, too."""

    def __init__(self, groups: Sequence[LayerGroup], page_tokens: int, chunk_tokens: int, gather_bytes: int) -> None:
        self._groups = groups
        self._page_tokens = page_tokens
        self._chunk_tokens = chunk_tokens
        self._gather_bytes = gather_bytes

    def cut(self, widest_of: Callable[[int], int], segment_bytes: int | None) -> Cut:
        """widest_of: heads of the widest rank slice, by layer group. segment_bytes: of the ring, if there is one."""
        entry_bytes = min(self._gather_bytes, segment_bytes or self._gather_bytes)

        def split(whole: Piece) -> tuple[Piece, ...]:
            group, widest = self._groups[whole.group], widest_of(whole.group)
            return split_group_piece(whole, widest, group, entry_bytes, self._page_tokens)

        return split

    def check(self, widest_of: Callable[[int], int], segment_bytes: int) -> None:
        """Raises ProtocolError for segments that not even one token of one layer fits: no server has such."""
        try:
            self._most_pieces(widest_of, segment_bytes, 1)
        except ValueError as error:
            raise ProtocolError(f"segments of {segment_bytes} bytes: {error}") from error

    def too_many(self, widest_of: Callable[[int], int], segment_bytes: int, tokens: int) -> str:
        """Why a prompt of so many tokens cannot be sent into segments that fit a token: it would be too many pieces. Or
        nothing."""
        pieces = self._most_pieces(widest_of, segment_bytes, tokens)
        if pieces <= MAX_PIECES:
            return ""
        return (
            f"{tokens} tokens would be sent in {pieces} pieces, as transfer.gather_bytes = {self._gather_bytes} here and "
            f"transfer.segment_bytes = {segment_bytes} there cut them; at most {MAX_PIECES} may be"
        )

    def _most_pieces(self, widest_of: Callable[[int], int], segment_bytes: int, tokens: int) -> int:
        entry_bytes = min(segment_bytes, self._gather_bytes)
        return most_pieces(self._groups, widest_of, tokens, self._chunk_tokens, entry_bytes, self._page_tokens)


def most_pieces(
    groups: Sequence[LayerGroup],
    widest_of: Callable[[int], int],
    tokens: int,
    chunk_tokens: int,
    entry_bytes: int,
    page_tokens: int,
) -> int:
    """What a prompt is cut into at most. Raises ValueError if not even one token of one layer fits an entry."""
    chunk = min(chunk_tokens, tokens)

    def most(group: int, positions: int) -> int:
        return most_group_pieces(positions, widest_of(group), groups[group], entry_bytes, page_tokens)

    def of_group(g: int) -> int:
        """What the cache holds is cut as a whole, the rest chunk by chunk. All of it either way; and where they meet, and
        where both end, a piece more of each layer."""
        if groups[g].is_state:
            return most(g, NUM_STATES)
        whole, of_chunk = most(g, tokens), most(g, chunk)
        computed = ceil_div(tokens, chunk) * of_chunk
        return min(whole + computed, max(whole, computed) + len(groups[g].layers) + of_chunk)

    return sum(map(of_group, range(len(groups))))


def uncut(whole: Piece) -> tuple[Piece, ...]:
    """Before there is a link nothing is offered, so nothing needs to fit."""
    return (whole,)
