"""Router streams of a server over real gRPC: hello, then all of the prefix cache, then what changes in it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from disagg.messages.channel import ReliableChannel
from disagg.messages.legs import (
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    RouterMessage,
    ServerHello,
    ServerMessage,
    ServerState,
)
from disagg.messages.plan import TokenLogprobs
from disagg.router.dial import dial_server
from disagg.router.streams import Connection
from disagg.router.view import CachedPages
from disagg.server import routers
from disagg.server.kv_feed import KvFeed
from disagg.server.routers import FRAME_BYTES, LOGPROB_BYTES, Lease, RouterStreams
from disagg.types.ids import LegKey, Role
from disagg.wire.server import RouterHello, ServerSays
from disagg.wire.services import make_server, server_handler

LOAD = LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64)
DEADLINE_S = 30.0
KEY = LegKey("r", 1, 0)
A, B, C = ((0, b"a"), (0, b"b"), (1, b"c"))


class Server:
    """RouterStreams with a cache that tests set, on a port of its own."""

    def __init__(self, heartbeat_s: float = 0.1) -> None:
        self.cached: tuple[tuple[int, bytes], ...] = ()
        self.incarnation = "one"
        self.heard: list[RouterMessage] = []
        self.streams = RouterStreams(
            lease_s=60.0,
            heartbeat_s=heartbeat_s,
            hello=self._hello,
            load=lambda: LOAD,
            snapshot=lambda: KvEvents(stored=self.cached),
            on_message=lambda _, message: self.heard.append(message),
            on_lease_end=lambda _, reason: None,
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

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._connection.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as made:
        yield made


async def attach(server: Server, stream_id: str = "s", name: str = "router-0") -> Router:
    return Router(
        *await dial_server(f"127.0.0.1:{server.port}", RouterHello(name, f"{name}-i", stream_id, 0), DEADLINE_S)
    )


async def test_a_router_hears_all_that_is_cached_and_then_what_changes(server: Server) -> None:
    server.cached = (A, B)
    router = await attach(server)
    await router.knows(A, B)
    server.streams.publish(KvEvents(stored=(C,), removed=(A,)))
    await router.knows(B, C)
    assert router.resets == 1
    await router.close()


async def test_every_router_hears_it(server: Server) -> None:
    attached = [await attach(server, name=f"router-{index}") for index in range(3)]
    server.streams.publish(KvEvents(stored=(A,)))
    server.cached = (A,)  # for those whose stream has not looked yet
    for router in attached:
        await router.knows(A)
        await router.close()


async def test_a_router_that_comes_back_hears_everything_again(server: Server) -> None:
    server.cached = (A,)
    router = await attach(server)
    await router.knows(A)
    await router.close()
    server.streams.publish(KvEvents(stored=(B,)))
    server.cached = (A, B)
    again = await attach(server)
    attached = again.said[0].attached
    assert attached is not None
    assert attached.resumed
    await again.knows(A, B)
    await again.close()


async def test_a_hello_begins_the_cache_again(server: Server) -> None:
    server.cached = (A,)
    router = await attach(server)
    await router.knows(A)
    server.streams.publish(KvEvents(stored=(B,)))  # of the workers that are lost
    server.cached, server.incarnation = (C,), "two"
    server.streams.announce()
    await router.until(lambda: router.hello is not None and router.hello.incarnation == "two")
    await router.knows(C)
    assert router.resets == 2
    await router.close()


async def test_changes_do_not_wait_for_a_heartbeat() -> None:
    async with Server(heartbeat_s=3600.0) as server:
        router = await attach(server)
        await router.until(lambda: router.resets == 1)
        server.streams.publish(KvEvents(stored=(A,)))
        await router.knows(A)
        await router.close()


async def test_news_of_the_cache_ride_on_frames_of_tokens_and_take_no_numbers(server: Server) -> None:
    router = await attach(server)
    await router.until(lambda: router.resets == 1)
    await asyncio.sleep(routers.KV_EVERY_S)
    server.streams.publish(KvEvents(stored=(A,)))
    server.streams.tell(0, LegTokens(KEY, 0, 0, (1,)))
    server.streams.tell(0, LegEnd(KEY, Outcome.DONE, ""))
    server.streams.flush()
    await router.knows(A)
    assert len(router.messages) == 2
    await asyncio.sleep(routers.KV_EVERY_S)
    server.streams.publish(KvEvents(stored=(B,)))
    await router.knows(A, B)
    assert router.channel.received == 1
    assert [says.frame.number for says in router.said if says.kv is not None] == [0, 1, 0]
    await router.close()


async def test_a_large_cache_is_told_at_leisure_and_tokens_overtake_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "KvFeed", partial(KvFeed, part_pages=1))
    monkeypatch.setattr(routers, "KV_EVERY_S", 3600.0)
    server.cached = (A, B, C)
    router = await attach(server)
    await router.until(lambda: router.resets == 1)
    heard = len(router.said)
    await router.until(lambda: len(router.said) >= heard + 2)  # heartbeats
    server.streams.tell(0, LegTokens(KEY, 0, 0, (1,)))
    server.streams.flush()
    await router.until(lambda: bool(router.messages))
    assert sum(router.cached.counts()) == 1
    await router.close()


async def test_the_cache_adds_nothing_to_an_idle_stream(server: Server) -> None:
    router = await attach(server)
    await router.until(lambda: router.resets == 1)
    heard = len(router.said)
    await router.until(lambda: len(router.said) >= heard + 2)  # heartbeats
    assert all(says.kv is None for says in router.said[heard:])
    await router.close()


def lease() -> Lease:
    return Lease(0, RouterHello("r", "i", "s", 0))


def tokens(first: int, count: int, choice: int = 0, top: int = 0) -> LegTokens:
    rows = tuple(TokenLogprobs(-1.0, ((1, -1.0),) * top) for _ in range(count)) if top else ()
    return LegTokens(LegKey("r", 1, 0), choice, first, tuple(range(first, first + count)), rows)


def test_what_waited_for_a_router_goes_out_in_frames_that_its_loop_reads_at_once() -> None:
    waiting = lease()
    for step in range(2000):
        for choice in range(4):
            waiting.put(tokens(step, 1, choice, top=20))
    before = waiting.pending_bytes
    frames = []
    while waiting.pending:
        frames.append(waiting.take())
        assert waiting.ready == bool(waiting.pending)
        if len(frames) == 3:
            waiting.put(tokens(2000, 1, 0, top=20))  # more comes meanwhile
    assert waiting.pending_bytes == 0
    assert len(frames) > 8
    sizes = [sum(LOGPROB_BYTES * 21 * len(m.logprobs) for m in frame) for frame in frames]
    assert max(sizes) <= FRAME_BYTES < before
    for choice, count in ((0, 2001), (1, 2000)):
        said = [m for frame in frames for m in frame if m.choice == choice]
        assert [token for m in said for token in m.token_ids] == list(range(count))
        assert all(a.first_index + len(a.token_ids) == b.first_index for a, b in itertools.pairwise(said))


def test_a_message_larger_than_a_frame_goes_out_alone() -> None:
    waiting = lease()
    waiting.put(tokens(0, 2000, top=20))
    waiting.put(tokens(2000, 1))
    assert [len(waiting.take()) for _ in range(2)] == [1, 1]
