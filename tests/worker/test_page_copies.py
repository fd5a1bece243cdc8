"""Pages between a rank's pool and its host pool: every byte of every page, and nothing else.

The kernel runs in Triton's interpreter by default; with `TRITON_INTERPRET=0`, all ways run on a CUDA device.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from disagg.memory.layout import PageSizing
from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.tiers import PageMove
from disagg.models.pool import Pool
from disagg.offload.keys import Scope
from disagg.worker import kernels, page_copies
from disagg.worker.host_memory import HostMemory, allocate_host
from disagg.worker.page_copies import (
    Copier,
    Extent,
    GroupMoves,
    KernelCopier,
    MemcpyCopier,
    PlainCopier,
    by_group,
    copy_whole,
    extents,
    fastest,
    open_copier,
    warm_up,
)
from tests.offload.pages import FULL, PAGE_TOKENS, SCOPES
from tests.worker.rank_pools import layout_of, pool_of

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
HOST_LARGE = 9
COPIERS = {"memcpy": MemcpyCopier, "kernel": KernelCopier} | ({"plain": PlainCopier} if DEVICE == "cpu" else {})
# Pages of 12 and 3 bytes a head: not even whole words; a window's, and states of several dtypes.
ODD = LayerGroup("odd", (0,), 3, 3, "uint8", GroupKind.WINDOW, window=5)
MIXED = LayerGroup.of_states("mixed", (1, 2), (StatePart("conv", (3,), "bfloat16"), StatePart("ssm", (9,), "float32")))
HALF = LayerGroup("half", (3, 4), 2, 8, "float16")
CUT = {
    "full, window and state": (SCOPES["everything"], PageSizing.LCM),
    "full, window and state, padded": (SCOPES["everything"], PageSizing.MAX),
    "odd": (Scope("w", "uint8", PAGE_TOKENS, (ODD,)), PageSizing.LCM),
    "half and mixed, padded": (Scope("w", "float16", PAGE_TOKENS, (HALF, MIXED)), PageSizing.MAX),
    "alone": (Scope("w", "float32", PAGE_TOKENS, (FULL,)), PageSizing.LCM),
}


@pytest.fixture(params=list(CUT))
def pools(request: pytest.FixtureRequest) -> tuple[Pool, HostMemory]:
    return made(*CUT[request.param])


def made(scope: Scope, sizing: PageSizing = PageSizing.LCM) -> tuple[Pool, HostMemory]:
    """Of random bytes."""
    layout, pool = layout_of(scope, 1, sizing), pool_of(scope, 1, sizing)
    if DEVICE != "cpu":
        there = Pool.create(pool.groups, pool.num_large, layout.large_bytes, layout.strides, PAGE_TOKENS, DEVICE)
        there.bytes.copy_(pool.bytes)
        pool = there
    storage = allocate_host(HOST_LARGE * layout.large_bytes, pinned=DEVICE != "cpu")
    storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    return pool, HostMemory(pool.groups, storage, layout.strides, PAGE_TOKENS)


def some_moves(pool: Pool, host: HostMemory, seed: int) -> list[PageMove]:
    """Of all groups, each in large pages of its own; some beside each other in both pools."""
    rng, moves = random.Random(seed), []
    owners = [[g % len(pool.groups) for g in range(count)] for count in (pool.num_large, HOST_LARGE)]
    for each in owners:
        rng.shuffle(each)
    for g, view in enumerate(pool.views):
        per_large = view.num_pages // pool.num_large
        ours, theirs = (
            [large * per_large + i for large, owner in enumerate(each) if owner == g for i in range(per_large)]
            for each in owners
        )
        count = min(len(ours), len(theirs))
        if seed % 2:
            rng.shuffle(ours)
        moves += [PageMove(g, a, b) for a, b in zip(ours[:count], theirs[:count], strict=True)]
    rng.shuffle(moves)
    return moves[: len(moves) * 3 // 4]


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("name", list(COPIERS))
def test_pages_are_copied_whole_and_no_other_page_changes(name: str, out: bool, pools: tuple[Pool, HostMemory]) -> None:
    pool, host = pools
    copier: Copier = COPIERS[name](pool, host)
    for seed in (0, 1):
        moves = some_moves(pool, host, seed)
        before, host_before = pool.bytes.cpu().clone(), host.bytes.clone()
        wanted = {}
        for move in moves:
            ours = pool.views[move.group].bytes[move.gpu_page].cpu().clone()
            theirs = torch.from_numpy(host.page(move.group, move.host_page).copy())
            wanted[move] = ours if out else theirs
        copy_whole(copier, by_group(moves), out=out)
        for move, content in wanted.items():
            assert torch.equal(pool.views[move.group].bytes[move.gpu_page].cpu(), content)
            assert torch.equal(torch.from_numpy(host.page(move.group, move.host_page)), content)
        target, changed = (host.bytes, host_before) if out else (pool.bytes.cpu(), before)
        source, unchanged = (pool.bytes.cpu(), before) if out else (host.bytes, host_before)
        assert torch.equal(source, unchanged)
        for move in moves:  # what is between two pages is nobody's
            stride = host.strides[move.group]
            page = (move.host_page if out else move.gpu_page) * stride
            changed[page : page + stride] = target[page : page + stride]
        assert torch.equal(target, changed)


def test_extents_are_pages_that_follow_each_other_on_both_sides() -> None:
    pairs = [(5, 9), (3, 7), (4, 8), (6, 11), (7, 12), (20, 0), (21, 2), (0, 1)]
    (moves,) = by_group([PageMove(2, *pair) for pair in pairs])
    assert moves.group == 2
    assert extents(moves) == [Extent(0, 1, 1), Extent(3, 7, 3), Extent(6, 11, 2), Extent(20, 0, 1), Extent(21, 2, 1)]


def test_groups_are_copied_one_after_the_other() -> None:
    moves = by_group([PageMove(1, 3, 4), PageMove(0, 7, 1), PageMove(1, 2, 3), PageMove(0, 6, 2)])
    assert [(each.group, each.pool.tolist(), each.host.tolist()) for each in moves] == [
        (0, [6, 7], [2, 1]),
        (1, [2, 3], [3, 4]),
    ]
    assert by_group([]) == []


def test_a_copy_of_more_pages_than_a_kernels_table_has_room_for_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_copies, "TABLE_MOVES", 3)
    monkeypatch.setattr(kernels, "PROGRAMS_OUT", 2)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", 64)
    pool, host = made(SCOPES["everything"])
    moves = some_moves(pool, host, 1)
    assert len(moves) > 8
    copier = KernelCopier(pool, host)
    waited: list[int] = []
    marks = iter(range(2 * page_copies.AT_ONCE))
    monkeypatch.setattr(copier._stream, "mark", lambda: partial(waited.append, next(marks)))
    waits = [copier.begin(by_group(moves), out=True) for _ in range(page_copies.AT_ONCE)]
    assert waited == [], "each begins before the one before it is over"
    for number, wait in enumerate(waits):
        wait()
        assert waited[-1] == number
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    for move in moves:
        theirs = torch.from_numpy(host.page(move.group, move.host_page))
        assert torch.equal(pool.views[move.group].bytes[move.gpu_page].cpu(), theirs)


@pytest.mark.parametrize("name", list(COPIERS))
def test_copies_begun_at_once_are_made_in_their_order(name: str) -> None:
    """Each takes what the one before it brought, and none is waited for before the next has begun."""
    pool, host = made(SCOPES["everything"])
    copier: Copier = COPIERS[name](pool, host)
    content = pool.views[0].bytes[0].cpu().clone()
    chain = [PageMove(0, at, at) for at in range(min(pool.views[0].num_pages, host.num_pages(0)))]
    waits = deque([copier.begin(by_group([chain[0]]), out=True)])
    for before, after in pairwise(chain):
        for move, out in ((PageMove(0, after.gpu_page, before.host_page), False), (after, True)):
            waits.append(copier.begin(by_group([move]), out=out))
            if len(waits) == page_copies.AT_ONCE:
                waits.popleft()()
    while waits:
        waits.popleft()()
    assert len(chain) > 3
    for move in chain:
        assert torch.equal(pool.views[0].bytes[move.gpu_page].cpu(), content)
        assert torch.equal(torch.from_numpy(host.page(0, move.host_page)), content)


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU")
@pytest.mark.parametrize("wanted", ["auto", "kernel", "memcpy"])
def test_without_a_gpu_pages_are_copied_plainly(wanted: Any) -> None:
    copier, how = open_copier(wanted, *made(SCOPES["full"]))
    assert isinstance(copier, PlainCopier) and how == "plain: there is no GPU"


@pytest.mark.parametrize("name", list(COPIERS))
def test_warming_up_leaves_the_pool_as_it_is(name: str) -> None:
    pool, host = made(SCOPES["everything"])
    before = pool.bytes.cpu().clone()
    warm_up(COPIERS[name](pool, host), host)
    assert torch.equal(pool.bytes.cpu(), before)


class Clock:
    """Moved by copiers that take as long as they are told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed:
    """Copies as another does, and takes the next of these seconds each time."""

    def __init__(self, inner: Copier, clock: Clock, seconds: Iterator[float]) -> None:
        self._inner, self._clock, self._seconds = inner, clock, seconds
        self.moves: list[GroupMoves] = []

    def begin(self, moves: Any, *, out: bool) -> Callable[[], None]:
        self.moves = list(moves)
        return partial(self._end, self._inner.begin(moves, out=out))

    def _end(self, wait: Callable[[], None]) -> None:
        wait()
        self._clock.now_s += next(self._seconds)


def test_the_faster_way_by_the_median_of_warm_rounds_is_taken_and_said() -> None:
    """The first rounds and single slow ones do not count."""
    pool, host = made(SCOPES["everything"])
    clock, before = Clock(), pool.bytes.cpu().clone()
    steady = [0.5] * 4 + [2e-6] * 10
    hasty = [1e-9] * 4 + [4e-6] * 8 + [1e-9] * 2
    inner = MemcpyCopier(pool, host)
    first, second = Timed(inner, clock, iter(steady)), Timed(inner, clock, iter(hasty))
    chosen, how = fastest({"kernel": first, "memcpy": second}, pool, host, clock)
    assert chosen is first
    (moves,) = first.moves
    rate = 2 * len(moves.pool) * host.page_bytes[moves.group] / 4e-6 / 1e9
    assert how == f"kernel ({rate:.1f} GB/s; memcpy {rate / 2:.1f})"
    assert torch.equal(pool.bytes.cpu(), before), "measuring leaves the pool as it was"
    assert (
        len(set(moves.host.tolist())) == len(moves.host) == min(page_copies.MEASURED_PAGES, host.num_pages(moves.group))
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
@pytest.mark.parametrize("wanted", ["auto", "kernel", "memcpy"])
def test_a_gpu_copies_as_it_is_told_or_measured(wanted: Any) -> None:
    pool, host = made(SCOPES["everything"])
    copier, how = open_copier(wanted, pool, host)
    print(how)
    assert how.startswith(("kernel (", "memcpy (") if wanted == "auto" else f"{wanted} (as configured)")
    copy_whole(copier, by_group(some_moves(pool, host, 1)), out=True)
