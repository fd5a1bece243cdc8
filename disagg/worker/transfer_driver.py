"""Does what it is commanded: binds, gathers, writes, scatters, reports. One object, one thread, one agent.

    prefill   Sender     gather ──> write ┐        consecutive pieces overlap: while one is written the next is gathered,
    decode    Receiver            scatter <┘       and while one is scattered the next arrives

Joins the two sides to the backend and to the plans that the compute thread computes. Nothing here waits: what is under way
on the GPU is polled by event, and the compute stream is never waited for. Nothing here decides where a piece goes or whether
a transfer is complete; a notification only says which ring entry to look at. Knows pages, pieces and offsets; nothing of
requests' text, engines or sockets.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from disagg.messages.control import OpenTransfer, TransferOpen
from disagg.messages.transfer import (
    AddPeer,
    Bind,
    DropSends,
    ExpectPiece,
    ForgetEntry,
    PeerAdded,
    PeerRemoved,
    PeerWired,
    RemovePeer,
    SendPiece,
    TransferCommand,
    TransferEvent,
    Unbind,
)
from disagg.models.pool import Pool
from disagg.staging.mover import create_mover
from disagg.transfer.backends.base import WARM_UP_BYTES, BackendError, Peer, Region, TransferBackend, create
from disagg.transfer.backends.memory import allocate
from disagg.types.bounded import forget_oldest
from disagg.worker.entries import agent_name, entry_of
from disagg.worker.receiver import Receiver
from disagg.worker.sender import ALL_LAYERS, KnownPeer, Progress, Sender

LINGER_S = 2.0  # how long to poll after meeting a peer, so that both ends finish wiring up, and after an unbinding
SPIN_S = 0.002  # on a GPU, how long to poll without naps after something has moved
GPU_NAP_S = 0.0001  # on a GPU, then, while something is under way: what a plan computes, or what comes, waits so long
BUSY_NAP_S = 0.001  # on CPU a shorter nap would take the core from the model
IDLE_NAP_S = 0.1
MAX_BROKEN = 4096


def nap_of(busy: bool, on_gpu: bool, still_s: float) -> float:
    """busy: something is to be polled for. on_gpu: for pieces, on a GPU. still_s: since something last moved."""
    if not busy:
        return IDLE_NAP_S
    if not on_gpu:
        return BUSY_NAP_S
    return 0.0 if still_s < SPIN_S else GPU_NAP_S


class TransferDriver:
    """`handle` requests, `turn` while `busy`, and pass the events of both on to the engine."""

    def __init__(self, rank: int, opened: OpenTransfer, pool: Pool) -> None:
        """Raises BackendError if the agent cannot start, ConfigError for kernels that the device has not.

        Made by the thread that will use it.
        """
        # OpenMP counts threads per calling thread: a second one here would spin on the core that computes.
        torch.set_num_threads(1)
        self._rank = rank
        self._device = pool.device
        self._on_gpu = pool.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(pool.device)
        self._backend: TransferBackend = create(
            opened.backend,
            name=agent_name(opened.incarnation, rank),
            ucx_tls=opened.ucx_tls or None,
            ucx_net_devices=opened.ucx_net_devices or None,
            log_file=opened.ucx_log_of(rank),
        )
        self._events: list[TransferEvent] = []
        mover = create_mover(opened.kernels, pool.device)
        arena: torch.Tensor | None = None
        self._arena_region: Region | None = None
        if opened.arena_bytes:
            # Peers that wire up write into the bytes after the arena.
            memory = allocate(opened.arena_bytes + WARM_UP_BYTES, pool.device)
            self._arena_region = self._backend.register(memory)
            arena = memory[: opened.arena_bytes]
        self._arena_bytes = opened.arena_bytes
        self._sender = Sender(pool, mover, self._backend, opened.gather_bytes, opened.gather_buffers, self._events)
        self._receiver = Receiver(pool, mover, arena, self._events)
        self._follows_layers = opened.follows_layers and self._sender.sends
        self._sender.prepare()
        self._receiver.prepare()
        self._computed = (-1, ALL_LAYERS)
        self._computing: deque[tuple[Progress, torch.cuda.Event | None]] = deque()  # whose kernels may still run
        self._removing: dict[int, None] = {}  # links
        self._broken: dict[Peer, None] = {}  # whose connection broke; the oldest first
        self._linger_until_s = 0.0
        self._moved_s = 0.0  # when something last moved
        # Pieces are to be sent whose KV a plan has yet to compute. Read by the compute thread.
        self.waits_for_plans = False

    def opened(self, pid: int) -> TransferOpen:
        region = self._arena_region
        return TransferOpen(
            rank=self._rank,
            pid=pid,
            metadata=self._backend.metadata(),
            arena_address=region.address if region else 0,
            arena_device=region.device if region else 0,
            arena_bytes=self._arena_bytes,
        )

    def layer_written(self, plan_no: int, layer: int) -> bool:
        """Called by the compute thread, in the order of plans and layers: K and V of this layer are in the pool.

        Whether pieces wait for this. On a GPU the kernels that write them may still be running, and run long after they were
        launched: pieces that are asked for meanwhile, as a ring has room for them, wait for layers that are launched already.
        """
        reached = (plan_no, layer + 1)
        awaited = reached in self._sender.awaited
        if awaited or (self._on_gpu and self._follows_layers):
            self._reached(reached)
        return awaited

    def plan_computed(self, plan_no: int) -> None:
        """Called by the compute thread, in the order of plans."""
        self._reached((plan_no, ALL_LAYERS))

    def _reached(self, progress: Progress) -> None:
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        self._computing.append((progress, event))

    @property
    def busy(self) -> bool:
        """Something is under way that only polling brings forward."""
        return self._active or time.monotonic() < self._linger_until_s

    @property
    def nap_s(self) -> float:
        """How long the thread may sleep before the next `turn`, unless something is asked of it."""
        return nap_of(self.busy, self._active and self._on_gpu, time.monotonic() - self._moved_s)

    @property
    def has_peers(self) -> bool:
        """Idle peers are polled too, though rarely: over TCP a write of theirs moves only when we do."""
        return self._sender.has_peers

    @property
    def writes_in_flight(self) -> int:
        return self._sender.writing

    @property
    def bound(self) -> int:
        return self._receiver.bound

    def handle(self, request: TransferCommand) -> None:
        match request:
            case AddPeer():
                self._add_peer(request)
            case RemovePeer():
                self._remove_peer(request)
            case SendPiece():
                self._sender.send(request)
            case DropSends():
                self._sender.drop(request.link, request.key)
            case Bind():
                self._receiver.bind(request)
            case ExpectPiece():
                self._receiver.expect(request)
            case ForgetEntry():
                self.turn()  # its notification may have been here for long, on a machine that is busy with other things
                self._receiver.forget(request.entry_id)
            case Unbind():
                self._receiver.unbind(request)
                self._linger()
        self._moved_s = time.monotonic()
        self.waits_for_plans = self._sender.queued > 0

    def turn(self) -> None:
        """Start what can start, poll the wire once, finish what has arrived."""
        self._finish_plans()
        moved = self._sender.advance(self._computed)
        polled = self._backend.poll()
        for handle in polled.completed:
            self._sender.written(handle)
        for failed in polled.failed:
            self._sender.not_written(failed.handle, failed.reason)
        for wired in polled.wired:
            self._events += [PeerWired(link, rank, wired.ways) for link, rank in self._sender.at(wired.peer)]
        for sender, payload in polled.notifications:
            entry_id = entry_of(payload)
            if entry_id is not None:
                self._receiver.notified(entry_id, sender)
        for peer in polled.gone:
            self._broken[peer] = None
            forget_oldest(self._broken, MAX_BROKEN)
            for link, rank in self._sender.at(peer):
                self._events.append(PeerAdded(link, rank, f"the agent {peer.name} has disconnected"))
        if polled.completed or polled.failed:
            self._sender.advance(self._computed)
            moved = True
        moved |= self._receiver.advance() or bool(polled.notifications)
        for link in [link for link in self._removing if not self._under_way(link)]:
            del self._removing[link]
            self._events.append(PeerRemoved(link, self._sender.forget_link(link)))
        if moved or self._sender.make_one_ready() or self._receiver.make_one_ready():
            self._moved_s = time.monotonic()
        self.waits_for_plans = self._sender.queued > 0

    def take_events(self) -> tuple[TransferEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def describe(self) -> str:
        """For a dump."""
        return f"{self._sender.describe()}; {self._receiver.describe()}; computed {self._computed}"

    def close(self) -> None:
        self._backend.close()

    # ---- parts of the above

    @property
    def _active(self) -> bool:
        return bool(
            self._sender.gathering
            or self._sender.writing
            or self._receiver.busy
            or self._removing
            or self._sender.unready
            or (self._sender.queued and (self._computing or self._sender.sendable(self._computed)))
        )

    def _linger(self) -> None:
        self._linger_until_s = time.monotonic() + LINGER_S

    def _finish_plans(self) -> None:
        """Learn how far plans are computed."""
        while self._computing:
            progress, event = self._computing[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            self._computed = progress
            self._computing.popleft()

    def _under_way(self, link: int) -> bool:
        return self._sender.under_way(link) or self._receiver.under_way(link)

    def _add_peer(self, request: AddPeer) -> None:
        try:
            # Two servers that send to each other have a link for each direction, and one agent on each side.
            peer = self._sender.met(request.metadata)
            if peer is None or peer in self._broken:
                peer = self._backend.add_peer(request.metadata)
        except BackendError as error:
            self._events.append(PeerAdded(request.link, request.peer_rank, str(error)))
            return
        arena = Region(request.arena_address, request.arena_bytes, request.arena_device)
        self._sender.add_peer((request.link, request.peer_rank), KnownPeer(peer, arena, request.metadata))
        self._linger()
        self._events.append(PeerAdded(request.link, request.peer_rank, ""))

    def _remove_peer(self, request: RemovePeer) -> None:
        """PeerRemoved follows when nothing is under way for the link."""
        self.turn()  # what is complete by now need not fail
        self._sender.remove_link(request.link)
        self._receiver.remove_link(request.link)
        self._removing[request.link] = None
        self.turn()
