"""Does what the lane asks: binds, gathers, writes, scatters, reports. One object, one thread, one agent.

Owns the gather buffers (prefill) and the arena (decode). Nothing here decides where a piece goes or whether a transfer is
complete; a notification only says which ring entry to look at. Knows pages, pieces and offsets; nothing of requests'
text, engines or sockets.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch

from disagg.messages.control import OpenTransfer, TransferOpen
from disagg.messages.lane import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    Landing,
    LaneReport,
    LaneRequest,
    PeerAdded,
    PeerRemoved,
    Piece,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    Unbind,
    Unbound,
)
from disagg.models.pool import Pool
from disagg.staging.copy import PageShape, gather, scatter
from disagg.staging.identity import identity_seed
from disagg.staging.pieces import group_payload_bytes
from disagg.transfer.backends.base import BackendError, Peer, Region, TransferBackend, create
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey

MAX_UNKNOWN = 1 << 16  # notifications without an entry, and entries without a leg, that are remembered
WIRE_UP_POLL_S = 2.0  # how long to poll after meeting a peer, so that both ends finish wiring up
ENTRY_BYTES = 8


@dataclass(slots=True)
class _Writing:
    """A write under way from gather buffer `buffer`."""

    request: SendPiece
    buffer: int
    gather_s: float
    posted_s: float


@dataclass(frozen=True, slots=True)
class _BoundPages:
    """A leg's pages of one layer group, from page position `first` on. pages: [n] int64."""

    first: int
    pages: torch.Tensor


class TransferDriver:
    """`handle` requests, `turn` while `busy`, and pass the reports of both on to the engine."""

    def __init__(self, rank: int, opened: OpenTransfer, pool: Pool) -> None:
        """Raises BackendError if the agent cannot start. Made by the thread that will use it."""
        # OpenMP counts threads per calling thread: a second one here would spin on the core that computes.
        torch.set_num_threads(1)
        self._rank = rank
        self._pool = pool
        self._shapes = tuple(PageShape.of(group, pool.page_tokens) for group in pool.groups)
        self._backend: TransferBackend = create(
            opened.backend,
            name=f"{opened.incarnation}/{rank}",
            ucx_tls=opened.ucx_tls or None,
            ucx_net_devices=opened.ucx_net_devices or None,
        )
        device = pool.device
        self._arena: torch.Tensor | None = None
        self._arena_region: Region | None = None
        if opened.arena_bytes:
            self._arena = torch.zeros(opened.arena_bytes, dtype=torch.uint8, device=device)
            self._arena_region = self._backend.register(self._arena)
        self._gather_bytes = opened.gather_bytes
        self._buffers: torch.Tensor | None = None
        self._buffers_region: Region | None = None
        self._free_buffers: list[int] = []
        if opened.gather_buffers:
            self._buffers = torch.zeros((opened.gather_buffers, opened.gather_bytes), dtype=torch.uint8, device=device)
            self._buffers_region = self._backend.register(self._buffers)
            self._free_buffers = list(range(opened.gather_buffers))
        self.computed_plan = -1  # written by the compute thread, read here
        self._peers: dict[tuple[int, int], tuple[Peer, int, int]] = {}  # (link, rank) -> peer, arena address, device
        self._to_send: deque[SendPiece] = deque()
        self._writing: dict[int, _Writing] = {}
        self._dropping: dict[tuple[int, LegKey], None] = {}
        self._bound: dict[LegKey, tuple[_BoundPages, ...]] = {}  # by layer group
        self._expected: dict[int, ExpectPiece] = {}
        self._abandoned: OrderedDict[int, ExpectPiece] = OrderedDict()
        self._early: OrderedDict[int, None] = OrderedDict()
        self._poll_until_s = 0.0
        self._reports: list[LaneReport] = []

    def opened(self, pid: int) -> TransferOpen:
        region = self._arena_region
        return TransferOpen(
            rank=self._rank,
            pid=pid,
            metadata=self._backend.metadata(),
            arena_address=region.address if region else 0,
            arena_device=region.device if region else 0,
        )

    @property
    def busy(self) -> bool:
        """Something is under way that only polling brings forward."""
        return bool(self._writing or self._expected or self._sendable() or time.monotonic() < self._poll_until_s)

    @property
    def waits_for_plans(self) -> bool:
        """Pieces are to be sent whose KV a plan has yet to compute. Asked by the compute thread after each plan."""
        return bool(self._to_send)

    @property
    def has_peers(self) -> bool:
        """Idle peers are polled too, though rarely: over TCP a write of theirs moves only when we do."""
        return bool(self._peers)

    @property
    def writes_in_flight(self) -> int:
        return len(self._writing)

    @property
    def bound(self) -> int:
        return len(self._bound)

    def handle(self, request: LaneRequest) -> None:
        match request:
            case AddPeer():
                self._add_peer(request)
            case RemovePeer():
                self._remove_peer(request)
            case SendPiece():
                self._to_send.append(request)
            case DropSends():
                self._to_send = deque(r for r in self._to_send if (r.link, r.key) != (request.link, request.key))
                self._dropping[request.link, request.key] = None
                self._report_dropped()
            case Bind():
                self._bind(request)
            case ExpectPiece():
                self._expected[request.entry_id] = request
                if request.entry_id in self._early:
                    del self._early[request.entry_id]
                    self._land(request.entry_id)
            case Unbind():
                self._unbind(request.key)

    def turn(self) -> None:
        """Start what can start, poll the wire once, finish what has arrived."""
        self._start_writes()
        polled = self._backend.poll()
        for handle in polled.completed:
            self._finish_write(handle, "")
        for failed in polled.failed:
            self._finish_write(failed.handle, failed.reason)
        for _, payload in polled.notifications:
            if len(payload) == ENTRY_BYTES:
                self._notified(int.from_bytes(payload, "little"))
        for peer in polled.gone:
            for (link, rank), (known, _, _) in list(self._peers.items()):
                if known == peer:
                    self._reports.append(PeerAdded(link, rank, f"the agent {peer.name} has disconnected", 0.0))
        if polled.completed or polled.failed:
            self._start_writes()

    def take_reports(self) -> tuple[LaneReport, ...]:
        reports, self._reports = tuple(self._reports), []
        return reports

    def describe(self) -> str:
        """For a dump."""
        return (
            f"writing {len(self._writing)}, to send {len(self._to_send)}, bound {len(self._bound)}, "
            f"expected {sorted(self._expected)[:16]}, early {len(self._early)}, peers {sorted(self._peers)}, "
            f"computed plan {self.computed_plan}"
        )

    def close(self) -> None:
        self._backend.close()

    # ---- peers

    def _add_peer(self, request: AddPeer) -> None:
        started = time.perf_counter()
        try:
            peer = self._backend.add_peer(request.metadata)
        except BackendError as error:
            self._reports.append(PeerAdded(request.link, request.peer_rank, str(error), 0.0))
            return
        self._backend.warm_up(peer)
        self._poll_until_s = time.monotonic() + WIRE_UP_POLL_S
        self._peers[request.link, request.peer_rank] = (peer, request.arena_address, request.arena_device)
        self._reports.append(PeerAdded(request.link, request.peer_rank, "", time.perf_counter() - started))

    def _remove_peer(self, request: RemovePeer) -> None:
        self._to_send = deque(r for r in self._to_send if r.link != request.link)
        for link, rank in [where for where in self._peers if where[0] == request.link]:
            peer, _, _ = self._peers.pop((link, rank))
            self._backend.remove_peer(peer)
        self.turn()  # reports the unfinished writes as failed
        for where in [where for where in self._dropping if where[0] == request.link]:
            del self._dropping[where]
        for entry_id in [e for e, expected in self._expected.items() if expected.link == request.link]:
            del self._expected[entry_id]
        self._reports.append(PeerRemoved(request.link))

    # ---- prefill side

    def _sendable(self) -> bool:
        return bool(self._to_send and self._free_buffers and self._to_send[0].after_plan <= self.computed_plan)

    def _start_writes(self) -> None:
        """Gather and post, oldest first, while there are buffers and the next piece's KV is final."""
        while self._sendable():
            request = self._to_send.popleft()
            known = self._peers.get((request.link, request.dst_rank))
            if known is None:
                self._failed(request, "its peer is not known here")
                continue
            if request.nbytes > self._gather_bytes:
                self._failed(request, f"{request.nbytes} bytes do not fit a gather buffer of {self._gather_bytes}")
                continue
            peer, arena_address, arena_device = known
            buffer = self._free_buffers.pop()
            started = time.perf_counter()
            assert self._buffers is not None
            assert self._buffers_region is not None
            piece, shape = request.piece, self._shapes[request.piece.group]
            nbytes = gather(
                self._pool.views[piece.group].bytes,
                self._page_ids(request.pages),
                shape,
                piece,
                request.src_head_start,
                request.heads,
                self._buffers[buffer],
                _seed(request),
                first_page=piece.token_start // shape.page_tokens,
            )
            posted = time.perf_counter()
            assert nbytes == request.nbytes, f"a piece takes {nbytes} bytes; its entry has {request.nbytes}"
            handle = self._backend.write(
                peer,
                self._buffers_region,
                buffer * self._gather_bytes,
                Region(arena_address, request.arena_offset + nbytes, arena_device),
                request.arena_offset,
                nbytes,
                request.entry_id.to_bytes(ENTRY_BYTES, "little"),
            )
            self._writing[handle] = _Writing(request, buffer, posted - started, posted)

    def _finish_write(self, handle: int, failure: str) -> None:
        writing = self._writing.pop(handle)
        self._free_buffers.append(writing.buffer)
        request = writing.request
        if failure:
            self._failed(request, failure)
        else:
            payload = group_payload_bytes(request.piece, request.heads, self._pool.groups[request.piece.group])
            wire_s = time.perf_counter() - writing.posted_s
            self._reports.append(
                PieceSent(request.link, request.entry_id, request.key, payload, writing.gather_s, wire_s)
            )
        self._report_dropped()

    def _failed(self, request: SendPiece, reason: str) -> None:
        self._reports.append(PieceFailed(request.link, request.entry_id, request.key, reason))

    def _report_dropped(self) -> None:
        """Answer DropSends for every leg of which nothing is under way any more."""
        if not self._dropping:
            return
        under_way = {(w.request.link, w.request.key) for w in self._writing.values()}
        for where in [where for where in self._dropping if where not in under_way]:
            del self._dropping[where]
            self._reports.append(SendsDropped(*where))

    # ---- decode side

    def _bind(self, request: Bind) -> None:
        assert len(request.tables) == len(self._pool.groups), f"{len(request.tables)} page tables are bound"
        if self._pool.mixed:
            # Rows that no piece fills are read by attention too, with weight zero, and must be numbers.
            for number, (group, table) in enumerate(zip(self._pool.groups, request.tables, strict=True)):
                if not group.is_state:
                    self._pool.zero_pages(number, table.pages)
        self._bound[request.key] = tuple(
            _BoundPages(table.first, self._page_ids(table.pages)) for table in request.tables
        )
        self._reports.append(Bound(request.key))

    def _page_ids(self, pages: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._pool.device)

    def _notified(self, entry_id: int) -> None:
        if entry_id in self._expected:
            self._land(entry_id)
        elif (abandoned := self._abandoned.pop(entry_id, None)) is not None:
            self._landing(abandoned, ok=False, reason="unbound", payload=0, scatter_s=0.0)
        else:
            # The engine's ExpectPiece is on its way, by another road than the bytes.
            self._early[entry_id] = None
            if len(self._early) > MAX_UNKNOWN:
                self._early.popitem(last=False)

    def _land(self, entry_id: int) -> None:
        expected = self._expected.pop(entry_id)
        tables = self._bound.get(expected.key)
        if tables is None:
            self._landing(expected, ok=False, reason="unbound", payload=0, scatter_s=0.0)
            return
        assert self._arena is not None
        started = time.perf_counter()
        piece, shape, table = expected.piece, self._shapes[expected.piece.group], tables[expected.piece.group]
        first_page = piece.token_start // shape.page_tokens
        stop_page = -(-piece.token_stop // shape.page_tokens)
        if first_page < table.first or stop_page > table.first + len(table.pages):
            bound = f"{table.first} to {table.first + len(table.pages)}"
            raise ProtocolError(f"{piece} of {expected.key} was to land where only page positions {bound} are bound")
        ok = scatter(
            self._arena[expected.arena_offset : expected.arena_offset + expected.nbytes],
            self._pool.views[piece.group].bytes,
            table.pages[first_page - table.first : stop_page - table.first],
            shape,
            piece,
            expected.dst_head_start,
            expected.heads,
            _seed(expected),
            first_page=first_page,
        )
        payload = group_payload_bytes(piece, expected.heads, self._pool.groups[piece.group])
        seconds = time.perf_counter() - started
        self._landing(expected, ok=ok, reason="" if ok else "checksum", payload=payload, scatter_s=seconds)

    def _landing(self, expected: ExpectPiece, *, ok: bool, reason: str, payload: int, scatter_s: float) -> None:
        self._reports.append(
            Landing(expected.link, expected.entry_id, expected.key, ok, reason, payload, scatter_s, time.time())
        )

    def _unbind(self, key: LegKey) -> None:
        self._bound.pop(key, None)
        for entry_id in [e for e, expected in self._expected.items() if expected.key == key]:
            self._abandoned[entry_id] = self._expected.pop(entry_id)
            self._poll_until_s = time.monotonic() + WIRE_UP_POLL_S
            if len(self._abandoned) > MAX_UNKNOWN:
                self._abandoned.popitem(last=False)
        self._reports.append(Unbound(key))


def _seed(request: SendPiece | ExpectPiece) -> int:
    piece: Piece = request.piece
    return identity_seed(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        trunk=request.key.trunk,
        src_incarnation=request.src_incarnation,
        dst_incarnation=request.dst_incarnation,
        group=piece.group,
        layer_start=piece.layer_start,
        layer_stop=piece.layer_stop,
        token_start=piece.token_start,
        token_stop=piece.token_stop,
        src_rank=request.src_rank,
        dst_rank=request.dst_rank,
    )
