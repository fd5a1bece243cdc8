"""The decode side of a transfer: knows what ring entries mean, scatters what arrives in them, and says what landed.

    expected ──> arrived ──> scattering ──> landed, or not
       └──> forgotten
    an entry is in use until its landing is reported; a leg's pages are, until Unbound is

Scatters are under way side by side; nothing here waits. What a scatter needs is made ready (`make_one_ready`) while nothing
else is to be done, before its bytes arrive. Knows pages, pieces and entries; nothing of peers.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from disagg.messages.transfer import Bind, Bound, ExpectPiece, Landing, TransferEvent, Unbind, Unbound
from disagg.models.pool import Pool
from disagg.staging.checksum import checksum
from disagg.staging.identity import identity_seed
from disagg.staging.mover import Move, Mover
from disagg.staging.pieces import TRAILER_BYTES, group_payload_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.transfer.landed import Arrival, LandedRows
from disagg.types.arithmetic import ceil_div
from disagg.types.bounded import forget_oldest
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.worker.entries import agent_name

MAX_UNKNOWN = 1 << 16  # notifications without an entry, and entries without a leg, that are remembered


@dataclass(frozen=True, slots=True)
class _BoundPages:
    """A leg's pages of one layer group, from page number `first` on. pages: the same ids, [n] int64 on the device."""

    first: int
    ids: tuple[int, ...]
    pages: torch.Tensor

    @property
    def stop(self) -> int:
        return self.first + len(self.ids)


@dataclass(slots=True)
class _Leg:
    """A leg that is bound, or about to be unbound."""

    key: LegKey
    tables: tuple[_BoundPages, ...]  # by layer group
    binding: list[Move] = field(default_factory=list)  # makes its pages blank before anything lands
    rows: LandedRows = field(default_factory=LandedRows)
    distrusted: bool = False  # nothing that has landed may stay
    blanking: list[Move] = field(default_factory=list)  # makes pages blank that were spoiled, before they go back

    @property
    def ready(self) -> bool:
        return all(move.done() for move in self.binding)


@dataclass(frozen=True, slots=True)
class _Scattering:
    expected: ExpectPiece
    leg: _Leg
    move: Move


class Receiver:
    """`bind`, `expect`, `notified`, `unbind`, and `advance` while `busy`. Events go into `events`."""

    def __init__(self, pool: Pool, mover: Mover, arena: torch.Tensor | None, events: list[TransferEvent]) -> None:
        """arena: [bytes] uint8, on the pool's device; None where nothing lands."""
        self._pool = pool
        self._mover = mover
        self._arena = arena
        self._events = events
        self._shapes = tuple(PageShape.of(group, pool.page_tokens) for group in pool.groups)
        self._bound: dict[LegKey, _Leg] = {}
        self._binding: deque[_Leg] = deque()  # whose pages are not blank yet
        self._unbinding: list[_Leg] = []
        self._expected: dict[int, ExpectPiece] = {}  # by entry_id, like the following
        self._arrived: deque[ExpectPiece] = deque()  # of bound legs; not begun
        self._scattering: deque[_Scattering] = deque()
        self._abandoned: OrderedDict[int, ExpectPiece] = OrderedDict()  # whose leg was unbound before they arrived
        self._early: OrderedDict[tuple[int, str], None] = OrderedDict()  # notified, by whom, and not expected yet
        self._unready: deque[int] = deque()  # entries, oldest first; some are prepared, or not expected any more
        self._prepared: dict[int, Callable[[], Move]] = {}  # scatters of what is expected

    # ---- what others want to know

    @property
    def busy(self) -> bool:
        return bool(self._expected or self._arrived or self._scattering or self._binding or self._unbinding)

    @property
    def bound(self) -> int:
        return len(self._bound)

    def under_way(self, link: int) -> bool:
        """Entries of this link are being read."""
        arrived = (*self._arrived, *(each.expected for each in self._scattering))
        return any(expected.link == link for expected in arrived)

    def describe(self) -> str:
        return (
            f"bound {self.bound}, binding {len(self._binding)}, unbinding {len(self._unbinding)}, expected "
            f"{sorted(self._expected)[:16]}, arrived {len(self._arrived)}, scattering {len(self._scattering)}, early "
            f"{len(self._early)}"
        )

    def prepare(self) -> None:
        """Compile what the first scatters would otherwise wait for."""
        if self._arena is not None:
            for view, shape in zip(self._pool.views, self._shapes, strict=True):
                self._mover.prepare(view.bytes, shape, self._arena)

    # ---- legs

    def bind(self, request: Bind) -> None:
        """Bound is reported when the pages hold numbers only."""
        assert len(request.tables) == len(self._pool.groups), f"{len(request.tables)} page tables are bound"
        assert request.key not in self._bound, f"{request.key} is bound twice"
        tables = tuple(
            _BoundPages(table.first, table.pages, self._mover.pages(table.pages)) for table in request.tables
        )
        leg = _Leg(request.key, tables)
        if self._pool.blanks:
            # Rows that no piece fills are read by attention too, with weight zero, and must be numbers.
            for number, group in enumerate(self._pool.groups):
                if not group.is_state and tables[number].ids:
                    leg.binding.append(self._mover.zero(self._pool.views[number].bytes, tables[number].pages))
        self._bound[request.key] = leg
        self._binding.append(leg)
        self.advance()

    def unbind(self, request: Unbind) -> None:
        """Unbound is reported when nothing is under way in the leg's pages, and nothing is left in them that is wrong."""
        key = request.key
        for entry_id in [e for e, expected in self._expected.items() if expected.slice.key == key]:
            self._abandoned[entry_id] = self._expected.pop(entry_id)
            self._prepared.pop(entry_id, None)
            forget_oldest(self._abandoned, MAX_UNKNOWN)
        for expected in [expected for expected in self._arrived if expected.slice.key == key]:
            self._arrived.remove(expected)
            self._landing(expected, reason="unbound")
        leg = self._bound.pop(key, None)
        if leg is None:
            self._events.append(Unbound(key))
        else:
            leg.distrusted = request.blank
            self._unbinding.append(leg)
            self.advance()

    def remove_link(self, link: int) -> None:
        """Nothing more is expected of a link. What is being scattered goes on to its end."""
        for entry_id in [e for e, expected in self._expected.items() if expected.link == link]:
            del self._expected[entry_id]
            self._prepared.pop(entry_id, None)
        for expected in [expected for expected in self._arrived if expected.link == link]:
            self._arrived.remove(expected)
            self._prepared.pop(expected.entry_id, None)

    # ---- entries

    def expect(self, request: ExpectPiece) -> None:
        self._expected[request.entry_id] = request
        self._unready.append(request.entry_id)
        early = (request.entry_id, _sender_of(request))
        if early in self._early:
            del self._early[early]
            self.notified(*early)

    def make_one_ready(self) -> bool:
        """Make one more expected piece ready to be scattered. False if all are that are bound.

        Raises ProtocolError for a piece that was to land outside of what is bound.
        """
        while self._unready:
            expected = self._expected.get(self._unready.popleft())
            leg = self._bound.get(expected.slice.key) if expected is not None else None
            if expected is not None and leg is not None:
                self._prepared[expected.entry_id] = self._prepare(expected, leg)
                return True
        return False

    def notified(self, entry_id: int, sender: str) -> None:
        """An agent says that an entry's bytes are in place. Ignores every agent but the entry's writer."""
        expected = self._expected.get(entry_id) or self._abandoned.get(entry_id)
        if expected is None:
            # The engine's ExpectPiece is on its way, by another road than the bytes.
            self._early[entry_id, sender] = None
            forget_oldest(self._early, MAX_UNKNOWN)
        elif sender == _sender_of(expected):
            self._abandoned.pop(entry_id, None)
            if self._expected.pop(entry_id, None) is not None and expected.slice.key in self._bound:
                self._arrived.append(expected)
                self.advance()
            else:
                self._landing(expected, reason="unbound")

    def forget(self, entry_id: int) -> None:
        """Nothing more is to be heard of an entry. If it has not arrived by now, Landing says that it is lost."""
        expected = self._expected.pop(entry_id, None) or self._abandoned.pop(entry_id, None)
        if expected is not None:
            self._landing(expected, reason="lost")

    def advance(self) -> bool:
        """Report what is done, and begin what can be begun. Whether anything was done.

        Raises ProtocolError for a piece that was to land outside of what is bound.
        """
        progress = False
        while self._finish_scatter() or self._begin_scatters():
            progress = True
        while self._binding and self._binding[0].ready:
            self._events.append(Bound(self._binding.popleft().key))
            progress = True
        return self._finish_unbinding() or progress

    # ---- parts of the above

    def _begin_scatters(self) -> bool:
        """Begin what need not wait for another scatter, oldest first. Whether anything was begun or settled."""
        waiting: deque[ExpectPiece] = deque()
        progress = False
        while self._arrived:
            expected = self._arrived.popleft()
            if self._begin(expected):
                progress = True
            else:
                waiting.append(expected)
        self._arrived = waiting
        return progress

    def _begin(self, expected: ExpectPiece) -> bool:
        """False if the piece must wait."""
        leg = self._bound[expected.slice.key]
        match leg.rows.judge(expected.slice):
            case Arrival.WAIT:
                return False
            case Arrival.NOTHING:
                self._landing(expected, reason="")
                return True
            case Arrival.VERIFY_FIRST:
                if not self._verifies(expected):
                    self._landing(expected, reason="checksum")
                    return True
            case Arrival.SCATTER:
                pass
        leg.rows.begin(expected.slice)
        scatter = self._prepared.pop(expected.entry_id, None) or self._prepare(expected, leg)
        self._scattering.append(_Scattering(expected, leg, scatter()))
        return True

    def _prepare(self, expected: ExpectPiece, leg: _Leg) -> Callable[[], Move]:
        """Ready to be scattered as soon as it has arrived."""
        pages, first_page = self._pages_of(expected, leg)
        piece = expected.slice.piece
        rows = PagedRows(
            self._pool.views[piece.group].bytes,
            pages,
            self._shapes[piece.group],
            piece,
            expected.slice.head_slice,
            identity_seed(expected.slice),
            first_page=first_page,
        )
        return self._mover.prepare_scatter(rows, self._entry(expected))

    def _pages_of(self, expected: ExpectPiece, leg: _Leg) -> tuple[torch.Tensor, int]:
        """(the pages that hold a piece, number of the first). Raises ProtocolError if they are not bound."""
        piece = expected.slice.piece
        shape, table = self._shapes[piece.group], leg.tables[piece.group]
        first_page = piece.token_start // shape.page_tokens
        stop_page = ceil_div(piece.token_stop, shape.page_tokens)
        if first_page < table.first or stop_page > table.stop:
            bound = f"{table.first} to {table.stop}"
            raise ProtocolError(
                f"{piece} of {expected.slice.key} was to land where only page numbers {bound} are bound"
            )
        return table.pages[first_page - table.first : stop_page - table.first], first_page

    def _entry(self, expected: ExpectPiece) -> torch.Tensor:
        assert self._arena is not None
        return self._arena[expected.arena_offset : expected.arena_offset + expected.nbytes]

    def _verifies(self, expected: ExpectPiece) -> bool:
        """Whether an entry's checksum is right, found out on the host. Slow, and rare."""
        entry = self._entry(expected)
        # On a stream of its own: the default one would wait for what is being computed.
        aside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if entry.is_cuda:
            aside = torch.cuda.stream(torch.cuda.Stream(entry.device))  # type: ignore[no-untyped-call]
        with aside:
            framed = entry.cpu()
        trailer = int.from_bytes(framed[-TRAILER_BYTES:].numpy().tobytes(), "little")
        return checksum(framed[:-TRAILER_BYTES], self._payload(expected), identity_seed(expected.slice)) == trailer

    def _finish_scatter(self) -> bool:
        """Report the oldest scatter, if it is done. Scatters end in the order in which they were begun."""
        if not self._scattering or not self._scattering[0].move.done():
            return False
        scattered = self._scattering.popleft()
        ok = scattered.move.ok()
        scattered.leg.rows.end(scattered.expected.slice, ok=ok)
        self._landing(scattered.expected, reason="" if ok else "checksum", scatter_s=scattered.move.seconds())
        return True

    def _finish_unbinding(self) -> bool:
        progress = False
        for leg in list(self._unbinding):
            if leg.rows.under_way or not leg.ready:
                continue
            if not leg.blanking:
                self._blank_spoiled(leg)
            if all(move.done() for move in leg.blanking):
                self._unbinding.remove(leg)
                self._events.append(Unbound(leg.key))
                progress = True
        return progress

    def _blank_spoiled(self, leg: _Leg) -> None:
        """Pages go back without bytes that never verified, or that are not trusted."""
        spoiled = leg.rows.pages if leg.distrusted else leg.rows.spoiled_pages
        for group, page_nos in spoiled(self._pool.groups, self._pool.page_tokens).items():
            table = leg.tables[group]
            pages = self._mover.pages([table.ids[page_no - table.first] for page_no in page_nos])
            leg.blanking.append(self._mover.zero(self._pool.views[group].bytes, pages))

    def _payload(self, expected: ExpectPiece) -> int:
        piece, heads = expected.slice.piece, expected.slice.head_slice.heads
        return group_payload_bytes(piece, heads, self._pool.groups[piece.group])

    def _landing(self, expected: ExpectPiece, *, reason: str, scatter_s: float = 0.0) -> None:
        self._prepared.pop(expected.entry_id, None)
        payload = 0 if reason in ("unbound", "lost") else self._payload(expected)
        self._events.append(
            Landing(
                link=expected.link,
                entry_id=expected.entry_id,
                key=expected.slice.key,
                ok=not reason,
                reason=reason,
                payload_bytes=payload,
                scatter_s=scatter_s,
                landed_unix_s=time.time(),
            )
        )


def _sender_of(expected: ExpectPiece) -> str:
    return agent_name(expected.slice.src_incarnation, expected.slice.head_slice.src_rank)
