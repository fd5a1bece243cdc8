"""What ranks write to storage, ranks of any other number read, and what fails is one operation's failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.messages.layout import GroupKind, LayerGroup
from disagg.messages.tiers import (
    CopiedOut,
    CopyOut,
    GroupParts,
    PageMove,
    PartsRead,
    PartsWritten,
    ReadParts,
    WriteParts,
)
from disagg.offload.causes import Cause
from disagg.offload.keys import Scope
from disagg.offload.store import ObjectStore, StoreError, open_store
from disagg.worker.offload_driver import NO_STORAGE
from disagg.worker.rank_storage import MAX_TIERS, UPLOADS, Budget, _all, _beside
from tests.offload.pages import FULL, PAGE_TOKENS, STATE, WINDOW, chain
from tests.worker.offload_ranks import PATIENCE_S, Rank, StoredPages, tier_at

# Two heads and six: of three ranks' size, and with more ranks than heads.
FEW_HEADS = LayerGroup("few", (0, 2), 2, 4, "bfloat16")
SIX_HEADS = LayerGroup("six", (1,), 6, 8, "float32", GroupKind.WINDOW, window=7)
SCOPES = {
    "everything": (Scope("weights", "float32", PAGE_TOKENS, (FULL, WINDOW, STATE)), (1, 2, 4)),
    "of three": (Scope("weights", "float32", PAGE_TOKENS, (SIX_HEADS, STATE)), (1, 2, 3)),
    "replicated": (Scope("weights", "float32", PAGE_TOKENS, (FEW_HEADS,)), (1, 2, 4)),
}
SCOPE = SCOPES["everything"][0]
PAGES = 5


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv"


@pytest.fixture
def made() -> Iterator[list[Rank]]:
    """Ranks that are closed at the end."""
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.close()


def sequence(scope: Scope = SCOPE, seed: int = 0) -> StoredPages:
    return StoredPages(scope, chain(scope, range(seed, seed + PAGES * PAGE_TOKENS)))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("name", list(SCOPES))
def test_what_ranks_of_any_number_write_ranks_of_any_other_read(
    name: str, compression: str, url: str, made: list[Rank]
) -> None:
    scope, sizes = SCOPES[name]
    tier = tier_at(url, scope)
    by_size = {tp: [Rank(scope, rank, tp, url, compression=compression) for rank in range(tp)] for tp in sizes}
    made += [rank for ranks in by_size.values() for rank in ranks]
    for op, writers in enumerate(by_size.values()):
        pages = sequence(scope, seed=op)
        for rank in writers:
            pages.fill(rank)
        span = pages.store(writers, tier, op)
        for rank in made:
            read = pages.load(op, tier, span, rank, place=1)
            assert (read.op, read.error, read.nbytes > 0) == (op, "", True)
            assert pages.differs(rank, place=1) == []


def test_replicated_heads_are_written_by_the_first_that_holds_them(url: str, made: list[Rank]) -> None:
    scope = SCOPES["replicated"][0]
    made += [Rank(scope, rank, 4, url) for rank in range(4)]
    pages = sequence(scope)
    written = []
    for rank in made:
        pages.fill(rank)
        written.append(rank.ask(pages.writing(0, rank), PartsWritten))
    heads = [[(ref.head_start, ref.head_stop) for ref in each.parts[0]] for each in written]
    assert heads == [[(0, 1)], [], [(1, 2)], []]
    assert [each.nbytes > 0 for each in written] == [True, False, True, False]


def test_groups_without_pages_have_no_parts(url: str, made: list[Rank]) -> None:
    made.append(Rank(SCOPE, url=url))
    pages = sequence()
    pages.page_nos = [(0, 1), (), ()]
    pages.fill(made[0])
    written = made[0].ask(pages.writing(0, made[0]), PartsWritten)
    assert [len(refs) for refs in written.parts] == [1, 0, 0]
    assert made[0].ask(ReadParts(0, "", (), ((), (), ())), PartsRead).error == ""


def files(url: str) -> list[Path]:
    return sorted(each for each in Path(url.removeprefix("file://")).rglob("*") if each.is_file())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "cause"), [(flip, Cause.CORRUPT), (truncate, Cause.TRUNCATED), (Path.unlink, Cause.ABSENT)]
)
def test_a_damaged_part_is_an_error_of_the_read_that_needs_it_alone(
    damage: Any, cause: Cause, url: str, made: list[Rank]
) -> None:
    made.append(Rank(SCOPE, url=url))
    tier, (rank,) = tier_at(url, SCOPE), made
    one, other = sequence(seed=0), sequence(seed=100)
    one.fill(rank)
    first = one.store([rank], tier, 0)
    damage(Path(url.removeprefix("file://")) / first.shares[1].parts[0].path)
    other.fill(rank)
    second = other.store([rank], tier, 1)
    rank.tell(one.reading(0, tier, first, rank, place=1), other.reading(1, tier, second, rank, place=2))
    failed, read = rank.reports(2)
    assert isinstance(failed, PartsRead) and failed.error.startswith(f"{cause}: v1/")
    assert (failed.op, failed.nbytes) == (0, 0)
    assert isinstance(read, PartsRead) and (read.op, read.error) == (1, "")
    assert other.differs(rank, place=2) == []


def test_a_page_of_which_a_head_is_not_to_be_read_is_an_error(url: str, made: list[Rank]) -> None:
    writers = [Rank(SCOPE, rank, 2, url) for rank in range(2)]
    made += [*writers, Rank(SCOPE, url=url)]
    tier, pages = tier_at(url, SCOPE), sequence()
    for rank in writers:
        pages.fill(rank)
    span = pages.store(writers, tier)
    whole = pages.reading(0, tier, span, made[2])
    read = made[2].ask(ReadParts(0, "", whole.reads[1:], whole.places), PartsRead)
    assert "pages [0, 1, 2, 3, 4] of group 0 are in no part that was to be read" in read.error


def test_tenants_store_apart_and_those_of_long_ago_are_forgotten(url: str, made: list[Rank]) -> None:
    made.append(Rank(SCOPE, url=url))
    for op in range(MAX_TIERS + 3):
        assert not made[0].ask(WriteParts(op, f"tenant {op}", (GroupParts((), ()),) * 3), PartsWritten).error
    assert f"{MAX_TIERS} tenants" in made[0].driver.describe()
    for salt in ("tenant a", "tenant b"):
        pages = StoredPages(Scope("weights", "float32", PAGE_TOKENS, SCOPE.groups, salt), sequence().hashes)
        pages.fill(made[0])
        op += 1
        parts = made[0].ask(pages.writing(op, made[0]), PartsWritten).parts
        tier = tier_at(url, pages.scope)
        assert all(tier.scope.place in ref.path for refs in parts for ref in refs)


def test_without_storage_writes_and_reads_say_so(made: list[Rank]) -> None:
    made.append(Rank(SCOPE))
    pages = sequence()
    written = made[0].ask(pages.writing(0, made[0]), PartsWritten)
    assert (written.error, written.parts, written.nbytes) == (NO_STORAGE, ((), (), ()), 0)
    assert made[0].ask(ReadParts(0, "", (), ((), (), ())), PartsRead).error == NO_STORAGE


# ---- stores that do as they like


class FakeStore:
    """An ObjectStore of a directory, some of whose calls wait or fail."""

    def __init__(self, url: str) -> None:
        self._inner: ObjectStore = open_store(url, {})
        self.gates: dict[str, threading.Event] = {}  # calls whose path contains the key wait
        self.fails: dict[str, Exception] = {}  # the same, but fail
        self.begun: list[str] = []
        self.most_at_once = self._at_once = 0
        self.deleted: list[str] = []
        self.state = "ok"

    async def create(self, path: str, buffers: Any) -> bool:
        await self._pass(path)
        return await self._inner.create(path, buffers)

    async def get(self, path: str, most_bytes: int) -> bytes:
        await self._pass(path)
        return await self._inner.get(path, most_bytes)

    async def get_range(self, path: str, start: int, stop: int) -> bytes:
        await self._pass(path)
        return await self._inner.get_range(path, start, stop)

    async def delete(self, paths: Any) -> None:
        await self._inner.delete(paths)
        self.deleted += paths

    async def _pass(self, path: str) -> None:
        self.begun.append(path)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            for key, failure in self.fails.items():
                if key in path:
                    raise failure
            for key, gate in self.gates.items():
                while key in path and not gate.is_set():
                    await asyncio.sleep(0.002)
        finally:
            self._at_once -= 1


@pytest.fixture
def store(url: str) -> FakeStore:
    return FakeStore(url)


def until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.002)


def salted(salt: str) -> StoredPages:
    return sequence(Scope("weights", "float32", PAGE_TOKENS, SCOPE.groups, salt))


def test_reports_of_writes_and_of_reads_come_in_the_order_of_their_operations(
    url: str, store: FakeStore, made: list[Rank]
) -> None:
    made.append(Rank(SCOPE, store=store))
    (rank,) = made
    each = [salted(f"tenant {i}") for i in range(8)]
    tiers = [tier_at(url, pages.scope) for pages in each]
    store.gates[each[0].scope.place] = gate = threading.Event()
    for pages in each[:1]:
        pages.fill(rank)
    rank.tell(*(pages.writing(op, rank) for op, pages in enumerate(each)))
    until(lambda: sum("/parts/" in path for path in store.begun) == 3 * 7 + 1)
    assert rank.reports(1, timeout_s=0.2) == []
    gate.set()
    written = [report for report in rank.reports(8) if isinstance(report, PartsWritten)]
    assert [(report.op, report.error) for report in written] == [(op, "") for op in range(8)]
    assert store.most_at_once <= UPLOADS
    gate.clear()
    spans = [pages.span(tier, [w.parts]) for pages, tier, w in zip(each, tiers, written, strict=True)]
    store.begun.clear()
    rank.tell(*(pages.reading(op, tiers[op], spans[op], rank, 1) for op, pages in enumerate(each)))
    until(lambda: len(store.begun) == 3 * 8)
    assert rank.reports(1, timeout_s=0.2) == []
    gate.set()
    reports = [report for report in rank.reports(8) if isinstance(report, PartsRead)]
    assert [(report.op, report.error) for report in reports] == [(op, "") for op in range(8)]


def test_parts_of_a_write_that_failed_are_deleted(url: str, store: FakeStore, made: list[Rank]) -> None:
    made.append(Rank(SCOPE, store=store))
    tier, pages = tier_at(url, SCOPE), sequence()
    pages.fill(made[0])
    pages.store(made, tier, 0)
    stays = files(url)
    store.fails[store.begun[-1].rpartition("/")[2].partition(".")[0]] = StoreError(Cause.LATE, "no answer in time")
    written = made[0].ask(pages.writing(1, made[0]), PartsWritten)
    assert (written.error, written.parts, written.nbytes) == ("late: no answer in time", ((), (), ()), 0)
    until(lambda: len(store.deleted) == 2)
    assert files(url) == stays


def test_a_bug_is_one_operations_error_and_is_logged(
    store: FakeStore, made: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    made.append(Rank(SCOPE, store=store))
    store.fails[""] = ZeroDivisionError("a bug")
    written = made[0].ask(sequence().writing(0, made[0]), PartsWritten)
    assert written.error == "ZeroDivisionError: a bug"
    assert "Traceback" in caplog.text
    store.fails.clear()
    assert made[0].ask(sequence().writing(1, made[0]), PartsWritten).error == ""


def test_a_store_that_is_back_gets_all_that_a_rank_is_told_to_write(tmp_path: Path, made: list[Rank]) -> None:
    """Whether it is left alone, the server decides: a rank that tried first would refuse all others meanwhile."""
    directory = tmp_path / "away"
    made.append(rank := Rank(SCOPE, url=f"file://{directory}"))
    directory.rmdir()
    directory.write_text("in the way")
    failed = [rank.ask(sequence().writing(op, rank), PartsWritten) for op in range(5)]
    assert all(report.error.startswith("failed: ") for report in failed), failed
    directory.unlink()
    rank.tell(*(sequence().writing(op, rank) for op in range(5, 13)))
    written = [report for report in rank.reports(8) if isinstance(report, PartsWritten)]
    assert [report.error for report in written] == [""] * 8


def test_a_store_that_hangs_delays_neither_copies_nor_the_end(store: FakeStore) -> None:
    rank = Rank(SCOPE, store=store)
    store.gates[""] = threading.Event()
    rank.tell(*(sequence().writing(op, rank) for op in range(10)))
    until(lambda: len(store.begun) == UPLOADS)
    for op in range(5):  # the store hangs for ever, so whatever waits for it is not done at all
        assert rank.ask(CopyOut(op, (PageMove(0, 0, 0),)), CopiedOut).last == op
    rank.driver.close()
    rank.driver.join(PATIENCE_S)
    assert not rank.driver._storage._thread.is_alive()  # type: ignore[union-attr]


def test_a_store_that_keeps_its_thread_does_not_keep_the_end(store: FakeStore) -> None:
    rank = Rank(SCOPE, store=store)
    let_go = threading.Event()

    async def create(path: str, buffers: Any) -> bool:
        store.begun.append(path)
        let_go.wait(60.0)
        return True

    store.create = create  # type: ignore[method-assign]
    rank.tell(sequence().writing(0, rank))
    until(lambda: bool(store.begun))
    assert rank.ask(CopyOut(0, (PageMove(0, 0, 0),)), CopiedOut).last == 0
    rank.driver.close()
    rank.driver.join(0.5)
    assert rank.driver._storage._thread.is_alive(), "it was not waited for"  # type: ignore[union-attr]
    let_go.set()
    rank.driver.join(PATIENCE_S)


def test_a_read_that_failed_waits_for_none_of_its_other_parts(url: str, store: FakeStore, made: list[Rank]) -> None:
    made.append(Rank(SCOPE, store=store))
    tier, pages = tier_at(url, SCOPE), sequence()
    pages.fill(made[0])
    span = pages.store(made, tier, 0)
    flip(Path(url.removeprefix("file://")) / span.shares[0].parts[0].path)
    store.gates[span.shares[1].parts[0].path] = threading.Event()
    # It would wait for ever, since nobody opens that gate.
    assert pages.load(0, tier, span, made[0], place=1).error.startswith("corrupt: ")


async def test_whoever_is_given_up_has_let_go_of_its_pages() -> None:
    """A thread that joins units into a page cannot be stopped: what failed is not reported before it is through."""
    joining, joined = threading.Event(), threading.Event()

    def join() -> None:
        joining.set()
        time.sleep(0.1)
        joined.set()

    async def fail() -> None:
        while not joining.is_set():
            await asyncio.sleep(0.002)
        raise StoreError(Cause.LATE, "no answer in time")

    with pytest.raises(StoreError):
        await _all([_beside(join), fail()])
    assert joined.is_set()


async def test_a_budget_lets_in_in_turn_and_whoever_is_too_large_alone() -> None:
    budget, inside = Budget(2, 10), list[str]()
    order: list[str] = []

    async def work(name: str, nbytes: int) -> None:
        async with budget.of(nbytes):
            order.append(name)
            inside.append(name)
            assert len(inside) <= 2 and (name != "huge" or inside == ["huge"])
            await asyncio.sleep(0.005)
            inside.remove(name)

    sizes = {"a": 5, "b": 6, "c": 4, "huge": 50, "d": 1, "e": 1, "f": 1}
    tasks = [asyncio.create_task(work(name, size)) for name, size in sizes.items()]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "c", "huge", "e", "f"]
    assert (budget._inside, budget._bytes, len(budget._waiting)) == (0, 0, 0)


@pytest.mark.parametrize("most", [1, 3, 16])
async def test_a_budget_is_all_there_again_when_all_that_were_in_it_or_waited_are_cancelled_at_once(most: int) -> None:
    """As the parts of a read are when one of them fails: those that are in leave before those that wait have heard of it."""
    budget = Budget(most, 100)

    async def work(number: int) -> None:
        async with budget.of(1):
            if not number:
                raise StoreError(Cause.ABSENT, "it is not there")
            await asyncio.sleep(60)

    with pytest.raises(StoreError):
        await _all([work(number) for number in range(40)])
    assert (budget._inside, budget._bytes, len(budget._waiting)) == (0, 0, 0)
