"""The ring of one link on one decode rank: who may write where, and when.

Decode assigns an entry for every piece that is announced; assigning always succeeds (overcommit). Prefill writes an
entry only when the watermark says that the bytes below it are free. Knows numbers of bytes; nothing of memory,
peers or messages.

A *ring byte* is a count that only grows; `round, offset = divmod(ring_byte, capacity)` says where it lies.

    ring byte  0         100        200        300        400        500        600
    segment    |    0     |    1     |    2     |    0     |    1     |    2     |     capacity 300, segments of 100
    entry                   [  live ][   ..   ]  [  live ]
                            ^ watermark                   ^ head
    an entry that ends at or before watermark + capacity overwrites only what lies before the watermark, which is free

What the other side must be told: the watermark, whenever it changes. It changes at a free, and also at an assign that
finds the ring empty and skips to the next segment; so every message that carries entries carries the watermark too,
and a new subscriber starts from the current watermark, never from zero.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from disagg.types.arithmetic import round_up

ALIGNMENT_BYTES = 16  # entries start where a kernel may load 128 bits at once


class RingEntry(Struct, frozen=True, order=True):
    """Bytes [ring_byte, ring_byte + nbytes) of a ring; never across a segment boundary, so never across the wrap."""

    ring_byte: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The ring byte after the last one."""
        return self.ring_byte + self.nbytes

    def locate(self, capacity_bytes: int) -> tuple[int, int]:
        """(round, offset in the ring)."""
        return divmod(self.ring_byte, capacity_bytes)


class RingAllocator:
    """Decode side. Entries are assigned in order and freed in any order."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        """`capacity_bytes` is a whole number of segments; segments are multiples of ALIGNMENT_BYTES."""
        _check_sizes(capacity_bytes, segment_bytes)
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._head = 0
        self._live: dict[int, RingEntry] = {}  # by ring byte
        self._order: deque[int] = deque()  # ring bytes, oldest first; the freed ones are dropped when they come first

    def assign(self, nbytes: int) -> RingEntry:
        """The next entry; always succeeds. Raises ValueError for a size that no entry can have: split the piece."""
        if not 0 < nbytes <= self.segment_bytes:
            raise ValueError(f"an entry of {nbytes} bytes does not fit: allowed are 1 to {self.segment_bytes}")
        into_segment = self._head % self.segment_bytes
        if into_segment + nbytes > self.segment_bytes:
            self._head += self.segment_bytes - into_segment
        entry = RingEntry(self._head, nbytes)
        self._head = align(entry.stop)
        self._live[entry.ring_byte] = entry
        self._order.append(entry.ring_byte)
        return entry

    def free(self, entry: RingEntry) -> None:
        """Give an entry back: after its scatter, or when its transfer was aborted and no write to it can come."""
        assert self._live.get(entry.ring_byte) == entry, f"{entry} is not live in this ring"
        del self._live[entry.ring_byte]
        while self._order and self._order[0] not in self._live:
            self._order.popleft()

    @property
    def watermark(self) -> int:
        """The ring byte of the oldest live entry, or the head when there is none: everything before it is free."""
        return self._order[0] if self._order else self._head

    @property
    def overcommitted(self) -> bool:
        """Some entry must wait for the watermark to move before it may be written."""
        return self._head > self.watermark + self.capacity_bytes

    @property
    def head(self) -> int:
        """The lowest ring byte that the next entry may have."""
        return self._head

    @property
    def live(self) -> tuple[RingEntry, ...]:
        """Assigned and not freed, oldest first."""
        return tuple(self._live[ring_byte] for ring_byte in self._order if ring_byte in self._live)

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        live = self.live
        assert len(live) == len(self._live)
        assert self._head % ALIGNMENT_BYTES == 0
        assert not self._order or self._order[0] in self._live, "a freed entry pins the watermark"
        stop = self.watermark
        for entry in live:
            assert entry.ring_byte >= stop, f"{entry} overlaps the one before it"
            assert entry.ring_byte // self.segment_bytes == (entry.stop - 1) // self.segment_bytes
            stop = entry.stop
        assert stop <= self._head


class RingWriterView:
    """Prefill side: what is known of the ring of a peer. Watermarks may come late, twice, or out of order."""

    def __init__(self, capacity_bytes: int, watermark: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.watermark = watermark

    def update(self, watermark: int) -> bool:
        """Take a watermark; False if it is not newer than what is known. It never moves back."""
        if watermark <= self.watermark:
            return False
        self.watermark = watermark
        return True

    def may_write(self, entry: RingEntry) -> bool:
        """True when every byte below the entry is known to be free."""
        return entry.stop <= self.watermark + self.capacity_bytes


def align(nbytes: int) -> int:
    """Where the next entry may begin, after so many bytes."""
    return round_up(nbytes, ALIGNMENT_BYTES)


def _check_sizes(capacity_bytes: int, segment_bytes: int) -> None:
    if segment_bytes <= 0 or segment_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"segment_bytes is {segment_bytes}; it must be a positive multiple of {ALIGNMENT_BYTES}")
    if capacity_bytes <= 0 or capacity_bytes % segment_bytes:
        raise ValueError(f"capacity_bytes is {capacity_bytes}; it must be a positive multiple of {segment_bytes}")
