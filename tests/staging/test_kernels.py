"""The kernels against staging/copy: byte for byte, trailer and padding included, and nothing else touched.

In Triton's interpreter by default, where a program takes some 10 ms; with `TRITON_INTERPRET=0`, on a CUDA device (see
tests/conftest).
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import copy
from disagg.staging import kernels as kernels_module
from disagg.staging.identity import identity_seed
from disagg.staging.kernels import SUMS, VERDICT_OK, VERDICT_WRONG, Launcher, launch_of, stretch_block_words
from disagg.staging.pieces import TRAILER_BYTES, framed_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.slices import head_slices, heads_per_rank
from tests.staging.identities import slice_of

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
SEED = 0xF234_5678_9ABC_DEF0  # above 2^63: keys are unsigned
SPARE = 24  # bytes behind a piece in staging


def long(*values: object) -> Any:
    """Parameters that `make check` leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Pool:
    """Random bytes with one sequence in shuffled pages. On CPU; `bytes_there` is the same pool on the kernels' device."""

    def __init__(self, shape: PageShape, positions: int, seed: int, slack: int = 0) -> None:
        """slack: bytes by which pages are farther apart than they are long."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.shape = shape
        pages = -(-positions // shape.page_tokens)
        self.page_ids = torch.tensor(rng.sample(range(pages + 3), pages))
        self._flat = torch.randint(0, 256, (pages + 3, shape.nbytes + slack), dtype=torch.uint8, generator=generator)
        self._flat_there = self._flat.to(DEVICE, copy=True)

    @property
    def bytes(self) -> torch.Tensor:
        return self._flat[:, : self.shape.nbytes]

    @property
    def bytes_there(self) -> torch.Tensor:
        return self._flat_there[:, : self.shape.nbytes]

    def rows(self, piece: Piece, part: HeadSlice) -> PagedRows:
        """Of the pool on CPU."""
        return PagedRows(self.bytes, self.page_ids, self.shape, piece, part, SEED)

    def same(self) -> bool:
        """Whether what the kernels and what staging/copy did to the pool is the same, between pages too."""
        return torch.equal(self._flat_there.cpu(), self._flat)


class Kernels:
    """The kernels, called as staging/copy is."""

    def __init__(self) -> None:
        self.sums = torch.zeros(SUMS, dtype=torch.int64, device=DEVICE)

    def gather(self, pool: Pool, piece: Piece, part: HeadSlice, seed: int = SEED, offset: int = 0) -> torch.Tensor:
        """What is in staging afterwards, SPARE bytes included. offset: of the piece in staging."""
        out = torch.full(
            (offset + framed_bytes(pool.shape.payload_bytes(piece, part.heads)) + SPARE,),
            0xEE,
            dtype=torch.uint8,
            device=DEVICE,
        )
        first = piece.token_start // pool.shape.page_tokens
        ids = pool.page_ids[first:].to(DEVICE)
        rows = PagedRows(pool.bytes_there, ids, pool.shape, piece, part, seed, first_page=first)
        assert rows.staged_bytes == len(out) - offset - SPARE
        launch_of(rows, out[offset:], self.sums, None)()
        assert self.sums.tolist() == [0] * SUMS, "the next launch would begin with this one's sum"
        return out[offset:].cpu()

    def scatter(
        self, staging: torch.Tensor, pool: Pool, piece: Piece, part: HeadSlice, seed: int = SEED, offset: int = 0
    ) -> bool:
        first = piece.token_start // pool.shape.page_tokens
        ids, there = (
            pool.page_ids[first:].to(DEVICE),
            torch.empty(offset + len(staging), dtype=torch.uint8, device=DEVICE),
        )
        there[offset:] = staging.to(DEVICE)
        verdict = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        rows = PagedRows(pool.bytes_there, ids, pool.shape, piece, part, seed, first_page=first)
        launch_of(rows, there[offset:], self.sums, verdict)()
        assert self.sums.tolist() == [0] * SUMS
        assert int(verdict) in (VERDICT_OK, VERDICT_WRONG)
        return int(verdict) == VERDICT_OK


def expected(pool: Pool, piece: Piece, part: HeadSlice) -> torch.Tensor:
    out = torch.full((framed_bytes(pool.shape.payload_bytes(piece, part.heads)) + SPARE,), 0xEE, dtype=torch.uint8)
    copy.gather(pool.rows(piece, part), out)
    return out


def move(src: Pool, dst: Pool, piece: Piece, part: HeadSlice, offset: int = 0) -> None:
    """Gather and scatter with both, and compare every byte."""
    kernels = Kernels()
    staged = expected(src, piece, part)
    gathered = kernels.gather(src, piece, part, offset=offset)
    assert torch.equal(gathered, staged)
    assert src.same(), "a gather wrote into the pool"
    assert kernels.scatter(gathered, dst, piece, part, offset=offset)
    assert copy.scatter(dst.rows(piece, part), staged)
    assert dst.same()


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


# ---- the checksum


@pytest.fixture(params=["runs", "words"])
def small(request: pytest.FixtureRequest) -> Pool:
    """Of one kernel's rows, and of the other's."""
    row_bytes = {"runs": 16, "words": 3}[request.param]
    return Pool(PageShape(1, 1, 2, row_bytes, 1, planes=1), 4, seed=5)


SMALL = Piece(0, 0, 1, 1, 3)
ONE_HEAD = HeadSlice(0, 0, 0, 0, 1)


@pytest.mark.parametrize("small", [long("runs"), "words"], indirect=True)
def test_every_flipped_bit_of_rows_padding_and_trailer_is_caught(small: Pool) -> None:
    kernels = Kernels()
    staged = kernels.gather(small, SMALL, ONE_HEAD)[:-SPARE]
    for bit in range(8 * len(staged)):
        wrong = staged.clone()
        wrong[bit // 8] ^= 1 << bit % 8
        assert not kernels.scatter(wrong, small, SMALL, ONE_HEAD), f"bit {bit}"
    assert kernels.scatter(staged, small, SMALL, ONE_HEAD)


WORDS = Piece(0, 0, 1, 0, 16)


def damaged(damage: Callable[[torch.Tensor], None]) -> bool:
    """Whether a piece of 32 words verifies after `damage` to its rows, as words."""
    pool, kernels = Pool(PageShape(1, 1, 4, 16, 1, planes=1), 16, seed=6), Kernels()
    staged = kernels.gather(pool, WORDS, ONE_HEAD)[:-SPARE]
    damage(staged[:-TRAILER_BYTES].view(torch.int64))
    return kernels.scatter(staged, pool, WORDS, ONE_HEAD)


def test_an_undamaged_piece_verifies() -> None:
    assert damaged(lambda words: None)


@pytest.mark.parametrize("bit", [15, 31, 47, 63])
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 31), (7, 8)])
def test_two_flipped_signs_are_caught(bit: int, one: int, other: int) -> None:
    def flip(words: torch.Tensor) -> None:
        words[[one, other]] ^= 1 << bit if bit < 63 else -(1 << 63)

    assert not damaged(flip)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 31), (12, 20)])
def test_swapped_words_are_caught(one: int, other: int) -> None:
    def swap(words: torch.Tensor) -> None:
        words[[one, other]] = words[[other, one]]

    assert not damaged(swap)


def test_rows_that_moved_by_one_are_caught() -> None:
    def rotate(words: torch.Tensor) -> None:
        words.copy_(words.roll(2))

    assert not damaged(rotate)


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "r-2"},
        {"attempt": 2},
        {"prefix_no": 1},
        {"src_incarnation": "ab"},
        {"dst_incarnation": "aa"},
        {"layer_start": 1, "layer_stop": 2},
        {"token_start": 3, "token_stop": 6},
        {"src_rank": 1},
        {"dst_rank": 0},
    ],
)
def test_a_piece_of_something_else_in_the_same_place_is_caught(other: dict[str, str | int]) -> None:
    identity = {"layer_start": 0, "layer_stop": 1, "token_start": 1, "token_stop": 3}
    pool, kernels = Pool(PageShape(1, 1, 2, 16, 1), 4, seed=5), Kernels()
    mine, stale = (identity_seed(slice_of(**each)) for each in (identity, identity | other))
    staged = kernels.gather(pool, SMALL, ONE_HEAD, seed=stale)[:-SPARE]
    assert kernels.scatter(staged, pool, SMALL, ONE_HEAD, seed=stale)
    assert not kernels.scatter(staged, pool, SMALL, ONE_HEAD, seed=mine)


def test_a_wrong_piece_writes_its_own_rows_and_nothing_else(small: Pool) -> None:
    kernels = Kernels()
    staged = expected(small, SMALL, ONE_HEAD)[:-SPARE]
    staged[0] ^= 1
    assert not kernels.scatter(staged, small, SMALL, ONE_HEAD)
    small.bytes[small.page_ids[0], small.shape.row_bytes] ^= 1  # of the second row of the first page
    assert small.same()


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


@pytest.mark.parametrize("row_bytes", [16, 3])
def test_programs_that_take_many_tiles_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch, row_bytes: int) -> None:
    """As in a launch of more tiles than programs can be counted."""
    monkeypatch.setattr(kernels_module, "_MOST_PROGRAMS", 4)
    monkeypatch.setattr(kernels_module, "_PROGRAM_TILES", 1)
    monkeypatch.setattr(kernels_module, "_TILE_WORDS", 8)
    monkeypatch.setattr(kernels_module, "_WORD_PROGRAMS", 3)
    monkeypatch.setattr(kernels_module, "_WORD_BLOCK", 8)
    src, dst = (Pool(PageShape(1, 2, 4, row_bytes, 1), 50, seed=seed) for seed in (1, 2))
    for start, stop in ((0, 50), (3, 41)):
        move(src, dst, Piece(0, 0, 1, start, stop), HeadSlice(0, 0, 0, 0, 2))


class Settling:
    """What `_settle` does, as a program for each of several sums whose atomic additions come in any order.

    In the interpreter one program ends before the next begins, so what they can see of each other is tried out here.
    """

    LOW, COUNT, SETTLED, MASK = (1 << 24) - 1, (1 << 20) - 1, 1 << 20, 2**64 - 1

    def __init__(self, totals: Sequence[int], order: tuple[int, int]) -> None:
        """order: in which a program's two additions reach memory."""
        self.order = order
        self.sums = [0, 0]
        self.trailer: dict[str, int] = {}
        self.programs = [self._program(total, len(totals)) for total in totals]

    def _program(self, total: int, programs: int) -> Iterator[None]:
        """Stops before each atomic addition."""
        low, high = (total & self.LOW) + (1 << 44), (total & ~self.LOW) + 1
        added = {}
        for index in self.order:
            yield
            added[index] = self._add(index, (low, high)[index])
        lows, highs = added[0], added[1]
        if lows >> 44 == programs:
            self.sums[0] = 0
            more = (lows & ((1 << 44) - 1) & ~self.LOW) + self.SETTLED
            self._write("low", lows & self.LOW)
            if highs & self.COUNT == programs:
                highs += more
            else:
                yield
                highs = self._add(1, more)
        if highs & (self.COUNT | self.SETTLED) == programs | self.SETTLED:
            self.sums[1] = 0
            self._write("high", highs >> 24)

    def _add(self, index: int, value: int) -> int:
        self.sums[index] = (self.sums[index] + value) & self.MASK
        return self.sums[index]

    def _write(self, part: str, value: int) -> None:
        assert part not in self.trailer, f"two programs wrote the {part} bits"
        self.trailer[part] = value & (self.MASK >> 24)


@pytest.mark.parametrize("additions", [(0, 1), (1, 0)])
def test_whatever_order_programs_end_in_exactly_one_settles_each_part(additions: tuple[int, int]) -> None:
    totals = (0xFFFF_FFFF_FFFF_FFFF, 0x0000_0001_FFFF_FFFF, 0x8000_0000_8080_0001)
    for order in itertools.product(range(3), repeat=8):
        settling = Settling(totals, additions)
        for number in order:
            next(settling.programs[number], None)
        for program in settling.programs:  # what the order left undone
            for _ in program:
                pass
        assert settling.trailer == {"low": sum(totals) & Settling.LOW, "high": (sum(totals) & Settling.MASK) >> 24}
        assert settling.sums == [0, 0]


def test_as_many_programs_as_may_be_counted_settle_their_sum() -> None:
    count, total = kernels_module._MOST_PROGRAMS, (1 << 64) - 1
    settling = Settling((total,) * count, (0, 1))
    for program in settling.programs:
        for _ in program:
            pass
    assert settling.trailer == {"low": count * total & Settling.LOW, "high": (count * total & Settling.MASK) >> 24}
    assert settling.sums == [0, 0]


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
