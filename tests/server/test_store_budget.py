"""Servers keep storage to its budget by themselves, one of them at a time, and none of them stands still for it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.config.tree import StorageConfig
from disagg.offload.store import ObjectStore, open_store
from disagg.offload.survey import COLLECTED_PATH, statistics, survey
from disagg.server.store_budget import EVERY_S, SOONEST_S, WRITTEN_SHARE, StoreBudget
from tests.offload.conftest import s3
from tests.offload.pages import SCOPES, chain, store_span
from tests.offload.s3_server import S3Server, says_500

__all__ = ["s3"]  # the fixture

SCOPE = SCOPES["full"]
BUDGET = 30_000
ENDS_S = 60.0

pytestmark = pytest.mark.asyncio


class Server:
    """A server's part: its clock, what it has written, and a budget keeper."""

    def __init__(self, store: ObjectStore, url: str, **changes: Any) -> None:
        self.now_s = 0.0
        self.written = 0
        storage = replace(StorageConfig(url=url, budget_bytes=BUDGET), **changes.pop("storage", {}))
        self.budget = StoreBudget(store, storage, lambda: self.written, clock=lambda: self.now_s, **changes)

    async def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.budget.tick()
        if self.budget._task is not None:
            await asyncio.wait_for(asyncio.gather(self.budget._task, return_exceptions=True), ENDS_S)


async def fill(store: ObjectStore, tmp_path: Path, conversations: int = 12) -> int:
    """Spans that are an hour old and more; how many bytes there are."""
    from disagg.offload.tier import StorageTier

    for number in range(conversations):
        hashes = chain(SCOPE, [1000 * number + i for i in range(24)])
        for start, stop in ((0, 2), (2, 6)):
            await store_span(StorageTier(store, SCOPE, checkpoint_tokens=8), hashes, start, stop)
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file():
            os.utime(file, (1e9, 1e9))
    return (await survey(store)).all_bytes


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv"


@pytest.fixture
def store(url: str) -> ObjectStore:
    return open_store(url, {})


async def test_what_is_above_the_budget_goes_within_one_turn(store: ObjectStore, url: str, tmp_path: Path) -> None:
    assert await fill(store, tmp_path) > 2 * BUDGET
    server = Server(store, url)
    await server.after(EVERY_S)
    found = await survey(store)
    assert BUDGET / 2 < found.all_bytes <= BUDGET and found.strangers == 0
    assert statistics(found).damaged == 0 and server.budget.removed_bytes > BUDGET


async def test_servers_take_turns(store: ObjectStore, url: str, tmp_path: Path) -> None:
    await fill(store, tmp_path, 2)
    first, second = Server(store, url), Server(store, url)
    await first.after(EVERY_S)
    noted_s = await store.modified(COLLECTED_PATH)
    await second.after(EVERY_S)
    assert await store.modified(COLLECTED_PATH) == noted_s, "the note is young, so the other leaves it alone"
    os.utime(tmp_path / "kv" / COLLECTED_PATH, (1e9, 1e9))
    await second.after(EVERY_S)
    assert await store.modified(COLLECTED_PATH) > 1e9 + 1


async def test_who_writes_much_looks_soon_and_who_writes_nothing_does_not(
    store: ObjectStore, url: str, tmp_path: Path
) -> None:
    await fill(store, tmp_path, 1)
    server = Server(store, url)
    server.budget._looked_s = 0.0
    await server.after(2 * SOONEST_S)
    assert server.budget._task is None
    server.written = BUDGET // WRITTEN_SHARE + 1
    await server.after(0.0)
    assert server.budget._task is not None and (await survey(store)).all_bytes > 0
    server.budget._task = None
    await server.after(2 * SOONEST_S)
    assert server.budget._task is None, "what it had written then has been looked at"


async def test_a_collector_that_fails_or_says_nonsense_is_a_line_in_the_log(
    store: ObjectStore, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(store, tmp_path, 1)
    for command, says in (
        ((sys.executable, "-c", "import sys; sys.exit('no room')"), "no room"),
        ((sys.executable, "-c", "print('?')"), "storage cannot be kept to its budget"),
        ((str(tmp_path / "nothing"),), "storage cannot be kept to its budget"),
    ):
        caplog.clear()
        (tmp_path / "kv" / COLLECTED_PATH).unlink(missing_ok=True)
        await Server(store, url, command=command).after(EVERY_S)
        assert says in caplog.text


async def test_a_server_that_ends_takes_its_collector_along(store: ObjectStore, url: str, tmp_path: Path) -> None:
    await fill(store, tmp_path, 1)
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    server = Server(store, url, command=(sys.executable, "-c", code))
    server.now_s += EVERY_S
    server.budget.tick()
    async with asyncio.timeout(ENDS_S):
        while not (pid.exists() and pid.read_text()):
            await asyncio.sleep(0.02)
        await server.budget.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_over_s3_with_the_options_of_the_settings(s3: S3Server, tmp_path: Path) -> None:
    store = open_store(s3.url, s3.options)
    from disagg.offload.tier import StorageTier

    for number in range(6):
        hashes = chain(SCOPE, [1000 * number + i for i in range(24)])
        await store_span(StorageTier(store, SCOPE, checkpoint_tokens=8), hashes, 0, 6)
    server = Server(store, s3.url, storage={"options": dict(s3.options), "budget_bytes": 10_000})
    await server.after(EVERY_S)
    assert (await survey(store)).all_bytes <= 10_000


async def test_a_store_that_fails_is_left_for_the_next_time(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(s3.url, s3.options)
    s3.fault = says_500
    await Server(store, s3.url, storage={"options": dict(s3.options)}).after(EVERY_S)
    assert "storage cannot be kept to its budget now" in caplog.text
