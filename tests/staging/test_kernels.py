"""The kernels against staging/copy: byte for byte, trailer and padding included, and nothing else touched.

Where they run: kernel_pools. What their checksums catch: test_kernel_checksums.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import copy
from disagg.staging.kernels import SUMS, VERDICT_OK, VERDICT_WRONG, Launcher, launch_of, stretch_block_words
from disagg.staging.pieces import TRAILER_BYTES
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.slices import head_slices, heads_per_rank
from tests.staging.kernel_pools import DEVICE, ONE_HEAD, SEED, SPARE, Kernels, Pool, expected, long, move

pytestmark = pytest.mark.usefixtures("one_thread")

PIECES = ((0, 37), (16, 32), (3, 5), (15, 33), (36, 37), (5, 16))


@pytest.mark.parametrize(
    ("dtype_bytes", "head_dim", "src_page", "dst_page"),
    [long(2, 64, 16, 16), (2, 64, 4, 16), long(4, 32, 16, 4), long(1, 128, 16, 8), long(2, 24, 16, 1)],
)
def test_attention_pages_of_every_dtype_move_as_torch_moves_them(
    dtype_bytes: int, head_dim: int, src_page: int, dst_page: int
) -> None:
    """bf16 and fp16, fp32, fp8, rows that are no power of two; token ranges that cut pages."""
    src = Pool(PageShape(2, 2, src_page, head_dim, dtype_bytes), 37, seed=1)
    dst = Pool(PageShape(2, 2, dst_page, head_dim, dtype_bytes), 37, seed=2)
    for start, stop in PIECES:
        move(src, dst, Piece(0, 0, 2, start, stop), HeadSlice(0, 0, 0, 0, 2))
    move(src, dst, Piece(0, 1, 2, 7, 30), HeadSlice(0, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("row_bytes", "slack", "offset"),
    [
        (16, 0, 8),  # staging at 8 bytes, not at 16
        (16, 8, 0),  # pages at 8 bytes
        long(24, 0, 0),
        long(8, 0, 0),
        long(12, 0, 0),
        (20, 4, 8),
        long(6, 0, 0),
        (10, 2, 8),
        long(3, 0, 0),
        long(1, 0, 0),
        (5, 3, 8),
        (16, 3, 0),  # rows at 16 bytes in pages at 1
    ],
)
def test_rows_of_any_size_at_any_alignment_move(row_bytes: int, slack: int, offset: int) -> None:
    src = Pool(PageShape(2, 3, 4, row_bytes, 1), 23, seed=3, slack=slack)
    dst = Pool(PageShape(2, 2, 8, row_bytes, 1), 23, seed=4, slack=slack)
    for start, stop in ((0, 23), (3, 6), (7, 8), (4, 16)):
        move(src, dst, Piece(0, 0, 2, start, stop), HeadSlice(0, 0, 1, 0, 2), offset)
    move(src, dst, Piece(0, 1, 2, 2, 21), HeadSlice(0, 0, 2, 1, 1), offset)


def groups() -> dict[str, LayerGroup]:
    return {
        "full": LayerGroup("full", (0, 1), 2, 64, "bfloat16"),
        "window": LayerGroup("window", (1, 3), 2, 96, "float16", GroupKind.WINDOW, window=9),
        "latent": LayerGroup("latent", (0, 1, 2), 1, 72, "bfloat16", planes=1),
        "states": LayerGroup.of_states(
            "states", (0, 2), (StatePart("conv", (3, 5), "bfloat16"), StatePart("ssm", (4, 150), "float32"))
        ),
    }


@pytest.mark.parametrize("name", ["full", long("window"), "latent", "states"])
def test_every_kind_of_layer_group_moves(name: str) -> None:
    group = groups()[name]
    positions = 2 if group.is_state else 40
    src, dst = (Pool(PageShape.of(group, page), positions, seed=page, slack=32) for page in (8, 16))
    layers = len(group.layers)
    for start, stop in ((0, positions), (1, 2), (positions - 1, positions)):
        move(src, dst, Piece(0, 0, layers, start, stop), HeadSlice(0, 0, 0, 0, group.kv_heads))
    move(src, dst, Piece(0, layers - 1, layers, 0, 1), HeadSlice(0, 0, 0, 0, group.kv_heads))


def test_a_state_longer_than_a_tile_moves() -> None:
    state = LayerGroup.of_states("states", (0, 1), (StatePart("ssm", (3, 7, 300), "float32"),))
    src, dst = Pool(PageShape.of(state, 16), 2, seed=1), Pool(PageShape.of(state, 16), 2, seed=2)
    move(src, dst, Piece(0, 0, 2, 0, 2), HeadSlice(0, 0, 0, 0, 1))


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (1, 4), (4, 1), (4, 2), long(8, 2), long(2, 8)])
def test_the_slices_of_every_tp_pair_move(src_tp: int, dst_tp: int) -> None:
    kv_heads, tokens = 4, 21
    src, dst = (
        [
            Pool(PageShape(2, heads_per_rank(tp, kv_heads), page, 32, 2), tokens, seed=tp * 10 + rank)
            for rank in range(tp)
        ]
        for tp, page in ((src_tp, 4), (dst_tp, 8))
    )
    for s in head_slices(src_tp, dst_tp, kv_heads):
        piece = Piece(0, 0, 2, 2, 19)
        move(src[s.src_rank], dst[s.dst_rank], piece, s)


@pytest.mark.parametrize("number", range(20))
def test_pieces_drawn_at_random_move(number: int) -> None:
    rng = random.Random(number)
    page_tokens = [rng.choice([1, 2, 4, 16]) for _ in range(2)]
    layers, planes, heads, dim, size = (
        rng.randint(1, 4),
        rng.randint(1, 2),
        rng.randint(1, 3),
        rng.randint(1, 40),
        rng.choice([1, 2, 4]),
    )
    src, dst = (
        Pool(
            PageShape(layers, heads + more, page, dim, size, planes),
            50,
            seed=number,
            slack=rng.choice([0, 0, 16, 4, 1]),
        )
        for more, page in zip((rng.randint(0, 2), rng.randint(0, 2)), page_tokens, strict=True)
    )
    layer_start, start = rng.randrange(layers), rng.randrange(50)
    piece = Piece(0, layer_start, rng.randint(layer_start + 1, layers), start, rng.randint(start + 1, 50))
    more = [rng.randint(0, pool.shape.kv_heads - heads) for pool in (src, dst)]
    move(src, dst, piece, HeadSlice(0, 0, *more, heads), offset=rng.choice([0, 0, 8]))


def test_bytes_that_are_no_number_survive() -> None:
    src, dst = (Pool(PageShape(1, 1, 4, 16, 4), 8, seed=seed) for seed in (1, 2))
    for there in (src.bytes, src.bytes_there):
        there.view(torch.int32).fill_(0x7F800001)  # a signalling NaN, which float arithmetic would make quiet
    move(src, dst, Piece(0, 0, 1, 0, 8), HeadSlice(0, 0, 0, 0, 1))


def test_launches_follow_each_other_whatever_their_verdicts() -> None:
    pool, part, kernels = Pool(PageShape(1, 2, 4, 16, 1), 16, seed=7), HeadSlice(0, 0, 0, 0, 2), Kernels()
    for number in range(6):
        piece = Piece(0, 0, 1, 0, 5 + number)
        staged = kernels.gather(pool, piece, part, seed=number)[:-SPARE]
        assert kernels.scatter(staged, pool, piece, part, seed=number)
        assert not kernels.scatter(staged, pool, piece, part, seed=number + 1)
    assert pool.same()


@pytest.mark.parametrize("row_bytes", [16, 3])
def test_pieces_begun_back_to_back_move_as_one_by_one(row_bytes: int) -> None:
    """Of many sizes, in pages of their own, none waiting for another; those with a wrong trailer are found out."""
    count = 8 if DEVICE == "cpu" else 200
    rng, shape, part = random.Random(row_bytes), PageShape(2, 3, 4, row_bytes, 1), HeadSlice(0, 0, 1, 0, 2)
    kernels = Kernels()
    launcher = Launcher(0 if DEVICE == "cpu" else torch.cuda.current_stream().cuda_stream)
    pieces = [Piece(0, 0, 2, start, rng.randint(start + 1, 60)) for start in rng.choices(range(60), k=count)]
    pools = [(Pool(shape, 60, seed=number), Pool(shape, 60, seed=number + count)) for number in range(count)]
    staged = [expected(src, piece, part)[:-SPARE] for (src, _), piece in zip(pools, pieces, strict=True)]
    entries = [torch.zeros_like(each, device=DEVICE) for each in staged]
    verdicts = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(count)]

    def bound(of: Pool, number: int, verdict: torch.Tensor | None) -> Callable[..., None]:
        ids = of.page_ids.to(DEVICE)
        rows = PagedRows(of.bytes_there, ids, shape, pieces[number], part, SEED)
        return launcher.bind(launch_of(rows, entries[number], kernels.sums, verdict))

    gathers = [bound(src, number, None) for number, (src, _) in enumerate(pools)]
    scatters = [bound(dst, number, verdicts[number]) for number, (_, dst) in enumerate(pools)]
    for number, begin in enumerate(gathers):
        begin(entries[number], kernels.sums, number == 0)
    for entry, wanted in zip(entries, staged, strict=True):
        assert torch.equal(entry.cpu(), wanted)
    wrong = set(rng.sample(range(count), count // 4))
    for number in wrong:
        entries[number][-1 - rng.randrange(TRAILER_BYTES)] ^= 1 << rng.randrange(8)
    for number, begin in enumerate(scatters):
        begin(entries[number], verdicts[number], number == 0)
    assert [int(verdict) for verdict in verdicts] == [
        VERDICT_WRONG if number in wrong else VERDICT_OK for number in range(count)
    ]
    for (_, dst), piece, wanted in zip(pools, pieces, staged, strict=True):
        assert copy.scatter(dst.rows(piece, part), wanted)
        assert dst.same()
    assert kernels.sums.tolist() == [0] * SUMS


# ---- what is refused


@pytest.mark.parametrize(
    ("piece", "head", "heads", "says"),
    [
        (Piece(0, 0, 3, 0, 4), 0, 1, "names layers"),
        (Piece(0, 0, 2, 0, 4), 1, 2, "heads 1+2"),
        (Piece(0, 0, 2, 0, 13), 0, 1, "no page 3"),
    ],
)
def test_what_does_not_fit_the_pool_is_refused_before_anything_is_launched(
    piece: Piece, head: int, heads: int, says: str
) -> None:
    pool = Pool(PageShape(2, 2, 4, 16, 1), 12, seed=1)
    with pytest.raises(AssertionError, match=says.replace("+", r"\+")):
        Kernels().gather(pool, piece, HeadSlice(0, 0, head, head, heads))


def test_too_little_staging_is_refused() -> None:
    pool = Pool(PageShape(2, 2, 4, 16, 1), 12, seed=1)
    with pytest.raises(AssertionError, match="bytes of staging"):
        Kernels().scatter(torch.zeros(16, dtype=torch.uint8), pool, Piece(0, 0, 1, 0, 4), ONE_HEAD)


@pytest.mark.parametrize(
    ("stretch_words", "block"),
    [(512, 512), (2048, 512), (1 << 20, 512), (384, 128), (24, 32), (320, 64), (2, 2), (300, 512)],
)
def test_a_stretch_is_cut_where_few_lanes_are_idle(stretch_words: int, block: int) -> None:
    assert stretch_block_words(stretch_words) == block
