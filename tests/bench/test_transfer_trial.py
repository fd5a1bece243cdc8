"""The plan of a measured transfer covers everything once, and where the time went adds up."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from disagg.bench.transfer import trial
from disagg.bench.transfer.trial import Asked, Interval, Means, Pair, Placement, Rings, Shape, place, trial_of
from disagg.staging.ring import RingEntry
from disagg.staging.slices import SliceError

PAGE_TOKENS = 4


@given(
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    src_tp=st.sampled_from([1, 2, 4]),
    dst_tp=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(1, 60),
    lead_pages=st.integers(0, 3),
    piece_bytes=st.integers(512, 8192),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_every_row_of_every_decode_rank_is_written_once_into_an_entry_of_its_own(
    layers: int, kv_heads: int, src_tp: int, dst_tp: int, num_tokens: int, lead_pages: int, piece_bytes: int
) -> None:
    shape, pair = Shape(layers, kv_heads, 8, "float32"), Pair(src_tp, dst_tp)
    rings = Rings.of(4 * (piece_bytes + trial.SEGMENT_ALIGN), piece_bytes)
    lead = lead_pages * PAGE_TOKENS
    pages = tuple(range(100, 100 + lead_pages + -(-num_tokens // PAGE_TOKENS)))
    try:
        planned = trial_of(
            Means(shape, pair, PAGE_TOKENS, piece_bytes, rings), Asked(1, num_tokens, pages, pages[::-1], 50, lead)
        )
    except SliceError:
        assume(False)
        return
    sends = {send.entry_id: send for of_rank in planned.sends for send in of_rank}
    assert len(sends) == planned.pieces + sum(planned.leads) and min(sends) == 50
    for of_rank, count in zip(planned.sends, planned.leads, strict=True):
        assert all(
            send.slice.piece.token_stop <= lead and send.after_plan < planned.plan_no for send in of_rank[:count]
        )
        assert all(
            send.slice.piece.token_start >= lead and send.after_plan == planned.plan_no for send in of_rank[count:]
        )
    for rank, expects in enumerate(planned.expects):
        heads = shape.on_rank(dst_tp).kv_heads
        rows: dict[tuple[int, int, int], int] = {}
        stop = 0
        for expect, ring_byte in zip(expects, planned.expect_ring_bytes[rank], strict=True):
            send = sends[expect.entry_id]
            piece, part = expect.slice.piece, expect.slice.head_slice
            assert (send.slice, send.arena_offset, send.nbytes) == (expect.slice, expect.arena_offset, expect.nbytes)
            first = piece.token_start // PAGE_TOKENS
            assert send.pages == pages[first : first + len(send.pages)]
            assert len(send.pages) == -(-piece.token_stop // PAGE_TOKENS) - first
            entry = RingEntry(ring_byte, expect.nbytes)
            assert entry.ring_byte >= stop and entry.locate(rings.capacity_bytes)[1] == expect.arena_offset
            assert expect.arena_offset % rings.segment_bytes + expect.nbytes <= rings.segment_bytes
            stop = entry.stop
            for layer in range(piece.layer_start, piece.layer_stop):
                for token in range(piece.token_start, piece.token_stop):
                    for head in range(part.dst_head_start, part.dst_head_start + part.heads):
                        rows[layer, token, head] = rows.get((layer, token, head), 0) + 1
        assert len(rows) == layers * (lead + num_tokens) * heads and set(rows.values()) == {1}
    assert planned.payload_bytes == sum(
        len(of_rank) and layers * num_tokens * 2 * shape.on_rank(dst_tp).kv_heads * 8 * 4 for of_rank in planned.expects
    )
    assert planned.largest_piece_bytes <= piece_bytes


@given(
    spans=st.lists(st.tuples(st.sampled_from(trial.STAGES), st.integers(-3, 20), st.integers(0, 8))),
    start=st.integers(0, 5),
    length=st.integers(1, 15),
)
@settings(derandomize=True, deadline=None)
def test_time_is_counted_once_per_stage_and_what_is_left_is_waiting(
    spans: list[tuple[str, int, int]], start: int, length: int
) -> None:
    intervals = [Interval(stage, float(first), float(first + taken)) for stage, first, taken in spans]
    spent = trial.spent(float(start), float(start + length), intervals)
    seconds = range(start, start + length)

    def busy(stages: tuple[str, ...]) -> int:
        return sum(any(s in stages and first <= at < first + taken for s, first, taken in spans) for at in seconds)

    assert spent.total_s == length
    assert (spent.gather_s, spent.wire_s, spent.scatter_s) == tuple(busy((stage,)) for stage in trial.STAGES)
    assert spent.waiting_s == length - busy(trial.STAGES)


def test_the_median_trial_is_one_that_took_place() -> None:
    trials = [trial.Spent(total, 0.0, 0.0, 0.0, 0.0) for total in (3.0, 1.0, 2.0, 9.0)]
    assert trial.median_of(trials) is trials[2]


@pytest.mark.parametrize(
    ("pair", "gpus", "placement"),
    [
        (Pair(1, 2), 0, Placement(("cpu",), ("cpu", "cpu"), shared=False)),
        (Pair(1, 1), 1, Placement(("cuda:0",), ("cuda:0",), shared=True)),
        (Pair(1, 1), 2, Placement(("cuda:0",), ("cuda:1",), shared=False)),
        (Pair(2, 1), 2, Placement(("cuda:0", "cuda:0"), ("cuda:1",), shared=True)),
        (Pair(2, 2), 2, Placement(("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), shared=True)),
        (Pair(1, 2), 4, Placement(("cuda:0",), ("cuda:1", "cuda:2"), shared=False)),
        (Pair(4, 2), 4, Placement(("cuda:0", "cuda:1") * 2, ("cuda:2", "cuda:3"), shared=True)),
    ],
)
def test_the_sides_share_no_gpu_where_there_are_two(pair: Pair, gpus: int, placement: Placement) -> None:
    assert place(pair, gpus) == placement


def test_plain_copies_move_what_the_ranks_owe_each_other() -> None:
    shape, pair = Shape(2, 8, 16, "bfloat16"), Pair(2, 1)
    routes = trial.routes(shape, pair, place(pair, 4), 10)
    assert routes == tuple((f"cuda:{rank}", "cuda:2", 5 * shape.bytes_per_token) for rank in range(2))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "8x8",
            "0x8x128xbfloat16",
            "32x8x128xint4",
            "axbxcxfloat32",
            "\u0663x8x128xfloat32",
            "\xb2x8x128xfloat32",
        ),
        *("1025x8x128xfloat32", "32x1025x128xfloat32", "32x8x4097xfloat32", f"32x8x{'9' * 9999}xfloat32"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape|dtype"):
        Shape.parse(text)


def test_shapes_and_pairs_are_read_as_they_are_written() -> None:
    assert Shape.parse("32x8x128xbfloat16") == trial.SHAPES["llama-3.1-8b"]
    assert trial.SHAPES["llama-3.1-8b"].bytes_per_token == 128 << 10
    assert str(Pair.parse("2:1")) == "2:1"
    for text in ("", "2", "2:", "0:1", "a:b"):
        with pytest.raises(ValueError, match="pair"):
            Pair.parse(text)


def test_a_piece_that_no_arena_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit an arena"):
        Rings.of(1 << 20, 1 << 20)


@pytest.mark.parametrize("text", ["1:0", "65:1", "1:65", f"1:{'9' * 9999}", "\u0661:1", "1"])
def test_pairs_of_sizes_that_nobody_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="each 1 to 64"):
        Pair.parse(text)
