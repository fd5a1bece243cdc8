"""Servers that share a store, for tests: a keeper each, ranks that write and read as real ones do, and what engines hear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from disagg.messages.stored import PartRef
from disagg.messages.tiers import PartsRead, PartsWritten, ReadParts, TierCommand, WriteParts
from disagg.offload.instructions import Ask, Fetch, Publish, StoreEvent, StoreFound, StorePublished, Upload, UploadShare
from disagg.offload.keys import PARTS, Scope
from disagg.offload.store import ObjectStore, open_store
from disagg.offload.survey import Survey, survey, verify
from disagg.offload.tier import Missed, StorageTier
from disagg.offload.units import cut_page, heads_of, written_by
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


async def surveyed(tmp_path: Path) -> Survey:
    store = open_at(tmp_path)
    found = await survey(store)
    assert await verify(store, found) == []
    return found
