"""A small HTTP server for probes and operators: GET /metrics, /health and /debug/dump. Knows nothing of what it serves.

One request per connection, small and bounded in time: whoever scrapes cannot hold up the loop that decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

REQUEST_TIMEOUT_S = 10.0
DUMP_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 16384
TEXT = "text/plain; charset=utf-8"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

Response = tuple[int, str, bytes]


class TelemetryServer:
    """health: (status code, text), asked at every probe; dump: everything worth knowing of a hung process, as text."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Callable[[], tuple[int, str]],
        dump: Callable[[], Awaitable[str]],
    ) -> None:
        self._registry = registry
        self._health = health
        self._dump = dump
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (for port 0: the one that was free). Raises OSError if it is taken."""
        assert self._server is None, "started twice"
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, status, content_type, body = await self._answer(head)
            reason = REASONS.get(status, "Unknown")
            writer.write(
                f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
            )
            if method != "HEAD":
                writer.write(body)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            pass  # the client went away, is too slow, or does not speak HTTP: nobody is left to tell
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> tuple[str, int, str, bytes]:
        """(method, status, content type, body) for one request head."""
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", 400, TEXT, b"this is not an HTTP/1.1 request\n"
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return method, 405, TEXT, b"only GET and HEAD are served here\n"
        return method, *await self._route(target.partition("?")[0])

    async def _route(self, path: str) -> Response:
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/health":
            status, text = self._health()
            return status, TEXT, text.encode() + b"\n"
        if path == "/debug/dump":
            try:
                async with asyncio.timeout(DUMP_TIMEOUT_S):
                    return 200, TEXT, (await self._dump()).encode()
            except TimeoutError:
                return 504, TEXT, f"no dump within {DUMP_TIMEOUT_S:g} s\n".encode()
        return 404, TEXT, b"served here: /metrics, /health, /debug/dump\n"
