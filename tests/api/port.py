"""The open HTTP port of a face for tests: raw connections to it, what is sent there, and what comes back as bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer
from disagg.api.crowd import Bounds
from tests.api.fakes import MODEL

DEADLINE_S = 30.0
BOUNDS = Bounds(max_connections=8, head_s=0.4, body_s=0.4, idle_s=0.6, stall_s=0.8)
PATIENT = replace(BOUNDS, head_s=DEADLINE_S, body_s=DEADLINE_S)  # for what comes in parts, and is not to be too slow


class Port:
    """A server with little patience, and raw connections to it."""

    def __init__(self, server: HttpServer, registry: CollectorRegistry) -> None:
        self.server = server
        self.registry = registry
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, sent: bytes = b"", **limits: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port, **limits)
        self._writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def answer(self, sent: bytes) -> tuple[int, bytes]:
        """The status and the whole of what came until the server closed the connection."""
        reader, _ = await self.open(sent)
        async with asyncio.timeout(DEADLINE_S):
            raw = await reader.read()
        return int(raw.split(b" ", 2)[1]), raw

    def ended(self, reason: str) -> float:
        return self.registry.get_sample_value("disagg_router_http_ended_total", {"reason": reason}) or 0.0

    def open_connections(self) -> float:
        return self.registry.get_sample_value("disagg_router_http_connections") or 0.0

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def post(body: bytes = b"", *headers: bytes, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> bytes:
    lines = [b"POST " + path + b" HTTP/" + version, b"host: face", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def completion(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "a b", "temperature": 0, **fields}).encode()
    return post(body, b"content-length: %d" % len(body))


def error_of(raw: bytes) -> dict[str, object]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error
