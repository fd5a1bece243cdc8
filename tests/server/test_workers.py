"""When a group of workers counts as lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from disagg.config.tree import LogConfig, WorkerConfig
from disagg.messages.control import Dump, Dumped, Profile, Profiled
from disagg.messages.plan import WorkerPlan
from disagg.server.workers import GroupLost, WorkerGroup

SILENT_S = 1.0
WORKER = Path(__file__).with_name("slow_worker.py")


@asynccontextmanager
async def group_of(reply_after_s: float) -> AsyncIterator[WorkerGroup]:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    command = (sys.executable, str(WORKER), str(reply_after_s))
    group = WorkerGroup("test", WorkerConfig(command=command, silent_s=SILENT_S), LogConfig(), 1, ignore, ignore)
    group.start()
    try:
        yield group
    finally:
        await group.kill()


async def test_a_rank_may_be_silent_while_it_does_what_it_was_called_for() -> None:
    async with group_of(3 * SILENT_S) as group:
        assert await group.call(Profile(1, 1), 30.0) == [Profiled(0, 5, 3)]


async def test_a_dump_and_another_call_get_their_own_answers() -> None:
    async with group_of(0.1) as group:
        for _ in range(3):
            profiled, dumped = await asyncio.gather(group.call(Profile(1, 1), 30.0), group.call(Dump(), 30.0))
            assert profiled == [Profiled(0, 5, 3)]
            assert dumped == [Dumped(0, "here")]


async def test_an_answer_that_comes_after_its_time_is_not_taken_for_the_next_ones() -> None:
    async with group_of(0.5) as group:
        with pytest.raises(GroupLost, match="no answer to Dump in time"):
            await group.call(Dump(), 0.1)
        assert await group.call(Profile(1, 1), 30.0) == [Profiled(0, 5, 3)]
        assert await group.call(Dump(), 30.0) == [Dumped(0, "here")]


async def test_a_rank_may_not_be_silent_because_somebody_asks_for_a_dump() -> None:
    async with group_of(60.0) as group:
        with pytest.raises(GroupLost, match="rank 0 has been silent"):
            await group.call(Dump(), 30.0)


async def test_a_rank_that_nobody_has_called_may_not_be_silent() -> None:
    async with group_of(0.0) as group:
        await group.call(Dump(), 30.0)
        assert "rank 0 has been silent" in await asyncio.wait_for(group.wait_lost(), 30.0)


async def test_a_call_is_lost_when_its_time_is_over_though_the_rank_lives() -> None:
    async with group_of(60.0) as group:
        with pytest.raises(GroupLost, match="no answer to Profile in time"):
            await group.call(Profile(1, 1), 3 * SILENT_S)


@pytest.mark.parametrize(
    ("what", "error"),
    [("plan", "IndexError"), ("plan", "Unheard"), ("job", "ZeroDivisionError"), ("lane", "IndexError")],
)
async def test_whatever_a_worker_raises_its_server_learns_the_cause(what: str, error: str) -> None:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    command = (sys.executable, "-m", "tests.server.failing_worker", what, error)
    group = WorkerGroup("test", WorkerConfig(command=command), LogConfig(), 1, ignore, ignore)
    group.start()
    try:
        if what == "plan":
            await group.barrier(30.0)
            group.publish(WorkerPlan(0))
        if what == "job":
            with pytest.raises(GroupLost) as caught:
                await group.call(Profile(1, 1), 30.0)
            reason = str(caught.value)
        else:
            reason = await asyncio.wait_for(group.wait_lost(), 30.0)
    finally:
        await group.kill()
    assert f"{error}: row 262144 is out of bounds" in reason
