"""What routers say, and ports that say something else, for tests of the commands that ask them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import convert

from disagg.cli.answers import ClusterStatus

ROUTER = {"name": "router-0", "pid": 7, "inflight": 0, "queued": 0}


def status_dict(*servers: dict[str, Any], state: str = "ready", **router: Any) -> dict[str, Any]:
    """/status as it comes. router: what its router says otherwise than ROUTER."""
    return {"state": state, "servers": list(servers), "routers": [{**ROUTER, **router}]}


def status_of(*servers: dict[str, Any], state: str = "ready", **router: Any) -> ClusterStatus:
    return convert(status_dict(*servers, state=state, **router), ClusterStatus)


Say = Callable[[socket.socket, str], None]  # to one connection; its first line


@contextlib.contextmanager
def port_that(say: Say) -> Iterator[str]:
    """A URL. Whoever connects is heard up to the end of a head, then `say` says what it likes, and it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                head = b""
                while b"\r\n\r\n" not in head and (part := connection.recv(65536)):
                    head += part
                say(connection, head.split(b"\r\n", 1)[0].decode())

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def head_of(length: int | None, kind: str = "application/json", more: str = "") -> bytes:
    """Of a 200. length None: until the connection ends."""
    size = "" if length is None else f"content-length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{size}{more}connection: close\r\n\r\n".encode()


def answering(body: bytes, kind: str = "application/json", more: str = "") -> Say:
    """Says this to whatever is asked."""
    return lambda connection, _: connection.sendall(head_of(len(body), kind, more) + body)
