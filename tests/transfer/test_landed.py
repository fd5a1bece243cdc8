"""What may be done with a piece that arrived, against a model that keeps every cell."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.transfer.landed import Arrival, LandedRows
from disagg.types.ids import LegKey

PAGE_TOKENS = 3
KEY = LegKey("r-1", 0, 0)
GROUPS = (
    LayerGroup("full", (0, 1, 2), 2, 4, "float32"),
    LayerGroup("window", (3,), 2, 4, "float32", GroupKind.WINDOW, window=5),
    LayerGroup.of_states("state", (4,), (StatePart("ssm", (4,), "float32"),)),
)
TOKENS = 8
Cell = tuple[int, int, int, int]  # group, layer, token, head


@st.composite
def slices(draw: st.DrawFn) -> RankSlice:
    group = draw(st.integers(0, len(GROUPS) - 1))
    layers, positions = len(GROUPS[group].layers), 2 if GROUPS[group].is_state else TOKENS
    first_layer, first = draw(st.integers(0, layers - 1)), draw(st.integers(0, positions - 1))
    piece = Piece(
        group,
        first_layer,
        draw(st.integers(first_layer + 1, layers)),
        first,
        draw(st.integers(first + 1, positions)),
    )
    head = 0 if GROUPS[group].is_state else draw(st.integers(0, 1))
    return RankSlice(KEY, piece, HeadSlice(0, 0, 0, head, 1), "P", "D")


def cells(rows: RankSlice) -> set[Cell]:
    piece = rows.piece
    return {
        (piece.group, layer, token, rows.head_slice.dst_head_start)
        for layer in range(piece.layer_start, piece.layer_stop)
        for token in range(piece.token_start, piece.token_stop)
    }


class LandedMachine(RuleBasedStateMachine):
    """verified: cells whose bytes are right; wrong: cells into which a piece was written that did not verify."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = LandedRows()
        self.under_way: list[tuple[RankSlice, bool]] = []
        self.verified: set[Cell] = set()
        self.wrong: set[Cell] = set()

    @rule(rows=slices(), right=st.booleans())
    def arrives(self, rows: RankSlice, right: bool) -> None:
        arrival = self.rows.judge(rows)
        if any(cells(rows) & cells(other) for other, _ in self.under_way):
            assert arrival is Arrival.WAIT
            return
        landed = cells(rows) & self.verified
        if landed == cells(rows):
            assert arrival is Arrival.NOTHING
        elif landed:
            assert arrival is Arrival.VERIFY_FIRST
        else:
            assert arrival is Arrival.SCATTER
        if arrival is Arrival.SCATTER or (arrival is Arrival.VERIFY_FIRST and right):
            self.rows.begin(rows)
            self.under_way.append((rows, right))
            self.wrong = self.wrong - cells(rows) if right else self.wrong | cells(rows)

    @rule(pick=st.integers(0))
    def ends(self, pick: int) -> None:
        if self.under_way:
            rows, right = self.under_way.pop(pick % len(self.under_way))
            self.rows.end(rows, ok=right)
            if right:
                self.verified |= cells(rows)
        assert self.rows.under_way == len(self.under_way)

    @rule()
    def goes_back(self) -> None:
        if self.under_way:
            return
        assert not self.verified & self.wrong, "verified rows were replaced by others"
        spoiled = self.rows.spoiled_pages(GROUPS, PAGE_TOKENS)
        for group, _, token, _ in self.wrong:
            if not GROUPS[group].is_state:
                assert token // PAGE_TOKENS in spoiled[group]
        for group, pages in spoiled.items():
            for page in pages:
                whole = {
                    (group, layer, token, head)
                    for layer in range(len(GROUPS[group].layers))
                    for token in range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                    for head in range(2)
                }
                assert not whole <= self.verified, "a page that landed whole may be in a cache"


def test_whatever_lands_in_whichever_order_is_told_from_what_is_spoiled() -> None:
    campaign = settings(derandomize=True, deadline=None, database=None, max_examples=150, stateful_step_count=30)
    run_state_machine_as_test(LandedMachine, settings=campaign)
