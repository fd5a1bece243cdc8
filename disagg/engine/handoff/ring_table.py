"""The decode side's rings: which link holds which segments of the arena, and which entries in them are live.

One lease per link serves every rank alike (arenas of a server's ranks are equal); each rank has its own ring in it. A link
that waits for segments makes the others give theirs back as soon as they are empty, and the one that has held its own
for longest takes nothing new until it is, so every link gets its turn. Knows links, legs and bytes; nothing of pages,
messages or time (times are arguments).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from disagg.staging.arena import Arena, SegmentLease
from disagg.staging.ring import RingAllocator, RingEntry
from disagg.types.ids import LegKey

TURN_S = 1.0  # a busy ring is kept at least for this long while another link waits for segments
DOUBTFUL_S = 1.0  # after which an entry of a full ring may have lost its notification
MAX_DOUBTFUL = 1024  # entries asked about at once


class RingState(enum.Enum):
    """Of a link's ring, as decode sees it: NONE -> OPEN -> CLOSING -> NONE."""

    NONE = "none"
    OPEN = "open"
    CLOSING = "closing"  # we asked for it back; prefill has not yet said RingClosed


@dataclass(slots=True)
class LiveEntry:
    """A ring entry that prefill may write to, or whose piece has not been scattered."""

    key: LegKey
    piece_no: int
    rank: int
    entry: RingEntry
    assigned_s: float


@dataclass(slots=True)
class LinkRing:
    """The ring of one link, over all decode ranks. entry_ids: shared by all links, so that an id means one entry ever."""

    entry_ids: Iterator[int]
    state: RingState = RingState.NONE
    ring_no: int = -1
    lease: SegmentLease | None = None
    rings: list[RingAllocator] = field(default_factory=list)  # by rank
    live: dict[int, LiveEntry] = field(default_factory=dict)  # by entry_id
    opened_s: float = 0.0
    idle_since_s: float = 0.0
    told: tuple[int, ...] = ()  # the watermarks that prefill was last told
    moved_s: float = 0.0  # when `watch` last saw it move
    _asked_s: float = 0.0
    _seen: tuple[tuple[int, bool], ...] = ()
    _legs: frozenset[LegKey] = frozenset()  # that had entries when `watch` looked last
    _holders: frozenset[LegKey] = frozenset()  # of these, whose entries were the oldest

    @property
    def watermarks(self) -> tuple[int, ...]:
        return tuple(ring.watermark for ring in self.rings)

    @property
    def oldest(self) -> dict[int, LiveEntry]:
        """Each rank's oldest live entry, by entry_id: all the others wait for these when the ring is full."""
        by_rank: dict[int, int] = {}
        for entry_id, live in self.live.items():
            by_rank.setdefault(live.rank, entry_id)
        return {entry_id: self.live[entry_id] for entry_id in by_rank.values()}

    def watch(self, open_legs: Container[LegKey], now_s: float) -> None:
        """Notes whether the ring moves: another entry is the oldest, or its leg has been given up and will be drained. And whose
        the entries are, once for all legs that are asked about."""
        oldest = self.oldest
        seen = tuple((entry_id, live.key in open_legs) for entry_id, live in oldest.items())
        if self._seen and seen != self._seen:  # into an empty ring nothing moves up: its first leg has just progressed
            self.moved_s = now_s
        self._seen = seen
        self._legs = frozenset(live.key for live in self.live.values())
        self._holders = frozenset(live.key for live in oldest.values())

    def idle_s(self, key: LegKey, progress_s: float, open_legs: Container[LegKey], now_s: float) -> float:
        """For how long a leg that last progressed at progress_s has stood still by its own fault, not by its place, as `watch`
        found it.

        While the ring moves, or waits for a piece of another open leg, the leg's turn has not come.
        """
        if key not in self._legs:
            return now_s - progress_s
        if key not in self._holders and any(holder in open_legs for holder in self._holders):
            return 0.0
        return now_s - max(progress_s, self.moved_s)

    def doubtful(self, now_s: float) -> tuple[int, ...]:
        """Entries to ask prefill about, oldest first: its writes wait for them, and nothing was heard of them for long.

        Nothing when it has been asked a moment ago: it may not have computed them yet.
        """
        if now_s - self._asked_s < DOUBTFUL_S:
            return ()
        full = {rank for rank, ring in enumerate(self.rings) if ring.overcommitted}
        old_s = now_s - DOUBTFUL_S
        doubtful = (e for e, live in self.live.items() if live.rank in full and live.assigned_s <= old_s)
        entry_ids = tuple(itertools.islice(doubtful, MAX_DOUBTFUL))
        if entry_ids:
            self._asked_s = now_s
        return entry_ids

    def assign(self, key: LegKey, piece_no: int, rank: int, nbytes: int, now_s: float) -> tuple[int, RingEntry]:
        """(entry_id, entry). Raises ValueError if no entry can be that large."""
        assert self.state is not RingState.NONE
        entry = self.rings[rank].assign(nbytes)
        entry_id = next(self.entry_ids)
        self.live[entry_id] = LiveEntry(key, piece_no, rank, entry, now_s)
        return entry_id, entry

    def free(self, entry_id: int) -> LiveEntry | None:
        """The entry, or None if it was freed before (its leg has ended)."""
        live = self.live.pop(entry_id, None)
        if live is not None:
            self.rings[live.rank].free(live.entry)
        return live

    def free_leg(self, key: LegKey) -> None:
        """Nothing can write to this leg's entries any more, and nothing will be read from them."""
        for entry_id in [entry_id for entry_id, live in self.live.items() if live.key == key]:
            self.free(entry_id)


class RingTable:
    """Rings of all links in one arena."""

    def __init__(self, arena_bytes: int, segment_bytes: int, link_segments: int, ranks: int, idle_s: float) -> None:
        self.arena = Arena(arena_bytes, segment_bytes)
        self._segments = min(link_segments, self.arena.share_segments)
        self._ranks = ranks
        self._idle_s = idle_s
        self.links: dict[int, LinkRing] = {}
        self._entry_ids = itertools.count()
        self._quarantine: dict[int, SegmentLease] = {}
        self._wanted: dict[int, None] = {}  # links that wait for segments, oldest first

    def add(self, link: int) -> None:
        self.links[link] = LinkRing(self._entry_ids)

    def blocked_by_quarantine(self, link: int, peer: str) -> bool:
        """The link has no ring, and so much is quarantined (of its peer's share, or in all) that it can get none."""
        if self.links[link].state is not RingState.NONE:
            return False
        quarantined = sum(len(lease.segments) for lease in self._quarantine.values())
        return (
            self.arena.held_segments(peer) + self._segments > self.arena.share_segments
            or quarantined + self._segments > self.arena.num_segments
        )

    def open(self, link: int, peer: str, now_s: float) -> bool:
        """True if the link may take new legs; False if it must wait (for segments, or for its old ring to drain and close).

        A ring just opened is to be told to prefill: its `told` is empty.
        """
        ring = self.links[link]
        if ring.state is RingState.OPEN:
            if self._must_yield(link, now_s):
                self._wanted[link] = None
                return False
            self._wanted.pop(link, None)
            return True
        if ring.state is RingState.CLOSING:
            return False
        if self.blocked_by_quarantine(link, peer):
            self._wanted.pop(link, None)  # it may not keep the others waiting
            return False
        if self._wanted and next(iter(self._wanted)) != link:
            self._wanted[link] = None
            return False
        lease = self.arena.lease(peer, self._segments)
        if lease is None:
            self._wanted[link] = None
            return False
        self._wanted.pop(link, None)
        ring.state = RingState.OPEN
        ring.ring_no += 1
        ring.lease = lease
        ring.rings = [RingAllocator(lease.nbytes, lease.segment_bytes) for _ in range(self._ranks)]
        ring.told = ()
        ring.opened_s = ring.idle_since_s = now_s
        return True

    def _must_yield(self, link: int, now_s: float) -> bool:
        """Another link waits, and this ring is the next that has to be drained for it."""
        ring = self.links[link]
        if next(iter(self._wanted), link) == link or now_s - ring.opened_s < TURN_S:
            return False
        if any(other.state is RingState.CLOSING for other in self.links.values()):
            return False
        return all(
            other.state is not RingState.OPEN or (ring.opened_s, link) <= (other.opened_s, number)
            for number, other in self.links.items()
        )

    def keep_wishes(self, links: set[int]) -> None:
        """Only these links have legs that wait; what the others once waited for is forgotten."""
        for link in [link for link in self._wanted if link not in links]:
            del self._wanted[link]

    def closable(self, now_s: float, busy: set[int]) -> list[int]:
        """Links whose ring should be given back now: idle for long enough, or wanted by another. Marks them CLOSING.

        busy: links with granted transfers that are not complete.
        """
        out = []
        for number, ring in self.links.items():
            if ring.state is not RingState.OPEN:
                continue
            if ring.live or number in busy:
                ring.idle_since_s = now_s
                continue
            if self._wanted or now_s - ring.idle_since_s >= self._idle_s:
                ring.state = RingState.CLOSING
                out.append(number)
        return out

    def closed(self, link: int) -> None:
        """Prefill says that it writes no more into the ring: the segments go back."""
        ring = self.links[link]
        assert ring.state is RingState.CLOSING
        assert ring.lease is not None
        self.arena.release(ring.lease)
        ring.state, ring.lease, ring.rings = RingState.NONE, None, []
        ring.live.clear()

    def remove(self, link: int, gone: bool) -> bool:
        """The link is lost. gone: its workers are known to have exited. True if its segments are now quarantined."""
        ring = self.links.pop(link)
        self._wanted.pop(link, None)
        if ring.lease is None:
            return False
        if gone:
            self.arena.release(ring.lease)
            return False
        self.arena.quarantine(ring.lease)
        self._quarantine[link] = ring.lease
        return True

    def quiet(self, link: int) -> None:
        """The workers behind a lost link have exited, or say that nothing of it is under way any more."""
        lease = self._quarantine.pop(link, None)
        if lease is not None:
            self.arena.unquarantine(lease)

    @property
    def quarantined_links(self) -> tuple[int, ...]:
        return tuple(self._quarantine)
