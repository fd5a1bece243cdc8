"""Movers: what they have in common, whichever kernels they use, and when a queued move is done."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging import triton_mover
from disagg.staging.kernels import Launch
from disagg.staging.mover import PREPARED_ALIGN, Move, Mover, TorchMover, create_mover
from disagg.staging.pieces import framed_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.triton_mover import TritonMover
from disagg.types.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = PageShape(2, 2, 4, 8, 2)
PIECE = Piece(0, 0, 2, 5, 14)
HEAD = HeadSlice(0, 0, 1, 0, 1)  # the second of the one pool becomes the first of the other
NBYTES = framed_bytes(SHAPE.payload_bytes(PIECE, 1))
PAGES, FIRST_PAGE = (3, 0, 5), 1  # page numbers 1, 2 and 3 of a sequence
SEED = 99

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="on CPU, kernels need the interpreter")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Queue:
    """Does everything at once, but says so no sooner than the test does."""

    def __init__(self, reached: int) -> None:
        """reached: how many marks are reached from the beginning."""
        self.marks = 0
        self.made = 0  # pieces of memory on the host
        self.reached = reached

    @property
    def handle(self) -> int:
        return 0

    def mark(self) -> _Mark:
        self.marks += 1
        return _Mark(self, self.marks)

    def reuse(self, mark: object) -> None:
        """Marks have numbers; none is used twice."""

    def host(self, values: Sequence[int]) -> torch.Tensor:
        self.made += 1
        return torch.tensor(values, dtype=torch.int64)


class _Mark:
    def __init__(self, queue: Queue, number: int) -> None:
        self._queue = queue
        self.number = number

    def query(self) -> bool:
        return self.number <= self._queue.reached


@pytest.fixture(params=["torch", "triton"])
def mover(request: pytest.FixtureRequest) -> Mover:
    return TorchMover(CPU) if request.param == "torch" else TritonMover(CPU, Queue(reached=1 << 30))


def pool(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (7, SHAPE.nbytes), dtype=torch.uint8, generator=generator)


def staging() -> torch.Tensor:
    return torch.zeros(NBYTES + 8, dtype=torch.uint8)


def rows_of(mover: Mover, pool: torch.Tensor, seed: int = SEED) -> PagedRows:
    return PagedRows(pool, mover.pages(PAGES), SHAPE, PIECE, HEAD, seed, FIRST_PAGE)


def gather(mover: Mover, source: torch.Tensor, out: torch.Tensor, seed: int = SEED) -> Move:
    return mover.prepare_gather(rows_of(mover, source, seed), out)(out)


def scatter(mover: Mover, staged: torch.Tensor, target: torch.Tensor, seed: int = SEED) -> Move:
    return mover.prepare_scatter(rows_of(mover, target, seed), staged)()


def rows(of: torch.Tensor, head: int) -> torch.Tensor:
    """[layers, planes, tokens of the piece, row bytes] of one head."""
    pages = of.view(-1, SHAPE.layers, SHAPE.planes, SHAPE.kv_heads, SHAPE.page_tokens, SHAPE.row_bytes)
    mine = [pages[PAGES[t // 4 - FIRST_PAGE], :, :, head, t % 4] for t in range(PIECE.token_start, PIECE.token_stop)]
    return torch.stack(mine, dim=2)


def test_what_is_gathered_is_scattered_into_the_other_pool(mover: Mover) -> None:
    source, target, staged = pool(1), pool(2), staging()
    sent, landed = gather(mover, source, staged), scatter(mover, staged, target)
    assert sent.done() and landed.done()
    assert sent.ok() and landed.ok()
    assert sent.nbytes == landed.nbytes == NBYTES
    assert torch.equal(rows(target, 0), rows(source, 1))


def test_a_planned_move_reads_what_is_there_when_it_begins(mover: Mover) -> None:
    source, target, apart = pool(1), pool(2), staging()
    memory = torch.zeros(8 * PREPARED_ALIGN, dtype=torch.uint8)
    elsewhere, into = memory[:NBYTES], memory[4 * PREPARED_ALIGN : 4 * PREPARED_ALIGN + NBYTES]
    begin_gather = mover.prepare_gather(rows_of(mover, source), elsewhere)
    begin_scatter = mover.prepare_scatter(rows_of(mover, target), into)
    source.copy_(pool(3))
    sent = begin_gather(into)
    assert sent.done() and sent.nbytes == NBYTES
    assert not elsewhere.any()
    gather(mover, source, apart)
    assert torch.equal(into, apart[:NBYTES])
    landed = begin_scatter()
    assert landed.done() and landed.ok() and landed.nbytes == NBYTES
    assert torch.equal(rows(target, 0), rows(pool(3), 1))


def test_both_movers_stage_the_same_bytes() -> None:
    staged = [staging(), staging()]
    for mover, out in zip((TorchMover(CPU), TritonMover(CPU, Queue(0))), staged, strict=True):
        gather(mover, pool(1), out)
    assert torch.equal(*staged)


def test_a_piece_of_another_identity_is_not_ok(mover: Mover) -> None:
    staged = staging()
    gather(mover, pool(1), staged, seed=SEED + 1)
    move = scatter(mover, staged, pool(2))
    assert move.done()
    assert not move.ok()


def test_zeroing_makes_the_given_pages_blank_and_no_other(mover: Mover) -> None:
    target = pool(1)
    wanted = target.clone()
    wanted[[2, 4]] = 0
    move = mover.zero(target, mover.pages([4, 2]))
    assert move.done() and move.ok()
    assert move.nbytes == 0
    assert torch.equal(target, wanted)


def test_preparing_moves_nothing(mover: Mover) -> None:
    target, staged = pool(1), staging()
    mover.prepare(target, SHAPE, staged)
    assert torch.equal(target, pool(1))
    assert torch.equal(staged, staging())


def test_a_move_says_how_long_it_took(mover: Mover) -> None:
    move = gather(mover, pool(1), staging())
    assert move.done()
    assert move.seconds() > 0


def test_a_move_is_done_when_the_queue_has_reached_its_end() -> None:
    queue = Queue(reached=0)
    mover = TritonMover(CPU, queue)
    staged = staging()
    sent, landed = gather(mover, pool(1), staged), scatter(mover, staged, pool(2))
    assert not sent.done() and not landed.done()
    with pytest.raises(AssertionError, match="under way"):
        landed.ok()
    queue.reached = 1
    assert sent.done() and not landed.done()
    queue.reached = 2
    assert landed.done() and landed.ok()


def test_moves_under_way_together_keep_their_own_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mover, "VERDICTS", 2)
    queue = Queue(reached=0)
    mover = TritonMover(CPU, queue)
    staged = staging()
    gather(mover, pool(1), staged)
    for _ in range(2):  # the second time with verdicts that were given back
        moves = [scatter(mover, staged, pool(2), seed=SEED + wrong) for wrong in (0, 1, 0, 0, 1)]
        queue.reached = queue.marks
        assert all(move.done() for move in moves)
        assert [move.ok() for move in moves] == [True, False, True, True, False]


def test_a_move_is_ordered_behind_a_page_table_or_a_zeroing_and_not_behind_a_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordered: list[bool] = []
    bind = triton_mover.Launcher.bind

    def noting(self: triton_mover.Launcher, launch: Launch) -> Callable[[torch.Tensor, torch.Tensor, bool], None]:
        begin = bind(self, launch)

        def noted(staging: torch.Tensor, verdict: torch.Tensor, is_ordered: bool) -> None:
            ordered.append(is_ordered)
            begin(staging, verdict, is_ordered)

        return noted

    monkeypatch.setattr(triton_mover.Launcher, "bind", noting)
    mover = TritonMover(CPU, Queue(reached=1 << 30))
    staged, target = staging(), pool(2)
    send = mover.prepare_gather(rows_of(mover, pool(1)), staged)
    land = mover.prepare_scatter(rows_of(mover, target), staged)
    send(staged), land(), send(staged)
    assert ordered == [True, False, False]
    pages = mover.pages([4])
    land(), land()
    assert ordered[3:] == [True, False]
    mover.zero(target, pages)
    send(staged), send(staged)
    assert ordered[5:] == [True, False]


def test_page_tables_stay_as_they_are_when_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mover, "TABLE_IDS", 64)
    mover = TritonMover(CPU, Queue(reached=0))
    wanted = [[7], [1, 2, 3], [], list(range(16)), [4, 5, 6], [8, 9], list(range(90)), [3], list(range(64))]
    tables = [mover.pages(page_ids) for page_ids in wanted]
    assert [table.tolist() for table in tables] == wanted
    assert all(table.storage_offset() % triton_mover.LINE_IDS == 0 for table in tables)


def test_memory_of_page_tables_is_used_again_only_when_nobody_holds_a_table_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_mover, "TABLE_IDS", 4)
    monkeypatch.setattr(triton_mover, "FIRST_BLOCKS", 2)
    monkeypatch.setattr(triton_mover, "RECENT_TABLES", 1)
    queue = Queue(reached=1 << 30)
    mover = TritonMover(CPU, queue)
    made = queue.made
    rng = random.Random(3)
    held: list[tuple[list[int], torch.Tensor]] = []
    for step in range(400):
        wanted = [rng.randrange(1000) for _ in range(rng.randint(1, 4))]
        held.append((wanted, mover.pages(wanted)))
        assert all(table.tolist() == ids for ids, table in held), f"a table changed in step {step}"
        while len(held) > 3:
            del held[rng.randrange(len(held))]
    assert queue.made - made <= 4, "five blocks hold four tables and one that is being filled"


def test_memory_of_page_tables_is_not_used_again_while_what_read_them_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mover, "TABLE_IDS", 4)
    monkeypatch.setattr(triton_mover, "FIRST_BLOCKS", 1)
    monkeypatch.setattr(triton_mover, "RECENT_TABLES", 1)
    queue = Queue(reached=0)
    mover = TritonMover(CPU, queue)
    made = queue.made

    def four_tables() -> None:
        for number in range(4):
            mover.pages([number, 1, 2, 3])  # and nobody holds it

    four_tables()
    assert queue.made - made == 3, "the queue may still read each"
    queue.reached = queue.marks
    four_tables()
    assert queue.made - made <= 4, "it is through with them; the last is held as a recent one"


def test_pieces_with_the_same_pages_share_a_table() -> None:
    mover = TritonMover(CPU, Queue(reached=0))
    first, again, other = mover.pages((1, 2)), mover.pages([1, 2]), mover.pages((1, 3))
    assert first is again and other is not first
    assert (first.tolist(), other.tolist()) == ([1, 2], [1, 3])


def test_on_cpu_torch_is_chosen() -> None:
    assert isinstance(create_mover("auto", CPU), TorchMover)
    assert isinstance(create_mover("torch", CPU), TorchMover)


def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'transfer\.kernels = "triton": Triton has no kernels for cpu'):
        create_mover("triton", CPU)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_triton_that_is_not_installed_is_said_at_start(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        create_mover(kernels, torch.device("cuda"))  # type: ignore[arg-type]
