"""Ranks with a pool of random bytes and an offload driver each, for tests of offload in workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from disagg.memory.layout import PageSizing, PoolLayout
from disagg.messages.control import OpenOffload
from disagg.messages.stored import PartRef, Span
from disagg.messages.tiers import GroupParts, PartsRead, PartsWritten, ReadParts, TierCommand, TierEvent, WriteParts
from disagg.offload.keys import Scope
from disagg.offload.store import open_store
from disagg.offload.tier import Found, StorageTier
from disagg.offload.units import heads_of
from disagg.worker.offload_driver import OffloadDriver
from tests.offload.pages import CHECKPOINT_TOKENS, rank_page
from tests.worker.rank_pools import layout_of, pool_of

PATIENCE_S = 20.0
HOST_LARGE = 64
MOST_PAGES = 6  # of a group, of a sequence in these tests

T = TypeVar("T")


def opening(scope: Scope, layout: PoolLayout, url: str = "", **changed: Any) -> OpenOffload:
    fields: dict[str, Any] = {
        "num_large": HOST_LARGE,
        "large_bytes": layout.large_bytes,
        "strides": layout.strides,
        "copy": "auto",
        "url": url,
        "options": {},
        "compression": "none",
        "weights": scope.weights,
        "dtype": scope.dtype,
        "page_tokens": scope.page_tokens,
        "checkpoint_tokens": CHECKPOINT_TOKENS,
        "groups": scope.groups,
    }
    return OpenOffload(**fields | changed)


class Rank:
    """A driver whose reports are waited for."""

    def __init__(
        self, scope: Scope, rank: int = 0, tp: int = 1, url: str = "", store: Any = None, **changed: Any
    ) -> None:
        self.scope, self.rank, self.tp = scope, rank, tp
        sizing = changed.pop("sizing", PageSizing.LCM)
        self.pool = pool_of(scope, tp, sizing)
        self._woken = threading.Event()
        opened = opening(scope, layout_of(scope, tp, sizing), url, **changed)
        self.driver = OffloadDriver(rank, tp, opened, self.pool, self._woken.set, store)

    def tell(self, *commands: TierCommand) -> None:
        for command in commands:
            self.driver.handle(command)

    def reports(self, count: int, timeout_s: float = PATIENCE_S) -> list[TierEvent]:
        """So many, or those that came in time."""
        deadline, reports = time.monotonic() + timeout_s, list[TierEvent]()
        while len(reports) < count and self._woken.wait(max(0.0, deadline - time.monotonic())):
            self._woken.clear()
            reports += self.driver.take_reports()
        return reports

    def ask(self, command: TierCommand, kind: type[T]) -> T:
        """What the one report says."""
        self.tell(command)
        (report,) = self.reports(1)
        assert isinstance(report, kind)
        return report

    def host(self, g: int, page: int) -> np.ndarray[Any, Any]:
        return self.driver._host.page(g, page)

    def close(self) -> None:
        self.driver.close()
        self.driver.join(3.0)


class StoredPages:
    """A sequence's pages in the host pools of ranks, in one of several places, each page in a large page of its own.

    page_nos: by group; all, but of a state the last.
    """

    def __init__(self, scope: Scope, hashes: Sequence[bytes]) -> None:
        self.scope, self.hashes = scope, list(hashes)
        self.page_nos = [(len(hashes) - 1,) if group.is_state else tuple(range(len(hashes))) for group in scope.groups]

    def at(self, rank: Rank, g: int, page_no: int, place: int) -> int:
        per_large = rank.driver._host.num_pages(g) // HOST_LARGE
        return ((place * len(self.scope.groups) + g) * MOST_PAGES + page_no) * per_large

    def fill(self, rank: Rank, place: int = 0) -> None:
        for g, page_no in self.pages():
            rank.host(g, self.at(rank, g, page_no, place))[:] = rank_page(
                self.scope, g, self.hashes[page_no], rank.rank, rank.tp
            )

    def differs(self, rank: Rank, place: int = 0) -> list[tuple[int, int]]:
        """Pages that are not what they must be."""
        return [
            (g, page_no)
            for g, page_no in self.pages()
            if (
                rank.host(g, self.at(rank, g, page_no, place))
                != rank_page(self.scope, g, self.hashes[page_no], rank.rank, rank.tp)
            ).any()
        ]

    def pages(self) -> list[tuple[int, int]]:
        return [(g, page_no) for g, page_nos in enumerate(self.page_nos) for page_no in page_nos]

    def writing(self, op: int, rank: Rank, place: int = 0) -> WriteParts:
        return WriteParts(
            op,
            self.scope.salt,
            tuple(
                GroupParts(tuple(self.hashes[p] for p in page_nos), tuple(self.at(rank, g, p, place) for p in page_nos))
                for g, page_nos in enumerate(self.page_nos)
            ),
        )

    def span(self, tier: StorageTier, parts: Sequence[tuple[tuple[PartRef, ...], ...]]) -> Span:
        """parts: by rank and group."""
        shares = [
            tier.share(g, page_nos, [ref for of_rank in parts for ref in of_rank[g]])
            for g, page_nos in enumerate(self.page_nos)
        ]
        return tier.span(0, self.scope.root, self.hashes, (), shares)

    def reading(self, op: int, tier: StorageTier, span: Span, rank: Rank, place: int = 0) -> ReadParts:
        found = [Found(span, len(self.hashes))]
        reads = [
            read
            for g, group in enumerate(self.scope.groups)
            for read in tier.reads(found, g, self.page_nos[g], heads_of(rank.rank, rank.tp, group))
        ]
        places = tuple(
            tuple((p, self.at(rank, g, p, place)) for p in page_nos) for g, page_nos in enumerate(self.page_nos)
        )
        return ReadParts(op, self.scope.salt, tuple(reads), places)

    def store(self, ranks: Sequence[Rank], tier: StorageTier, op: int = 0, place: int = 0) -> Span:
        """As all ranks of a group write it. Their host pages hold it already."""
        written = [rank.ask(self.writing(op, rank, place), PartsWritten) for rank in ranks]
        assert [each.error for each in written] == [""] * len(ranks)
        return self.span(tier, [each.parts for each in written])

    def load(self, op: int, tier: StorageTier, span: Span, rank: Rank, place: int = 0) -> PartsRead:
        return rank.ask(self.reading(op, tier, span, rank, place), PartsRead)


def tier_at(url: str, scope: Scope) -> StorageTier:
    """Of the server: what it makes of parts, and what it has read."""
    return StorageTier(open_store(url, {}), scope, checkpoint_tokens=CHECKPOINT_TOKENS)
