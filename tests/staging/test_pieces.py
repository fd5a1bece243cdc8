"""Pieces: sizes, splitting, and coverage against a set of cells."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from disagg.messages.layout import LayerGroup, StatePart
from disagg.messages.pieces import Piece
from disagg.staging.pieces import (
    Coverage,
    framed_bytes,
    group_payload_bytes,
    group_piece_bytes,
    most_group_pieces,
    split_group_piece,
    split_pieces,
)

Cell = tuple[int, int, int]


def cells(piece: Piece) -> set[Cell]:
    return {
        (piece.group, layer, token)
        for layer in range(piece.layer_start, piece.layer_stop)
        for token in range(piece.token_start, piece.token_stop)
    }


@st.composite
def pieces(draw: st.DrawFn, groups: int = 2, layers: int = 6, tokens: int = 12) -> Piece:
    layer_start, layer_stop = sorted(draw(st.sets(st.integers(0, layers), min_size=2, max_size=2)))
    token_start, token_stop = sorted(draw(st.sets(st.integers(0, tokens), min_size=2, max_size=2)))
    return Piece(draw(st.integers(0, groups - 1)), layer_start, layer_stop, token_start, token_stop)


def test_a_piece_takes_its_valid_rows_padding_to_words_and_a_trailer() -> None:
    piece = Piece(0, 1, 3, 5, 8)
    attention = LayerGroup("full", (0, 1, 2), 4, 4, "bfloat16")
    assert group_payload_bytes(piece, 2, attention) == 2 * 2 * 2 * 3 * 4 * 2
    assert group_piece_bytes(piece, 2, attention) == 2 * 2 * 2 * 3 * 4 * 2 + 8
    assert group_piece_bytes(piece, 1, LayerGroup("odd", (0, 1, 2), 1, 1, "uint8")) == 16 + 8  # 12 bytes of rows
    assert group_piece_bytes(piece, 1, LayerGroup("latent", (0, 1, 2), 1, 1, "uint8", planes=1)) == 8 + 8


def test_a_state_is_as_large_as_its_parts_and_is_cut_by_layers_only() -> None:
    parts = (StatePart("conv", (3,), "bfloat16"), StatePart("ssm", (5,), "float32"))  # 6 and 20 bytes: 16 and 32
    states = LayerGroup.of_states("states", (0, 1, 2, 3, 4), parts)
    checkpoint = Piece(1, 0, 5, 1, 2)
    assert group_piece_bytes(checkpoint, 1, states) == 5 * 48 + 8
    cut = split_group_piece(checkpoint, 1, states, max_bytes=2 * 48 + 8, page_tokens=16)
    assert cut == (Piece(1, 0, 2, 1, 2), Piece(1, 2, 4, 1, 2), Piece(1, 4, 5, 1, 2))
    with pytest.raises(ValueError, match="one token of one layer takes 56 bytes"):
        split_group_piece(checkpoint, 1, states, max_bytes=55, page_tokens=16)


def test_a_group_is_cut_by_the_rows_of_its_widest_slice() -> None:
    group = LayerGroup("full", (0, 1), 4, 2, "float32")
    pieces = split_group_piece(Piece(0, 0, 2, 0, 64), 3, group, max_bytes=40 * 2 * 3 * 8 + 8, page_tokens=16)
    cut = [(p.layer_start, p.layer_stop, p.token_start, p.token_stop) for p in pieces]
    assert cut == [(0, 1, 0, 32), (0, 1, 32, 64), (1, 2, 0, 32), (1, 2, 32, 64)]
    assert all(group_piece_bytes(piece, 3, group) <= 40 * 2 * 3 * 8 + 8 for piece in pieces)


@pytest.mark.parametrize(
    "bad", [(-1, 0, 1, 0, 1), (0, 1, 1, 0, 1), (0, 0, 1, 3, 2), (0, -1, 1, 0, 1), (0, 0, 1, -2, 1)]
)
def test_a_piece_without_layers_or_tokens_does_not_exist(bad: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="is no piece"):
        Piece(*bad)


def test_an_oversized_piece_is_split_not_failed() -> None:
    whole = Piece(0, 0, 5, 0, 100)
    parts = split_pieces(whole, bytes_per_token_layer=10, max_bytes=2008, page_tokens=16)
    assert parts == (Piece(0, 0, 2, 0, 100), Piece(0, 2, 4, 0, 100), Piece(0, 4, 5, 0, 100)), (
        "first come the first layers"
    )
    parts = split_pieces(whole, bytes_per_token_layer=10, max_bytes=808, page_tokens=16)
    assert parts == tuple(
        Piece(0, layer, layer + 1, start, stop) for layer in range(5) for start, stop in ((0, 80), (80, 100))
    )


def test_cuts_fall_on_absolute_page_boundaries_also_after_a_prefix_hit() -> None:
    parts = split_pieces(Piece(0, 0, 1, 21, 70), bytes_per_token_layer=8, max_bytes=8 * 20 + 8, page_tokens=16)
    assert [p.token_stop for p in parts] == [32, 48, 64, 70]


def test_a_page_that_does_not_fit_is_cut_inside() -> None:
    parts = split_pieces(Piece(0, 0, 2, 0, 16), bytes_per_token_layer=8, max_bytes=8 * 5 + 8, page_tokens=16)
    assert [(p.layer_start, p.layers, p.tokens) for p in parts] == [
        (layer, 1, tokens) for layer in (0, 1) for tokens in (5, 5, 5, 1)
    ]
    with pytest.raises(ValueError, match="one token of one layer takes 16 bytes; at most 15 fit"):
        split_pieces(Piece(0, 0, 1, 0, 1), bytes_per_token_layer=8, max_bytes=15)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(pieces(), st.integers(1, 40), st.integers(48, 800), st.sampled_from([1, 3, 4]))
def test_the_parts_of_a_split_are_the_whole_without_overlap_and_fit(
    whole: Piece, bytes_per_token_layer: int, max_bytes: int, page_tokens: int
) -> None:
    parts = split_pieces(whole, bytes_per_token_layer, max_bytes, page_tokens)
    assert sum(len(cells(part)) for part in parts) == len(cells(whole))
    assert set().union(*map(cells, parts)) == cells(whole)
    for part in parts:
        assert framed_bytes(part.layers * part.tokens * bytes_per_token_layer) <= max_bytes


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 9), st.integers(40, 2000), st.sampled_from([1, 3, 16]))
def test_pieces_are_counted_without_being_made(
    positions: int, heads: int, layers: int, max_bytes: int, page_tokens: int
) -> None:
    group = LayerGroup("full", tuple(range(layers)), 8, 3, "uint8")
    try:
        parts = split_group_piece(Piece(0, 0, layers, 0, positions), heads, group, max_bytes, page_tokens)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            most_group_pieces(positions, heads, group, max_bytes, page_tokens)
    else:
        # the last piece of each layer may do without a cut at a page
        assert 0 <= most_group_pieces(positions, heads, group, max_bytes, page_tokens) - len(parts) <= layers


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(pieces(), max_size=12), st.lists(pieces(), min_size=1, max_size=3))
def test_coverage_agrees_with_a_set_of_cells(landed: list[Piece], plan: list[Piece]) -> None:
    coverage, model = Coverage(), set[Cell]()
    for piece in landed:
        assert coverage.add(piece) == bool(cells(piece) - model)
        model |= cells(piece)
        coverage.check_integrity()
        for planned in plan:
            holes = coverage.missing([planned])
            assert sum(len(cells(hole)) for hole in holes) == len(cells(planned) - model), "holes overlap"
            assert set().union(*map(cells, holes)) == cells(planned) - model
        wanted = set().union(*map(cells, plan))
        assert coverage.complete(plan) == (wanted <= model)


def test_pieces_in_any_order_with_repeats_complete_a_plan_once() -> None:
    plan = (Piece(0, 0, 80, 0, 4096), Piece(1, 0, 20, 3000, 4096))
    parts = [p for whole in plan for p in split_pieces(whole, 64, 64 * 80 * 256 + 8, 16)]
    coverage = Coverage()
    for piece in reversed(parts):
        assert not coverage.complete(plan)
        assert coverage.add(piece)
        assert not coverage.add(piece)
    assert coverage.complete(plan)
    assert coverage.missing(plan) == ()


def test_a_huge_plan_costs_corners_not_cells() -> None:
    coverage = Coverage()
    for start in range(0, 1_000_000, 4096):
        coverage.add(Piece(0, 0, 100, start, start + 4096))
    assert coverage.complete([Piece(0, 0, 100, 0, 1_000_000)])
    assert coverage.missing([Piece(0, 99, 101, 500_000, 2_000_000)]) == (
        Piece(0, 99, 100, 1_003_520, 2_000_000),
        Piece(0, 100, 101, 500_000, 2_000_000),
    )
