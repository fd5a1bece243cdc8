"""What a transfer backend must do: one-sided writes into a peer's registered memory, each followed by a notification.

    prefill worker                                   decode worker
    backend.prepare_write(...)()  ── bytes, then ─────> backend.poll().notifications
    backend.poll().completed                              "look at the session"

One backend object belongs to one thread. Nothing moves unless both sides poll. `poll` never raises for what a peer
does: a peer that is lost shows up in `gone`, its writes in `failed`; a peer that is frozen shows up nowhere, so
deadlines are the caller's. Failing or removing a peer is no fence: bytes of a write that is not `completed` may still
land, until that peer's memory is known to be gone (docs/architecture.md).

Every backend passes tests/transfer_backends. Knows bytes and peers; nothing of KV, requests or rings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

HOST = -1  # device index of host memory
WARM_UP_BYTES = 16


class BackendError(Exception):
    """The backend cannot be used as asked: it does not start, or a region or metadata is not one."""


class Memory(Protocol):
    """What of a torch tensor a backend looks at."""

    def data_ptr(self) -> int: ...

    def get_device(self) -> int: ...  # HOST or a CUDA device

    def is_contiguous(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...


class Region(Struct, frozen=True):
    """Registered memory, described to peers. `address` means something only to the process that registered it."""

    address: int
    nbytes: int
    device: int  # HOST or a CUDA device


class Peer(Struct, frozen=True):
    """A peer that was added. A peer that is added again, restarted or not, gets a new serial."""

    name: str
    serial: int


class FailedWrite(Struct, frozen=True):
    """A write that will not be reported as completed. Its source may be reused.

    Some or all of its bytes may have landed, or may yet land where they are on their way.
    """

    handle: int
    reason: str


class Wired(Struct, frozen=True):
    """A peer into whose memory `warm_up` has written. ways: by what writes to it go, such as "zero-copy tcp/eth0"; several if it
    is one of them; empty if that is not known. For people, in the words of the library below.
    """

    peer: Peer
    ways: tuple[str, ...]


class Polled(Struct, frozen=True):
    """What happened since the last poll. A handle is reported once, as completed or as failed."""

    completed: tuple[int, ...] = ()  # all bytes are in place, and the source may be reused
    failed: tuple[FailedWrite, ...] = ()
    notifications: tuple[tuple[str, bytes], ...] = ()  # (name of the peer, payload), in order per peer
    gone: tuple[Peer, ...] = ()  # connections that broke; each once; to be removed, perhaps added again
    wired: tuple[Wired, ...] = ()


NOTHING = Polled()


class TransferBackend(Protocol):
    """See the module. Names of peers are unique among everything that may talk to each other."""

    @property
    def name(self) -> str:
        """Of this agent: what its peers see in `notifications`."""
        ...

    def register(self, memory: Memory) -> Region:
        """Make memory readable for own writes and writable for peers that get `metadata` afterwards.

        The caller keeps the memory alive until `close`. Raises BackendError.
        """
        ...

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`: register first. Travels over the caller's own control channel."""
        ...

    def add_peer(self, metadata: bytes) -> Peer:
        """Make a peer known; one of the same name that was there before is removed. Raises BackendError."""
        ...

    def warm_up(
        self, peer: Peer, local: Region | None = None, remote: Region | None = None, remote_offset: int = 0
    ) -> None:
        """Begin wiring up, so that the first write is as fast as the second. Returns at once; polls finish it.

        With regions the path between these two memories is wired too: WARM_UP_BYTES are written from the start of
        `local` to `remote_offset`, where nothing of value may be, and `Polled.wired` says when they have landed.
        """
        ...

    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer. Its unfinished writes are reported as failed. Removing twice is nothing."""
        ...

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
        """Prepares a write; calling the result, at most once, begins it and returns a handle that a later `poll` reports.

        Preparing is half of what a write costs the host, and needs no final source. The peer sees `notification`, which may
        be empty, when all bytes are in place. A peer that is removed or gone makes the write fail, also one that is prepared
        already. Preparing raises ValueError for a range outside of a region.
        """
        ...

    def poll(self) -> Polled:
        """Make progress and say what happened. Does not block, and raises nothing for what a peer does."""
        ...

    @property
    def outstanding(self) -> int:
        """What only further polls can finish: writes that are not reported yet, and wire-up writes."""
        ...

    def close(self) -> None:
        """Let go of everything. The backend is of no use afterwards; closing twice is nothing."""
        ...


_BACKENDS = {"nixl": "disagg.transfer.backends.nixl:NixlBackend"}


def names() -> tuple[str, ...]:
    """Backends that `create` knows."""
    return tuple(_BACKENDS)


def create(backend: str, **options: Any) -> TransferBackend:
    """Import a backend and make an agent of it. `options` are its constructor's. Raises BackendError."""
    if backend not in _BACKENDS:
        raise BackendError(f"there is no transfer backend {backend!r}; known: {', '.join(sorted(_BACKENDS))}")
    module, _, attribute = _BACKENDS[backend].partition(":")
    made: TransferBackend = getattr(importlib.import_module(module), attribute)(**options)
    return made


def check_range(region: Region, offset: int, nbytes: int) -> None:
    """Raises ValueError for a range that is empty or outside of the region."""
    if nbytes <= 0 or offset < 0 or offset + nbytes > region.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are no range of a region of {region.nbytes} bytes")
