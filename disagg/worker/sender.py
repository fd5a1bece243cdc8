"""The prefill side of a transfer: gathers pieces into buffers, writes them to peers, and says what became of them.

    queued ──> gathering ──> writing ──> sent, or failed
               a buffer is held: until the backend says that nothing reads it any more

Gathers, and writes to several peers, are under way side by side; nothing here waits. What a gather needs is made ready
(`make_one_ready`) while nothing else is to be done, as long before its KV is final as there is time for it. Knows pages,
buffers and peers; nothing of what is done with a piece where it lands.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from disagg.messages.transfer import PieceFailed, PieceSent, SendPiece, SendsDropped, TransferEvent
from disagg.models.pool import Pool
from disagg.staging.identity import identity_seed
from disagg.staging.mover import PREPARED_ALIGN, Move, Mover
from disagg.staging.pieces import group_payload_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.transfer.backends.base import WARM_UP_BYTES, Peer, Region, TransferBackend
from disagg.transfer.backends.memory import allocate
from disagg.transfer.buffers import GatherBuffers
from disagg.types.arithmetic import round_up
from disagg.types.ids import LegKey
from disagg.worker.entries import notification_of

Where = tuple[int, int]  # (link, rank of the peer)
# (plan, layers): the first so many layers are as this plan leaves them, and all are as the plans before it did.
Progress = tuple[int, int]
ALL_LAYERS = 1 << 30


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """arena: of the peer, without what it keeps for wiring up. metadata: by which it was made known."""

    peer: Peer
    arena: Region
    metadata: bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """gather: into the memory it is given. pages: what it reads, kept alive until it is done."""

    gather: Callable[[torch.Tensor], Move]
    pages: torch.Tensor


@dataclass(slots=True, eq=False)
class _Queued:
    request: SendPiece
    final_at: Progress  # when the KV of its rows is
    prepared: _Prepared | None = None


@dataclass(frozen=True, slots=True)
class _Gathering:
    request: SendPiece
    prepared: _Prepared
    buffer: int
    move: Move
    write: Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Writing:
    request: SendPiece
    buffer: int
    gathered: Move
    posted_s: float


class Sender:
    """`send`, and `advance` while `busy`; tell it what the backend says of its writes. Events go into `events`."""

    def __init__(
        self,
        pool: Pool,
        mover: Mover,
        backend: TransferBackend,
        gather_bytes: int,
        num_buffers: int,
        events: list[TransferEvent],
    ) -> None:
        """num_buffers of gather_bytes each are allocated and registered; with 0 of them nothing can be sent.

        Raises BackendError if the memory cannot be had.
        """
        self._pool = pool
        self._mover = mover
        self._backend = backend
        self._events = events
        self._gather_bytes = gather_bytes
        self._stride = round_up(gather_bytes, PREPARED_ALIGN)
        self._buffers = GatherBuffers(num_buffers)
        self._memory: tuple[torch.Tensor, ...] = ()  # by buffer
        self._region: Region | None = None
        if num_buffers:
            memory = allocate(num_buffers * self._stride, pool.device)
            buffers = memory.view(num_buffers, self._stride)
            self._memory = tuple(buffers[number, :gather_bytes] for number in range(num_buffers))
            self._region = backend.register(memory)
        self._shapes = tuple(PageShape.of(group, pool.page_tokens) for group in pool.groups)
        self._peers: dict[Where, KnownPeer] = {}
        self.awaited: Counter[Progress] = Counter()  # of all that is queued; also read by the compute thread
        self._queues: dict[Where, deque[_Queued]] = {}  # those that are not empty; whose turn it is comes first
        self._unready: deque[_Queued] = deque()  # oldest first; some are prepared, or no longer queued
        self._gathering: deque[_Gathering] = deque()
        self._writing: dict[int, _Writing] = {}  # by handle
        self._dropping: dict[tuple[int, LegKey], None] = {}
        self._unsure: set[int] = set()  # links of which a write has failed

    # ---- what others want to know

    @property
    def sends(self) -> bool:
        """Whether it has buffers to send from."""
        return bool(self._memory)

    @property
    def has_peers(self) -> bool:
        return bool(self._peers)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def writing(self) -> int:
        return len(self._writing)

    @property
    def gathering(self) -> int:
        return len(self._gathering)

    @property
    def unready(self) -> bool:
        """There may be something for `make_one_ready`."""
        return bool(self._unready)

    def sendable(self, computed: Progress) -> bool:
        """Something could be gathered now."""
        now_s = time.monotonic()
        return any(self._next_of(where, computed, now_s) is not None for where in self._queues)

    def under_way(self, link: int) -> bool:
        """A gather or a write for this link has not ended."""
        return any(request.link == link for request in self._requests())

    def describe(self) -> str:
        now_s = time.monotonic()
        slow = [where for where in self._peers if self._buffers.overdue(where, now_s)]
        return (
            f"to send {self.queued}, gathering {self.gathering}, writing {self.writing}, peers {sorted(self._peers)}"
            + (f", overdue writes to {slow}" if slow else "")
        )

    def prepare(self) -> None:
        """Compile what the first gathers would otherwise wait for."""
        if self._memory:
            for view, shape in zip(self._pool.views, self._shapes, strict=True):
                self._mover.prepare(view.bytes, shape, self._memory[0])

    # ---- peers

    def add_peer(self, where: Where, known: KnownPeer) -> None:
        """Make a peer's arena known, and begin wiring up the way into it."""
        self._peers[where] = known
        pad = Region(known.arena.address, known.arena.nbytes + WARM_UP_BYTES, known.arena.device)
        if self._region is not None and known.arena.nbytes:
            self._backend.warm_up(known.peer, self._region, pad, known.arena.nbytes)
        else:
            self._backend.warm_up(known.peer)

    def remove_link(self, link: int) -> None:
        """Forget the peers of a link and what waits for them. What is under way will be reported as failed."""
        for where in [where for where in self._peers if where[0] == link]:
            peer = self._peers.pop(where).peer
            if not self.at(peer):  # by another link, in the other direction
                self._backend.remove_peer(peer)
            self._left(self._queues.pop(where, ()))
            self._buffers.forget(where)
        for dropped in [dropped for dropped in self._dropping if dropped[0] == link]:
            del self._dropping[dropped]

    def forget_link(self, link: int) -> bool:
        """Nothing of a removed link is under way any more. Whether all of its writes were complete."""
        clean = link not in self._unsure
        self._unsure.discard(link)
        return clean

    def met(self, metadata: bytes) -> Peer | None:
        """The peer that said this of itself on another link, if it is known."""
        return next((known.peer for known in self._peers.values() if known.metadata == metadata), None)

    def at(self, peer: Peer) -> list[Where]:
        """Where a peer of the backend is known."""
        return [where for where, known in self._peers.items() if known.peer == peer]

    # ---- pieces

    def send(self, request: SendPiece) -> None:
        """Gather and write a piece as soon as its plan has computed its layers."""
        where = _where(request)
        known = self._peers.get(where)
        stop = request.arena_offset + request.nbytes
        if known is None:
            self._failed(request, "its peer is not known here")
        elif request.nbytes > self._gather_bytes or not self._buffers.count:
            self._failed(request, f"{request.nbytes} bytes do not fit a gather buffer of {self._gather_bytes}")
        elif request.arena_offset < 0 or stop > known.arena.nbytes:
            self._failed(
                request, f"bytes {request.arena_offset} to {stop} lie outside of an arena of {known.arena.nbytes}"
            )
        else:
            queued = _Queued(request, self._final_at(request))
            self.awaited[queued.final_at] += 1
            self._queues.setdefault(where, deque()).append(queued)
            self._unready.append(queued)

    def drop(self, link: int, key: LegKey) -> None:
        """Send nothing more of a leg; SendsDropped is reported when nothing of it is under way."""
        for where, queue in list(self._queues.items()):
            if where[0] == link:
                kept = deque(queued for queued in queue if queued.request.slice.key != key)
                self._left(queued for queued in queue if queued.request.slice.key == key)
                if kept:
                    self._queues[where] = kept
                else:
                    del self._queues[where]
        self._dropping[link, key] = None
        self._report_dropped()

    def advance(self, computed: Progress) -> bool:
        """Gather what can be gathered and post what has been. Whether anything was done."""
        progress = False
        while self._post() or self._gather(computed):
            progress = True
        return progress

    def make_one_ready(self) -> bool:
        """Make one more queued piece ready to be gathered. False if all are."""
        while self._unready:
            queued = self._unready.popleft()
            if queued.prepared is None and queued in self._queues.get(_where(queued.request), ()):
                queued.prepared = self._prepare(queued.request)
                return True
        return False

    def written(self, handle: int) -> None:
        """The backend says that a write is complete."""
        writing = self._writing.pop(handle)
        self._buffers.give_back(writing.buffer, time.monotonic())
        request = writing.request
        piece, heads = request.slice.piece, request.slice.head_slice.heads
        payload = group_payload_bytes(piece, heads, self._pool.groups[piece.group])
        gather_s, wire_s = writing.gathered.seconds(), time.perf_counter() - writing.posted_s
        self._events.append(PieceSent(request.link, request.entry_id, request.slice.key, payload, gather_s, wire_s))
        self._report_dropped()

    def not_written(self, handle: int, reason: str) -> None:
        """The backend says that a write failed, and that its source is read no more. Its bytes may yet land."""
        writing = self._writing.pop(handle)
        self._unsure.add(writing.request.link)
        self._buffers.give_back(writing.buffer, time.monotonic())
        self._failed(writing.request, reason)
        self._report_dropped()

    # ---- parts of the above

    def _final_at(self, request: SendPiece) -> Progress:
        """A plan leaves layer after layer as it will be. What it makes of states may be copied after the last."""
        piece = request.slice.piece
        group = self._pool.groups[piece.group]
        return request.after_plan, ALL_LAYERS if group.is_state else group.layers[piece.layer_stop - 1] + 1

    def _left(self, pieces: Iterable[_Queued]) -> None:
        """These are queued no more."""
        for queued in pieces:
            self.awaited[queued.final_at] -= 1
            if not self.awaited[queued.final_at]:
                del self.awaited[queued.final_at]

    def _prepare(self, request: SendPiece) -> _Prepared:
        """Ready to be gathered as soon as its KV is final."""
        piece = request.slice.piece
        pages, shape = self._mover.pages(request.pages), self._shapes[piece.group]
        rows = PagedRows(
            self._pool.views[piece.group].bytes,
            pages,
            shape,
            piece,
            request.slice.head_slice,
            identity_seed(request.slice),
            first_page=piece.token_start // shape.page_tokens,
        )
        return _Prepared(self._mover.prepare_gather(rows, self._memory[0]), pages)

    def _next_of(self, where: Where, computed: Progress, now_s: float) -> _Queued | None:
        """The oldest piece for a peer whose KV is final, if the peer may have a buffer."""
        if not self._buffers.may_take(where, len(self._peers), now_s):
            return None
        return next((queued for queued in self._queues[where] if queued.final_at <= computed), None)

    def _gather(self, computed: Progress) -> bool:
        """Begin one gather, for the peer whose turn it is. False if none can begin."""
        now_s = time.monotonic()
        for where in self._queues:
            queued = self._next_of(where, computed, now_s)
            if queued is not None:
                break
        else:
            return False
        queue = self._queues.pop(where)
        queue.remove(queued)
        self._left((queued,))
        if queue:
            self._queues[where] = queue  # as the last
        request, prepared = queued.request, queued.prepared or self._prepare(queued.request)
        buffer = self._buffers.take(where, now_s)
        move = prepared.gather(self._memory[buffer])
        assert move.nbytes == request.nbytes, f"a piece takes {move.nbytes} bytes; its entry has {request.nbytes}"
        known = self._peers[where]
        assert self._region is not None
        write = self._backend.prepare_write(
            known.peer,
            self._region,
            buffer * self._stride,
            known.arena,
            request.arena_offset,
            request.nbytes,
            notification_of(request.entry_id),
        )
        self._gathering.append(_Gathering(request, prepared, buffer, move, write))
        return True

    def _post(self) -> bool:
        """Write the oldest piece that is gathered. False if the oldest gather is still under way."""
        if not self._gathering or not self._gathering[0].move.done():
            return False
        gathered = self._gathering.popleft()
        request, buffer = gathered.request, gathered.buffer
        known = self._peers.get(_where(request))
        if known is None or (request.link, request.slice.key) in self._dropping:
            self._buffers.give_back(buffer, time.monotonic())
            if known is None:
                self._failed(request, "its peer was removed")
            self._report_dropped()
            return True
        handle = gathered.write()
        self._writing[handle] = _Writing(request, buffer, gathered.move, time.perf_counter())
        return True

    def _requests(self) -> list[SendPiece]:
        """Of which a gather or a write is under way."""
        return [gathering.request for gathering in self._gathering] + [each.request for each in self._writing.values()]

    def _failed(self, request: SendPiece, reason: str) -> None:
        self._events.append(PieceFailed(request.link, request.entry_id, request.slice.key, reason))

    def _report_dropped(self) -> None:
        """Answer DropSends for every leg of which nothing is under way any more."""
        if not self._dropping:
            return
        under_way = {(request.link, request.slice.key) for request in self._requests()}
        for where in [where for where in self._dropping if where not in under_way]:
            del self._dropping[where]
            self._events.append(SendsDropped(*where))


def _where(request: SendPiece) -> Where:
    return request.link, request.slice.head_slice.dst_rank
