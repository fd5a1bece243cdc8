"""What one router is still to be told of the KV that this server has. Pure; knows pages by their names, and no streams.

    begin ──> all of it is due ──> parts, the first of them a reset ──> changes, the latest of each page ──> parts ...
                  ^                                                          │
                  └─────────── more changes wait than are kept ──────────────┘

What routers know of a cache is a hint, so it needs no numbers and no acknowledgements: within a stream nothing is lost,
and every stream begins with all of it. Tiers take turns, so that none waits for another that always has news.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagg.messages.legs import KvEvents, Tier
from disagg.wire.server import KvUpdate

PART_PAGES = 8192  # about 300 KB on the wire
MAX_CHANGES = 65536  # pages; when more wait, to tell everything again costs no more


class KvFeeds:
    """Of several tiers. snapshots: of each, everything that is in it, asked only if due."""

    def __init__(self, snapshots: Mapping[Tier, Callable[[], KvEvents]]) -> None:
        self._snapshots = snapshots
        self._feeds = {tier: KvFeed(tier) for tier in snapshots}

    def begin(self) -> None:
        for feed in self._feeds.values():
            feed.begin()

    def add(self, tier: Tier, events: KvEvents) -> None:
        if tier in self._feeds:
            self._feeds[tier].add(events)

    @property
    def pending(self) -> bool:
        return any(feed.pending for feed in self._feeds.values())

    @property
    def waiting_pages(self) -> int:
        return sum(feed.waiting_pages for feed in self._feeds.values())

    def take(self) -> KvUpdate | None:
        """The next part, of the tier that has waited longest since its last one."""
        for tier, feed in self._feeds.items():
            if feed.pending:
                self._feeds[tier] = self._feeds.pop(tier)
                return feed.take(self._snapshots[tier])
        return None


class KvFeed:
    """`begin` it with every hello, `add` what happens, `take` one part at a time."""

    def __init__(self, tier: Tier = Tier.GPU, part_pages: int = PART_PAGES, max_changes: int = MAX_CHANGES) -> None:
        self._tier = tier
        self._part_pages = part_pages
        self._max_changes = max_changes
        self._all_due = False
        self._changes: dict[tuple[int, bytes], bool] = {}  # page -> stored, or removed
        # What is being told now, before any later change: what was removed, then what was stored, from _told on.
        self._telling: KvEvents | None = None
        self._told = 0

    def begin(self) -> None:
        """The router is to be told everything, whatever it was told before."""
        self._all_due = True
        self._telling = None
        self._changes.clear()

    def add(self, events: KvEvents) -> None:
        if self._all_due:
            return  # what is there will be looked up when it is told
        for page in events.removed:
            self._changes[page] = False
        for page in events.stored:
            self._changes[page] = True
        if len(self._changes) > self._max_changes:
            self.begin()

    @property
    def pending(self) -> bool:
        """There is something to take."""
        return self._all_due or self._telling is not None or bool(self._changes)

    @property
    def waiting_pages(self) -> int:
        """How many pages are known to wait."""
        telling = self._telling
        left = len(telling.removed) + len(telling.stored) - self._told if telling is not None else 0
        return left + len(self._changes)

    def take(self, snapshot: Callable[[], KvEvents]) -> KvUpdate | None:
        """The next part, of at most `part_pages` pages. snapshot: everything that is in the tier, asked only if due."""
        reset = self._all_due
        if reset:
            self._all_due = False
            self._telling, self._told = snapshot(), 0
        elif self._telling is None and self._changes:
            stored = tuple(page for page, is_stored in self._changes.items() if is_stored)
            removed = tuple(page for page, is_stored in self._changes.items() if not is_stored)
            self._changes.clear()
            self._telling, self._told = KvEvents(stored, removed), 0
        if self._telling is None:
            return None
        first, stop = self._told, self._told + self._part_pages
        removed, stored = self._telling.removed, self._telling.stored
        part = KvEvents(
            stored=stored[max(0, first - len(removed)) : max(0, stop - len(removed))], removed=removed[first:stop]
        )
        self._told = stop
        if stop >= len(removed) + len(stored):
            self._telling = None
        return KvUpdate(part, reset, self._tier)
