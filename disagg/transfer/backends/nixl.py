"""The NIXL backend: UCX below it chooses cuda_ipc (NVLink), InfiniBand/RoCE, shared memory or TCP.

Measured facts of NIXL 1.5.1 that shape this module:
- Without the progress thread (which burns a core) nothing moves unless someone polls. The receiver must too: over TCP for
  bytes to move, over cuda_ipc for a write to be complete, so a receiver that naps for 1 ms makes every write take that long.
- A write without a notification is made with b"", so an empty notification needs a byte of its own: every notification
  begins with one that says what it is. That byte also marks the wire-up message, which no caller sees.
- A killed peer raises nixlRemoteDisconnectError from whichever call notices; a removed one nixlNotFoundError from the
  state of every unfinished write; a frozen one raises nothing. None of the calls waits for a peer.
- Releasing the handle of a write that is still under way aborts it and raises; it must be tried again until it does not.
  Only then is a failed write reported, because only then is its source read no more.
- UCX reads its environment when it is loaded: its settings are arguments of the first agent in a process, and so is the file
  that it writes its log into (`ucx`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from disagg.transfer.backends.base import (
    HOST,
    NOTHING,
    WARM_UP_BYTES,
    BackendError,
    FailedWrite,
    Memory,
    Peer,
    Polled,
    Region,
    Wired,
    check_range,
)
from disagg.transfer.backends.ucx import SETTINGS, UcxLog, Ways

_WIRE_UP, _CALLER = b"\x00", b"\x01"  # first byte of every notification
_DIGEST_BYTES = 16
# NIXL says no more than an error's name.
_CAUSES = (
    "UCX says why in this process' log, before this; likely are a UCX_* variable of the environment that does not fit, a limit "
    "of files or locked memory (`ulimit -f`, `-n`, `-l`), or a full /dev/shm"
)

# UCX aborts the process ("arbiter group is empty") when it is torn down right after a write to a dead peer; a few
# rounds of progress let it sort out what failed.
_CLOSING_ROUNDS = 10
_LOG_EVERY_S = 1.0

# Of the PCI bus: a vendor, and the class of controllers of displays, GPUs without one among them.
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_HIDDEN = "transport 'cuda_copy' is not available"  # which UCX says where the GPUs are hidden from this process


class _Metadata(msgspec.Struct, frozen=True):
    """What peers exchange, behind a digest of it."""

    name: str
    agent: bytes


_settings: dict[str, str] | None = None  # of this process, once NIXL is loaded
_log: UcxLog | None = None  # of this process, if it is kept


def ucx_settings(ucx_tls: str | None, ucx_net_devices: str | None, log_level: str = "WARN") -> dict[str, str]:
    """What UCX and NIXL read of their environment; None leaves UCX to choose."""
    if ucx_tls is not None and nvidia_on_the_bus():
        ucx_tls = with_cuda(ucx_tls)
    settings = {"UCX_TLS": ucx_tls, "UCX_NET_DEVICES": ucx_net_devices, "NIXL_LOG_LEVEL": log_level}
    return {key: value for key, value in settings.items() if value is not None}


def with_cuda(ucx_tls: str) -> str:
    """A list of transports that NIXL takes on a machine with an NVIDIA GPU.

    It starts no agent there under a list without a transport of CUDA memory, though a process on the CPU, from which the GPUs
    may even be hidden, has no use for one (NIXL, `src/plugins/ucx/config.cpp`, validateTlsCudaSupport). Where UCX cannot have
    this one it warns, and goes on.
    """
    named = {each.strip().removeprefix("\\") for each in ucx_tls.split(",")}
    if ucx_tls.lstrip().startswith("^") or named & {"all", "cuda", "cuda_copy"}:
        return ucx_tls
    return f"{ucx_tls},cuda_copy"


def nvidia_on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has an NVIDIA GPU, as NIXL looks for one: in containers too, to which it may not be given."""
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):
            if (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(
                _DISPLAY
            ):
                return True
    return False


def load_nixl(settings: dict[str, str], log_file: str = "", expected: str = "") -> tuple[Any, Any]:
    """The NIXL module and its bindings, loaded under `settings` of UCX's environment. log_file: where UCX's log goes, if given;
    what of it is expected is not passed on.

    Raises BackendError.
    """
    global _settings, _log
    if _settings is None:
        os.environ.update(settings)
        if log_file:
            try:
                _log = UcxLog(Path(log_file), expected)
            except OSError as error:
                raise BackendError(f"UCX's log cannot be kept in {log_file}: {error.strerror or error}") from error
            os.environ.update(SETTINGS, UCX_LOG_FILE=log_file)
    elif settings != _settings:
        raise BackendError(f"NIXL is loaded with {_settings}; it cannot be used with {settings} in the same process")
    try:
        nixl = importlib.import_module("nixl_cu13")
        bindings = importlib.import_module("nixl_cu13._bindings")
    except ImportError as error:
        raise BackendError(f"NIXL cannot be loaded ({error}); install nixl-cu13") from error
    _settings = settings
    return nixl, bindings


class NixlBackend:
    """A `TransferBackend`. `name` is unique among the agents that may meet: put the incarnation in it."""

    def __init__(
        self,
        name: str,
        ucx_tls: str | None = None,
        ucx_net_devices: str | None = None,
        log_level: str = "WARN",
        log_file: str = "",
    ) -> None:
        """`ucx_tls`, `ucx_net_devices`: UCX_TLS and UCX_NET_DEVICES, e.g. "posix,cma,tcp" and "lo" on one host without
        a GPU; None leaves UCX to choose. `log_file`: of UCX, from which `Wired.ways` is learned; empty: it is not.

        Raises BackendError."""
        settings = ucx_settings(ucx_tls, ucx_net_devices, log_level)
        added = settings.get("UCX_TLS") != ucx_tls
        nixl, bindings = load_nixl(settings, log_file, _HIDDEN if added else "")
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self._errors: tuple[type[Exception], ...] = tuple(
            error
            for key, error in vars(bindings).items()
            if key.startswith("nixl") and isinstance(error, type) and issubclass(error, Exception)
        )
        try:
            self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except self._errors as error:
            if _log is not None:
                _log.ways()
            raise BackendError(f"NIXL agent {name!r} cannot start: {error}; {_CAUSES}") from error
        if "UCX" not in self._agent.backends:
            raise BackendError(f"NIXL agent {name!r} cannot start: its UCX plugin is missing")
        self._name = name
        self._thread = threading.get_ident()
        self._registered: list[Any] = []
        self._peers: dict[str, Peer] = {}
        self._gone: set[Peer] = set()  # that broke and are not removed
        self._next_serial = 0
        self._next_handle = 0
        self._next_wire_up = 0  # their handles are negative, and reported to nobody
        self._writes: dict[int, tuple[Peer, Any]] = {}
        self._aborting: dict[int, tuple[FailedWrite, Any]] = {}  # failed, and not released yet
        self._failed: list[FailedWrite] = []  # to be reported by the next poll, like the following
        self._newly_gone: list[Peer] = []
        self._ways = Ways()
        self._next_log_s = 0.0

    @property
    def name(self) -> str:
        return self._name

    @property
    def outstanding(self) -> int:
        return len(self._writes) + len(self._aborting) + len(self._failed)

    def register(self, memory: Memory) -> Region:
        self._check_thread()
        if not memory.is_contiguous() or memory.nbytes == 0:
            raise BackendError(f"memory to register must be contiguous and not empty; got {memory.nbytes} bytes")
        region = Region(memory.data_ptr(), memory.nbytes, memory.get_device())
        try:
            descriptors = self._agent.register_memory(
                [(region.address, region.nbytes, max(region.device, 0), "")], _kind(region)
            )
        except self._errors as error:
            raise BackendError(f"NIXL cannot register {region}: {error}") from error
        self._registered.append(descriptors)
        return region

    def metadata(self) -> bytes:
        self._check_thread()
        body = msgspec.msgpack.encode(_Metadata(self._name, self._agent.get_agent_metadata()))
        return _digest(body) + body

    def add_peer(self, metadata: bytes) -> Peer:
        # NIXL cannot be left to judge: after damaged metadata it refuses the right ones of the same agent too.
        self._check_thread()
        digest, body = metadata[:_DIGEST_BYTES], metadata[_DIGEST_BYTES:]
        if _digest(body) != digest:
            raise BackendError(f"these {len(metadata)} bytes are no metadata of a NIXL backend")
        try:
            decoded = msgspec.msgpack.decode(body, type=_Metadata)
        except msgspec.DecodeError as error:
            raise BackendError(f"this metadata is of another version: {error}") from error
        before = self._peers.get(decoded.name)
        if before is not None:
            self.remove_peer(before)
        try:
            self._agent.add_remote_agent(decoded.agent)
        except self._errors as error:
            raise BackendError(f"NIXL cannot add peer {decoded.name!r}: {error}") from error
        peer = Peer(decoded.name, self._next_serial)
        self._next_serial += 1
        self._peers[peer.name] = peer
        return peer

    def warm_up(
        self, peer: Peer, local: Region | None = None, remote: Region | None = None, remote_offset: int = 0
    ) -> None:
        if not self._usable(peer):
            return
        try:
            self._ways.wiring(peer)
            self._agent.make_connection(peer.name)
            self._agent.send_notif(peer.name, _WIRE_UP)
            if local is not None and remote is not None:
                check_range(remote, remote_offset, WARM_UP_BYTES)
                transfer = self._prepare(peer, local, 0, remote, remote_offset, WARM_UP_BYTES, _WIRE_UP)
                self._agent.transfer(transfer)
                self._next_wire_up -= 1
                self._writes[self._next_wire_up] = (peer, transfer)
        except self._errors as error:
            self._lost(peer, error)

    def remove_peer(self, peer: Peer) -> None:
        self._check_thread()
        if self._peers.get(peer.name) == peer:
            del self._peers[peer.name]
            self._gone.discard(peer)
            self._ways.forget(peer)
            self._agent.remove_remote_agent(peer.name)

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

        def prepare() -> Any:
            return self._prepare(peer, local, local_offset, remote, remote_offset, nbytes, _CALLER + notification)

        try:
            prepared = prepare() if self._usable(peer) else None
        except self._errors:
            prepared = None  # and again when it is begun, which can report it

        def begin() -> int:
            handle = self._next_handle
            self._next_handle += 1
            if not self._usable(peer):
                self._failed.append(FailedWrite(handle, f"peer {peer.name} is gone or was removed"))
                return handle
            try:
                transfer = prepared or prepare()
                self._agent.transfer(transfer)
            except self._errors as error:
                self._failed.append(FailedWrite(handle, self._reason(peer, error)))
            else:
                self._writes[handle] = (peer, transfer)
            return handle

        return begin

    def poll(self) -> Polled:
        self._check_thread()
        arrived = self._agent.get_new_notifs()
        self._read_log(time.monotonic())
        if not (arrived or self._writes or self._aborting or self._failed or self._newly_gone):
            return NOTHING
        notifications = tuple(
            (peer_name, message[1:])
            for peer_name, messages in arrived.items()
            for message in messages
            if message[:1] == _CALLER
        )
        completed = []
        wired = []
        for handle, (peer, transfer) in list(self._writes.items()):
            try:
                state = self._agent.check_xfer_state(transfer)
                reason = f"NIXL reports {state} for a write to {peer.name}"
            except self._errors as error:
                state, reason = "ERR", self._reason(peer, error)
            if state == "PROC":
                continue
            del self._writes[handle]
            if state == "DONE":
                self._release(transfer)
                completed.append(handle)
                if handle < 0:
                    self._read_log()
                    wired.append(Wired(peer, self._ways.wired(peer)))
            else:
                self._aborting[handle] = (FailedWrite(handle, reason), transfer)
        for handle, (failure, transfer) in list(self._aborting.items()):
            if self._release(transfer):
                del self._aborting[handle]
                self._failed.append(failure)
        completed = [handle for handle in completed if handle >= 0]
        failed, self._failed = tuple(failure for failure in self._failed if failure.handle >= 0), []
        gone, self._newly_gone = tuple(self._newly_gone), []
        return Polled(tuple(completed), failed, notifications, gone, tuple(wired))

    def close(self) -> None:
        if self._agent is None:
            return
        self._check_thread()
        for _ in range(_CLOSING_ROUNDS):
            self._agent.get_new_notifs()
            time.sleep(0.001)
        for peer in list(self._peers.values()):
            self.remove_peer(peer)
        for _, transfer in (*self._writes.values(), *self._aborting.values()):
            self._release(transfer)
        self._writes.clear()
        self._aborting.clear()
        for descriptors in self._registered:
            self._agent.deregister_memory(descriptors)
        self._registered.clear()
        self._agent = None

    def _read_log(self, now_s: float | None = None) -> None:
        """Now, or, with now_s, not too often."""
        if _log is None or (now_s is not None and now_s < self._next_log_s):
            return
        self._next_log_s = (time.monotonic() if now_s is None else now_s) + _LOG_EVERY_S
        self._ways.taken(_log.ways())

    def _usable(self, peer: Peer) -> bool:
        """A peer that was removed, or whose connection broke, gets nothing more."""
        self._check_thread()
        return self._peers.get(peer.name) == peer and peer not in self._gone

    def _lost(self, peer: Peer, error: Exception) -> None:
        """Only a broken connection says something about the peer; every other error is about the call."""
        if isinstance(error, self._disconnected) and self._usable(peer):
            self._gone.add(peer)
            self._newly_gone.append(peer)

    def _reason(self, peer: Peer, error: Exception) -> str:
        self._lost(peer, error)
        if self._peers.get(peer.name) != peer:
            return f"peer {peer.name} was removed"
        return f"write to {peer.name} failed: {error}"

    def _prepare(
        self,
        peer: Peer,
        local: Region,
        local_offset: int,
        remote: Region,
        remote_offset: int,
        nbytes: int,
        message: bytes,
    ) -> Any:
        source, target = self._range(local, local_offset, nbytes), self._range(remote, remote_offset, nbytes)
        return self._agent.initialize_xfer("WRITE", source, target, peer.name, message)

    def _range(self, region: Region, offset: int, nbytes: int) -> Any:
        return self._agent.get_xfer_descs([(region.address + offset, nbytes, max(region.device, 0))], _kind(region))

    def _release(self, transfer: Any) -> bool:
        """False if it is still under way; asking began to abort it. NIXL releases what is left with the agent."""
        try:
            transfer.release()
        except self._errors:
            return False
        return True

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "a NIXL agent belongs to the thread that made it"
        assert self._agent is not None, "this backend is closed"


def _kind(region: Region) -> str:
    return "DRAM" if region.device == HOST else "VRAM"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
