"""The rings that a decode engine owns: what it says and hears of them, over links and to its ranks.

    OpenRing ──> entries: ExpectPiece to a rank, AssignEntries to prefill ──> Landing ──> Watermarks ──> CloseRing, RingClosed
                                                                └─ nothing heard: AskWritten, Written ──> ForgetEntry

Turns what `ring_table` decides into instructions. Knows links, keys of legs and pieces; nothing of pages, tokens, or of what
becomes of a leg.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disagg.engine.facts import TransferFacts
from disagg.engine.handoff.ring_table import LiveEntry, RingState, RingTable
from disagg.engine.instructions import ForgetLink, Instruction, ToLink, ToTransfer
from disagg.messages import link as m
from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import ExpectPiece, ForgetEntry
from disagg.staging.arena import locate
from disagg.staging.pieces import group_piece_bytes
from disagg.staging.slices import head_turns
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey


@dataclass(slots=True)
class _Peer:
    """Who is at the other end of a link, and which slices its ranks send."""

    hello: m.LinkHello
    turns: tuple[tuple[tuple[HeadSlice, ...], ...], ...]  # by layer group: head_turns; a piece takes the next
    pieces: list[int]  # by layer group: how many have been assigned

    @property
    def name(self) -> str:
        """Of the incarnation."""
        return f"{self.hello.name}/{self.hello.incarnation}"

    def next_slices(self, group: int) -> tuple[HeadSlice, ...]:
        """Of one more piece of this group."""
        turns = self.turns[group]
        self.pieces[group] += 1
        return turns[self.pieces[group] % len(turns)]


class RingOwner:
    """The rings of all links. Instructions are appended to `out`."""

    def __init__(
        self,
        facts: TransferFacts,
        groups: tuple[LayerGroup, ...],
        tp: int,
        incarnation: str,
        out: list[Instruction],
    ) -> None:
        self.table = RingTable(facts.arena_bytes, facts.segment_bytes, facts.link_segments, tp, facts.link_idle_s)
        self._tp = tp
        self._incarnation = incarnation
        self._groups = groups
        self._out = out
        self._peers: dict[int, _Peer] = {}
        self._quarantined: dict[int, _Peer] = {}  # of lost links that hold segments still

    # ---- links

    def add(self, number: int, hello: m.LinkHello) -> tuple[tuple[int, ...], ...]:
        """A link is up. How many slices of a piece each rank gets, by layer group and rank.

        Raises SliceError if the two TP sizes cannot exchange heads.
        """
        turns = tuple(head_turns(hello.tp, self._tp, group.kv_heads) for group in self._groups)
        self._peers[number] = _Peer(hello, turns, [0] * len(self._groups))
        self.table.add(number)
        ranks = range(self._tp)
        return tuple(tuple(sum(part.dst_rank == rank for part in turn[0]) for rank in ranks) for turn in turns)

    def peer_name(self, number: int) -> str:
        """Of the server at the other end."""
        return self._peers[number].hello.name

    def remove(self, number: int, gone: bool) -> None:
        """A link is lost for good. gone: its workers are known to have exited, so nothing can write to its ring."""
        peer = self._peers.pop(number)
        if self.table.remove(number, gone):
            self._quarantined[number] = peer
        elif not gone:
            self._out.append(ForgetLink(number))

    def quiet(self, number: int) -> None:
        """Nothing of a lost link is under way any more: its segments come back."""
        self._quarantined.pop(number, None)
        self.table.quiet(number)

    # ---- a ring

    def blocked_by_quarantine(self, number: int) -> bool:
        """See RingTable."""
        return self.table.blocked_by_quarantine(number, self._peers[number].name)

    def open(self, number: int, now_s: float) -> bool:
        """True if the link may take new legs. Prefill is told of a ring that it does not know."""
        if not self.table.open(number, self._peers[number].name, now_s):
            return False
        ring = self.table.links[number]
        if not ring.told:
            assert ring.lease is not None
            ring.told = ring.watermarks
            offsets = tuple(segment * ring.lease.segment_bytes for segment in ring.lease.segments)
            for rank in range(self._tp):
                self._out.append(ToLink(number, m.OpenRing(ring.ring_no, rank, ring.lease.segment_bytes, offsets)))
        return True

    def assign(self, number: int, key: LegKey, pieces: Iterable[tuple[int, Piece]], now_s: float) -> bool:
        """Entries for all slices of these numbered pieces; False if there are none.

        Raises ProtocolError for a piece that no entry can hold.
        """
        ring, peer = self.table.links[number], self._peers[number]
        entries = []
        for piece_no, piece in pieces:
            for part in peer.next_slices(piece.group):
                nbytes = group_piece_bytes(piece, part.heads, self._groups[piece.group])
                try:
                    entry_id, entry = ring.assign(key, piece_no, part.dst_rank, nbytes, now_s)
                except ValueError as error:
                    raise ProtocolError(f"{piece} was offered: {error}") from error
                assert ring.lease is not None
                entries.append(
                    m.Entry(
                        entry_id=entry_id,
                        piece_no=piece_no,
                        src_rank=part.src_rank,
                        dst_rank=part.dst_rank,
                        src_head_start=part.src_head_start,
                        heads=part.heads,
                        ring_byte=entry.ring_byte,
                        nbytes=nbytes,
                    )
                )
                expected = ExpectPiece(
                    link=number,
                    entry_id=entry_id,
                    slice=RankSlice(key, piece, part, peer.hello.incarnation, self._incarnation),
                    arena_offset=locate(ring.lease, entry.ring_byte % ring.lease.nbytes),
                    nbytes=nbytes,
                )
                self._out.append(ToTransfer(part.dst_rank, expected))
        if entries:
            self._out.append(ToLink(number, m.AssignEntries(key, ring.ring_no, tuple(entries))))
            self._tell_watermarks(number)
        return bool(entries)

    def landed(self, number: int, entry_id: int) -> LiveEntry | None:
        """An entry is free again. None if it was before: its leg has ended, or its link is lost."""
        ring = self.table.links.get(number)
        live = ring.free(entry_id) if ring is not None else None
        if live is not None:
            self._tell_watermarks(number)
        return live

    def free_leg(self, number: int, key: LegKey) -> None:
        """Nothing can write to this leg's entries any more, and nothing will be read from them."""
        self.table.links[number].free_leg(key)
        self._tell_watermarks(number)

    def forget_leg(self, number: int, key: LegKey) -> None:
        """All of this leg's entries are written: those whose notification has not come by now are free."""
        live = self.table.links[number].live
        self._forget(number, [entry_id for entry_id, entry in live.items() if entry.key == key])

    def ask_doubtful(self, now_s: float) -> None:
        """Of rings that are full, ask which entries are written."""
        for number, ring in self.table.links.items():
            if doubtful := ring.doubtful(now_s):
                self._out.append(ToLink(number, m.AskWritten(ring.ring_no, doubtful)))

    def close_idle(self, busy: set[int], now_s: float) -> None:
        """Ask for rings back that nobody uses. busy: links with granted transfers that are not complete."""
        for number in self.table.closable(now_s, busy):
            self._out.append(ToLink(number, m.CloseRing(self.table.links[number].ring_no)))

    # ---- what prefill says

    def written(self, number: int, message: m.Written) -> None:
        """The answer to AskWritten."""
        ring = self.table.links[number]
        if ring.ring_no == message.ring_no:
            self._forget(number, [entry_id for entry_id in message.entry_ids if entry_id in ring.live])

    def closed(self, number: int, message: m.RingClosed) -> None:
        """The segments go back. Raises ProtocolError for a ring that was not asked for."""
        ring = self.table.links[number]
        if ring.state is not RingState.CLOSING or ring.ring_no != message.ring_no:
            raise ProtocolError(f"prefill closed ring {message.ring_no}, which it was not asked for")
        self.table.closed(number)

    def quiet_links(self, number: int, message: m.QuietLinks) -> None:
        """The segments of these lost links come back. A peer speaks for itself only."""
        speaker = self._peers[number].name
        for lost, peer in list(self._quarantined.items()):
            if peer.name == speaker and peer.hello.generation in message.generations:
                self.quiet(lost)
                self._out.append(ForgetLink(lost))

    # ---- for people and tests

    def describe(self, number: int) -> dict[str, object]:
        ring = self.table.links[number]
        return {
            "ring": ring.state.value,
            "segments": list(ring.lease.segments) if ring.lease else [],
            "live entries": len(ring.live),
            "watermarks": list(ring.watermarks),
        }

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self.table.arena.check_integrity()
        for ring in self.table.links.values():
            for rank_ring in ring.rings:
                rank_ring.check_integrity()
            assert sum(len(rank_ring.live) for rank_ring in ring.rings) == len(ring.live)

    # ---- parts of the above

    def _forget(self, number: int, entry_ids: Iterable[int]) -> None:
        live = self.table.links[number].live
        for entry_id in entry_ids:
            self._out.append(ToTransfer(live[entry_id].rank, ForgetEntry(number, entry_id)))

    def _tell_watermarks(self, number: int) -> None:
        ring = self.table.links[number]
        if ring.rings and ring.watermarks != ring.told:
            ring.told = ring.watermarks
            self._out.append(ToLink(number, m.Watermarks(ring.ring_no, ring.told)))
