"""A server that answers nonsense costs the router, or the decode server that dials it, that stream, and nothing else.

Over real gRPC, byte by byte. The one that dials goes on: it dials again, and its other streams are as they were.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, RouterConfig, ServerRef
from disagg.messages.channel import Frame
from disagg.messages.legs import (
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    PeerRef,
    ServerHello,
    ServerState,
)
from disagg.messages.link import Announce, LinkHello, QuietLinks
from disagg.router import streams
from disagg.router.service import Router
from disagg.server import links
from disagg.server.links import Links
from disagg.types.ids import LegKey, Role
from disagg.wire import pb
from disagg.wire.peer import LinkGreeting, link_frame_to_proto, link_greeting_to_proto
from disagg.wire.server import AttachReply, KvUpdate, ServerSays, server_says_to_proto
from disagg.wire.services import PEER, SERVER, make_server
from tests.campaigns import Campaign
from tests.router.fake_server import TOKENIZER
from tests.server.router_streams import Server
from tests.server.test_hostile_streams import CAMPAIGNS
from tests.server.test_links import RANKS
from tests.wire.wire_hostile import conversation

DEADLINE_S = 120.0  # on a machine that does much else
KEY = LegKey("r", 1, 0)
READY = LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64)
HELLO = ServerHello("p0", Role.PREFILL, 1, 1, (2,), "one", "f", "m", 64, 64, "p0:1", READY)
SERVER_HELLOS = [
    server_says_to_proto(ServerSays(Frame(0, 0, ()), READY, hello, attached)).SerializeToString()
    for hello, attached in (
        (HELLO, AttachReply(0, False)),
        (HELLO, AttachReply(2**63, True)),
        (ServerHello("p0", Role.PREFILL, 1, 2, (), "", "", "", 0, 0, "", READY), AttachReply(0, False)),
        (ServerHello("d0", Role.DECODE, 1, 2, (), "", "", "", 0, 0, "", READY), AttachReply(0, False)),
        (HELLO, None),
    )
]
SERVER_FRAMES = [
    server_says_to_proto(says).SerializeToString()
    for says in (
        ServerSays(Frame(1, 0, (LegTokens(KEY, 0, 0, (1, 2)),))),
        ServerSays(Frame(1, 0, (LegEnd(KEY, Outcome.DONE, ""),)), READY),
        ServerSays(Frame(0, 2**63, ()), kv=KvUpdate(KvEvents(stored=((0, b"a"), (99, b"b"))), True)),
        ServerSays(Frame(2, 0, ()), hello=HELLO),
    )
]
LINK_HELLOS = [
    link_greeting_to_proto(greeting).SerializeToString()
    for greeting in (
        LinkGreeting(LinkHello("P", "g", "p1", "same", 1, "elsewhere", RANKS), 0),
        LinkGreeting(LinkHello("P", "g", "p1", "same", 1, "elsewhere", RANKS, "evil"), 2**63),
        LinkGreeting(LinkHello("P", "g", "p2", "same", 1, "elsewhere", RANKS), 0),
        LinkGreeting(LinkHello("P", "g", "p1", "other", 1, "elsewhere", RANKS), 0),
    )
]
LINK_FRAMES = [
    link_frame_to_proto(Frame(number, 0, messages)).SerializeToString()
    for number, messages in ((1, (Announce(KEY, 3),)), (1, (QuietLinks(("g",)),)), (0, ()), (5, ()))
]


class Hostile:
    """Serves one method with what it is told to say, one script for each stream, and then ends the stream."""

    def __init__(self, service: str, method: str) -> None:
        self.scripts: deque[list[bytes]] = deque()
        self.begun = 0
        handler = grpc.stream_stream_rpc_method_handler(self._answer)  # bytes as they are
        self._grpc = make_server(grpc.method_handlers_generic_handler(service, {method: handler}))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.begun += 1
        for message in self.scripts.popleft() if self.scripts else ():
            yield message

    async def __aenter__(self) -> Hostile:
        await self._grpc.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._grpc.stop(None)


S = TypeVar("S", Hostile, Server)


async def entered(make: Callable[[], S]) -> S:
    """Made on the loop that it is to serve on."""
    return await make().__aenter__()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def campaign(examples: int, talks: Any, body: Callable[[list[bytes]], None]) -> None:
    counted = Campaign(examples)

    def one(messages: list[bytes]) -> None:
        counted.begin()
        body(messages)

    limits = settings(
        max_examples=counted.examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    limits(given(talks)(one))()
    counted.check()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@CAMPAIGNS
def test_no_server_says_what_a_router_does_not_survive(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(streams, "MAX_BACKOFF_S", 0.001)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as servers run
        hostile = runner.run(entered(lambda: Hostile(SERVER, "Attach")))
        healthy = runner.run(entered(Server))
        refs = (
            ServerRef(name="p0", role="prefill", address=f"127.0.0.1:{hostile.port}"),
            ServerRef(name="d0", role="decode", address=f"127.0.0.1:{healthy.port}"),
        )
        config = Config(router=RouterConfig(servers=refs, heartbeat_s=0.05))

        async def begin() -> Router:
            router = Router(config, TOKENIZER, model_name="m", max_model_len=64, registry=CollectorRegistry())
            await router.start()
            return router

        router = runner.run(begin())
        runner.run(until(lambda: router.status()["servers"][1]["connected"]))

        async def one(messages: list[bytes]) -> None:
            hostile.scripts.append(messages)
            await until(lambda: not hostile.scripts)
            begun = hostile.begun
            await until(lambda: hostile.begun > begun)  # it dials again
            assert router.status()["servers"][1]["connected"]
            assert not healthy.ended

        def body(messages: list[bytes]) -> None:
            runner.run(one(messages))

        campaign(examples, conversation(pb.server.ServerFrame, SERVER_HELLOS, SERVER_FRAMES), body)
        runner.run(router.close(0.0))
        runner.run(healthy.__aexit__())
        runner.run(hostile.__aexit__())


@CAMPAIGNS
def test_no_peer_answers_what_a_server_that_dials_does_not_survive(
    examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REDIAL_S", 0.001)
    ups: list[int] = []
    downs: list[int] = []
    failed: list[str] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as servers run
        hostile = runner.run(entered(lambda: Hostile(PEER, "Link")))

        async def begin() -> Links:
            return Links(
                lease_s=30.0,
                greeting=lambda generation: LinkHello("D", generation, "one", "same", 1, "here", RANKS, "process"),
                on_up=lambda number, _, dialled: ups.append(number),
                on_message=lambda number, message: None,
                on_down=lambda number, gone, reason: downs.append(number),
                on_gone=lambda number: None,
                on_dial_failed=lambda peer, reason: failed.append(reason),
            )

        ours = runner.run(begin())

        async def one(messages: list[bytes]) -> None:
            hostile.scripts.append(messages)
            begun, ended = hostile.begun, len(downs) + len(failed)
            ours.dial(PeerRef("P", f"127.0.0.1:{hostile.port}", "p1"))
            # It fails, or the link is lost, or what says nothing wrong is dialled again.
            await until(lambda: len(downs) + len(failed) > ended or hostile.begun > begun + 1)
            ours.drop_all("the next one")
            for task in list(ours._dialling):
                task.cancel()
            await until(lambda: not ours._dialling)
            ours._dials.clear()
            for number in list(ours._lost):
                ours.forget(number)
            assert len(ups) == len(downs)
            assert not ours._links

        def body(messages: list[bytes]) -> None:
            runner.run(one(messages))

        campaign(examples, conversation(pb.peer.LinkFrame, LINK_HELLOS, LINK_FRAMES), body)
        assert ups
        assert failed
        runner.run(ours.close())
        runner.run(hostile.__aexit__())
