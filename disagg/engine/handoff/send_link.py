"""A link to one decode server's incarnation, as a prefill engine sees it: its ring, its entries, and what is being written.

What no decode engine may say is a ProtocolError. Knows entries, slices and keys of legs; nothing of what becomes of a leg.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.engine.handoff.fitting import Fitting
from disagg.engine.handoff.ring_writer import WriterRing, check_ring
from disagg.messages import link as m
from disagg.messages.pieces import HeadSlice, Piece
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey


@dataclass(slots=True)
class SendLink:
    """What prefill keeps of a link to a decode server: its ring, and what is being written to it."""

    number: int
    hello: m.LinkHello
    turns: tuple[tuple[tuple[HeadSlice, ...], ...], ...]  # by layer group: head_turns
    rings: dict[int, WriterRing] = field(default_factory=dict)  # by ring_no: none or one
    next_ring_no: int = 0
    next_entry_id: int = 0  # at least
    writing: dict[int, tuple[LegKey, int]] = field(default_factory=dict)  # entry_id -> (leg, ring_no)

    @property
    def num_slices(self) -> tuple[int, ...]:
        """Rank slices of a piece, by layer group."""
        return tuple(len(turns[0]) for turns in self.turns)

    def widest(self, group: int) -> int:
        """Heads of the widest rank slice of a piece."""
        return max(part.heads for part in self.turns[group][0])

    def slice_of(self, piece: Piece, entry: m.Entry) -> HeadSlice:
        """What of a piece an entry is for. Raises ProtocolError if no turn sends that."""
        named = (entry.src_rank, entry.dst_rank, entry.src_head_start, entry.heads)
        for parts in self.turns[piece.group]:
            for part in parts:
                if (part.src_rank, part.dst_rank, part.src_head_start, part.heads) == named:
                    return part
        raise ProtocolError(f"{entry} is no rank slice of {piece}")

    def ring(self, ring_no: int) -> WriterRing:
        """Raises ProtocolError if it is not open."""
        ring = self.rings.get(ring_no)
        if ring is None:
            raise ProtocolError(f"ring {ring_no} is not open on this link")
        return ring

    def open_ring(self, message: m.OpenRing, fitting: Fitting) -> None:
        check_ring(message, self.hello.tp)
        ring = self.rings.get(message.ring_no)
        if ring is None:
            if self.rings or message.ring_no < self.next_ring_no:
                raise ProtocolError(f"ring {message.ring_no} is opened while another one is open, or for a second time")
            fitting.check(self.widest, message.segment_bytes)
            ring = self.rings[message.ring_no] = WriterRing(message.segment_bytes)
            self.next_ring_no = message.ring_no + 1
        ring.open(message)

    def take(self, message: m.AssignEntries) -> WriterRing:
        """Decode has assigned these. The ring that they are in."""
        ring = self.ring(message.ring_no)
        for entry in message.entries:
            if entry.entry_id < self.next_entry_id:
                raise ProtocolError(f"{entry} was assigned before, or after a later one")
            self.next_entry_id = entry.entry_id + 1
            ring.take(entry)
        return ring

    def update(self, message: m.Watermarks) -> bool:
        """False if the ring is closed by now."""
        ring = self.rings.get(message.ring_no)
        if ring is None:
            return False
        if len(message.ring_bytes) != self.hello.tp:
            raise ProtocolError(f"{len(message.ring_bytes)} watermarks came of {self.hello.tp} ranks")
        ring.update(message)
        return True

    def written(self, message: m.AskWritten) -> tuple[int, ...]:
        """Those of the entries asked about of which nothing is under way, and nothing will come."""
        ring = self.rings.get(message.ring_no)
        if ring is None:
            return ()
        to_come = {write.entry.entry_id for write in ring.pending} | set(self.writing)
        return tuple(e for e in message.entry_ids if e < self.next_entry_id and e not in to_come)

    def close_if_quiet(self, ring_no: int) -> bool:
        """True, once, when a ring is to be closed and nothing will be written into it any more."""
        ring = self.rings.get(ring_no)
        if ring is None or not ring.closing or ring.pending:
            return False
        if any(number == ring_no for _, number in self.writing.values()):
            return False
        del self.rings[ring_no]
        return True

    def forget(self, key: LegKey) -> None:
        """No write of this leg is under way any more."""
        self.writing = {entry: item for entry, item in self.writing.items() if item[0] != key}
