"""A transfer backend inside one process: agents on threads, joined by a hub. Passes the same suite as the real one.

The hub can kill and freeze agents, as signals do to processes. A write happens when its sender polls, the receiver
being neither: bytes first, then the notification.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable

from disagg.transfer.backends.base import (
    BackendError,
    FailedWrite,
    Memory,
    Peer,
    Polled,
    Region,
    Wired,
    check_range,
)


class Hub:
    """Where agents find each other. Everything in it is guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.agents: dict[str, LoopbackBackend] = {}  # by metadata: one per life of an agent
        self.frozen: set[str] = set()
        self._lives = itertools.count(1)

    def add(self, name: str, agent: LoopbackBackend) -> str:
        """Metadata of a new life: a number no earlier one had, as addresses of objects are used again."""
        with self.lock:
            life = f"loopback {name} {next(self._lives)}"
            self.agents[life] = agent
        return life

    def find(self, metadata: str) -> LoopbackBackend | None:
        return self.agents.get(metadata)

    def kill(self, metadata: str) -> None:
        with self.lock:
            self.agents.pop(metadata, None)

    def freeze(self, metadata: str, frozen: bool) -> None:
        with self.lock:
            (self.frozen.add if frozen else self.frozen.discard)(metadata)


class _Write:
    def __init__(self, peer: Peer, source: int, region: Region, offset: int, nbytes: int, message: bytes) -> None:
        self.peer, self.source, self.region, self.offset = peer, source, region, offset
        self.nbytes, self.message = nbytes, message


class LoopbackBackend:
    def __init__(self, name: str, hub: Hub) -> None:
        self._name, self._hub = name, hub
        self.regions: list[tuple[Region, Memory]] = []
        self.inbox: deque[tuple[str, bytes]] = deque()
        self._peers: dict[str, tuple[Peer, str]] = {}
        self._gone: set[Peer] = set()
        self._newly_gone: list[Peer] = []
        self._next = 0
        self._writes: dict[int, _Write] = {}
        self._failed: list[FailedWrite] = []
        self._wired: list[Wired] = []
        self._life = hub.add(name, self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def outstanding(self) -> int:
        return len(self._writes) + len(self._failed)

    def register(self, memory: Memory) -> Region:
        if not memory.is_contiguous() or memory.nbytes == 0:
            raise BackendError("memory to register must be contiguous and not empty")
        region = Region(memory.data_ptr(), memory.nbytes, memory.get_device())
        self.regions.append((region, memory))
        return region

    def has_registered(self, part: Region) -> bool:
        return any(
            region.device == part.device
            and region.address <= part.address
            and part.address + part.nbytes <= region.address + region.nbytes
            for region, _ in self.regions
        )

    def metadata(self) -> bytes:
        return self._life.encode()

    def add_peer(self, metadata: bytes) -> Peer:
        kind, _, rest = metadata.decode(errors="replace").partition(" ")
        name, _, life = rest.partition(" ")
        if kind != "loopback" or not life.isdigit():
            raise BackendError("these bytes are no metadata of a loopback backend")
        if name in self._peers:
            self.remove_peer(self._peers[name][0])
        peer = Peer(name, self._number())
        self._peers[name] = (peer, metadata.decode())
        return peer

    def warm_up(
        self, peer: Peer, local: Region | None = None, remote: Region | None = None, remote_offset: int = 0
    ) -> None:
        if local is not None and remote is not None and self._usable(peer):
            self._wired.append(Wired(peer, ("loopback",)))

    def remove_peer(self, peer: Peer) -> None:
        if self._usable(peer) or peer in self._gone:
            del self._peers[peer.name]
            self._gone.discard(peer)

    def prepare_write(
        self,
        peer: Peer,
        local: Region,
        local_offset: int,
        remote: Region,
        remote_offset: int,
        nbytes: int,
        notification: bytes,
    ) -> Callable[[], int]:
        check_range(local, local_offset, nbytes)
        check_range(remote, remote_offset, nbytes)
        write = _Write(peer, local.address + local_offset, remote, remote_offset, nbytes, notification)

        def begin() -> int:
            handle = self._number()
            self._writes[handle] = write
            return handle

        return begin

    def say(self, peer: Peer, notification: bytes) -> None:
        """See say.py."""
        with self._hub.lock:
            target = self._target(peer)
            assert target is not None
            target.inbox.append((self._name, notification))

    def poll(self) -> Polled:
        completed = []
        with self._hub.lock:
            for handle, write in list(self._writes.items()):
                if not self._usable(write.peer):
                    self._fail(handle, f"peer {write.peer.name} is gone or was removed")
                    continue
                target = self._target(write.peer)
                if target is None:
                    self._fail(handle, f"peer {write.peer.name} is gone")
                elif target._life in self._hub.frozen:
                    continue
                elif not target.has_registered(write.region):
                    self._fail(handle, f"{write.region} is not registered by {write.peer.name}")
                else:
                    ctypes.memmove(write.region.address + write.offset, write.source, write.nbytes)
                    target.inbox.append((self._name, write.message))
                    completed.append(handle)
                    del self._writes[handle]
            notifications = tuple(self.inbox)
            self.inbox.clear()
        failed, self._failed = tuple(self._failed), []
        gone, self._newly_gone = tuple(self._newly_gone), []
        wired, self._wired = tuple(self._wired), []
        return Polled(tuple(completed), failed, notifications, gone, wired)

    def close(self) -> None:
        self._hub.kill(self._life)

    def _usable(self, peer: Peer) -> bool:
        return peer.name in self._peers and self._peers[peer.name][0] == peer and peer not in self._gone

    def _target(self, peer: Peer) -> LoopbackBackend | None:
        """The agent behind a usable peer; notes that the peer is gone if it is."""
        if not self._usable(peer):
            return None
        target = self._hub.find(self._peers[peer.name][1])
        if target is None:
            self._gone.add(peer)
            self._newly_gone.append(peer)
        return target

    def _fail(self, handle: int, reason: str) -> None:
        del self._writes[handle]
        self._failed.append(FailedWrite(handle, reason))

    def _number(self) -> int:
        self._next += 1
        return self._next
