"""What a prefill engine knows of a ring in a decode server's arena: where it may write, and what it waits for to do so.

    ring byte   0 ─────── watermark ───────── head ─────── watermark + capacity
                free again │ assigned          │ next entry │
                                                 └ written when all its bytes are before the last of these

Decode assigns entries in order, each rank's on its own; an entry is written when what lay there before has been taken out.
What no decode engine may say is a ProtocolError. Knows entries and bytes; nothing of pages or of who reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from disagg.messages import link as m
from disagg.messages.pieces import RankSlice
from disagg.staging.ring import ALIGNMENT_BYTES, RingEntry, RingWriterView, align
from disagg.transfer.session import Write
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

MAX_ARENA_BYTES = 1 << 48  # no device has so much; a sum of such offsets stays within what the transfer agent takes
MAX_SEGMENTS = 1024  # of one ring


def check_ring(message: m.OpenRing, ranks: int) -> None:
    """Raises ProtocolError for a ring that no arena could have. ranks: of the decode server."""
    rank, segment_bytes, segments = message.dst_rank, message.segment_bytes, message.segment_offsets
    if not 0 <= rank < ranks or not 0 < len(segments) <= MAX_SEGMENTS or segment_bytes % ALIGNMENT_BYTES:
        raise ProtocolError(f"a ring of {len(segments)} segments of {segment_bytes} bytes on rank {rank} cannot be")
    if not all(0 <= offset <= MAX_ARENA_BYTES - segment_bytes for offset in segments):
        raise ProtocolError(f"a segment of {segment_bytes} bytes ends beyond what an arena may have")


@dataclass(slots=True)
class RankRing:
    """A ring on one decode rank."""

    segment_bytes: int
    offsets: tuple[int, ...]  # of its segments in the arena
    view: RingWriterView
    head: int = 0  # where the next entry may begin at the earliest, so that no two share a byte of one round
    pending: deque[tuple[RankSlice, Write]] = field(default_factory=deque)  # not yet writable

    def take(self, entry: m.Entry) -> None:
        """Decode has assigned an entry. Raises ProtocolError if it lies where no ring could put it."""
        if (
            entry.nbytes <= 0
            or entry.ring_byte % ALIGNMENT_BYTES
            or not self.head <= entry.ring_byte <= self.head + self.view.capacity_bytes
            or entry.ring_byte % self.segment_bytes + entry.nbytes > self.segment_bytes
        ):
            raise ProtocolError(
                f"{entry} does not follow ring byte {self.head} in segments of {self.segment_bytes} bytes"
            )
        self.head = align(entry.ring_byte + entry.nbytes)

    def writable(self) -> Iterator[tuple[RankSlice, Write]]:
        """Those whose bytes are free by now, in order; they are pending no more."""
        while self.pending:
            entry = self.pending[0][1].entry
            if not self.view.may_write(RingEntry(entry.ring_byte, entry.nbytes)):
                return
            yield self.pending.popleft()

    def locate(self, ring_byte: int) -> int:
        """Arena offset of a ring byte."""
        offset = ring_byte % (len(self.offsets) * self.segment_bytes)
        segment, within = divmod(offset, self.segment_bytes)
        return self.offsets[segment] + within


@dataclass(slots=True)
class WriterRing:
    """A ring, by decode rank."""

    segment_bytes: int
    ranks: dict[int, RankRing] = field(default_factory=dict)
    closing: bool = False

    def open(self, message: m.OpenRing) -> None:
        """One more rank has it. Raises ProtocolError if that cannot be."""
        rank = message.dst_rank
        if rank in self.ranks or message.segment_bytes != self.segment_bytes or self.closing:
            raise ProtocolError(f"ring {message.ring_no} is opened again on rank {rank}, or with other segments")
        view = RingWriterView(self.segment_bytes * len(message.segment_offsets))
        self.ranks[rank] = RankRing(self.segment_bytes, message.segment_offsets, view)

    def take(self, entry: m.Entry) -> None:
        """As RankRing's."""
        ring = self.ranks.get(entry.dst_rank)
        if ring is None:
            raise ProtocolError(f"{entry} names a rank that is not there")
        ring.take(entry)

    def update(self, message: m.Watermarks) -> None:
        """Everything before these ring bytes is free. Raises ProtocolError for one that is beyond what was assigned."""
        for rank, ring_byte in enumerate(message.ring_bytes):
            ring = self.ranks.get(rank)
            if ring is None:
                continue
            if ring_byte > ring.head:
                raise ProtocolError(f"watermark {ring_byte} of rank {rank} is beyond entry {ring.head}")
            ring.view.update(ring_byte)

    def drop(self, key: LegKey) -> None:
        """A leg's writes that are pending will not be done."""
        for ring in self.ranks.values():
            ring.pending = deque(item for item in ring.pending if item[0].key != key)

    @property
    def pending(self) -> list[Write]:
        return [write for ring in self.ranks.values() for _, write in ring.pending]
