"""Router streams of a server over real gRPC: who gets one; hello, all of the prefix cache, and then what changes in it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import pytest
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, RouterConfig, ServerRef
from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import (
    AbortLeg,
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    PeerRef,
    RouterMessage,
    ServerHello,
    ServerMessage,
    ServerState,
    StartLeg,
    Tier,
)
from disagg.messages.plan import TokenLogprobs
from disagg.router.dial import dial_server
from disagg.router.service import Router as WholeRouter
from disagg.router.streams import Connection, NameTaken
from disagg.router.view import CachedPages
from disagg.server import door, kv_feed, routers
from disagg.server.kv_feed import KvFeed
from disagg.server.routers import FRAME_BYTES, LOGPROB_BYTES, Lease, MergingOutbox, RouterStreams
from disagg.types.errors import Unavailable
from disagg.types.ids import LegKey, Role
from disagg.types.sampling import SamplingParams
from disagg.wire.server import RouterHello, ServerSays
from disagg.wire.services import ServerStub, make_server, open_channel, server_handler
from tests.router.fake_server import TOKENIZER

LOAD = LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64)
DEADLINE_S = 30.0
KEY = LegKey("r", 1, 0)
START = StartLeg(KEY, (1, 2, 3), 3, SamplingParams(max_tokens=5), (0,), PeerRef("p0", "p0:1", "i"), 60.0)
A, B, C = ((0, b"a"), (0, b"b"), (1, b"c"))


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


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as made:
        yield made


async def attach(server: Server, stream_id: str = "s", name: str = "router-0", process: str = "") -> Router:
    hello = RouterHello(name, process or f"{name}-i", stream_id, 0)
    return Router(*await dial_server(f"127.0.0.1:{server.port}", hello, DEADLINE_S))


async def test_a_router_hears_all_that_is_cached_and_then_what_changes(server: Server) -> None:
    server.cached = (A, B)
    router = await attach(server)
    await router.knows(A, B)
    server.streams.publish(Tier.GPU, KvEvents(stored=(C,), removed=(A,)))
    await router.knows(B, C)
    assert router.resets == 1
    await router.close()


async def test_every_router_hears_it(server: Server) -> None:
    attached = [await attach(server, name=f"router-{index}") for index in range(3)]
    server.streams.publish(Tier.GPU, KvEvents(stored=(A,)))
    server.cached = (A,)  # for those whose stream has not looked yet
    for router in attached:
        await router.knows(A)
        await router.close()


async def test_a_router_that_comes_back_hears_everything_again(server: Server) -> None:
    server.cached = (A,)
    router = await attach(server)
    await router.knows(A)
    await router.close()
    server.streams.publish(Tier.GPU, KvEvents(stored=(B,)))
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
    server.streams.publish(Tier.GPU, KvEvents(stored=(B,)))  # of the workers that are lost
    server.cached, server.incarnation = (C,), "two"
    server.streams.announce()
    await router.until(lambda: router.hello is not None and router.hello.incarnation == "two")
    await router.knows(C)
    assert router.resets == 2
    await router.close()


async def test_a_server_that_leaves_knows_when_routers_have_heard_so_and_what_they_sent_before() -> None:
    async with Server(heartbeat_s=3600.0) as server:
        router = await attach(server)
        await router.until(lambda: router.resets == 1)
        server.incarnation = ""
        server.streams.announce()
        server.streams.settle()
        assert not server.streams.drained
        await router.until(lambda: router.channel.received == 1)
        assert router.hello is not None and router.hello.incarnation == "", "it heard that first"
        await router.send(AbortLeg(KEY))  # what it had sent, or sends, before it says that it heard
        await router.until(lambda: server.streams.drained)
        assert server.heard == [AbortLeg(KEY)] and router.messages == []
        await router.close()


async def test_a_router_that_is_not_connected_holds_nobody_up(server: Server) -> None:
    router = await attach(server)
    await router.close()
    async with asyncio.timeout(DEADLINE_S):
        while any(lease["unacked frames"] for lease in server.streams.describe().values()):  # type: ignore[index]
            await asyncio.sleep(0.01)
        while any(lease.stream.state.served for lease in server.streams._leases.values()):
            await asyncio.sleep(0.01)
    server.streams.settle()
    assert server.streams.drained


async def test_changes_do_not_wait_for_a_heartbeat() -> None:
    async with Server(heartbeat_s=3600.0) as server:
        router = await attach(server)
        await router.until(lambda: router.resets == 1)
        server.streams.publish(Tier.GPU, KvEvents(stored=(A,)))
        await router.knows(A)
        await router.close()


async def test_news_of_the_cache_ride_on_frames_of_tokens_and_take_no_numbers(server: Server) -> None:
    router = await attach(server)
    await router.until(lambda: router.resets == 1)
    await asyncio.sleep(routers.KV_EVERY_S)
    server.streams.publish(Tier.GPU, KvEvents(stored=(A,)))
    server.streams.tell(0, LegTokens(KEY, 0, 0, (1,)))
    server.streams.tell(0, LegEnd(KEY, Outcome.DONE, ""))
    server.streams.flush()
    await router.knows(A)
    assert len(router.messages) == 2
    await asyncio.sleep(routers.KV_EVERY_S)
    server.streams.publish(Tier.GPU, KvEvents(stored=(B,)))
    await router.knows(A, B)
    assert router.channel.received == 1
    assert [says.frame.number for says in router.said if says.kv is not None] == [0, 1, 0]
    await router.close()


async def test_a_large_cache_is_told_at_leisure_and_tokens_overtake_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_feed, "KvFeed", partial(KvFeed, part_pages=1))
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


# ---- one living router to a name


async def test_a_second_router_of_a_living_name_is_refused_and_the_first_is_unharmed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first = await attach(server, process="one")
    for _ in range(3):
        with pytest.raises(NameTaken, match=r'"router-0" is held by a router that lives, process one at ipv4:127.*own'):
            await attach(server, stream_id="t", process="two")
    server.streams.tell(0, LegEnd(KEY, Outcome.DONE, ""))
    server.streams.flush()
    await first.until(lambda: bool(first.messages))
    assert not server.ended
    said = [record.getMessage() for record in caplog.records if "second router" in record.getMessage()]
    assert len(said) == 1, "once, however often it comes"
    assert "process two at ipv4:127.0.0.1" in said[0]
    other = await attach(server, name="router-1")  # which has a name of its own
    await first.close()
    await other.close()


async def test_a_router_that_restarts_gets_in_as_soon_as_its_old_stream_is_broken(server: Server) -> None:
    old = await attach(server, process="one")
    await old.close()
    new = await comes_in(server, "two")
    assert server.ended == ["it began again"]
    await new.close()


async def test_a_router_that_restarts_before_its_old_stream_is_known_to_be_broken_gets_in_afterwards(
    server: Server,
) -> None:
    old = await attach(server, process="one")
    with pytest.raises(NameTaken):
        await attach(server, stream_id="t", process="two")
    await old.close()  # the old process says nothing any more
    new = await comes_in(server, "two")
    await new.close()


async def test_a_second_router_does_not_take_the_name_while_the_stream_of_the_first_is_broken(server: Server) -> None:
    hello = RouterHello("router-0", "one", "s", 0)
    connection, _ = await dial_server(f"127.0.0.1:{server.port}", hello, DEADLINE_S)
    with pytest.raises(NameTaken):
        await attach(server, stream_id="t", process="two")
    await connection.write(Frame(number=0, ack=0, messages=()))  # a heartbeat: it lives
    await connection.write(Frame(number=1, ack=0, messages=(AbortLeg(KEY),)))
    async with asyncio.timeout(DEADLINE_S):
        while not server.heard:
            await asyncio.sleep(0.005)
    await connection.close()
    for _ in range(20):
        with pytest.raises(NameTaken):
            await attach(server, stream_id="t", process="two")
        await asyncio.sleep(0.01)
    again = await attach(server, process="one")
    attached = again.said[0].attached
    assert attached is not None and attached.resumed
    assert not server.ended
    await again.close()


async def test_only_the_end_of_a_router_that_was_served_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Server(lease_s=0.2) as server:

        async def level_of_the_end(router: Router) -> str:
            await router.close()
            ended = len(server.ended)
            async with asyncio.timeout(DEADLINE_S):
                while len(server.ended) == ended:
                    await asyncio.sleep(0.01)
                    server.streams.tick()
            return [each.levelname for each in caplog.records if "lease of router" in each.getMessage()][-1]

        assert await level_of_the_end(await attach(server)) == "INFO"
        asked = await attach(server)
        await asked.send(START)
        await asked.until(lambda: START in server.heard)
        assert await level_of_the_end(asked) == "WARNING"
        stays = await attach(server)
        [lease] = server.streams._leases.values()
        async with asyncio.timeout(DEADLINE_S):
            while not lease.served(0.2):  # it is heard for a lease, which nothing ends here: nobody calls `tick`
                await stays.send(AbortLeg(KEY))
                await asyncio.sleep(0.02)
        assert await level_of_the_end(stays) == "WARNING"


def test_names_of_processes_that_are_made_up_cost_a_line_now_and_then() -> None:
    rivals = door.Rivals()
    assert sum(rivals.refused(f"p{number}", number / 100) for number in range(1000)) == 1
    assert not rivals.refused("p0", 20.0), "of which there was a line"
    assert rivals.refused("p999", 20.0) and not rivals.refused("p999", 40.0)


async def test_a_name_is_free_when_the_lease_of_its_holder_is_over() -> None:
    async with Server(lease_s=0.3) as server:
        first = await attach(server, process="one")  # it reads, and says nothing
        with pytest.raises(NameTaken):
            await attach(server, stream_id="t", process="two")
        async with asyncio.timeout(DEADLINE_S):
            while not server.ended:
                await asyncio.sleep(0.02)
                server.streams.tick()
        second = await attach(server, stream_id="t", process="two")
        assert server.streams.lease_expiries == 1
        await first.close()
        await second.close()


async def test_a_server_that_stood_still_reads_before_it_ends_a_lease() -> None:
    async with Server(lease_s=0.3) as server:
        router = await attach(server)
        server.streams.tick()
        time.sleep(1.0 + 0.3)  # noqa: ASYNC251  # everything stands still, as after SIGSTOP
        server.streams.tick()
        assert not server.ended and not server.streams.lease_expiries
        await router.close()


def router_of(server: Server, name: str = "") -> WholeRouter:
    """The whole of a router, its status too, with this one server."""
    ref = ServerRef(name="d0", role="decode", address=f"127.0.0.1:{server.port}")
    config = Config(router=RouterConfig(name=name, servers=(ref,), heartbeat_s=0.05))
    return WholeRouter(config, TOKENIZER, model_name="m", max_model_len=64, registry=CollectorRegistry())


async def attached(router: WholeRouter) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not router.status()["servers"][0]["connected"]:
            await asyncio.sleep(0.01)


async def test_two_routers_without_names_share_a_server(server: Server) -> None:
    both = [router_of(server) for _ in range(2)]
    for router in both:
        await router.start()
        await attached(router)
    assert len({router.status()["routers"][0]["name"] for router in both}) == 2
    for router in both:
        await router.close(0.0)
    assert not server.ended


async def test_the_second_of_two_routers_with_one_name_says_why_it_has_no_servers_and_takes_over_in_the_end(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = router_of(server, "gateway"), router_of(server, "gateway")
    await first.start()
    await attached(first)
    await second.start()
    async with asyncio.timeout(DEADLINE_S):
        while not (error := second.status()["routers"][0]["error"]):
            await asyncio.sleep(0.01)
    assert 'the name "gateway" is held by a router that lives' in error
    assert second.status()["servers"][0]["error"] == error
    assert first.status()["routers"][0]["error"] == ""
    assert [record.levelname for record in caplog.records if "this router is refused" in record.getMessage()] == [
        "ERROR"
    ]
    assert first.status()["servers"][0]["connected"]
    assert not server.ended
    await first.close(0.0)
    server.streams._lease_s = 0.0  # it is long over
    server.streams.tick()
    await attached(second)
    assert second.status()["routers"][0]["error"] == ""
    await second.close(0.0)


async def comes_in(server: Server, process: str) -> Router:
    """Dials as a router does, until it is let in."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await attach(server, stream_id="t", process=process)
            except NameTaken:
                await asyncio.sleep(0.01)


async def test_a_router_that_means_another_server_harms_nobodys_stream(server: Server) -> None:
    """As when one server stands in a router's list twice, by two addresses."""
    first = await attach(server, process="one")
    hello = RouterHello("router-0", "one", "t", 0, server_name="d1")
    with pytest.raises(Unavailable, match="this is server d0; d1 is meant"):
        await dial_server(f"127.0.0.1:{server.port}", hello, DEADLINE_S)
    assert not server.ended
    await first.close()


# ---- streams that keep no hours


async def test_a_stream_that_says_no_hello_is_ended_with_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HELLO_S", 0.2)
    router = await attach(server)
    channel = open_channel(f"127.0.0.1:{server.port}")
    call = ServerStub(channel).attach()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async with asyncio.timeout(DEADLINE_S):
            await call.read()
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ended.value.details() == "no hello came within 0.2 s"
    heard = len(router.said)
    await router.until(lambda: len(router.said) > heard)
    await channel.close()
    await router.close()


async def test_streams_that_wait_with_their_hello_are_few(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_WAITING", 3)
    channel = open_channel(f"127.0.0.1:{server.port}")
    calls = [ServerStub(channel).attach() for _ in range(10)]
    refused = 0
    reads = [asyncio.create_task(call.read()) for call in calls]
    async with asyncio.timeout(DEADLINE_S):
        while refused < 7:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                reads.remove(read)
                error = read.exception()
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                refused += 1
    assert len(reads) == 3
    router = await attach(server)  # one that says hello gets in while they wait
    await router.close()
    for call in calls:
        call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await channel.close()


async def test_a_router_that_acknowledges_nothing_loses_its_lease(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard and reads, and what is kept for it must not grow without end."""
    monkeypatch.setattr(routers, "MAX_PENDING_BYTES", 100 * routers.MESSAGE_BYTES)
    deaf = await attach(server)  # Router here acknowledges nothing
    for count in range(1, 101):
        server.streams.tell(0, LegTokens(KEY, 0, count, (1,)))
        server.streams.flush()
        await deaf.until(lambda count=count: deaf.channel.received == count or bool(server.ended))
        if server.ended:
            break
    assert count >= 50
    assert "acknowledgement" in server.ended[0]
    await deaf.close()


def test_a_frame_holds_a_bounded_number_of_messages_and_none_is_lost() -> None:
    stream = Lease(0, RouterHello("r", "i", "s", 0), "here", heartbeat_s=3600.0).stream.state
    ends = [LegEnd(LegKey(f"r{number}", 1, 0), Outcome.DONE, "") for number in range(2500)]
    for end in ends:
        stream.put(end)
    taken: list[ServerMessage] = []
    stream.flush()
    while (frame := stream.next_frame(0.0)) is not None:
        assert len(frame.messages) <= 1024
        taken += frame.messages
    assert taken == ends
    assert stream.outbox.size == 0
    assert stream.kept > 0
    stream.hear(Frame(number=0, ack=99, messages=()), 0.0)
    assert stream.kept == 0


def tokens(first: int, count: int, choice: int = 0, top: int = 0) -> LegTokens:
    rows = tuple(TokenLogprobs(-1.0, ((1, -1.0),) * top) for _ in range(count)) if top else ()
    return LegTokens(LegKey("r", 1, 0), choice, first, tuple(range(first, first + count)), rows)


def test_what_waited_for_a_router_goes_out_in_frames_that_its_loop_reads_at_once() -> None:
    waiting = MergingOutbox()
    for step in range(2000):
        for choice in range(4):
            waiting.put(tokens(step, 1, choice, top=20))
    before = waiting.size
    frames = []
    while len(waiting):
        frames.append(waiting.take())
        if len(frames) == 3:
            waiting.put(tokens(2000, 1, 0, top=20))  # more comes meanwhile
    assert waiting.size == 0
    assert len(frames) > 8
    sizes = [sum(LOGPROB_BYTES * 21 * len(m.logprobs) for m in frame) for frame in frames]
    assert max(sizes) <= FRAME_BYTES < before
    for choice, count in ((0, 2001), (1, 2000)):
        said = [m for frame in frames for m in frame if m.choice == choice]
        assert [token for m in said for token in m.token_ids] == list(range(count))
        assert all(a.first_index + len(a.token_ids) == b.first_index for a, b in itertools.pairwise(said))


def test_a_token_without_log_probabilities_is_no_part_of_a_message_that_has_them() -> None:
    """As of an answer that goes on from elsewhere, where its last token was told with them."""
    waiting = MergingOutbox()
    for message in (tokens(0, 1), tokens(1, 1, top=2), tokens(2, 1, top=2), tokens(3, 1), tokens(4, 1)):
        waiting.put(message)
    said = waiting.take()
    assert [(m.token_ids, len(m.logprobs)) for m in said] == [((0,), 0), ((1, 2), 2), ((3, 4), 0)]
    assert waiting.size == 0


def test_a_message_larger_than_a_frame_goes_out_alone() -> None:
    waiting = MergingOutbox()
    waiting.put(tokens(0, 2000, top=20))
    waiting.put(tokens(2000, 1))
    assert [len(waiting.take()) for _ in range(2)] == [1, 1]
