"""What a server tells routers over real gRPC: hello, all of the prefix cache, and then what changes in it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from disagg.messages.legs import AbortLeg, KvEvents, LegEnd, LegTokens, Outcome, Tier
from disagg.server import kv_feed, routers
from disagg.server.kv_feed import KvFeed
from tests.server.router_streams import DEADLINE_S, KEY, Server, attach

A, B, C = ((0, b"a"), (0, b"b"), (1, b"c"))


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
