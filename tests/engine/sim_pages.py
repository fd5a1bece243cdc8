"""The KV pages of one simulated rank: cells instead of bytes, each of which says what it is of.

A cell is (token id, position), or all tokens that a state has seen. A large page belongs to one layer group at a time: what
another group had in it is lost with the first write.
"""

from __future__ import annotations

import itertools

from disagg.engine.facts import EngineFacts
from disagg.messages.layout import GroupPages, LayerGroup
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.slices import heads_per_rank

Cell = tuple[int, ...]
Cells = dict[tuple[int, int, int], Cell]  # (layer, head of a slice, position) -> cell
SPOILED: Cell = (-1, -1)  # bytes that never verified


class SimPages:
    """name: of the rank, for messages."""

    def __init__(self, facts: EngineFacts, name: str) -> None:
        self.groups = facts.model.groups
        self._name = name
        self._tp = facts.tp
        self._per_large = facts.memory.layout.per_large
        self._page_tokens = facts.memory.page_tokens
        self._pages: dict[tuple[int, int], Cells] = {}  # (group, page) -> (row, layer, own head) -> cell
        self._large_group: dict[int, int] = {}  # who wrote last into a large page

    def _heads(self, group: LayerGroup) -> int:
        return heads_per_rank(self._tp, group.kv_heads)

    def _page(self, g: int, page: int) -> Cells:
        """A page to write to."""
        large = page // self._per_large[g]
        if self._large_group.get(large) != g:
            for other, per_large in enumerate(self._per_large):
                for lost in range(large * per_large, (large + 1) * per_large):
                    self._pages.pop((other, lost), None)
            self._large_group[large] = g
        return self._pages.setdefault((g, page), {})

    # ---- what a model does

    def row(self, g: int, page: int, offset: int) -> Cell:
        """What all layers and heads hold of one position."""
        cells = self._pages.get((g, page), {})
        layers, heads = range(len(self.groups[g].layers)), range(self._heads(self.groups[g]))
        found = {cells.get((offset, layer, head)) for layer, head in itertools.product(layers, heads)}
        where = f"{self._name} group {g} page {page}"
        assert len(found) == 1, f"{where}: cells differ: {found}"
        cell = found.pop()
        assert cell is not None, f"{where}: row {offset} was never written, or was lost"
        return cell

    def write_row(self, g: int, page: int, offset: int, cell: Cell) -> None:
        layers, heads = range(len(self.groups[g].layers)), range(self._heads(self.groups[g]))
        cells = self._page(g, page)
        for layer, head in itertools.product(layers, heads):
            cells[offset, layer, head] = cell

    def copy(self, g: int, source: int, destination: int) -> None:
        cells = dict(self._pages.get((g, source), {}))
        page = self._page(g, destination)
        page.clear()
        page.update(cells)

    # ---- what a transfer does

    def gather(self, piece: Piece, part: HeadSlice, pages: tuple[int, ...]) -> Cells:
        """As it is now. pages: that hold the piece."""
        rows = self.groups[piece.group].rows_per_page(self._page_tokens)
        first = piece.token_start // rows
        return {
            (layer, head, position): self._pages[piece.group, pages[position // rows - first]][
                position % rows, layer, part.src_head_start + head
            ]
            for layer, head, position in _cells_of(piece, part)
        }

    def scatter(self, piece: Piece, part: HeadSlice, table: GroupPages, cells: Cells | None) -> None:
        """None: bytes that did not verify."""
        rows = self.groups[piece.group].rows_per_page(self._page_tokens)
        for layer, head, position in _cells_of(piece, part):
            page = self._page(piece.group, table.pages[position // rows - table.first])
            cell = SPOILED if cells is None else cells[layer, head, position]
            page[position % rows, layer, part.dst_head_start + head] = cell

    def blank(self, g: int, page: int) -> None:
        self._page(g, page).clear()

    def put(self, g: int, page: int, cells: Cells) -> None:
        """All of a page."""
        self.blank(g, page)
        self._page(g, page).update(cells)

    def contents(self, g: int, page: int) -> Cells:
        return dict(self._pages.get((g, page), {}))


def _cells_of(piece: Piece, part: HeadSlice) -> itertools.product[tuple[int, int, int]]:
    layers, tokens = range(piece.layer_start, piece.layer_stop), range(piece.token_start, piece.token_stop)
    return itertools.product(layers, range(part.heads), tokens)
