"""The other side of the conformance suite: an agent with one region that does what a connection tells it.

Runs in a process of its own (nixl) or on a thread (loopback). Without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from disagg.transfer.backends.base import BackendError, TransferBackend, create
from tests.transfer_backends.memory import HostMemory
from tests.transfer_backends.say import say

UCX = {"ucx_tls": "posix,cma,tcp", "ucx_net_devices": "lo", "log_level": "FATAL"}


def run_process(connection: Connection, name: str, nbytes: int) -> None:
    """Body of a child process."""
    serve(connection, create("nixl", name=name, **UCX), nbytes, spin=False, killed=threading.Event())


def serve(connection: Connection, backend: TransferBackend, nbytes: int, spin: bool, killed: threading.Event) -> None:
    """Poll, obey, and answer notifications that ask for it:

    b"verify OFFSET NBYTES VALUE"  -> b"same" if all these bytes are VALUE at this very moment, else b"different"
    b"echo ..."                    -> b"..."
    anything else                  -> kept for the command "notifications"
    """
    memory = HostMemory(nbytes)
    region = backend.register(memory)
    peers: dict[str, Any] = {}
    kept: list[tuple[str, bytes]] = []
    results: list[tuple[str, int]] = []

    def add(metadata: bytes) -> None:
        peer = backend.add_peer(metadata)
        backend.warm_up(peer)
        peers[peer.name] = peer

    def fill(offset: int, data: bytes) -> None:
        memory.view[offset : offset + len(data)] = data

    def drain(of: list[Any]) -> list[Any]:
        out = list(of)
        of.clear()
        return out

    def set_spin(value: bool) -> None:
        nonlocal spin
        spin = value

    commands: dict[str, Callable[..., Any]] = {
        "metadata": backend.metadata,
        "region": lambda: region,
        "add": add,
        "fill": fill,
        "read": lambda offset, n: bytes(memory.view[offset : offset + n]),
        "write": lambda to, offset, remote, remote_offset, n, message: backend.prepare_write(
            peers[to], region, offset, remote, remote_offset, n, message
        )(),
        "say": lambda to, message: say(backend, peers[to], message),
        "notifications": lambda: drain(kept),
        "results": lambda: drain(results),
        "spin": set_spin,
    }
    while not killed.is_set():
        polled = backend.poll()
        results += [("completed", handle) for handle in polled.completed]
        results += [("failed", failure.handle) for failure in polled.failed]
        for sender, message in polled.notifications:
            if message.startswith(b"verify "):
                offset, n, value = map(int, message.split()[1:])
                same = memory.view[offset : offset + n] == bytes([value]) * n
                say(backend, peers[sender], b"same" if same else b"different")
            elif message.startswith(b"echo "):
                say(backend, peers[sender], message[5:])
            else:
                kept.append((sender, message))
        idle_s = 0.0 if spin or polled.notifications else 0.0005
        if not connection.poll(idle_s):
            continue
        try:
            command, *arguments = connection.recv()
        except EOFError:
            return
        if command == "stop":
            backend.close()
            return
        try:
            connection.send(commands[command](*arguments))
        except BackendError as error:
            connection.send(error)
