"""Whatever is said on Server.Attach and Peer.Link ends with a clear status, and costs nobody else's stream a message.

Over real gRPC, byte by byte as a hostile process may send it; a healthy router or peer is attached all the while.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings

from disagg.messages.channel import Frame
from disagg.messages.legs import AbortLeg, LegTokens, PeerRef, StartLeg
from disagg.messages.link import Announce, LinkHello, Revoke, Watermarks
from disagg.types.ids import LegKey
from disagg.types.protocol import Version
from disagg.types.sampling import SamplingParams
from disagg.wire import pb
from disagg.wire.peer import LinkGreeting, link_frame_to_proto, link_greeting_to_proto
from disagg.wire.server import RouterHello, router_frame_to_proto, router_hello_to_proto
from disagg.wire.services import PEER, SERVER, open_channel
from tests.campaigns import Campaign, sizes
from tests.server.router_streams import KEY, Router, Server, attach
from tests.server.test_links import RANKS, Dialled, Prefill, decode_hello
from tests.wire.wire_hostile import conversation

DEADLINE_S = 120.0  # on a machine that does much else
GROWTH_BYTES = 64 << 20
CLEAR = {
    grpc.StatusCode.OK,  # all of it was right, and then the other side ended the stream
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,  # of its version, which both names are said with: see `say`
}
CAMPAIGNS = sizes()

TOO_NEW = Version(9001, 9000, "9.0")

LEG = StartLeg(KEY, (1, 2, 3), 3, SamplingParams(max_tokens=5), (0,), PeerRef("D", "d:1", "d1"), 60.0)
ROUTER_HELLOS = [
    router_hello_to_proto(RouterHello(name, process, stream, 0)).SerializeToString()
    for name, process, stream in (
        ("evil", "e1", "s1"),
        ("evil", "e2", "s2"),
        ("evil", "e1", "s3"),
        ("healthy", "e3", "s4"),  # another process under a name that is taken
        ("worse", "e4", "s5"),
    )
] + [
    router_hello_to_proto(RouterHello("newer", "e5", "s6", 0, version=TOO_NEW)).SerializeToString(),
]
ROUTER_FRAMES = [
    router_frame_to_proto(Frame(number, ack, messages)).SerializeToString()
    for number, ack, messages in (
        (1, 0, (LEG,)),
        (1, 2**64 - 1, (AbortLeg(KEY),)),
        (2, 0, (AbortLeg(LegKey("r", 1, 0), 3),)),
        (0, 7, ()),
    )
]
LINK_HELLOS = [
    link_greeting_to_proto(greeting).SerializeToString()
    for greeting in (
        LinkGreeting(decode_hello("h1", "evil-1", name="E"), 0),
        LinkGreeting(decode_hello("h2", "evil-2", name="E"), 0),
        LinkGreeting(decode_hello("h3", "evil-3", "two", name="D"), 0),
        LinkGreeting(decode_hello("healthy", "evil-4", "two", name="D"), 0),  # another's link
        LinkGreeting(decode_hello("h5", "evil-5", name="F"), 9),
        LinkGreeting(decode_hello("h6", "evil-6", name="F"), 0, "another"),
        LinkGreeting(LinkHello("G", "h7", "one", "other layout", 1, "", RANKS), 0),
    )
]
LINK_FRAMES = [
    link_frame_to_proto(Frame(number, ack, messages)).SerializeToString()
    for number, ack, messages in (
        (1, 0, (Announce(KEY, 3),)),
        (1, 2**64 - 1, (Revoke(KEY, "no"),)),
        (2, 0, (Watermarks(0, (1,)),)),
        (0, 7, ()),
    )
]


class Victim(Protocol):
    """A server with somebody healthy attached."""

    port: int

    async def ping(self) -> None:
        """The healthy one is told one thing, and hears it, and nothing else."""

    def left(self) -> object:
        """What the hostile ones left behind that is still there; empty if nothing."""

    async def close(self) -> None: ...


class AttachVictim:
    """Router streams, with a healthy router."""

    async def start(self) -> AttachVictim:
        self._server = await Server().__aenter__()
        self.port = self._server.port
        self._router: Router = await attach(self._server, name="healthy", process="one")
        self._pings = 0
        return self

    async def ping(self) -> None:
        sent = LegTokens(LegKey("healthy", 1, 0), 0, self._pings, (self._pings,))
        self._pings += 1
        self._server.streams.tell(0, sent)
        self._server.streams.flush()
        await self._router.until(lambda: len(self._router.messages) == self._pings)
        assert self._router.messages[-1] == sent
        await self._router.acknowledge()
        streams = self._server.streams
        for lease in [lease for number, lease in streams._leases.items() if number]:
            lease.stream.state.heard_s = float("-inf")
        streams._leases[0].stream.state.heard_s = float("inf")
        streams.tick()

    def left(self) -> object:
        streams = self._server.streams
        return [list(streams._leases)[1:], streams._door.waiting, streams._door.streams - 1]

    async def close(self) -> None:
        await self._router.close()
        await self._server.__aexit__()


class LinkVictim:
    """Links of a prefill server, with a healthy decode server."""

    async def start(self) -> LinkVictim:
        self._prefill = await Prefill().__aenter__()
        self.port = self._prefill.port
        self._healthy = Dialled(self._prefill, decode_hello("healthy", "process-1"))
        await self._healthy.greeted()
        self._pings = 0
        return self

    async def ping(self) -> None:
        sent = Watermarks(0, (self._pings,))
        self._prefill.links.send(0, sent)
        self._prefill.links.flush()
        self._pings += 1
        async with asyncio.timeout(DEADLINE_S):
            assert await self._healthy.next_message() == sent
        for number, (_, link) in list(self._prefill.links._by_number.items()):
            link.stream.state.heard_s = float("-inf") if number else float("inf")
        self._prefill.links.tick()
        for number in list(self._prefill.links._lost):
            self._prefill.links.forget(number)

    def left(self) -> object:
        known = self._prefill.links
        return [list(known._by_number)[1:], known._door.waiting, known._door.streams - 1]

    async def close(self) -> None:
        await self._healthy.close()
        await self._prefill.__aexit__()


async def say(call: Any, messages: list[bytes]) -> grpc.StatusCode:
    """Says all of it, ends the stream, and reads until its end. The status."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has ended already
        if (
            await call.details() == "Internal error from Core"
        ):  # our own end's word for: it wrote after the other had ended
            return grpc.StatusCode.OK
        code = await call.code()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            assert "no protocol in common; upgrade" in await call.details()
        return code


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def campaign(examples: int, victim: Callable[[], Awaitable[Victim]], path: str, talks: Any) -> None:
    """Each example is one hostile stream; after each the healthy one is tried."""
    seen: set[grpc.StatusCode] = set()
    grown: list[int] = []
    counted = Campaign(examples)
    examples = counted.examples
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as after_all:  # as servers run
        target = runner.run(victim())
        after_all.callback(lambda: runner.run(target.close()))  # else what is found here is said of the next test, too

        async def one(messages: list[bytes]) -> None:
            method = channel.stream_stream(path)  # bytes as they are
            code = await say(method(), messages)
            assert code in CLEAR, (code, messages)
            seen.add(code)
            await target.ping()

        def body(messages: list[bytes]) -> None:
            counted.begin()
            runner.run(one(messages))
            if len(grown) < 2 * examples:
                grown.append(0)
            if len(grown) == examples // 10:
                grown[0] = resident_bytes()

        channel = runner.run(opened(target.port))
        limits = settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        limits(given(talks)(body))()
        counted.check()
        runner.run(channel.close())
        runner.run(until(lambda: not any(target.left()), target.ping))
        after = resident_bytes()
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS} <= seen
    assert after - grown[0] < GROWTH_BYTES, f"{(after - grown[0]) >> 20} MiB more than at the beginning"


async def opened(port: int) -> grpc.aio.Channel:
    return open_channel(f"127.0.0.1:{port}")


async def until(condition: Callable[[], bool], meanwhile: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await meanwhile()
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of warnings are what is to be expected here; pytest would keep them all."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@CAMPAIGNS
def test_no_router_says_what_harms_another(examples: int) -> None:
    talks = conversation(pb.server.RouterFrame, ROUTER_HELLOS, ROUTER_FRAMES)
    campaign(examples, lambda: AttachVictim().start(), f"/{SERVER}/Attach", talks)


@CAMPAIGNS
def test_no_peer_that_dials_says_what_harms_another(examples: int) -> None:
    talks = conversation(pb.peer.LinkFrame, LINK_HELLOS, LINK_FRAMES)
    campaign(examples, lambda: LinkVictim().start(), f"/{PEER}/Link", talks)
