"""The kernels' checksum: every piece that is damaged or another one is caught, and however programs end, one settles the sum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import kernels as kernels_module
from disagg.staging.identity import identity_seed
from disagg.staging.pieces import TRAILER_BYTES
from disagg.staging.rows import PageShape
from tests.staging.identities import slice_of
from tests.staging.kernel_pools import ONE_HEAD, SPARE, Kernels, Pool, expected, long, move

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["runs", "words"])
def small(request: pytest.FixtureRequest) -> Pool:
    """Of one kernel's rows, and of the other's."""
    row_bytes = {"runs": 16, "words": 3}[request.param]
    return Pool(PageShape(1, 1, 2, row_bytes, 1, planes=1), 4, seed=5)


SMALL = Piece(0, 0, 1, 1, 3)


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
