"""A store that fails, hangs or has no room: engines are answered always and in time, and it is tried again in pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.messages.tiers import PartsWritten
from disagg.offload.breaker import Breaker
from disagg.offload.causes import Cause
from disagg.offload.instructions import Ask, Discard, Publish, StoreEvent, StoreFound, StorePublished, StoreWorks
from disagg.offload.store import StoreError
from disagg.server.keeper_facts import KeeperFacts, KeeperLimits
from disagg.server.store_keeper import StoreKeeper
from disagg.server.tier_sums import TierSums
from tests.offload.pages import CHECKPOINT_TOKENS, chain
from tests.server.store_servers import OTHER, PATIENCE_S, SCOPE, TOKENS, Server, open_at, surveyed, upload_of


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
