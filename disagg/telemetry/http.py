"""A small HTTP server for probes and operators: GET /metrics, /health, /live and /debug/dump. Knows nothing of what it serves.

One request per connection, small and bounded in time: whoever scrapes cannot hold up the loop that decides. A client that
stalls is dropped with what it has not read, and so are those that are too many. /debug answers only clients on this host,
unless it is opened to others: what it tells is for operators, and it costs more than a scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from disagg.telemetry.listening import bound_socket
from disagg.telemetry.near import Asker, fault_of_asker

REQUEST_TIMEOUT_S = 10.0
DUMP_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 16384
MAX_CONNECTIONS = 64  # at once; each may keep an answer of some hundred KB for REQUEST_TIMEOUT_S
TEXT = "text/plain; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

Response = tuple[int, str, bytes]


class TelemetryServer:
    """health: (status code, text), asked at every probe; dump: everything worth knowing of a hung process, as text.

    debug_remote: whether clients on other hosts may ask for it.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Callable[[], tuple[int, str]],
        dump: Callable[[], Awaitable[str]],
        debug_remote: bool = False,
    ) -> None:
        self._registry = registry
        self._health = health
        self._dump = dump
        self._debug_remote = debug_remote
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return len(self._open)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (for port 0: the one that was free). Raises as `bound_socket`
        does, which says what `host` may be."""
        assert self._server is None, "started twice"
        listener = bound_socket(host, port)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening, and ends what is open. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in self._open:
                writer.transport.abort()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.write(_head(503, TEXT, 0))
            writer.close()  # what was written goes out, or not: nothing here waits for it
            return
        self._open.add(writer)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, status, content_type, body = await self._answer(head, _asker(writer, head))
            writer.transport.set_write_buffer_limits(0)  # `drain` returns when the system has all of it
            writer.write(_head(status, content_type, len(body)))
            if method != "HEAD":
                writer.write(body)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
            writer.close()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            pass  # the client went away, is too slow, or does not speak HTTP: nobody is left to tell
        finally:
            self._open.discard(writer)
            if not writer.is_closing():
                writer.transport.abort()  # closing would wait for as long as the client does not read

    async def _answer(self, head: bytes, asker: Asker) -> tuple[str, int, str, bytes]:
        """(method, status, content type, body) for one request head."""
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", 400, TEXT, b"this is not an HTTP/1.1 request\n"
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return method, 405, TEXT, b"only GET and HEAD are served here\n"
        return method, *await self._route(target.partition("?")[0], asker)

    async def _route(self, path: str, asker: Asker) -> Response:
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/health":
            status, text = self._health()
            return status, TEXT, text.encode() + b"\n"
        if path == "/live":  # whoever answers lives, whatever it waits for: to be killed would only begin it again
            return 200, TEXT, b"alive\n"
        if path.startswith("/debug/") and (fault := fault_of_asker(asker, self._debug_remote)) is not None:
            return 403, TEXT, f"{fault}\n".encode()
        if path == "/debug/dump":
            try:
                async with asyncio.timeout(DUMP_TIMEOUT_S):
                    return 200, TEXT, (await self._dump()).encode()
            except TimeoutError:
                return 504, TEXT, f"no dump within {DUMP_TIMEOUT_S:g} s\n".encode()
        return 404, TEXT, b"served here: /metrics, /health, /live, /debug/dump\n"


def _head(status: int, content_type: str, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def _asker(writer: asyncio.StreamWriter, head: bytes) -> Asker:
    """The last of each header counts: who sends several is no browser."""
    peer = writer.get_extra_info("peername")
    address = peer[0] if isinstance(peer, tuple) and peer else ""
    lines = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in lines}
    return Asker(str(address), headers.get("host", ""), headers.get("origin", ""), headers.get("sec-fetch-site", ""))
