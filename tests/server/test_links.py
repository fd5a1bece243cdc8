"""Links of a prefill server over real gRPC, with a decode server that keeps to the letter of the protocol and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from disagg.messages.channel import Frame
from disagg.messages.link import LinkHello, RankInfo, Watermarks
from disagg.server import links
from disagg.server.links import Links
from disagg.wire import pb
from disagg.wire.peer import LinkGreeting, link_frame_from_proto, link_frame_to_proto, link_greeting_to_proto
from disagg.wire.services import PeerStub, make_server, open_channel, peer_handler

pytestmark = pytest.mark.timeout(60)

RANKS = (RankInfo(0, 1, 1, b"agent", 0, 0, 0),)


class Prefill:
    """Links of a prefill server, on a port of its own. lost: why each link was lost."""

    def __init__(self) -> None:
        self.up: list[int] = []
        self.lost: list[str] = []
        self.links = Links(
            lease_s=30.0,
            greeting=lambda generation: LinkHello("P", generation, "one", "same", 1, "here", RANKS),
            on_up=lambda number, _: self.up.append(number),
            on_message=lambda number, message: None,
            on_down=lambda number, gone, reason: self.lost.append(reason),
            on_gone=lambda number: None,
            on_dial_failed=lambda peer, reason: None,
        )
        self._grpc = make_server(peer_handler(self.links))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Prefill:
        await self._grpc.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close()
        await self._grpc.stop(None)


async def test_a_peer_that_is_heard_and_never_acknowledges_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for it must not grow without end; what is usual within a lease is kept."""
    monkeypatch.setattr(links, "MAX_UNACKED_MESSAGES", 50)
    heard = asyncio.Event()

    async def beats() -> AsyncIterator[pb.peer.LinkFrame]:
        hello = LinkHello("D", "generation", "one", "same", 1, "elsewhere", RANKS)
        yield link_greeting_to_proto(LinkGreeting(hello, 0))
        while True:
            await heard.wait()
            heard.clear()
            yield link_frame_to_proto(Frame(number=0, ack=0, messages=()))

    async with Prefill() as prefill:
        channel = open_channel(f"127.0.0.1:{prefill.port}")
        call = PeerStub(channel).link(beats())
        assert isinstance(link_frame_from_proto(await call.read()), LinkGreeting)
        (number,) = prefill.up
        for position in range(51):
            assert not prefill.lost, f"after {position} messages"
            prefill.links.send(number, Watermarks(0, (position,)))
            prefill.links.flush()
            link_frame_from_proto(await call.read())
            heard.set()
            await asyncio.sleep(0)
            prefill.links.tick()
        assert prefill.lost == ["D leaves 50 messages unacknowledged"]
        await channel.close()
