"""Router streams of a server over real gRPC: who gets one, and for how long."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import pytest
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, RouterConfig, ServerRef
from disagg.messages.channel import Frame
from disagg.messages.legs import AbortLeg, LegEnd, LegTokens, Outcome, PeerRef, StartLeg
from disagg.router.dial import dial_server
from disagg.router.service import Router as WholeRouter
from disagg.router.streams import NameTaken
from disagg.server import door, routers
from disagg.types.errors import Unavailable
from disagg.types.sampling import SamplingParams
from disagg.wire.server import RouterHello
from disagg.wire.services import ServerStub, open_channel
from tests.router.fake_server import TOKENIZER
from tests.server.router_streams import DEADLINE_S, KEY, Router, Server, attach

START = StartLeg(KEY, (1, 2, 3), 3, SamplingParams(max_tokens=5), (0,), PeerRef("p0", "p0:1", "i"), 60.0)


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
