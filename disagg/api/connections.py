"""The open port: what one client's connection may take, for how long, and who makes room when there are too many.

    wait ──first byte──> head ──> body ──> answer ──> wait        leaving: a refusal is on its way out

uvicorn bounds none of this but the wait after an answer, which a byte now and then prolongs for ever. So its protocol is
subclassed rather than an app wrapped: heads are read before any app runs, and only the protocol has the socket. Costs at most,
per connection: HEAD_BYTES, PIPELINED requests within AHEAD_BYTES, WRITE_HIGH_BYTES of an answer that is not read (and what the
router's mailbox merges), and a body, which belongs to BODIES_BYTES of all connections together.

A client that closes its sending half counts as gone: that is how a client that ended looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from enum import Enum
from http import HTTPStatus
from typing import Any

import httptools
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from disagg.api.errors import Fault

HEAD_BYTES = 32 << 10  # request line and headers; trailers, too
AHEAD_BYTES = 64 << 10  # of requests that a client sends before it has the answer to the one before
PIPELINED = 16  # such requests
BODIES_BYTES = 64 << 20  # of unfinished bodies, of all connections: beyond it, the slowest is refused
WRITE_HIGH_BYTES = 32 << 10  # of an answer, in this process; what is behind it stays in the mailbox, where it is merged
UNSENT_BYTES = 64 << 10  # of an answer, in the kernel, before the client's side has room
LAST_WORDS_BYTES = 4 << 20  # what the kernel is asked to take when the process ends; it gives what it allows
LINGER_S = 5.0  # for a client to read a refusal while it still sends
LINGER_BYTES = 16 << 20
SPARE_CONNECTIONS = 256  # above the limit, for as long as it takes to tell them so
_ACKED_OFFSET = 120  # of tcpi_bytes_acked in struct tcp_info


class Bounds(Struct, frozen=True, kw_only=True):
    """What clients may take. The settings of the same names say what each is."""

    max_connections: int = 2048
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    stall_s: float = 60.0


class Phase(Enum):
    """What a connection waits for, in the order in which they make room for others."""

    IDLE = "idle"  # the next request
    HEAD = "head"  # the rest of a head, or the first byte of a new connection
    BODY = "body"  # the rest of a body
    ANSWER = "answer"  # us
    SURPLUS = "surplus"  # the rest of a request that is answered already
    LEAVING = "leaving"  # the client to read a refusal


_ROOM = (Phase.IDLE, Phase.HEAD, Phase.BODY)


def overdue(phase: Phase, age_s: float, bounds: Bounds) -> bool:
    """Whether a connection has been in its phase for too long."""
    match phase:
        case Phase.IDLE:
            return age_s > bounds.idle_s
        case Phase.HEAD:
            return age_s > bounds.head_s
        case Phase.BODY:
            return age_s > bounds.body_s
        case Phase.SURPLUS | Phase.LEAVING:
            return age_s > LINGER_S
        case Phase.ANSWER:
            return False


class HttpMetrics:
    """Connections of the HTTP face."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("disagg_router_http_connections", "Open HTTP connections", registry=registry)
        self.ended = Counter(
            "disagg_router_http_ended", "Connections that the router ended, by why", ["reason"], registry=registry
        )


def _fault(status: int, message: str, code: str, retry_after_s: int | None = None) -> Fault:
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    return Fault(status, kind, message, code=code, retry_after_s=retry_after_s)


MALFORMED = _fault(400, "this is not an HTTP/1.1 request that can be read", "malformed_request")
UPGRADE = _fault(400, "only HTTP/1.1 is spoken here, and no WebSockets; ask for no upgrade", "unsupported_upgrade")
HEAD_TOO_LARGE = _fault(431, f"the head of the request has more than {HEAD_BYTES} bytes", "head_too_large")
CROWDED = _fault(503, "too many clients are connected", "too_many_connections", 1)
CLOSING = _fault(503, "the router is shutting down", "service_unavailable", 1)


class Crowd:
    """All connections of one HTTP server."""

    def __init__(self, bounds: Bounds, metrics: HttpMetrics) -> None:
        self.bounds = bounds
        self.metrics = metrics
        self.body_bytes = 0
        self._by_phase: dict[Phase, dict[Connection, None]] = {phase: {} for phase in Phase}  # longest in it first
        metrics.connections.set_function(self.__len__)

    def __len__(self) -> int:
        return sum(map(len, self._by_phase.values()))

    def move(self, connection: Connection, old: Phase | None, new: Phase | None) -> None:
        if old is not None:
            self._by_phase[old].pop(connection, None)
        if new is not None:
            self._by_phase[new][connection] = None

    def make_room(self) -> bool:
        """For one more connection: whoever waits for a client gives way to who comes. False: everybody is being served."""
        if len(self) < self.bounds.max_connections:
            return True
        for phase in _ROOM:
            for connection in self._by_phase[phase]:
                connection.give_way()
                return True
        return False

    @property
    def full(self) -> bool:
        return len(self) >= self.bounds.max_connections + SPARE_CONNECTIONS

    def count_body(self, num_bytes: int) -> None:
        """Bytes of bodies that came (or, if negative, went on to the app). Beyond the limit, the slowest is refused."""
        self.body_bytes += num_bytes
        while self.body_bytes > BODIES_BYTES and self._by_phase[Phase.BODY]:
            next(iter(self._by_phase[Phase.BODY])).give_way()

    def sweep(self, now_s: float) -> None:
        """Ends what has waited for too long. About a microsecond per connection."""
        for phase, connections in self._by_phase.items():
            for connection in tuple(connections):
                if overdue(phase, now_s - connection.since_s, self.bounds):
                    connection.time_out()
                else:
                    connection.check_reader(now_s)

    async def sweep_always(self) -> None:
        bounds = self.bounds
        shortest_s = min(bounds.head_s, bounds.body_s, bounds.idle_s, bounds.stall_s, LINGER_S)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, shortest_s / 4))
            self.sweep(loop.time())

    def hurry(self) -> None:
        for connections in self._by_phase.values():
            for connection in tuple(connections):
                connection.hurry()

    def cut(self) -> None:
        for connections in self._by_phase.values():
            for connection in tuple(connections):
                connection.transport.abort()


class _RefusedError(Exception):
    """Raised in a callback of the parser, to stop it."""


class Connection(HttpToolsProtocol):
    """One connection. `crowd` is all of them."""

    def __init__(
        self, crowd: Crowd, config: Config, server_state: ServerState, app_state: dict[str, Any], **other: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **other)
        self.since_s = 0.0
        self._crowd = crowd
        self._phase: Phase | None = None
        self._reading: Phase | None = None  # HEAD or BODY of the newest request; None between requests
        self._cycles: deque[RequestResponseCycle] = deque()  # requests without their whole answer, oldest first
        self._refusal: tuple[Fault, str] = (MALFORMED, "malformed")  # of what the parser stops at
        self._surplus = False  # came when there was no room
        self._deaf = False  # what comes is not read any more; what was asked is still answered
        self._head_bytes = 0  # of this request's head
        self._unclaimed_bytes = 0  # that came and are part of no header, body or end as yet
        self._body_bytes = 0  # of this request's body, as long as it is under way
        self._ahead_bytes = 0  # that came while something was being answered, or on its way out
        self._hurried = False
        self._acked_bytes = -1  # by the client's side, when it was last looked at; -1: nothing was pending
        self._acked_s = 0.0

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if self._crowd.full:
            self._count("crowded")
            self.transport.abort()
            return
        self._surplus = not self._crowd.make_room()
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._enter(Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the newest only
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()
        self._forget_body()
        self._crowd.move(self, self._phase, None)
        self._phase = None

    def data_received(self, data: bytes) -> None:
        unread = self._deaf or self._phase is Phase.LEAVING
        if unread or self._answers_others() or self._phase is Phase.SURPLUS:
            self._ahead_bytes += len(data)
            limit = AHEAD_BYTES if self._cycles else LINGER_BYTES
            if self._ahead_bytes > limit:
                self._count("pipeline")
                self.transport.abort()
                return
        if unread:
            return
        self._unclaimed_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
            if self._unclaimed_bytes > HEAD_BYTES:
                self._stop(HEAD_TOO_LARGE, "head_too_large")
        except httptools.HttpParserUpgrade:
            self._deafen()  # no other protocol is spoken here, and what follows is not HTTP/1.1
        except (httptools.HttpParserError, _RefusedError):
            self._refuse(*self._refusal)
        self._settle()

    def shutdown(self) -> None:
        super().shutdown()
        self._settle()

    # ---- what the parser found

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = Phase.HEAD
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._grow_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unclaimed_bytes = 0
        if self.parser.should_upgrade():
            # The parser leaves out the body of such a request, so it is served only if it has none.
            has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
            if has_body or self._get_upgrade() == b"websocket":
                self._stop(UPGRADE, "upgrade")
        if self._surplus and self.url.startswith(b"/v1/"):  # probes and operators are still answered
            self._stop(CROWDED, "crowded")
        if len(self._cycles) > PIPELINED:
            self._stop(MALFORMED, "pipeline")
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if self._surplus:
            self.cycle.keep_alive = False
        self._reading = Phase.BODY
        self.flow.resume_reading()  # also behind a pipelined request: else its client's going away is not seen

    def on_body(self, body: bytes) -> None:
        self._unclaimed_bytes = 0
        super().on_body(body)
        if not self.cycle.response_complete:
            self._body_bytes += len(body)
            self._crowd.count_body(len(body))

    def on_message_complete(self) -> None:
        self._unclaimed_bytes = 0
        super().on_message_complete()
        self._reading = None
        self._forget_body()

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        self._ahead_bytes = 0
        super().on_response_complete()
        self._unset_keepalive_if_required()  # waiting is timed here
        self._settle()

    def _grow_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > HEAD_BYTES:
            self._stop(HEAD_TOO_LARGE, "head_too_large")

    def _stop(self, fault: Fault, reason: str) -> None:
        self._refusal = (fault, reason)
        raise _RefusedError

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn tells the log, at every such request, which packages are missing."""

    # ---- phases

    def _settle(self) -> None:
        """Into the phase that follows from what is read and answered."""
        if self._phase is None or self._phase is Phase.LEAVING:
            return
        if self._reading is Phase.BODY and not self._cycles:
            self._enter(Phase.SURPLUS)
        elif self._reading is not None and not self._deaf:
            self._enter(self._reading)
        elif self._cycles:
            self._enter(Phase.ANSWER)
        elif self.cycle is not None:
            self._enter(Phase.IDLE)

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._crowd.move(self, self._phase, phase)
            self._phase = phase
            self.since_s = self.loop.time()

    def time_out(self) -> None:
        bounds = self._crowd.bounds
        if self.transport.is_closing() and self._phase in _ROOM:  # what it was sent is still on its way
            self._enter(Phase.ANSWER)
            return
        match self._phase:
            case Phase.HEAD:
                late = f"the head of the request did not come within {bounds.head_s:g} s"
                self._refuse(_fault(408, late, "request_timeout"), "head_timeout")
            case Phase.BODY:
                late = f"the body of the request did not come within {bounds.body_s:g} s"
                self._refuse(_fault(408, late, "request_timeout"), "body_timeout")
            case Phase.IDLE:
                self._count("idle")
                self.transport.close()
            case _:
                self.transport.abort()

    def give_way(self) -> None:
        """Makes room for another, at once: in 60 microseconds, of which a flood costs as many as it has connections."""
        if self._phase is Phase.IDLE or (self._phase is Phase.HEAD and self._reading is None):
            self._count("crowded")  # nothing was asked, so nothing is answered
        else:
            self._refuse(CROWDED, "crowded")
        self._forget_body()
        self._crowd.move(self, self._phase, Phase.LEAVING)
        self._phase = Phase.LEAVING
        self.transport.close()

    def _refuse(self, fault: Fault, reason: str) -> None:
        """Answers the request that is being read with `fault`, as far as HTTP allows, and closes the connection."""
        self._count(reason)
        if self.transport.is_closing():
            return
        if self._answers_others():
            self._deafen()
            return
        if self._reading is Phase.BODY:
            answered = not self._cycles or self._cycles[0].response_started
            for cycle in self._cycles:
                cycle.disconnected = True  # for the app, which waits for the body
                cycle.message_event.set()
            self._cycles.clear()
            self._forget_body()
            if answered:
                self.transport.close()
                return
        self.transport.write(_raw(fault))
        if self.transport.can_write_eof():
            self.transport.write_eof()  # a plain close, with bytes unread, would take the answer back
        self._enter(Phase.LEAVING)

    def _deafen(self) -> None:
        """Reads no more requests; the one that is being answered still is."""
        self._deaf = True
        self.flow.resume_reading()
        self.pipeline.clear()
        while len(self._cycles) > 1:
            self._cycles.pop().disconnected = True
        for cycle in self._cycles:
            cycle.keep_alive = False

    def _answers_others(self) -> bool:
        """Whether a request before the one that is being read has not got its whole answer."""
        return len(self._cycles) > (self._reading is Phase.BODY)

    def _forget_body(self) -> None:
        num_bytes, self._body_bytes = self._body_bytes, 0
        if num_bytes:
            self._crowd.count_body(-num_bytes)

    def _count(self, reason: str) -> None:
        self._crowd.metrics.ended.labels(reason=reason).inc()

    # ---- readers

    def check_reader(self, now_s: float) -> None:
        """Ends a connection whose client has taken no byte of what is pending for stall_s. A little at a time is enough."""
        if not self.transport.get_write_buffer_size():
            self._acked_bytes = -1
            return
        try:
            info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:  # it has just been lost, which the loop will say
            return
        acked_bytes = struct.unpack_from("=Q", info, _ACKED_OFFSET)[0]
        if acked_bytes != self._acked_bytes:
            self._acked_bytes, self._acked_s = acked_bytes, now_s
        elif now_s - self._acked_s > self._crowd.bounds.stall_s:
            self._count("stalled")
            self.transport.abort()

    def pause_writing(self) -> None:
        if not self._hurried:
            super().pause_writing()

    def hurry(self) -> None:
        """The process is about to end: whatever is still to be written goes to the kernel, as far as it takes it.

        What the kernel has, it delivers, also to a client that reads it later.
        """
        self._hurried = True
        with contextlib.suppress(OSError):  # it has just been lost
            sending = self.transport.get_extra_info("socket")
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 2**31 - 1)
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LAST_WORDS_BYTES)
        if self._phase is Phase.BODY:
            self._refuse(CLOSING, "closing")
        self.resume_writing()


def _raw(fault: Fault) -> bytes:
    body = fault.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **fault.headers(),
    }
    lines = [f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body
