"""Links of a prefill server over real gRPC, with a decode server that keeps to the letter of the protocol and no more."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator

import grpc
import pytest

from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.link import LinkHello, RankInfo, Watermarks
from disagg.server import door, links
from disagg.server.links import Link, Links
from disagg.server.pids import host_id, started
from disagg.wire import pb
from disagg.wire.peer import LinkGreeting, link_frame_from_proto, link_frame_to_proto, link_greeting_to_proto
from disagg.wire.services import PeerStub, make_server, open_channel, peer_handler

pytestmark = pytest.mark.timeout(60)

RANKS = (RankInfo(0, 1, 1, b"agent", 0, 0, 0),)
SELF = (RankInfo(0, os.getpid(), started(os.getpid()), b"agent", 0, 0, 0),)  # a worker that lives


class Prefill:
    """Links of a prefill server, on a port of its own. lost: why each link was lost."""

    def __init__(self) -> None:
        self.up: list[int] = []
        self.lost: list[str] = []
        self.gone: list[int] = []
        self.links = Links(
            lease_s=30.0,
            greeting=lambda generation: LinkHello("P", generation, "one", "same", 1, "here", RANKS),
            on_up=lambda number, _, dialled: self.up.append(number),
            on_message=lambda number, message: None,
            on_down=lambda number, gone, reason: self.lost.append(reason),
            on_gone=self.gone.append,
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


async def test_only_a_link_that_was_of_use_is_warned_of_when_it_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Prefill() as prefill:
        dialled = []
        for name in ("D", "E"):
            dialled.append(Dialled(prefill, decode_hello(f"of {name}", name, name=name)))
            await dialled[-1].greeted()
        prefill.links.send(prefill.up[1], Watermarks(0, (1,)))
        prefill.links.drop_all("told to")
        said = {each.getMessage(): each.levelname for each in caplog.records if "is lost" in each.getMessage()}
        assert said == {"link 0 to D is lost: told to": "INFO", "link 1 to E is lost: told to": "WARNING"}
        for each in dialled:
            await each.close()


# ---- peers whose pods are known to have ended


POD = "models/decode-0/uid-1"


async def test_a_lost_peer_in_a_pod_is_gone_when_the_pod_is() -> None:
    async with Prefill() as prefill:
        hellos = [
            LinkHello(name, f"generation {name}", "one", "same", 1, "elsewhere", RANKS, name, pod)
            for name, pod in (("D", POD), ("E", "models/decode-1/uid-2"), ("F", ""))
        ]
        dialled = []
        for hello in hellos:
            dialled.append(Dialled(prefill, hello))
            await dialled[-1].greeted()
        prefill.links.drop_all("told to")
        assert prefill.links.lost_pods() == (POD, "models/decode-1/uid-2")
        prefill.links.pod_gone("models/decode-0/uid-of-another")
        prefill.links.pod_gone("")
        assert prefill.gone == []
        prefill.links.pod_gone(POD)
        assert prefill.gone == [prefill.up[0]] and prefill.links.lost_pods() == ("models/decode-1/uid-2",)
        prefill.links.forget(prefill.up[1])
        assert prefill.links.lost_pods() == ()
        for each in dialled:
            await each.close()


async def test_a_link_to_a_pod_that_has_ended_is_lost_before_its_lease_ends() -> None:
    async with Prefill() as prefill:
        dialled = Dialled(prefill, LinkHello("D", "g", "one", "same", 1, "elsewhere", RANKS, "d", POD))
        await dialled.greeted()
        assert prefill.links.lost_pods() == ()
        prefill.links.pod_gone(POD)
        assert prefill.lost == ["the workers of D have exited"]
        await dialled.close()


# ---- one living server to a name


def decode_hello(generation: str, process: str, incarnation: str = "one", name: str = "D") -> LinkHello:
    return LinkHello(name, generation, incarnation, "same", 1, "elsewhere", RANKS, process)


class Dialled:
    """A decode server's end of one stream that beats as long as it is open."""

    def __init__(self, prefill: Prefill, hello: LinkHello) -> None:
        self._channel = open_channel(f"127.0.0.1:{prefill.port}")
        self._hello = hello
        self.channel: ReliableChannel[object] = ReliableChannel()
        self._greeted = asyncio.Event()
        self.call = PeerStub(self._channel).link(self._frames())

    async def _frames(self) -> AsyncIterator[pb.peer.LinkFrame]:
        yield link_greeting_to_proto(LinkGreeting(self._hello, 0))
        await self._greeted.wait()  # gRPC hides the status of a call that ends while it writes
        while True:
            yield link_frame_to_proto(self.channel.ack_frame())
            await asyncio.sleep(0.02)

    async def greeted(self) -> None:
        assert isinstance(link_frame_from_proto(await self.call.read()), LinkGreeting)
        self._greeted.set()

    async def next_message(self) -> object:
        """The next message of any frame; what it is acknowledged with is the next beat."""
        while True:
            frame = link_frame_from_proto(await self.call.read())
            assert isinstance(frame, Frame)
            for message in self.channel.take(frame, 0.0):
                return message

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await self.call.read()
        return ended.value.code(), ended.value.details() or ""

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


async def test_a_second_server_of_a_living_name_is_refused_and_the_first_ones_link_is_unharmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Prefill() as prefill:
        first = Dialled(prefill, decode_hello("g1", "process-1"))
        await first.greeted()
        for attempt in range(3):
            second = Dialled(prefill, decode_hello(f"g2-{attempt}", "process-2", "two"))
            code, why = await second.refusal()
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert 'the name "D" is held by a server that lives, process process-1' in why
            await second.close()
        assert (prefill.up, prefill.lost) == ([0], [])
        said = [record.getMessage() for record in caplog.records if "second server" in record.getMessage()]
        assert len(said) == 1
        assert "process process-2 at ipv4:127.0.0.1" in said[0]
        await first.close()


async def test_a_server_that_restarted_links_again_once_its_old_stream_is_broken() -> None:
    async with Prefill() as prefill:
        old = Dialled(prefill, decode_hello("g1", "process-1"))
        await old.greeted()
        await old.close()
        await asyncio.sleep(0.5)  # what it said last is heard: after a rival's first try it would be a sign of life
        async with asyncio.timeout(30):
            for attempt in range(1000):
                new = Dialled(prefill, decode_hello(f"g2-{attempt}", "process-2", "two"))
                if link_frame := await _first(new):
                    break
                await new.close()
        assert isinstance(link_frame, LinkGreeting)
        assert prefill.lost == ["D has dialled anew"]
        await new.close()


async def test_one_process_that_dials_anew_gets_its_link_at_once() -> None:
    async with Prefill() as prefill:
        first = Dialled(prefill, decode_hello("g1", "process-1"))
        await first.greeted()
        second = Dialled(prefill, decode_hello("g2", "process-1", "two"))
        await second.greeted()
        assert prefill.lost == ["D has dialled anew"]
        await first.close()
        await second.close()


async def _first(dialled: Dialled) -> object:
    try:
        return link_frame_from_proto(await dialled.call.read())
    except grpc.aio.AioRpcError:
        return None


@pytest.mark.parametrize(
    ("process", "address", "on_this_host", "proven"),
    [
        ("same", "a:1", False, True),  # its server has started workers again, after the old ones had exited
        ("same", "a:2", True, True),
        ("other", "a:2", False, False),  # another server of that name
        ("other", "a:2", True, False),
        ("other", "a:1", True, False),  # its processes can be watched: they tell it themselves
        ("other", "a:1", False, True),  # it came in place of the old one
        ("", "a:1", False, True),
        ("", "", False, False),
    ],
)
def test_what_a_new_incarnation_proves_of_the_old_ones_workers(
    process: str, address: str, on_this_host: bool, proven: bool
) -> None:
    old = LinkHello("P", "g1", "one", "same", 1, host_id() if on_this_host else "elsewhere", SELF, "same")
    link = Link(0, old, "a:1")
    new = LinkHello("P", "g2", "two", "same", 1, old.host_id, RANKS, process)
    assert link.ended_by(new, address) is proven
    assert not link.ended_by(LinkHello("Q", "g2", "two", "same", 1, "", RANKS, "same"), "a:1")
    assert not link.ended_by(LinkHello("P", "g2", "one", "same", 1, "", RANKS, "same"), "a:1")
    assert not link.gone
    link.close()


async def test_a_link_that_says_no_greeting_is_ended_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HELLO_S", 0.2)
    async with Prefill() as prefill:
        channel = open_channel(f"127.0.0.1:{prefill.port}")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(30):
                await PeerStub(channel).link().read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()


async def test_a_link_that_the_engine_will_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Prefill() as prefill:
        monkeypatch.setattr(
            prefill.links, "_on_up", lambda number, _, dialled: prefill.links.drop(number, "no slices fit")
        )
        dialled = Dialled(prefill, decode_hello("g1", "process-1"))
        async with asyncio.timeout(30):
            code, _ = await dialled.refusal()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        await dialled.close()
