"""A worker's process with offload, by its sockets: what comes from storage goes to the pool and back to storage."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.config.tree import LogConfig, WorkerConfig
from disagg.memory.groups import spec_of
from disagg.memory.layout import PoolLayout, pool_layout
from disagg.messages.control import Dump, Dumped, Load, Loaded, MakePool, OffloadOpen, OpenOffload, OpenTransfer
from disagg.messages.tiers import (
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    GroupParts,
    PageMove,
    PartsRead,
    PartsWritten,
    ReadParts,
    TierEvent,
    WriteParts,
)
from disagg.messages.transfer import Beat
from disagg.offload.keys import Scope
from disagg.offload.tier import Found
from disagg.offload.units import cut_page
from disagg.server.device import UCX_TLS_ON_CPU
from disagg.server.workers import Workers
from disagg.types.errors import ConfigError
from tests.models.tiny import make_tiny
from tests.offload.pages import PAGE_TOKENS, chain, store_span, whole_page
from tests.worker.offload_ranks import CHECKPOINT_TOKENS, tier_at

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PATIENCE_S = 60.0
NUM_LARGE = 16


class Worker:
    """Workers of one rank with a pool; its reports."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[TierEvent] = asyncio.Queue()
        self.workers = Workers("test", WorkerConfig(silent_s=PATIENCE_S), LogConfig(), 1, lambda _: None, self._heard)
        self.scope: Scope
        self.layout: PoolLayout

    def _heard(self, rank: int, report: Any) -> None:
        if not isinstance(report, Beat):
            self.reports.put_nowait(report)

    async def start(self, model_dir: Path) -> None:
        self.workers.start()
        load = Load(str(model_dir), "float32", "cpu", 0, 1, False, 1, PATIENCE_S, PATIENCE_S)
        (loaded,) = await self.workers.call(load, PATIENCE_S)
        assert isinstance(loaded, Loaded)
        self.scope = Scope("weights", "float32", PAGE_TOKENS, loaded.groups)
        specs = [spec_of(group, PAGE_TOKENS) for group in loaded.groups]
        self.layout = pool_layout(specs, PAGE_TOKENS, CHECKPOINT_TOKENS)
        await self.workers.call(
            MakePool(NUM_LARGE, self.layout.large_bytes, self.layout.strides, PAGE_TOKENS, 1), PATIENCE_S
        )
        await self.workers.call(
            OpenTransfer("nixl", self.workers.incarnation, 1 << 20, 0, 0, UCX_TLS_ON_CPU, ""), PATIENCE_S
        )

    async def open(self, url: str, num_large: int = NUM_LARGE) -> OffloadOpen:
        opened = OpenOffload(
            num_large=num_large,
            large_bytes=self.layout.large_bytes,
            strides=self.layout.strides,
            copy="auto",
            url=url,
            options={},
            compression="none",
            weights=self.scope.weights,
            dtype=self.scope.dtype,
            page_tokens=PAGE_TOKENS,
            checkpoint_tokens=CHECKPOINT_TOKENS,
            groups=self.scope.groups,
        )
        (reply,) = await self.workers.call(opened, PATIENCE_S)
        assert isinstance(reply, OffloadOpen)
        return reply

    async def ask(self, command: Any) -> Any:
        self.workers.send(0, [command])
        return await asyncio.wait_for(self.reports.get(), PATIENCE_S)


@asynccontextmanager
async def worker_of(tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker()
    try:
        await worker.start(make_tiny("jamba", tmp_path / "model"))
        yield worker
    finally:
        await worker.workers.kill()


async def test_pages_go_from_storage_to_the_pool_and_back(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        with pytest.raises(ConfigError, match="bytes of host memory"):
            await worker.open("", num_large=1 << 45)
        url, scope, layout = f"file://{tmp_path}/kv", worker.scope, worker.layout
        opened = await worker.open(url)
        assert opened == OffloadOpen(0, NUM_LARGE * layout.large_bytes, "plain: there is no GPU")

        hashes = chain(scope, range(2 * PAGE_TOKENS))
        page_nos = [(1,) if group.is_state else (0, 1) for group in scope.groups]
        # Each group in large pages of its own; on the host in others than in the pool.
        pool = [[(4 * g + p) * layout.per_large[g] for p in range(2)] for g in range(len(page_nos))]
        host = [[(4 * g + 2 + p) * layout.per_large[g] for p in range(2)] for g in range(len(page_nos))]
        there = tier_at(url, scope)
        span = await store_span(there, hashes, 0, 2)
        reads = [
            read
            for g, group in enumerate(scope.groups)
            for read in there.reads([Found(span, 2)], g, page_nos[g], range(group.kv_heads))
        ]
        places = tuple(tuple((p, host[g][p]) for p in each) for g, each in enumerate(page_nos))
        read = await worker.ask(ReadParts(0, "", tuple(reads), places))
        assert isinstance(read, PartsRead) and read.error == "" and read.nbytes > 0

        moves = tuple(PageMove(g, pool[g][p], host[g][p]) for g, each in enumerate(page_nos) for p in each)
        copied = await worker.ask(CopyIn(0, moves))
        assert isinstance(copied, CopiedIn) and (copied.last, copied.nbytes) == (0, read.nbytes)
        # To pages of the host that nothing has been read into.
        spare = [[(4 * g + p) * layout.per_large[g] for p in range(2)] for g in range(len(page_nos))]
        back = tuple(PageMove(g, pool[g][p], spare[g][p]) for g, each in enumerate(page_nos) for p in each)
        copied = await worker.ask(CopyOut(0, back))
        assert isinstance(copied, CopiedOut) and (copied.last, copied.nbytes) == (0, read.nbytes)

        groups = tuple(
            GroupParts(tuple(hashes[p] for p in each), tuple(spare[g][p] for p in each))
            for g, each in enumerate(page_nos)
        )
        written = await worker.ask(WriteParts(0, "another", groups))
        assert isinstance(written, PartsWritten) and written.error == ""
        other = Scope(scope.weights, scope.dtype, PAGE_TOKENS, scope.groups, "another")
        tier = tier_at(url, other)
        shares = [tier.share(g, each, written.parts[g]) for g, each in enumerate(page_nos)]
        copy = tier.span(0, other.root, hashes, (), shares)
        for g, group in enumerate(scope.groups):
            found = await asyncio.gather(
                *(tier.fetch(each) for each in tier.reads([Found(copy, 2)], g, page_nos[g], range(group.kv_heads)))
            )
            units = {(unit.page_no, unit.head): bytes(unit.data) for part in found for unit in part}
            for page_no in page_nos[g]:
                for head, unit in enumerate(cut_page(whole_page(scope, g, hashes[page_no]), group, PAGE_TOKENS)):
                    assert units[page_no, head] == bytes(unit)

        (dumped,) = await worker.workers.call(Dump(), PATIENCE_S)
        assert isinstance(dumped, Dumped)
        assert "offload: plain: there is no GPU, 2 copies made, 0 waiting" in dumped.text
        await asyncio.wait_for(worker.workers.stop(), PATIENCE_S)
        assert [process.returncode for process in worker.workers._processes] == [0]


async def test_a_page_that_is_not_there_ends_the_group(tmp_path: Path) -> None:
    async with worker_of(tmp_path) as worker:
        await worker.open("")
        worker.workers.send(0, [CopyOut(0, (PageMove(0, 0, 1 << 40),))])
        lost = await asyncio.wait_for(worker.workers.wait_lost(), PATIENCE_S)
        assert "ProtocolError: page 1099511627776 of the host" in lost


def test_the_worker_that_dies_in_slow_campaigns_still_finds_what_it_replaces(tmp_path: Path) -> None:
    """Campaigns run seldom: what they take from a worker's inside would go unnoticed."""
    arguments = ["worker", str(tmp_path), "--name", "decode-0"]
    program = f"import sys; sys.argv = {arguments!r}; import tests.cluster.dying_worker"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
