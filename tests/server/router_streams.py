"""Both ends of a server's router streams for tests, over real gRPC: the server with a cache that tests set, and a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from disagg.messages.channel import ReliableChannel
from disagg.messages.legs import KvEvents, LoadReport, RouterMessage, ServerHello, ServerMessage, ServerState, Tier
from disagg.router.dial import dial_server
from disagg.router.streams import Connection
from disagg.router.view import CachedPages
from disagg.server.routers import RouterStreams
from disagg.types.ids import LegKey, Role
from disagg.wire.server import RouterHello, ServerSays
from disagg.wire.services import make_server, server_handler

LOAD = LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64)
DEADLINE_S = 30.0
KEY = LegKey("r", 1, 0)


class Server:
    """RouterStreams with a cache that tests set, on a port of its own."""

    def __init__(self, heartbeat_s: float = 0.1, lease_s: float = 60.0) -> None:
        self.cached: tuple[tuple[int, bytes], ...] = ()
        self.incarnation = "one"
        self.heard: list[RouterMessage] = []
        self.ended: list[str] = []
        self.streams = RouterStreams(
            lease_s=lease_s,
            heartbeat_s=heartbeat_s,
            hello=self._hello,
            load=lambda: LOAD,
            snapshots={Tier.GPU: lambda: KvEvents(stored=self.cached)},
            on_message=lambda _, message: self.heard.append(message),
            on_lease_end=lambda _, reason: self.ended.append(reason),
            dump=lambda: "",
        )
        self._grpc = make_server(server_handler(self.streams))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Server:
        await self._grpc.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.streams.close()
        await self._grpc.stop(0)

    def _hello(self) -> ServerHello:
        return ServerHello("d0", Role.DECODE, 1, 1, (2,), self.incarnation, "f", "m", 64, 64, "d0:1", LOAD)


class Router:
    """The router's end of one stream: takes frames, and knows what it was told."""

    def __init__(self, connection: Connection, first: ServerSays) -> None:
        self._connection = connection
        self.hello = first.hello
        self.cached = CachedPages()
        self.said: list[ServerSays] = [first]
        self.messages: list[ServerMessage] = []
        self.channel: ReliableChannel[ServerMessage] = ReliableChannel()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for says in self._connection.heard():
            self.said.append(says)
            self.messages.extend(self.channel.take(says.frame, time.monotonic()))
            if says.hello is not None:
                self.hello = says.hello
                self.cached.clear()
            if says.kv is not None:
                self.cached.apply(says.kv.events, reset=says.kv.reset)

    @property
    def resets(self) -> int:
        return sum(says.kv is not None and says.kv.reset for says in self.said)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                assert not self._reader.done()
                await asyncio.sleep(0.005)

    async def knows(self, *pages: tuple[int, bytes]) -> None:
        await self.until(
            lambda: sum(self.cached.counts()) == len(pages) and all(self.cached.holds(*page) for page in pages)
        )

    async def send(self, *messages: RouterMessage) -> None:
        await self._connection.write(self.channel.push(messages, time.monotonic()))  # type: ignore[arg-type]

    async def acknowledge(self) -> None:
        await self._connection.write(self.channel.ack_frame())

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._connection.close()


async def attach(server: Server, stream_id: str = "s", name: str = "router-0", process: str = "") -> Router:
    hello = RouterHello(name, process or f"{name}-i", stream_id, 0)
    return Router(*await dial_server(f"127.0.0.1:{server.port}", hello, DEADLINE_S))
