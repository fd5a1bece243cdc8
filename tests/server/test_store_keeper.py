"""What an engine has done in storage: published once, found and read by others, answered always, whatever the store does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from disagg.messages.stored import PartRef
from disagg.messages.tiers import PartsRead, PartsWritten, ReadParts, TierCommand, WriteParts
from disagg.offload.breaker import Breaker
from disagg.offload.causes import Cause
from disagg.offload.instructions import (
    Ask,
    Beyond,
    Discard,
    Fetch,
    ForgetAsk,
    Publish,
    StoreEvent,
    StoreFound,
    StorePublished,
    StoreWorks,
    Upload,
    UploadShare,
)
from disagg.offload.keys import PARTS, Scope, span_path
from disagg.offload.objects import VERSION
from disagg.offload.store import ObjectStore, StoreError, open_store
from disagg.offload.survey import Survey, statistics, survey, verify
from disagg.offload.tier import Missed, StorageTier
from disagg.offload.units import cut_page, heads_of, written_by
from disagg.server import store_keeper
from disagg.server.keeper_facts import KeeperFacts, KeeperLimits
from disagg.server.store_keeper import StoreKeeper
from disagg.server.tier_sums import TierSums
from tests.offload.joined import join_page
from tests.offload.pages import CHECKPOINT_TOKENS, SCOPES, chain, rank_page

PATIENCE_S = 30.0

SCOPE = SCOPES["everything"]
TOKENS = list(range(40))
OTHER = [*range(22), *range(100, 118)]  # parts from TOKENS within page 5


class Ranks:
    """Fake workers: their pages of the host hold what their names say, written and read as real ones do."""

    def __init__(self, store: ObjectStore, tp: int, scope: Scope = SCOPE) -> None:
        self.tp, self.scope = tp, scope
        self.tier = StorageTier(store, scope, checkpoint_tokens=CHECKPOINT_TOKENS, random=Random(tp))
        self.sent: list[tuple[int, TierCommand]] = []

    def send(self, rank: int, messages: Sequence[TierCommand]) -> None:
        self.sent += [(rank, message) for message in messages]

    async def write(self, rank: int, command: WriteParts) -> PartsWritten:
        parts: list[tuple[PartRef, ...]] = []
        for g, (group, wanted) in enumerate(zip(self.scope.groups, command.groups, strict=True)):
            heads = written_by(rank, self.tp, group)
            if not (heads and wanted.hashes):
                parts.append(())
                continue
            pages = [rank_page(self.scope, g, page_hash, rank, self.tp) for page_hash in wanted.hashes]
            own = group.on_rank(self.tp)
            units = np.ascontiguousarray(np.stack([cut_page(each, own, self.scope.page_tokens) for each in pages], 1))
            parts.append((await self.tier.write_part(g, wanted.hashes, heads.start, units),))
        return PartsWritten(command.op, "", tuple(parts), 1, 0.0)

    async def read(self, rank: int, command: ReadParts, hashes: Sequence[bytes]) -> PartsRead:
        """Whole pages only, and what comes is what belongs there."""
        units = {}
        try:
            for read in command.reads:
                units.update({(read.group, each.page_no, each.head): each.data for each in await self.tier.fetch(read)})
        except Missed as missed:
            return PartsRead(command.op, str(missed), 0, 0.0)
        for g, places in enumerate(command.places):
            group = self.scope.groups[g]
            own, heads = group.on_rank(self.tp), heads_of(rank, self.tp, group)
            for page_no, _ in places:
                out = np.empty(own.page_bytes(self.scope.page_tokens), np.uint8)
                if any((g, page_no, head) not in units for head in heads):
                    return PartsRead(command.op, "a page is not whole", 0, 0.0)
                join_page([units[g, page_no, head] for head in heads], own, self.scope.page_tokens, out)
                assert (out == rank_page(self.scope, g, hashes[page_no], rank, self.tp)).all()
        return PartsRead(command.op, "", 1, 0.0)


class Server:
    """A keeper, its ranks, and what its engine hears."""

    def __init__(
        self,
        store: ObjectStore,
        tp: int = 2,
        *,
        limits: KeeperLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.ranks, self.sums = Ranks(store, tp), TierSums()
        self.heard: list[StoreEvent] = []
        facts = KeeperFacts(SCOPE, tp, CHECKPOINT_TOKENS, "none")
        more = {} if clock is None else {"clock": clock}
        self.keeper = StoreKeeper(store, facts, self.ranks.send, self.heard.append, self.sums, limits=limits, **more)
        self._asks = 0

    async def next(self, kind: type[StoreEvent], within_s: float = PATIENCE_S) -> StoreEvent:
        async with asyncio.timeout(within_s):
            while not (found := [event for event in self.heard if isinstance(event, kind)]):
                await asyncio.sleep(0.005)
        self.heard.remove(found[0])
        return found[0]

    async def settle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.keeper._tasks:
                await asyncio.sleep(0.005)

    async def upload(self, op: int, tokens: Sequence[int], start: int, stop: int) -> None:
        """As far as that all ranks have reported it."""
        self.keeper.do(upload_of(op, tokens, start, stop))
        for rank, command in self.taken():
            assert isinstance(command, WriteParts)
            self.keeper.rank_report(rank, await self.ranks.write(rank, command))

    async def publish(self, op: int, tokens: Sequence[int], start: int, stop: int) -> int | None:
        await self.upload(op, tokens, start, stop)
        self.keeper.do(Publish(op))
        published = await self.next(StorePublished)
        assert isinstance(published, StorePublished) and published.op == op
        return published.pages

    def taken(self) -> list[tuple[int, TierCommand]]:
        taken, self.ranks.sent = self.ranks.sent, []
        return taken

    async def ask(self, tokens: Sequence[int], first: int = 0) -> StoreFound:
        self._asks += 1
        self.keeper.do(Ask(self._asks, "", tuple(chain(SCOPE, tokens)), first))
        found = await self.next(StoreFound)
        assert isinstance(found, StoreFound) and found.ask == self._asks
        return found

    async def fetch(
        self, op: int, ask: int, tokens: Sequence[int], page_nos: Sequence[Sequence[int]]
    ) -> list[PartsRead]:
        self.keeper.do(Fetch(op, ask, tuple(tuple((at, at) for at in group) for group in page_nos)))
        reports = []
        for rank, command in self.taken():
            assert isinstance(command, ReadParts) and command.op == op
            reports.append(await self.ranks.read(rank, command, chain(SCOPE, tokens)))
            self.keeper.rank_report(rank, reports[-1])
        assert len(reports) == self.ranks.tp
        return reports


def upload_of(op: int, tokens: Sequence[int], start: int, stop: int) -> Upload:
    hashes = chain(SCOPE, tokens)
    shares = []
    for group in SCOPE.groups:
        page_nos = (stop - 1,) if group.is_state else tuple(range(start, stop))
        shares.append(UploadShare(page_nos, tuple(hashes[at] for at in page_nos), page_nos))
    parent = hashes[start - 1] if start else SCOPE.root
    return Upload(op, "", start, parent, tuple(hashes[start:stop]), (), tuple(shares))


def parts_in(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "kv").rglob(f"*/{PARTS}/*/*") if path.is_file()]


def open_at(tmp_path: Path, **changes: object) -> ObjectStore:
    store = open_store(f"file://{tmp_path}/kv", {})
    for name, value in changes.items():
        setattr(store, name, value)
    return store


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(open_at(tmp_path))
    yield server
    await server.keeper.close()


async def surveyed(tmp_path: Path) -> Survey:
    store = open_at(tmp_path)
    found = await survey(store)
    assert await verify(store, found) == []
    return found


# ---- what works


async def test_what_one_server_publishes_another_finds_and_reads_at_another_size(
    server: Server, tmp_path: Path
) -> None:
    assert await server.publish(1, TOKENS, 0, 4) == 4
    assert await server.publish(2, TOKENS, 4, 10) == 6
    assert server.keeper.idle
    other = Server(open_at(tmp_path), tp=4)
    found = await other.ask(TOKENS)
    assert found == StoreFound(1, 10, (tuple(range(10)), tuple(range(10)), (3, 9)))
    reports = await other.fetch(1, 1, TOKENS, [range(10), (8, 9), (9,)])
    assert [report.error for report in reports] == [""] * 4
    await other.settle()
    stats = statistics(await surveyed(tmp_path))
    assert stats.pages == stats.distinct_pages == server.sums.published_pages == 22
    assert server.sums.duplicate_pages == 0 and not other.sums.misses
    assert any(path.parts[-3] == "reads" for path in (tmp_path / "kv").rglob("*")), "what was fetched is spared by gc"
    await other.keeper.close()


async def test_what_begins_within_a_span_is_found_by_looking_from_the_start(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 6)
    await server.publish(2, TOKENS, 6, 10)
    assert (await server.ask(TOKENS, first=6)).pages == 10
    assert (await server.ask(TOKENS, first=3)).pages == 10
    assert (await server.ask(OTHER, first=3)).pages == 5
    assert await server.ask(list(range(500, 540)), first=3) == StoreFound(4, 3, ())
    assert await server.ask(list(range(500, 540))) == StoreFound(5, 0, ())


async def test_of_two_servers_that_publish_at_once_one_is_kept_and_both_know_what_is_there(tmp_path: Path) -> None:
    servers = [Server(open_at(tmp_path), tp) for tp in (1, 2, 4)]
    plans = [(TOKENS, 6), (TOKENS, 10), (OTHER, 8)]
    pages = await asyncio.gather(
        *(server.publish(1, tokens, 0, stop) for server, (tokens, stop) in zip(servers, plans, strict=True))
    )
    for server in servers:
        await server.settle()
        await server.keeper.close()
    found = await surveyed(tmp_path)
    assert len(found.spans) == 1 and statistics(found).unused_parts == 0, "the others' parts are gone"
    there = found.spans[0].span.hashes
    for (tokens, stop), num in zip(plans, pages, strict=True):
        hashes = chain(SCOPE, tokens)[:stop]
        assert num == next(
            (i for i, (a, b) in enumerate(zip(hashes, there, strict=False)) if a != b), min(stop, len(there))
        )
    assert sum(server.sums.published_pages for server in servers) == statistics(found).pages
    assert sum(server.sums.duplicate_pages > 0 for server in servers) == 2


async def test_what_else_is_in_spans_that_a_sequence_goes_through_is_told(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 7)
    hashes, others = chain(SCOPE, TOKENS), chain(SCOPE, OTHER)
    rest = Beyond(tuple(hashes[5:7]), (*((g, hashes[at]) for g in (0, 1) for at in (5, 6)), (2, hashes[6])))
    assert (await server.ask(OTHER)).beyond == rest, "it leaves the span"
    assert (await server.ask(TOKENS[:20])).beyond == rest, "it ends within the span"
    assert (await server.ask(TOKENS)).beyond == Beyond()
    for op, tokens, stop, pages in ((2, TOKENS, 5, 5), (3, OTHER, 8, 5)):
        await server.upload(op, tokens, 0, stop)
        server.keeper.do(Publish(op))
        assert await server.next(StorePublished) == StorePublished(op, pages, rest)
    assert await server.publish(4, OTHER, 5, 8) == 3
    assert (await server.ask(OTHER)).pages == 8 and len(set(others[:8]) & set(hashes)) == 5


async def test_tenants_share_nothing(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 4)
    server.keeper.do(Ask(7, "other", tuple(chain(SCOPE, TOKENS)), 0))
    assert await server.next(StoreFound) == StoreFound(7, 0, ())


# ---- what is not wanted


async def test_what_is_discarded_is_deleted_also_when_it_is_reported_later(server: Server, tmp_path: Path) -> None:
    server.keeper.do(upload_of(1, TOKENS, 0, 4))
    (first, one), (second, two) = server.taken()
    assert isinstance(one, WriteParts) and isinstance(two, WriteParts)
    server.keeper.rank_report(first, await server.ranks.write(first, one))
    server.keeper.do(Discard(1))
    await server.settle()
    assert not server.keeper.idle and parts_in(tmp_path) == []
    late = await server.ranks.write(second, two)
    assert parts_in(tmp_path)
    server.keeper.rank_report(second, late)
    await server.settle()
    assert server.keeper.idle and parts_in(tmp_path) == []
    server.keeper.rank_report(second, late)  # of what nobody knows any more


async def test_of_a_failed_upload_nothing_stays(server: Server, tmp_path: Path) -> None:
    server.keeper.do(upload_of(1, TOKENS, 0, 4))
    (first, one), (second, _) = server.taken()
    assert isinstance(one, WriteParts)
    server.keeper.rank_report(second, PartsWritten(1, "no room", ((), (), ()), 0, 0.0))
    server.keeper.rank_report(first, await server.ranks.write(first, one))
    server.keeper.do(Discard(1))
    await server.settle()
    assert server.keeper.idle and parts_in(tmp_path) == [] and server.sums.failures == 1


async def test_a_fetch_of_an_unknown_or_forgotten_ask_goes_to_the_ranks_which_refuse_it(server: Server) -> None:
    await server.publish(1, TOKENS, 0, 4)
    await server.ask(TOKENS)
    server.keeper.do(ForgetAsk(1))
    server.keeper.do(ForgetAsk(99))
    for op, ask in enumerate((1, 99), 1):
        reports = await server.fetch(op, ask, TOKENS, [(0, 1), (), ()])
        assert all(report.error for report in reports)


async def test_what_is_remembered_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    server = Server(open_at(tmp_path), limits=KeeperLimits(known_asks=2))
    await server.publish(1, TOKENS, 0, 4)
    for _ in range(3):
        await server.ask(TOKENS)
    errors = [[each.error for each in await server.fetch(op, op, TOKENS, [(0,), (), ()])] for op in (1, 2, 3)]
    assert all(errors[0]) and not any((*errors[1], *errors[2]))
    await server.keeper.close()


async def test_tenants_are_bounded_and_misses_of_those_forgotten_stay_counted(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    [path] = [path for path in (tmp_path / "kv").rglob("spans/*/*") if path.is_file()]
    path.write_bytes(b"nonsense")
    assert (await server.ask(TOKENS)).pages == 0
    for n in range(store_keeper.TENANTS + 5):
        server.keeper.do(Ask(100 + n, f"salt {n}", tuple(chain(SCOPE, TOKENS)), 0))
        await server.next(StoreFound)
    assert len(server.keeper._tiers) == store_keeper.TENANTS
    assert sum(server.sums.misses.values()) == 1


# ---- what is damaged


async def test_a_damaged_part_is_found_out_counted_and_replaced(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    for path in parts_in(tmp_path):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    other = Server(open_at(tmp_path), tp=1)
    assert (await other.ask(TOKENS)).pages == 4
    [report] = await other.fetch(1, 1, TOKENS, [range(4), (), ()])
    assert report.error
    await other.settle()
    assert other.sums.misses == {Cause.CORRUPT: 1}
    assert (await other.ask(TOKENS)).pages == 0, "not found again by the same server"
    assert await other.publish(1, TOKENS, 0, 4) == 4
    assert (await other.ask(TOKENS)).pages == 4
    assert [each.error for each in await other.fetch(2, 3, TOKENS, [range(4), range(4), (3,)])] in (
        [""],
        [report.error],
    )
    await other.keeper.close()
    await surveyed(tmp_path)


# ---- a store that fails


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Moody:
    """Stands for obstore's calls: fails or hangs as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mood = "well"
        self.calls = 0
        for name in ("get_async", "put_async", "delete_async"):
            monkeypatch.setattr(f"disagg.offload.store.obstore.{name}", self._moody(name))

    def _moody(self, name: str) -> Callable[..., object]:
        import obstore

        call = getattr(obstore, name)

        async def moody(*args: object, **rest: object) -> object:
            self.calls += 1
            if self.mood == "hangs":
                await asyncio.sleep(60)
            if self.mood == "fails" or (self.mood == "full" and name == "put_async"):
                raise OSError(28, "No space left on device")
            return await call(*args, **rest)

        return moody


async def test_a_store_that_fails_is_left_alone_said_to_fail_and_comes_back_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody, clock = Moody(monkeypatch), Clock()
    server = Server(open_at(tmp_path, _clock=clock), clock=clock)
    await server.publish(1, TOKENS, 0, 4)
    moody.mood = "fails"
    for _ in range(3):
        assert (await server.ask(TOKENS)).pages == 0
    server.keeper.tick()
    assert server.heard == [StoreWorks(False)] and not server.keeper.works
    server.heard.clear()
    calls = moody.calls
    assert (await server.ask(TOKENS, first=2)).pages == 2
    assert moody.calls == calls and server.sums.misses[Cause.DEGRADED] == 1, "it was not asked"
    for clock.now_s in (2.0, 3.0, 10.0):  # tried, in pauses that grow, and still failing
        server.keeper.tick()
        await server.settle()
    assert calls < moody.calls <= calls + 3 and server.heard == []
    moody.mood = "well"
    clock.now_s = 50.0
    server.keeper.tick()
    await server.settle()
    server.keeper.tick()
    assert server.heard == [StoreWorks(True)] and server.keeper.works
    server.heard.clear()
    assert (await server.ask(TOKENS)).pages == 4
    await server.keeper.close()
    assert (await surveyed(tmp_path)).strangers == 0


async def test_a_store_without_room_fails_though_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody, clock = Moody(monkeypatch), Clock()
    server = Server(open_at(tmp_path, _clock=clock), clock=clock)
    await server.publish(1, TOKENS, 0, 4)
    moody.mood = "full"
    for op in (2, 3, 4):
        server.keeper.do(upload_of(op, OTHER, 0, 4))
        server.keeper.rank_report(0, PartsWritten(op, "No space left on device", ((), (), ()), 0, 0.0))
        server.keeper.rank_report(1, PartsWritten(op, "", ((), (), ()), 0, 0.0))  # others hold the same heads
        server.keeper.do(Discard(op))
    for clock.now_s in (0.0, 1.5, 10.0):
        server.keeper.tick()
        await server.settle()
    assert server.heard == [StoreWorks(False)]
    server.heard.clear()
    moody.mood, clock.now_s = "well", 100.0
    server.keeper.tick()
    await server.settle()
    server.keeper.tick()
    assert server.heard == [StoreWorks(True)]
    await server.keeper.close()


async def test_a_store_with_room_for_a_trial_and_none_for_what_ranks_write_is_tried_in_pauses_that_grow(
    tmp_path: Path,
) -> None:
    """As a full disk mostly is: what does not fit is larger than what is left."""
    clock, pauses, op = Clock(), list[float](), 0
    server = Server(open_at(tmp_path, _clock=clock), clock=clock)

    async def tick_until(works: bool, act: Callable[[], None]) -> None:
        while server.heard != [StoreWorks(works)]:
            assert server.heard == [] and clock.now_s < 1000
            act()
            server.keeper.tick()
            await server.settle()
        server.heard.clear()

    def fail() -> None:
        nonlocal op
        op += 1
        server.keeper.do(upload_of(op, OTHER, 0, 4))
        server.keeper.rank_report(0, PartsWritten(op, "No space left on device", ((), (), ()), 0, 0.0))
        server.keeper.rank_report(1, PartsWritten(op, "", ((), (), ()), 0, 0.0))
        server.keeper.do(Discard(op))

    def wait() -> None:
        clock.now_s += 0.5

    for _ in range(7):
        await tick_until(False, fail)
        began_s = clock.now_s
        await tick_until(True, wait)
        pauses.append(clock.now_s - began_s)
    assert all(least <= pause <= least + 1 for least, pause in zip((1, 2, 4, 8, 16, 30, 30), pauses, strict=True)), (
        pauses
    )
    assert op == 3 + 6, "when it is tried again, one failure is enough"
    assert await server.publish(op + 1, TOKENS, 0, 4) == 4
    op += 1
    await tick_until(False, fail)
    assert op == 9 + 1 + 3, "what ranks can write proves that it works"
    began_s = clock.now_s
    await tick_until(True, wait)
    assert clock.now_s - began_s <= 2
    await server.keeper.close()


async def test_what_ranks_tried_before_a_store_failed_says_nothing_when_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody, clock = Moody(monkeypatch), Clock()
    server = Server(open_at(tmp_path, _clock=clock), clock=clock)
    moody.mood = "fails"
    for op in range(6):
        server.keeper.do(upload_of(op, OTHER, 0, 4))
    late = [PartsWritten(op, "late: the store did not answer in time", ((), (), ()), 0, 0.0) for op in range(6)]
    for report in late[:3]:
        server.keeper.rank_report(0, report)
    server.keeper.tick()
    assert server.heard == [StoreWorks(False)]
    moody.mood, clock.now_s = "well", 50.0
    server.keeper.tick()
    await server.settle()
    for report in late[3:]:
        server.keeper.rank_report(0, report)
    server.keeper.tick()
    assert server.heard == [StoreWorks(False), StoreWorks(True)] and server.keeper.works
    assert server.sums.failures == 6
    await server.keeper.close()


async def test_an_upload_that_cannot_be_published_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody(monkeypatch)
    server = Server(open_at(tmp_path))
    await server.upload(1, TOKENS, 0, 4)
    moody.mood = "fails"
    server.keeper.do(Publish(1))
    assert not server.keeper.idle
    assert await server.next(StorePublished) == StorePublished(1, None)
    assert server.keeper.idle
    await server.keeper.close()


async def test_asks_of_a_store_that_hangs_are_answered_in_time_and_its_breaker_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody = Moody(monkeypatch)
    server = Server(open_at(tmp_path, _call_s=60.0), limits=KeeperLimits(ask_s=0.1, walks=2, asks=5))
    moody.mood = "hangs"
    hashes = tuple(chain(SCOPE, TOKENS))
    for ask in range(8):
        server.keeper.do(Ask(ask, "", hashes, 0))
    assert server.heard == [], "not from within"
    answers = [await server.next(StoreFound) for _ in range(8)]  # sooner than a call to the store is given up
    assert {answer.ask for answer in answers if isinstance(answer, StoreFound)} == set(range(8))
    assert all(isinstance(answer, StoreFound) and answer.pages == 0 for answer in answers)
    assert server.sums.misses[Cause.LATE] >= 8 and server.keeper.works
    await server.keeper.close()

    store = open_at(tmp_path, _call_s=0.3, breaker=Breaker(failures=3))
    server = Server(store, limits=KeeperLimits(ask_s=0.1, walks=2, asks=5))
    while server.keeper.works:
        server.keeper.do(Ask(9, "", hashes, 0))
        await asyncio.sleep(0.05)
    await server.keeper.close()


async def test_what_was_late_is_not_said_after_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody(monkeypatch)
    server = Server(open_at(tmp_path), limits=KeeperLimits(ask_s=0.05))
    await server.publish(1, TOKENS, 0, 4)

    async def slow(*args: object) -> bytes:
        await asyncio.sleep(0.2)
        raise StoreError(Cause.ABSENT, "it is not there")

    monkeypatch.setattr(server.keeper._store, "get", slow)
    assert (await server.ask(TOKENS)).pages == 0
    await server.settle()
    assert server.heard == [] and moody.mood == "well"
    await server.keeper.close()


async def test_nothing_is_said_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody(monkeypatch)
    server = Server(open_at(tmp_path))
    await server.upload(1, TOKENS, 0, 4)
    moody.mood = "hangs"
    server.keeper.do(Publish(1))
    for ask in range(3):
        server.keeper.do(Ask(ask, "", tuple(chain(SCOPE, TOKENS)), 0))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENCE_S):  # less than the store hangs
        await server.keeper.close()
    server.keeper.tick()
    assert server.heard == [] and not server.keeper._tasks


async def test_what_an_engine_raises_is_raised_by_tick(tmp_path: Path) -> None:
    def refuse(event: StoreEvent) -> None:
        raise ValueError("no engine hears this")

    facts = KeeperFacts(SCOPE, 1, CHECKPOINT_TOKENS, "none")
    keeper = StoreKeeper(open_at(tmp_path), facts, lambda rank, messages: None, refuse, TierSums())
    keeper.do(Ask(1, "", tuple(chain(SCOPE, TOKENS)), 0))
    while keeper._tasks:
        await asyncio.sleep(0.005)
    with pytest.raises(ValueError, match="no engine"):
        keeper.tick()
    await keeper.close()


async def test_what_a_newer_version_has_published_stays(server: Server, tmp_path: Path) -> None:
    await server.publish(1, TOKENS, 0, 4)
    path = tmp_path / "kv" / span_path(SCOPE.place, chain(SCOPE, TOKENS)[0])
    data = bytearray(path.read_bytes())
    data[8:12] = (VERSION + 1).to_bytes(4, "little")
    path.write_bytes(data)
    other = Server(open_at(tmp_path), tp=1)
    assert (await other.ask(TOKENS)).pages == 0 and other.sums.misses == {Cause.VERSION: 1}
    assert await other.publish(1, TOKENS, 0, 4) is None
    assert path.read_bytes() == bytes(data)
    await other.keeper.close()
