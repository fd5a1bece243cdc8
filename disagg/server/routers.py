"""Router streams, the server's side: one lease per router, which outlives a broken stream.

Tokens for a router wait in its lease, merged per choice, until its stream takes them all as one frame; so a slow router
gets fewer, larger frames and never blocks the engine. A lease ends when nothing has been heard for `lease_s`, when the
router comes back as another process, or when too much is waiting. Another process under a name whose holder lives is no
router that came back: it is refused. News of the prefix cache ride along, a part at a time (`kv_feed`). Knows connections
and hellos; `streams` numbers, acknowledges and repeats. Nothing of legs' meaning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc

from disagg.messages.channel import Frame
from disagg.messages.legs import (
    KvEvents,
    LegTokens,
    LoadReport,
    RouterMessage,
    ServerHello,
    ServerMessage,
    StartLeg,
    Tier,
)
from disagg.server.door import Door, Rivals
from disagg.server.kv_feed import KvFeeds
from disagg.streams.awake import Awake
from disagg.streams.state import Verdict, frame_length
from disagg.streams.stream import ResumableStream
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.types.protocol import refusal
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
KV_EVERY_S = 0.1  # no two parts of cache news follow each other faster: tokens come first


class MergingOutbox:
    """What waits for one router: tokens of one choice that follow each other are one message. size: bytes, roughly."""

    def __init__(self) -> None:
        self.size = 0
        self._messages: list[ServerMessage] = []
        self._open: dict[tuple[LegKey, int], int] = {}  # (leg, choice) -> index in messages of tokens to merge with

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: ServerMessage) -> None:
        """Merges as long as the message remains small."""
        self.size += _size(message)
        if isinstance(message, LegTokens):
            at = self._open.get((message.key, message.choice))
            if at is not None:
                before = self._messages[at]
                assert isinstance(before, LegTokens)
                follows = before.first_index + len(before.token_ids) == message.first_index
                # The token that an answer goes on from elsewhere has no log-probabilities, which were told where it was sampled.
                follows &= bool(before.logprobs) == bool(message.logprobs)
                if follows and _size(before) < MERGED_BYTES:
                    self._messages[at] = LegTokens(
                        key=message.key,
                        choice=message.choice,
                        first_index=before.first_index,
                        token_ids=before.token_ids + message.token_ids,
                        logprobs=before.logprobs + message.logprobs,
                        finish=message.finish,
                    )
                    self.size -= MESSAGE_BYTES
                    return
            self._open[message.key, message.choice] = len(self._messages)
        self._messages.append(message)

    def take(self) -> tuple[ServerMessage, ...]:
        """The first of them, as much as goes into one frame."""
        count = frame_length(self._messages, _size, FRAME_BYTES)
        messages = tuple(self._messages[:count])
        del self._messages[:count]
        self._open = {place: at - count for place, at in self._open.items() if at >= count}
        self.size -= sum(map(_size, messages))
        return messages


class Lease:
    """What a server keeps for one router across its connections."""

    def __init__(self, number: int, hello: RouterHello, where: str, heartbeat_s: float) -> None:
        self.number = number
        self.hello = hello
        self.where = where  # the address that its last connection came from
        self.stream: ResumableStream[ServerMessage, RouterMessage] = ResumableStream(
            MergingOutbox(), heartbeat_s=heartbeat_s, max_kept=MAX_PENDING_BYTES
        )
        self.said = 0  # number of the last frame that went out for the first time
        self.hello_due = False
        self.kv = KvFeeds({})  # of the connection that serves this lease now
        self.rivals = Rivals()
        self.fault = ""  # what its router said and must not
        self.had_leg = False

    def served(self, lease_s: float) -> bool:
        """Its router was there for a lease, or had a leg here. Whoever came and went may be anybody."""
        return self.had_leg or self.stream.state.lived_s >= lease_s


def _size(message: ServerMessage) -> int:
    """Bytes of what waits here, roughly. All rows of log-probabilities of a message are as long as the first."""
    if not isinstance(message, LegTokens):
        return MESSAGE_BYTES + len(message.reason) + TIMELINE_BYTES * len(message.timeline)
    rows = len(message.logprobs) * (1 + len(message.logprobs[0].top)) if message.logprobs else 0
    return MESSAGE_BYTES + TOKEN_BYTES * len(message.token_ids) + LOGPROB_BYTES * rows


class RouterStreams(ServerServicer):
    """Serves Attach and Dump. `tell`, `publish` and `flush` are called by the server's loop; everything runs on that loop.

    snapshots: of each tier that there is, everything that is in it now, as stored.
    """

    def __init__(
        self,
        lease_s: float,
        heartbeat_s: float,
        hello: Callable[[], ServerHello],
        load: Callable[[], LoadReport],
        snapshots: Mapping[Tier, Callable[[], KvEvents]],
        on_message: Callable[[int, RouterMessage], None],
        on_lease_end: Callable[[int, str], None],
        dump: Callable[[], Any],
    ) -> None:
        self._lease_s = lease_s
        self._awake = Awake(time.monotonic())
        self._heartbeat_s = heartbeat_s
        self._hello = hello
        self._load = load
        self._snapshots = snapshots
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
        lease.stream.put(message)
        if lease.stream.state.overfull:
            self._end(lease, f"more than {MAX_PENDING_BYTES} bytes were waiting for it, or for its acknowledgement")

    def flush(self) -> None:
        """A step is over, or nothing is running: what is pending goes out, one frame per router."""
        for lease in self._leases.values():
            lease.stream.flush()

    def publish(self, tier: Tier, events: KvEvents) -> None:
        """A tier has changed since the last call, or since `snapshot` was asked."""
        for lease in self._leases.values():
            idle = not lease.kv.pending
            lease.kv.add(tier, events)
            if idle:
                lease.stream.wake()

    def announce(self) -> None:
        """State, workers or load have changed: say hello again to every router, and then what the prefix cache has."""
        for lease in self._leases.values():
            lease.hello_due = True
            lease.stream.wake()

    def settle(self) -> None:
        """Once `drained` is true, every router that is connected now has heard what was announced, and all that it sent before it
        heard of it has come."""
        for lease in self._leases.values():
            if lease.stream.state.served:
                lease.stream.settle()

    def tick(self) -> None:
        """End the leases of routers that have been silent for too long."""
        now = time.monotonic()
        awake = self._awake.look(now)
        for lease in list(self._leases.values()):
            if lease.stream.state.verdict(self._lease_s, now, awake=awake) is Verdict.SILENT:
                self.lease_expiries += 1
                self._end(lease, f"nothing was heard from it for {self._lease_s:g} s")

    @property
    def drained(self) -> bool:
        """Every router has everything."""
        return all(lease.stream.state.idle for lease in self._leases.values())

    def close(self) -> None:
        """End every stream."""
        self._closing = True
        for lease in self._leases.values():
            lease.stream.end()

    def describe(self) -> dict[str, object]:
        return {
            f"{lease.hello.router_name}/{lease.hello.router_incarnation}": {
                "number": lease.number,
                "address": lease.where,
                "version": str(lease.hello.version),
                "heard s ago": round(time.monotonic() - lease.stream.state.heard_s, 2),
                "unacked frames": lease.stream.state.unacked,
                "pending": len(lease.stream.state.outbox),
                "cache news": lease.kv.waiting_pages,
            }
            for lease in self._leases.values()
        }

    def _end(self, lease: Lease, reason: str) -> None:
        if self._leases.pop(lease.number, None) is None:
            return
        level = logging.WARNING if lease.served(self._lease_s) else logging.INFO
        logger.log(level, "lease of router %s ended: %s", lease.hello.router_name, reason)
        lease.stream.end()
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
            connection = lease.stream.connect(hello.last_received)
            listener = asyncio.create_task(self._listen(lease, connection, requests))
            try:
                async for says in self._speak(lease, connection, resumed):
                    yield server_says_to_proto(says)
            finally:
                listener.cancel()
                lease.stream.disconnect(connection)
            if lease.fault:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(lease.fault))

    def _admit(self, hello: RouterHello, where: str) -> tuple[Lease, bool]:
        """The lease of this channel, and whether it existed; any other lease of this router ends. Raises _NotAdmitted."""
        now = time.monotonic()
        process, server = hello.router_incarnation, self._hello()
        own = server.name
        if hello.server_name not in ("", own):  # or it would end what the same router has here under our own name
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION, f"this is server {own}; {hello.server_name} is meant"
            )
        if refused := refusal(f"server {own}", server.version, f"router {hello.router_name}", hello.version):
            raise _NotAdmitted(grpc.StatusCode.UNIMPLEMENTED, refused)
        if self._closing:
            raise _NotAdmitted(grpc.StatusCode.UNAVAILABLE, f"{own} is shutting down")
        for lease in list(self._leases.values()):
            if lease.hello.router_incarnation == process and lease.hello.stream_id == hello.stream_id:
                lease.where = where
                return lease, True
            if lease.hello.router_name != hello.router_name:
                continue
            same_process, state = lease.hello.router_incarnation == process, lease.stream.state
            if same_process or lease.rivals.may_take_over(process, state.served, state.heard_s):
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
        lease = Lease(self._next_number, hello, where, self._heartbeat_s)
        self._next_number += 1
        self._leases[lease.number] = lease
        return lease, False

    async def _speak(self, lease: Lease, connection: int, resumed: bool) -> AsyncIterator[ServerSays]:
        """The hello, and then frames as they are due. A load rides on every beat, and news of the cache on any frame."""
        state = lease.stream.state
        now = time.monotonic()
        attached = AttachReply(last_received=state.received, resumed=resumed)
        yield ServerSays(frame=state.beat(now), load=self._load(), hello=self._hello(), attached=attached)
        next_kv_s = now
        feed = lease.kv = KvFeeds(self._snapshots)
        feed.begin()

        def also_due_s() -> float:
            if lease.hello_due:
                return -math.inf
            return next_kv_s if feed.pending else math.inf

        async for frame in lease.stream.turns(connection, also_due_s):
            now = time.monotonic()
            if lease.hello_due:
                lease.hello_due = False
                feed.begin()
                yield ServerSays(frame=state.beat(now), load=self._load(), hello=self._hello())
            kv = None
            if feed.pending and now >= next_kv_s:
                kv = feed.take()
                next_kv_s = now + KV_EVERY_S
            if frame is not None:
                if frame.number > lease.said:
                    lease.said = frame.number
                    self.token_frames += any(isinstance(message, LegTokens) for message in frame.messages)
                yield ServerSays(frame=frame, load=None if frame.number else self._load(), kv=kv)
            elif kv is not None:
                yield ServerSays(frame=state.acknowledgement(), kv=kv)

    async def _listen(self, lease: Lease, connection: int, requests: AsyncIterator[pb.server.RouterFrame]) -> None:
        """Ends when the connection does."""
        try:
            await lease.stream.listen(connection, requests, _frame_of, partial(self._heard, lease))
        except ProtocolError as error:
            lease.fault = str(error)
            self._end(lease, lease.fault)
        except grpc.aio.AioRpcError as error:
            logger.info("the stream of router %s broke: %s", lease.hello.router_name, error.code())

    def _heard(self, lease: Lease, message: RouterMessage) -> None:
        lease.had_leg = lease.had_leg or isinstance(message, StartLeg)
        self._on_message(lease.number, message)

    async def dump(
        self, request: pb.server.DumpRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.server.DumpResponse:
        return pb.server.DumpResponse(text=await self._dump())


class _NotAdmitted(Exception):
    """A stream that gets no lease, and the status that it ends with."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def _frame_of(message: pb.server.RouterFrame) -> Frame[RouterMessage]:
    frame = router_frame_from_proto(message)
    if isinstance(frame, RouterHello):
        raise ProtocolError("a second hello on one stream")
    return frame
