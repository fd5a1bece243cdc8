"""The transfer thread of a simulated worker: what `worker/transfer_driver` is, over cells and an imagined wire.

It passes the same suite as the real one (tests/transfer/test_transfer_contract). What happens next is its caller's choice: that a
command is served (`serve`), a piece gathered (`start_write`), a write brought forward (`advance`), a notification looked at
(`notified`). Knows commands and events, as the real one does; nothing of engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from disagg.engine.facts import EngineFacts
from disagg.messages.layout import GroupPages
from disagg.messages.pieces import RankSlice
from disagg.messages.transfer import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    ForgetEntry,
    Landing,
    PeerAdded,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    TransferCommand,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.transfer.landed import Arrival, LandedRows
from disagg.types.ids import LegKey
from tests.engine.sim_pages import Cells, SimPages

GRANULE = 8  # bytes of an arena that are told apart


@dataclass
class ArenaWrite:
    """A write as it lies in an arena. identity: what the checksum is seeded with."""

    identity: tuple[object, ...]
    nbytes: int
    cells: Cells
    corrupt: bool = False


@dataclass
class Write:
    """A write under way. It goes in two halves; the notification follows the second."""

    command: SendPiece
    target: SimTransfer
    data: ArenaWrite
    halves: int = 0


@dataclass
class _BoundLeg:
    tables: tuple[GroupPages, ...]
    rows: LandedRows = field(default_factory=LandedRows)


class Wire(Protocol):
    """The world between two transfer threads."""

    gather_buffers: int

    def target(self, link: int, rank: int) -> SimTransfer | None:
        """Who is at the other end, as far as it lives."""

    def breaks(self) -> bool:
        """A write fails now."""

    def corrupts(self) -> bool:
        """What has been written is not what was sent."""

    def notify(self, target: SimTransfer, entry_id: int) -> None:
        """A notification is on its way to `target.notifications`, or lost."""

    def stray(self, writer: SimTransfer, write: Write) -> None:
        """A write has failed: what is on its way may land (`land_stray`) as long as its writer lives."""

    def bad_checksum(self) -> None:
        """A piece did not verify."""


def _identity(of: RankSlice) -> tuple[object, ...]:
    ranks = of.head_slice
    return (of.key, of.piece, of.src_incarnation, of.dst_incarnation, ranks.src_rank, ranks.dst_rank)


class SimTransfer:
    """See the module. computed: the last plan that the compute thread has computed. overwrites: pages are written before it is
    known whether a piece verifies, as on a GPU.
    """

    def __init__(
        self, facts: EngineFacts, pages: SimPages, wire: Wire, computed: Callable[[], int], *, overwrites: bool
    ) -> None:
        self._facts = facts
        self._pages = pages
        self._wire = wire
        self._computed = computed
        self._overwrites = overwrites
        self.alive = True
        self.commands: deque[TransferCommand] = deque()
        self.events: deque[TransferEvent] = deque()
        self.arena: list[ArenaWrite | None] = [None] * (facts.transfer.arena_bytes // GRANULE)
        self.to_send: deque[SendPiece] = deque()
        self.writing: list[Write] = []
        self.dropping: dict[tuple[int, LegKey], None] = {}
        self.bound: dict[LegKey, _BoundLeg] = {}
        self.expected: dict[int, ExpectPiece] = {}
        self.notifications: list[int] = []  # delivered, and not looked at; in any order
        self._peers: set[tuple[int, int]] = set()
        self._unsure: set[int] = set()  # links of which a write has failed
        self._abandoned: dict[int, ExpectPiece] = {}
        self._early: set[int] = set()

    # ---- commands

    def serve(self) -> None:
        """The oldest command."""
        command = self.commands.popleft()
        match command:
            case AddPeer():
                self._peers.add((command.link, command.peer_rank))
                self.events.append(PeerAdded(command.link, command.peer_rank, ""))
            case RemovePeer():
                self._remove_peer(command.link)
            case SendPiece():
                self._send(command)
            case DropSends():
                self.to_send = deque(r for r in self.to_send if (r.link, r.slice.key) != (command.link, command.key))
                self.dropping[command.link, command.key] = None
                self._report_dropped()
            case Bind():
                assert command.key not in self.bound, f"{command.key} is bound twice"
                self.bound[command.key] = _BoundLeg(command.tables)
                self.events.append(Bound(command.key))
            case ExpectPiece():
                self.expected[command.entry_id] = command
                if command.entry_id in self._early:
                    self._early.discard(command.entry_id)
                    self._land(command.entry_id)
            case ForgetEntry():
                if command.entry_id in self.notifications:  # it has been here for long, perhaps
                    self.notified(command.entry_id)
                lost = self.expected.pop(command.entry_id, None) or self._abandoned.pop(command.entry_id, None)
                if lost is not None:
                    self._landing(lost, "lost")
            case Unbind():
                self._unbind(command.key, blank=command.blank)

    def _remove_peer(self, link: int) -> None:
        self._peers = {peer for peer in self._peers if peer[0] != link}
        self.to_send = deque(r for r in self.to_send if r.link != link)
        for write in [w for w in self.writing if w.command.link == link]:
            self._give_up(write)
            self._failed(write.command, "its peer was removed")
        for where in [where for where in self.dropping if where[0] == link]:
            del self.dropping[where]
        for entry_id in [e for e, expected in self.expected.items() if expected.link == link]:
            del self.expected[entry_id]
        clean = link not in self._unsure
        self._unsure.discard(link)
        self.events.append(PeerRemoved(link, clean))

    def _unbind(self, key: LegKey, *, blank: bool) -> None:
        for entry_id in [e for e, expected in self.expected.items() if expected.slice.key == key]:
            self._abandoned[entry_id] = self.expected.pop(entry_id)
        leg = self.bound.pop(key, None)
        if leg is not None:  # pages go back without bytes that never verified, or that are not trusted
            spoiled = leg.rows.pages if blank else leg.rows.spoiled_pages
            groups, page_tokens = self._facts.model.groups, self._facts.memory.page_tokens
            for g, page_nos in spoiled(groups, page_tokens).items():
                for page_no in page_nos:
                    self._pages.blank(g, leg.tables[g].pages[page_no - leg.tables[g].first])
        self.events.append(Unbound(key))

    # ---- writes

    def _send(self, command: SendPiece) -> None:
        if (command.link, command.slice.head_slice.dst_rank) not in self._peers:
            self._failed(command, "its peer is not known here")
        else:
            assert command.nbytes <= self._facts.transfer.gather_bytes
            self.to_send.append(command)

    @property
    def sendable(self) -> bool:
        """`start_write` has something to do."""
        return len(self.writing) < self._wire.gather_buffers and self._final() is not None

    def _final(self) -> SendPiece | None:
        """The oldest piece whose KV is final."""
        return next((command for command in self.to_send if command.after_plan <= self._computed()), None)

    def start_write(self) -> None:
        """Gather, as it is now, what the pages hold."""
        command = self._final()
        assert command is not None
        self.to_send.remove(command)
        of = command.slice
        target = self._wire.target(command.link, of.head_slice.dst_rank)
        if target is None:
            self._failed(command, "its peer has exited")
            return
        cells = self._pages.gather(of.piece, of.head_slice, command.pages)
        self.writing.append(Write(command, target, ArenaWrite(_identity(of), command.nbytes, cells)))

    def advance(self, write: Write) -> None:
        """Half of a write goes over the wire; with the second half its notification."""
        command = write.command
        if not write.target.alive or self._wire.breaks():
            self._give_up(write)
            self._failed(command, "the wire broke")
            self._report_dropped()
            return
        assert command.arena_offset % 16 == 0
        first, count = command.arena_offset // GRANULE, command.nbytes // GRANULE
        assert first + count <= len(write.target.arena), "a write outside of the arena"
        half = count // 2
        for index in range(half) if write.halves == 0 else range(half, count):
            write.target.arena[first + index] = write.data
        write.halves += 1
        if write.halves < 2:
            return
        write.data.corrupt = self._wire.corrupts()
        self.writing.remove(write)
        self.events.append(PieceSent(command.link, command.entry_id, command.slice.key, command.nbytes, 0.0, 0.0))
        self._report_dropped()
        self._wire.notify(write.target, command.entry_id)

    def _give_up(self, write: Write) -> None:
        """A write fails."""
        self.writing.remove(write)
        self._unsure.add(write.command.link)
        self._wire.stray(self, write)

    def land_stray(self, write: Write) -> None:
        first, count = write.command.arena_offset // GRANULE, write.command.nbytes // GRANULE
        if self.alive and write.target.alive:
            for index in range(count // 2, count):
                write.target.arena[first + index] = write.data

    def _report_dropped(self) -> None:
        under_way = {(w.command.link, w.command.slice.key) for w in self.writing}
        for where in [where for where in self.dropping if where not in under_way]:
            del self.dropping[where]
            self.events.append(SendsDropped(*where))

    def _failed(self, command: SendPiece, reason: str) -> None:
        self.events.append(PieceFailed(command.link, command.entry_id, command.slice.key, reason))

    # ---- what arrives

    def notified(self, entry_id: int) -> None:
        """A notification is looked at."""
        self.notifications.remove(entry_id)
        if entry_id in self.expected:
            self._land(entry_id)
        elif (abandoned := self._abandoned.pop(entry_id, None)) is not None:
            self._landing(abandoned, "unbound")
        else:
            self._early.add(entry_id)

    def _land(self, entry_id: int) -> None:
        expected = self.expected.pop(entry_id)
        leg = self.bound.get(expected.slice.key)
        if leg is None:
            self._landing(expected, "unbound")
            return
        judged = leg.rows.judge(expected.slice)
        assert judged is not Arrival.WAIT, "here every scatter is over at once"
        if judged is Arrival.NOTHING:
            self._landing(expected, "")
            return
        cells = self._verified(expected)
        if judged is Arrival.SCATTER or cells is not None:
            self._scatter(leg, expected, cells)
        self._landing(expected, "checksum" if cells is None else "")

    def _scatter(self, leg: _BoundLeg, expected: ExpectPiece, cells: Cells | None) -> None:
        piece, part = expected.slice.piece, expected.slice.head_slice
        table = leg.tables[piece.group]
        rows = self._facts.model.groups[piece.group].rows_per_page(self._facts.memory.page_tokens)
        first, stop = piece.token_start // rows, -(-piece.token_stop // rows)
        within = table.first <= first and stop <= table.first + len(table.pages)
        assert within, "a piece lands outside of what was bound"
        leg.rows.begin(expected.slice)
        if cells is not None or self._overwrites:
            self._pages.scatter(piece, part, table, cells)
        leg.rows.end(expected.slice, ok=cells is not None)

    def _verified(self, expected: ExpectPiece) -> Cells | None:
        """What lies where the entry is, if it is what was to come."""
        first = expected.arena_offset // GRANULE
        lies = self.arena[first : first + expected.nbytes // GRANULE]
        data = lies[0]
        whole = data is not None and all(each is data for each in lies) and data.nbytes == expected.nbytes
        if data is not None and whole and data.identity == _identity(expected.slice) and not data.corrupt:
            return data.cells
        self._wire.bad_checksum()
        return None

    def _landing(self, expected: ExpectPiece, reason: str) -> None:
        self.events.append(
            Landing(expected.link, expected.entry_id, expected.slice.key, not reason, reason, 1, 0.0, 0.0)
        )
