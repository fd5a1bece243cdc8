"""Peer.Link, both ends: whoever receives KV dials, whoever sends it answers. A link outlives a broken stream.

A link is one generation between two incarnations. It is up from the first greeting until it is lost: nothing heard for
`lease_s`, too much that the peer has not acknowledged, the peer refuses to resume it, or its workers are known to have
exited. Two servers of one name are told apart by the id of their processes: what is proven of one is not said of the
other. Knows connections and greetings; `streams` numbers, acknowledges and repeats. Nothing of what link messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from disagg.messages.channel import Frame
from disagg.messages.legs import PeerRef
from disagg.messages.link import LinkHello, LinkMessage
from disagg.server.door import Door, Rivals
from disagg.server.pids import ProcessWatch, host_id
from disagg.streams.awake import Awake
from disagg.streams.state import Queue, Verdict
from disagg.streams.stream import ResumableStream
from disagg.types.bounded import forget_oldest
from disagg.types.errors import ProtocolError
from disagg.types.protocol import refusal
from disagg.wire import pb
from disagg.wire.peer import LinkGreeting, link_frame_from_proto, link_frame_to_proto, link_greeting_to_proto
from disagg.wire.services import PeerServicer, PeerStub, open_channel, read_message
from disagg.wire.status import details_of

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
REDIAL_S = 0.1
GREETING_TIMEOUT_S = 5.0
MAX_ENDED = 4096  # generations of lost links that are remembered
# Messages kept for a peer that does not acknowledge them; what a lease's length brings is usual.
MAX_UNACKED_MESSAGES = 1 << 16
MAX_LOST_PODS = 64  # that are said at once
MAX_LINKS = 256  # that are up; each has a transfer agent of every rank of its peer in every worker


class Link:
    """One link, of either side. address: where the peer was dialled; empty if it dialled."""

    def __init__(self, number: int, peer: LinkHello, address: str = "") -> None:
        self.number = number
        self.peer = peer
        self.address = address
        self.stream: ResumableStream[LinkMessage, LinkMessage] = ResumableStream(
            Queue(), heartbeat_s=HEARTBEAT_S, max_kept=MAX_UNACKED_MESSAGES
        )
        self.rivals = Rivals()
        self.fault = ""  # what the peer said and must not
        self.used = False  # a message was sent over it, or came
        self.pod_gone = False
        on_this_host = bool(peer.host_id) and peer.host_id == host_id()
        self.watches = [ProcessWatch(rank.pid, rank.pid_started) for rank in peer.ranks] if on_this_host else []

    @property
    def up(self) -> bool:
        return not self.stream.state.ended

    @property
    def gone(self) -> bool:
        """The peer's workers are known to have exited."""
        return self.pod_gone or (bool(self.watches) and all(watch.gone for watch in self.watches))

    def ended_by(self, newer: LinkHello, address: str) -> bool:
        """Whether a server that says so, at this address, proves that the peer's workers have exited.

        A server starts workers only after its old ones have exited. Of another process of that name only its address
        tells that it came in place of the old one, and only where the processes themselves cannot be watched.
        """
        old = self.peer
        if old.name != newer.name or old.incarnation == newer.incarnation:
            return False
        if old.server_id and old.server_id == newer.server_id:
            return True
        return not self.watches and bool(address) and address == self.address

    def close(self) -> None:
        for watch in self.watches:
            watch.close()


class Links(PeerServicer):
    """All links of one server, over all its incarnations. `greeting` is None while the server cannot link."""

    def __init__(
        self,
        lease_s: float,
        greeting: Callable[[str], LinkHello | None],
        on_up: Callable[..., None],
        on_message: Callable[[int, LinkMessage], None],
        on_down: Callable[[int, bool, str], None],
        on_gone: Callable[[int], None],
        on_dial_failed: Callable[[PeerRef, str], None],
        channel_to: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        """greeting(generation): our own hello. on_up(number, hello, dialled=): whether this side made it. on_down(number, gone,
        reason). on_gone: a lost link's peer has exited.
        """
        self._lease_s = lease_s
        self._awake = Awake(time.monotonic())
        self._greeting = greeting
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._on_gone = on_gone
        self._on_dial_failed = on_dial_failed
        self._channel_to = channel_to
        self._links: dict[str, Link] = {}  # by generation
        self._by_number: dict[int, tuple[str, Link]] = {}
        self._lost: dict[int, Link] = {}  # down, peer not known to be gone
        self._ended: dict[str, None] = {}  # generations of lost links, the oldest first: none of them begins again
        self._dials: dict[tuple[str, str], asyncio.Task[None]] = {}  # that make a link or keep one up
        self._dialling: set[asyncio.Task[None]] = set()  # these, and those whose link is lost
        self._next_number = 0
        self._door = Door()
        self.lease_expiries = 0
        self.stopping = False  # the server drains: a lost link is nothing to warn of

    # ---- the server's calls

    def send(self, number: int, message: LinkMessage) -> None:
        """Queue a message; `flush` lets all that is queued go as one frame."""
        known = self._by_number.get(number)
        if known is not None:
            known[1].used = True
            known[1].stream.put(message)

    def flush(self) -> None:
        for _, link in self._by_number.values():
            link.stream.flush()

    def dial(self, peer: PeerRef) -> None:
        """Make a link to this incarnation of this server, unless there is one or it is being made."""
        where = (peer.name, peer.incarnation)
        if where in self._dials:
            return
        task = asyncio.create_task(self._dial(peer, where), name=f"link to {peer.name}")
        self._dials[where] = task
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    def drop(self, number: int, reason: str) -> None:
        """Lose a link now."""
        known = self._by_number.get(number)
        if known is not None:
            self._lose(known[0], known[1], reason)

    def drop_all(self, reason: str, *, intended: bool = False) -> None:
        """intended: nothing to warn of."""
        for generation, link in list(self._links.items()):
            self._lose(generation, link, reason, intended=intended)

    def tick(self) -> None:
        """Lose links that are silent for too long or leave too much unacknowledged; learn which lost peers have exited."""
        now = time.monotonic()
        awake = self._awake.look(now)
        for generation, link in list(self._links.items()):
            name, verdict = link.peer.name, link.stream.state.verdict(self._lease_s, now, awake=awake)
            if link.gone:
                self._lose(generation, link, f"the workers of {name} have exited")
            elif verdict is Verdict.SILENT:
                self.lease_expiries += 1
                self._lose(generation, link, f"nothing was heard from {name} for {self._lease_s:g} s")
            elif verdict is Verdict.OVERFULL:
                self._lose(generation, link, f"{name} leaves {MAX_UNACKED_MESSAGES} messages unacknowledged")
        for number, link in list(self._lost.items()):
            if link.gone:
                self._gone(number)

    def lost_pods(self) -> tuple[str, ...]:
        """Of peers that are lost and may still write here. Whoever learns that one has ended says so with `pod_gone`."""
        pods = dict.fromkeys(link.peer.pod for link in self._lost.values() if link.peer.pod)
        return tuple(pods)[:MAX_LOST_PODS]

    def pod_gone(self, pod: str) -> None:
        """A pod has ended, with all of its processes."""
        if not pod:
            return
        for link in (*self._links.values(), *self._lost.values()):
            link.pod_gone |= link.peer.pod == pod
        self.tick()

    def peer_of(self, number: int) -> str:
        """The name at the other end; empty if the link is not up."""
        known = self._by_number.get(number)
        return known[1].peer.name if known is not None else ""

    def forget(self, number: int) -> None:
        """Nobody needs to know when the peer of this lost link exits."""
        link = self._lost.pop(number, None)
        if link is not None:
            link.close()

    def _gone(self, number: int) -> None:
        self.forget(number)
        self._on_gone(number)

    def describe(self) -> dict[int, dict[str, object]]:
        now = time.monotonic()
        return {
            link.number: {
                "peer": link.peer.name,
                "peer's process": link.peer.server_id,
                "version": str(link.peer.version),
                "incarnation": link.peer.incarnation,
                "generation": generation,
                "heard s ago": round(now - link.stream.state.heard_s, 2),
                "unacked frames": link.stream.state.unacked,
            }
            for generation, link in self._links.items()
        }

    async def close(self) -> None:
        self.drop_all("the server is shutting down")
        for task in self._dialling:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        for link in self._lost.values():
            link.close()

    # ---- both ends

    def _establish(self, generation: str, peer: LinkHello, address: str = "") -> Link:
        link = Link(self._next_number, peer, address)
        self._next_number += 1
        self._links[generation] = link
        self._by_number[link.number] = (generation, link)
        for number, lost in list(self._lost.items()):
            if lost.ended_by(peer, address):
                self._gone(number)
        logger.info("link %d to %s is up", link.number, peer.name)
        self._on_up(link.number, peer, dialled=bool(address))
        return link

    def _lose(self, generation: str, link: Link, reason: str, *, intended: bool = False) -> None:
        if self._links.pop(generation, None) is None:
            return
        del self._by_number[link.number]
        self._ended[generation] = None
        forget_oldest(self._ended, MAX_ENDED)
        if link.address:
            self._dials.pop((link.peer.name, link.peer.incarnation), None)  # a leg may need another link at once
        link.stream.end()
        gone = link.gone
        served = link.address or link.used or link.stream.state.lived_s >= self._lease_s  # else it may be anybody's
        level = logging.INFO if self.stopping or intended or not served else logging.WARNING
        logger.log(level, "link %d to %s is lost: %s", link.number, link.peer.name, reason)
        if gone:
            link.close()
        else:
            self._lost[link.number] = link
        self._on_down(link.number, gone, reason)

    async def _listen(
        self, generation: str, link: Link, connection: int, incoming: AsyncIterator[pb.peer.LinkFrame]
    ) -> None:
        """Hands messages on until the connection ends. What the peer may not say loses the link."""
        try:
            await link.stream.listen(connection, incoming, _frame_of, partial(self._heard, link))
        except ProtocolError as error:
            link.fault = str(error)
            self._lose(generation, link, f"{link.peer.name} broke the protocol: {error}")
        except grpc.aio.AioRpcError as error:
            logger.info("the stream of link %d broke: %s", link.number, error.code())

    def _heard(self, link: Link, message: LinkMessage) -> None:
        link.used = True
        self._on_message(link.number, message)

    # ---- who sends: answer

    async def link(
        self, requests: AsyncIterator[pb.peer.LinkFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.peer.LinkFrame]:
        async with self._door.opened(context):
            first = await self._door.first(requests, context)
            try:
                greeting = link_frame_from_proto(first) if first is not None else None
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(error))
            if not isinstance(greeting, LinkGreeting):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a link must be a greeting")
                return
            generation = greeting.hello.generation
            answer = self._answer(greeting, context.peer())
            if isinstance(answer, _Refusal):
                await context.abort(answer.code, details_of(answer.reason))
                return
            ours, link, connection = answer
            yield link_greeting_to_proto(LinkGreeting(ours, link.stream.state.received))
            listener = asyncio.create_task(self._listen(generation, link, connection, requests))
            try:
                async for frame in link.stream.frames(connection):
                    yield link_frame_to_proto(frame)
            finally:
                listener.cancel()
                link.stream.disconnect(connection)
            if link.fault:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(link.fault))

    def _answer(self, greeting: LinkGreeting, where: str) -> tuple[LinkHello, Link, int] | _Refusal:
        """Our own greeting, the link, resumed or new, and the number of its new connection; or why there is none."""
        theirs, code = greeting.hello, grpc.StatusCode
        ours = self._greeting(theirs.generation)
        if ours is None:
            return _Refusal(code.UNAVAILABLE, "this server's workers are not up")
        if greeting.expected_incarnation not in ("", ours.incarnation):
            return _Refusal(code.NOT_FOUND, f"{ours.name} has restarted; its workers are {ours.incarnation} now")
        if mismatch := _mismatch(ours, theirs):
            return _Refusal(code.FAILED_PRECONDITION, mismatch)
        link = self._links.get(theirs.generation)
        if link is None:
            if greeting.last_received or theirs.generation in self._ended:
                return _Refusal(code.NOT_FOUND, f"link {theirs.generation} is not known here any more")
            if held := self._held(theirs, where):
                return _Refusal(code.ALREADY_EXISTS, held)
            if len(self._links) >= MAX_LINKS:
                return _Refusal(code.RESOURCE_EXHAUSTED, f"{MAX_LINKS} links are up already; no more may be")
            link = self._establish(theirs.generation, theirs)
            if not link.up:  # the engine would not have it
                return _Refusal(code.FAILED_PRECONDITION, f"{ours.name} cannot exchange KV with {theirs.name}")
        elif (link.peer.name, link.peer.incarnation, link.peer.server_id) != (
            theirs.name,
            theirs.incarnation,
            theirs.server_id,
        ):
            return _Refusal(code.INVALID_ARGUMENT, f"link {theirs.generation} is of another server, {link.peer.name}")
        return ours, link, link.stream.connect(greeting.last_received)

    def _held(self, theirs: LinkHello, where: str) -> str:
        """Why a server of this name may not link here; empty if it may, and then what it had before is lost.

        It dials one link per incarnation of ours: what it had before, it has given up. Another process of that name has
        come in its place, unless it lives. Links that we have dialled are none of its business.
        """
        process = theirs.server_id
        for generation, other in list(self._links.items()):
            if other.peer.name != theirs.name or other.address:
                continue
            state = other.stream.state
            if other.peer.server_id == process or other.rivals.may_take_over(process, state.served, state.heard_s):
                self._lose(generation, other, f"{theirs.name} has dialled anew")
                continue
            held = (
                f'the name "{theirs.name}" is held by a server that lives, process {other.peer.server_id}; every server '
                "must have a server.name of its own"
            )
            if other.rivals.refused(process, time.monotonic()):
                logger.error("a second server, process %s at %s, is refused: %s", process, where, held)
            return held
        return ""

    # ---- who receives: dial

    async def _dial(self, peer: PeerRef, where: tuple[str, str]) -> None:
        """Keeps one link up until it is lost. Before the first greeting a refusal is final: the legs go elsewhere."""
        generation = secrets.token_hex(8)
        deadline = time.monotonic() + self._lease_s
        link: Link | None = None
        try:
            while link is None or link.up:
                failure = await self._one_stream(peer, generation)
                link = link or self._links.get(generation)
                if link is None and (failure.final or failure.linked or time.monotonic() > deadline):
                    if not failure.linked:
                        self._dials.pop(where, None)
                        self._on_dial_failed(peer, failure.reason)
                    return
                if link is not None and link.up and failure.final:
                    self._lose(generation, link, failure.reason)
                await asyncio.sleep(REDIAL_S)
        finally:
            if link is not None and link.up:
                self._lose(generation, link, "it is no longer dialled")

    async def _one_stream(self, peer: PeerRef, generation: str) -> _Failure:
        """One gRPC stream, from dialling to its end."""
        ours = self._greeting(generation)
        if ours is None:
            return _Failure("our own workers are not up", final=True)
        link = self._links.get(generation)
        channel = self._channel_to(peer.address)
        try:
            call = PeerStub(channel).link()
            received = link.stream.state.received if link is not None else 0
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await call.write(link_greeting_to_proto(LinkGreeting(ours, received, peer.incarnation)))
                first = await read_message(call)
            if first is grpc.aio.EOF:
                return _Failure(*await _status_of(call))
            greeting = link_frame_from_proto(first)
            if not isinstance(greeting, LinkGreeting):
                return _Failure(f"{peer.name} did not greet", final=True)
            theirs = greeting.hello
            if theirs.incarnation != peer.incarnation:
                return _Failure(f"{peer.name} has restarted; its workers are {theirs.incarnation} now", final=True)
            if mismatch := _mismatch(ours, theirs):
                return _Failure(mismatch, final=True)
            link = link or self._establish(generation, theirs, peer.address)
            if not link.up:
                return _Failure("the link was given up at once", final=True, linked=True)
            connection = link.stream.connect(greeting.last_received)
            listener = asyncio.create_task(self._listen(generation, link, connection, _reads(call)))
            try:
                async for frame in link.stream.frames(connection):
                    await call.write(link_frame_to_proto(frame))
            finally:
                listener.cancel()
                link.stream.disconnect(connection)
                call.cancel()
            return _Failure("the stream ended", final=False, linked=True)
        except TimeoutError:
            return _Failure(f"{peer.name} at {peer.address} did not answer in time", False, link is not None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                return _Failure(*_reason(error.code(), error.details() or ""), link is not None)
            return _Failure(*await _status_of(call), link is not None)
        except ProtocolError as error:
            return _Failure(f"{peer.name} broke the protocol: {error}", final=True)
        finally:
            await channel.close()


class _Refusal:
    """Why a peer that dialled gets no link, and the status that its stream ends with."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        self.code = code
        self.reason = reason


class _Failure:
    """Why a stream ended. final: dialling again cannot help. linked: it had made the link; once lost, it stays lost."""

    def __init__(self, reason: str, final: bool, linked: bool = False) -> None:
        self.reason = reason
        self.final = final
        self.linked = linked


_FINAL_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


def _mismatch(ours: LinkHello, theirs: LinkHello) -> str:
    """Why no KV can cross between the two; empty if it can."""
    if ours.fingerprint != theirs.fingerprint:
        return f"KV layouts differ: {ours.name} has {ours.fingerprint}, {theirs.name} has {theirs.fingerprint}"
    return refusal(f"server {ours.name}", ours.version, f"server {theirs.name}", theirs.version)


def _reason(code: grpc.StatusCode, details: str) -> tuple[str, bool]:
    return f"{code.name.lower().replace('_', ' ')}: {details}", code in _FINAL_CODES


def _frame_of(message: pb.peer.LinkFrame) -> Frame[LinkMessage]:
    frame = link_frame_from_proto(message)
    if isinstance(frame, LinkGreeting):
        raise ProtocolError("a second greeting on one stream")
    return frame


async def _status_of(call: Any) -> tuple[str, bool]:
    with contextlib.suppress(grpc.aio.AioRpcError):
        return _reason(await call.code(), await call.details() or "")
    return "the stream broke", False


async def _reads(call: Any) -> AsyncIterator[pb.peer.LinkFrame]:
    """What a call receives, until its end."""
    while True:
        message = await read_message(call)
        if message is grpc.aio.EOF:
            return
        yield message
