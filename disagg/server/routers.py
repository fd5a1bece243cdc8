"""Router streams, the server's side: one lease per router, which outlives a broken stream.

Tokens for a router wait in its lease, merged per choice, until its stream takes them all as one frame; so a slow router
gets fewer, larger frames and never blocks the engine. A lease ends when nothing has been heard for `lease_s`, when the
router comes back as another process, or when too much is waiting. Another process under a name whose holder lives is no
router that came back: it is refused. News of the prefix cache ride along, a part at a time (`kv_feed`). Knows streams and
frames; nothing of legs' meaning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from disagg.messages.channel import FRAME_MESSAGES, Frame, ReliableChannel
from disagg.messages.legs import (
    AbortLeg,
    KvEvents,
    LegTokens,
    LoadReport,
    RouterMessage,
    ServerHello,
    ServerMessage,
    StartLeg,
)
from disagg.server.door import Door, Rivals
from disagg.server.kv_feed import KvFeed
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.wire import pb
from disagg.wire.server import (
    AttachReply,
    RouterHello,
    ServerSays,
    router_frame_from_proto,
    server_says_to_proto,
)
from disagg.wire.services import ServerServicer
from disagg.wire.status import details_of

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 << 20  # of messages of one router that wait, or that it has not acknowledged
MAX_LEASES = 256  # routers; each may keep so many bytes, and the names of all cached pages
MESSAGE_BYTES = 256  # a message without what counts below, roughly, as it waits here
TOKEN_BYTES = 64
LOGPROB_BYTES = 32
TIMELINE_BYTES = 128
MERGED_BYTES = 128 << 10  # of one message: what a router does with it keeps its loop for some 20 ms
FRAME_BYTES = 512 << 10  # of one frame, for the same reason: a router that was away finds several
ACK_DELAY_S = 0.1  # an acknowledgement waits this long for a frame to ride on
KV_EVERY_S = 0.1  # no two parts of cache news follow each other faster: tokens come first


class Lease:
    """What a server keeps for one router across its streams."""

    def __init__(self, number: int, hello: RouterHello, where: str) -> None:
        self.number = number
        self.hello = hello
        self.where = where  # the address that its last stream came from
        self.channel: ReliableChannel[Any] = ReliableChannel()
        self.heard_s = time.monotonic()
        self.pending: list[ServerMessage] = []
        self.pending_bytes = 0
        self._sent: deque[int] = deque()  # bytes of each frame that is not acknowledged
        self._sent_bytes = 0
        self._open: dict[tuple[LegKey, int], int] = {}  # (leg, choice) -> index in pending of tokens to merge with
        self.ready = False  # pending may go out
        self.hello_due = False
        self.kv = KvFeed()  # of the stream that serves this lease now
        self.wake = asyncio.Event()
        self.stream = 0  # number of the stream that serves this lease now; older ones end
        self.served = False  # that stream is not known to be broken
        self.rivals = Rivals()
        self.fault = ""  # what its router said and must not

    @property
    def kept_bytes(self) -> int:
        """What waits, and what was sent and may have to be sent again; roughly."""
        while len(self._sent) > self.channel.unacked:
            self._sent_bytes -= self._sent.popleft()
        return self.pending_bytes + self._sent_bytes

    def put(self, message: ServerMessage) -> None:
        """Tokens of one choice that follow each other become one message, as long as it is small."""
        self.pending_bytes += _size(message)
        if isinstance(message, LegTokens):
            at = self._open.get((message.key, message.choice))
            if at is not None:
                before = self.pending[at]
                assert isinstance(before, LegTokens)
                follows = before.first_index + len(before.token_ids) == message.first_index
                if follows and _size(before) < MERGED_BYTES:
                    self.pending[at] = LegTokens(
                        key=message.key,
                        choice=message.choice,
                        first_index=before.first_index,
                        token_ids=before.token_ids + message.token_ids,
                        logprobs=before.logprobs + message.logprobs,
                        finish=message.finish,
                    )
                    self.pending_bytes -= MESSAGE_BYTES
                    return
            self._open[message.key, message.choice] = len(self.pending)
        self.pending.append(message)

    def take(self) -> tuple[ServerMessage, ...]:
        """The first of what is pending, as much as goes into one frame, to be pushed at once. What is left stays ready."""
        count = total = 0
        for message in self.pending[:FRAME_MESSAGES]:
            if count and total + _size(message) > FRAME_BYTES:
                break
            total += _size(message)
            count += 1
        messages = tuple(self.pending[:count])
        self._sent.append(total)
        self._sent_bytes += total
        del self.pending[:count]
        self._open = {place: at - count for place, at in self._open.items() if at >= count}
        self.pending_bytes -= total
        self.ready = bool(self.pending)
        return messages


def _size(message: ServerMessage) -> int:
    """Bytes of what waits here, roughly. All rows of log-probabilities of a message are as long as the first."""
    if not isinstance(message, LegTokens):
        return MESSAGE_BYTES + len(message.reason) + TIMELINE_BYTES * len(message.timeline)
    rows = len(message.logprobs) * (1 + len(message.logprobs[0].top)) if message.logprobs else 0
    return MESSAGE_BYTES + TOKEN_BYTES * len(message.token_ids) + LOGPROB_BYTES * rows


class RouterStreams(ServerServicer):
    """Serves Attach and Dump. `tell`, `publish` and `flush` are called by the server's loop; everything runs on that loop.

    snapshot: everything that is in the prefix cache now, as stored.
    """

    def __init__(
        self,
        lease_s: float,
        heartbeat_s: float,
        hello: Callable[[], ServerHello],
        load: Callable[[], LoadReport],
        snapshot: Callable[[], KvEvents],
        on_message: Callable[[int, RouterMessage], None],
        on_lease_end: Callable[[int, str], None],
        dump: Callable[[], Any],
    ) -> None:
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._hello = hello
        self._load = load
        self._snapshot = snapshot
        self._on_message = on_message
        self._on_lease_end = on_lease_end
        self._dump = dump
        self._leases: dict[int, Lease] = {}
        self._next_number = 0
        self._door = Door()
        self.token_frames = 0  # frames with tokens, over all routers
        self.lease_expiries = 0
        self._closing = False

    # ---- the server's calls

    def tell(self, router: int, message: ServerMessage) -> None:
        """Queue a message; `flush` lets it go. A router whose lease has ended is not told."""
        lease = self._leases.get(router)
        if lease is None:
            return
        lease.put(message)
        if lease.kept_bytes > MAX_PENDING_BYTES:
            self._end(lease, f"more than {MAX_PENDING_BYTES} bytes were waiting for it, or for its acknowledgement")

    def flush(self) -> None:
        """A step is over, or nothing is running: what is pending goes out, one frame per router."""
        for lease in self._leases.values():
            if lease.pending:
                lease.ready = True
                lease.wake.set()

    def publish(self, events: KvEvents) -> None:
        """The prefix cache has changed since the last call, or since `snapshot` was asked."""
        for lease in self._leases.values():
            idle = not lease.kv.pending
            lease.kv.add(events)
            if idle:
                lease.wake.set()

    def announce(self) -> None:
        """State, workers or load have changed: say hello again to every router, and then what the prefix cache has."""
        for lease in self._leases.values():
            lease.hello_due = True
            lease.wake.set()

    def tick(self) -> None:
        """End the leases of routers that have been silent for too long."""
        now = time.monotonic()
        for lease in [lease for lease in self._leases.values() if now - lease.heard_s > self._lease_s]:
            self.lease_expiries += 1
            self._end(lease, f"nothing was heard from it for {self._lease_s:g} s")

    @property
    def drained(self) -> bool:
        """Every router has everything."""
        return not any(lease.pending or lease.channel.unacked for lease in self._leases.values())

    def close(self) -> None:
        """End every stream."""
        self._closing = True
        for lease in self._leases.values():
            lease.wake.set()

    def describe(self) -> dict[str, object]:
        return {
            f"{lease.hello.router_name}/{lease.hello.router_incarnation}": {
                "number": lease.number,
                "address": lease.where,
                "heard s ago": round(time.monotonic() - lease.heard_s, 2),
                "unacked frames": lease.channel.unacked,
                "pending": len(lease.pending),
                "cache news": lease.kv.waiting_pages,
            }
            for lease in self._leases.values()
        }

    def _end(self, lease: Lease, reason: str) -> None:
        if self._leases.pop(lease.number, None) is None:
            return
        logger.warning("lease of router %s ended: %s", lease.hello.router_name, reason)
        lease.stream = -1
        lease.wake.set()
        self._on_lease_end(lease.number, reason)

    # ---- gRPC

    async def attach(
        self, requests: AsyncIterator[pb.server.RouterFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.server.ServerFrame]:
        async with self._door.opened(context):
            first = await self._door.first(requests, context)
            try:
                hello = router_frame_from_proto(first) if first is not None else None
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(error))
            if not isinstance(hello, RouterHello):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be a hello")
                return
            try:
                lease, resumed = self._admit(hello, context.peer())
            except _NotAdmitted as error:
                await context.abort(error.code, details_of(error))
            stream = lease.stream
            reader = asyncio.create_task(self._read(lease, stream, requests))
            try:
                async for says in self._speak(lease, stream, hello, resumed, reader):
                    yield server_says_to_proto(says)
            finally:
                reader.cancel()
                if lease.stream == stream:
                    lease.served = False
            if lease.fault:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(lease.fault))

    def _admit(self, hello: RouterHello, where: str) -> tuple[Lease, bool]:
        """The lease of this channel, and whether it existed; any other lease of this router ends. Raises _NotAdmitted."""
        now = time.monotonic()
        process = hello.router_incarnation
        own = self._hello().name
        if hello.server_name not in ("", own):  # or it would end what the same router has here under our own name
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION, f"this is server {own}; {hello.server_name} is meant"
            )
        for lease in list(self._leases.values()):
            if lease.hello.router_incarnation == process and lease.hello.stream_id == hello.stream_id:
                lease.stream += 1
                lease.served, lease.where = True, where
                lease.channel.take(Frame(number=0, ack=hello.last_received, messages=()), now)
                lease.heard_s = now
                lease.wake.set()
                return lease, True
            if lease.hello.router_name != hello.router_name:
                continue
            same_process = lease.hello.router_incarnation == process
            if same_process or lease.rivals.may_take_over(process, lease.served, lease.heard_s):
                self._end(lease, "it began again")
                continue
            held = (
                f'the name "{hello.router_name}" is held by a router that lives, process '
                f"{lease.hello.router_incarnation} at {lease.where}; every router must have a router.name of its own"
            )
            if lease.rivals.refused(process, now):
                logger.error("a second router, process %s at %s, is refused: %s", process, where, held)
            raise _NotAdmitted(grpc.StatusCode.ALREADY_EXISTS, held)
        if len(self._leases) >= MAX_LEASES:
            raise _NotAdmitted(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_LEASES} routers are attached already; no more may be"
            )
        lease = Lease(self._next_number, hello, where)
        lease.served = True
        self._next_number += 1
        self._leases[lease.number] = lease
        return lease, False

    async def _speak(
        self, lease: Lease, stream: int, hello: RouterHello, resumed: bool, reader: asyncio.Task[None]
    ) -> AsyncIterator[ServerSays]:
        channel = lease.channel
        now = time.monotonic()
        attached = AttachReply(last_received=channel.received, resumed=resumed)
        yield ServerSays(frame=channel.ack_frame(), load=self._load(), hello=self._hello(), attached=attached)
        for frame in channel.repeat(now):
            yield ServerSays(frame=frame)
        next_beat_s, next_kv_s = now + self._heartbeat_s, now
        feed = lease.kv = KvFeed()
        feed.begin()
        while not self._closing and lease.stream == stream and not reader.done():
            now = time.monotonic()
            timeout = max(0.0, next_beat_s - now)
            if channel.ack_owed:
                timeout = min(timeout, ACK_DELAY_S)
            if feed.pending:
                timeout = min(timeout, max(0.0, next_kv_s - now))
            if not (lease.ready or lease.hello_due):
                try:
                    async with asyncio.timeout(timeout):
                        await lease.wake.wait()
                except TimeoutError:
                    pass
            lease.wake.clear()
            if lease.stream != stream or self._closing:
                return
            now = time.monotonic()
            if lease.hello_due:
                lease.hello_due = False
                feed.begin()
                yield ServerSays(frame=channel.ack_frame(), load=self._load(), hello=self._hello())
            kv = None
            if feed.pending and now >= next_kv_s:
                kv = feed.take(self._snapshot)
                next_kv_s = now + KV_EVERY_S
            if lease.ready:
                messages = lease.take()
                if any(isinstance(message, LegTokens) for message in messages):
                    self.token_frames += 1
                yield ServerSays(frame=channel.push(messages, now), kv=kv)
            elif now >= next_beat_s or channel.ack_owed:
                next_beat_s = now + self._heartbeat_s
                yield ServerSays(frame=channel.ack_frame(), load=self._load(), kv=kv)
                for frame in channel.overdue(now):
                    yield ServerSays(frame=frame)
            elif kv is not None:
                yield ServerSays(frame=channel.ack_frame(), kv=kv)

    async def _read(self, lease: Lease, stream: int, requests: AsyncIterator[pb.server.RouterFrame]) -> None:
        """Ends when the stream does."""
        try:
            async for message in requests:
                frame = router_frame_from_proto(message)
                if isinstance(frame, RouterHello):
                    raise ProtocolError("a second hello on one stream")
                if lease.stream != stream:
                    return
                lease.heard_s = time.monotonic()
                for each in lease.channel.take(frame, lease.heard_s):
                    assert isinstance(each, StartLeg | AbortLeg)
                    self._on_message(lease.number, each)
        except ProtocolError as error:
            lease.fault = str(error)
            self._end(lease, lease.fault)
        except grpc.aio.AioRpcError as error:
            logger.info("the stream of router %s broke: %s", lease.hello.router_name, error.code())
        finally:
            if lease.stream == stream:
                lease.served = False
            lease.wake.set()

    async def dump(
        self, request: pb.server.DumpRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.server.DumpResponse:
        return pb.server.DumpResponse(text=await self._dump())


class _NotAdmitted(Exception):
    """A stream that gets no lease, and the status that it ends with."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
