"""The open port: what one client's connection may take, and what it is told when it takes more. (All of them: `crowd`.)

    wait ──first byte──> head ──> body ──> answer ──> wait        leaving: a refusal is on its way out

uvicorn bounds none of this but the wait after an answer, which a byte now and then prolongs for ever. So its protocol is
subclassed rather than an app wrapped: heads are read before any app runs, and only the protocol has the socket. Costs at most,
per connection: HEAD_BYTES, PIPELINED requests within AHEAD_BYTES, WRITE_HIGH_BYTES of an answer that is not read (and what the
router's mailbox merges), and a body, which belongs to BODIES_BYTES of all connections together.

A client that closes its sending half may read its answer still, and a client that ended looks the same: until its answer begins,
it is asked with interim answers, to which the system of one that ended says that nobody is there (Connection.eof_received).
One that closes that half later, while its answer is streamed, counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from disagg.api.crowd import ROOM, Crowd, Phase
from disagg.api.errors import Fault
from disagg.api.heads import fault_of_head, fault_of_protocol, fault_of_target_host, host_of_target, unreadable
from disagg.types.errors import InvalidRequest, Unavailable

HEAD_BYTES = 32 << 10  # request line and headers; trailers, too
AHEAD_BYTES = 64 << 10  # of requests that a client sends before it has the answer to the one before
PIPELINED = 16  # such requests
WRITE_HIGH_BYTES = 32 << 10  # of an answer, in this process; what is behind it stays in the mailbox, where it is merged
UNSENT_BYTES = 64 << 10  # of an answer, in the kernel, before the client's side has room
LAST_WORDS_BYTES = 4 << 20  # what the kernel is asked to take when the process ends; it gives what it allows
LINGER_BYTES = 16 << 20
FIRST_PROBE_S = 0.05  # after a client has closed its sending half; each further wait is twice as long, up to:
MAX_PROBE_S = 1.0
_TCP_CLOSED = 7  # tcpi_state, the first byte of struct tcp_info
_ACKED_OFFSET = 120  # of tcpi_bytes_acked in struct tcp_info

TUNNEL = fault_of_protocol(400, "this is no proxy: it makes no tunnels (CONNECT)", "unsupported_method")
PIPELINE = fault_of_protocol(
    400, f"more than {PIPELINED} requests were sent ahead of their answers, which is the most", "too_many_pipelined"
)
API = b"/v1/"
WRITER = "disagg.writer"  # in a scope: a Writer, where parts of the answer may be written at once
TARGET = "its target is no path or URL"
HEAD_TOO_LARGE = fault_of_protocol(431, f"the head of the request has more than {HEAD_BYTES} bytes", "head_too_large")
CROWDED = fault_of_protocol(503, "too many clients are connected", "too_many_connections", 1)
CLOSING = fault_of_protocol(503, "the router is shutting down", "service_unavailable", 1)


class Writer:
    """Writes parts of a streamed answer where it is called, which `send` of an app does in a task of its own only."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """What is written now goes out: the client is there and reads, and the answer goes on."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.response_started and cycle.chunked_encoding
        )

    def write(self, body: bytes) -> None:
        """While it is ready."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _RefusedError(Exception):
    """Raised in a callback of the parser, to stop it."""


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """For HTTP/1.0, which knows no chunks: an answer whose length is not said ends with the connection."""

    async def old_app(scope: Any, receive: Any, send: Any) -> None:
        length_unsaid = False

        async def send_plain(message: Any) -> None:
            nonlocal length_unsaid
            if message["type"] == "http.response.start":
                length_unsaid = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if length_unsaid:
                    cycle.chunked_encoding = False
            elif length_unsaid:
                cycle.expected_content_length = len(message.get("body", b""))  # each part is all that is expected
            await send(message)

        await app(scope, receive, send_plain)

    return old_app


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
        self._refusal: tuple[Fault, str] | None = None  # of what we, and not the parser, stopped at
        self._surplus = False  # came when there was no room
        self._deaf = False  # what comes is not read any more; what was asked is still answered
        self._last_words: Fault | None = None  # to be said when it is
        self._head_bytes = 0  # of this request's head
        self._unclaimed_bytes = 0  # that came and are part of no header, body or end as yet
        self._body_bytes = 0  # of this request's body, as long as it is under way
        self._ahead_bytes = 0  # that came while something was being answered, or on its way out
        self._hurried = False
        self._asks_upgrade = False  # and is to be read anew, without that
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

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's says None, which closes
        """The client says nothing more. It may still read what it asked for; or it is gone, which only writing tells: to a
        client that is there, an interim answer means nothing, and the system of one that is gone answers it with a reset.
        Within an answer nothing can be said, so there it counts as gone.

        True: the connection stays open for what is being answered.
        """
        if not self._answers_others() or self._phase is Phase.LEAVING or self.transport.is_closing():
            return False
        if self._cycles[0].response_started:
            return False
        self._deafen()
        self._settle()
        self._ask_if_there(FIRST_PROBE_S)
        return True

    def _ask_if_there(self, wait_s: float) -> None:
        """The loop does not watch a connection of which it reads no more, so its state is looked at."""
        if self.transport is None or self.transport.is_closing() or not self._cycles:
            return
        with contextlib.suppress(OSError):  # it has just been lost, which the loop will say
            if self._tcp_info(1)[0] == _TCP_CLOSED:
                self.transport.abort()
                return
        oldest = self._cycles[0]
        if not oldest.response_started and oldest.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(wait_s, self._ask_if_there, min(2 * wait_s, MAX_PROBE_S))

    def _tcp_info(self, num_bytes: int) -> bytes:
        """The first bytes of the kernel's. Raises OSError for a connection that has just been lost."""
        sending = self.transport.get_extra_info("socket")
        return cast(bytes, sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, num_bytes))

    def data_received(self, data: bytes) -> None:
        unread = self._deaf or self._phase is Phase.LEAVING
        if unread or self._answers_others() or self._phase is Phase.SURPLUS:
            self._ahead_bytes += len(data)
            limit = AHEAD_BYTES if self._cycles and not unread else LINGER_BYTES
            if self._ahead_bytes > limit:
                self._count("pipeline")
                self.transport.abort()
                return
        if unread:
            return
        self._unclaimed_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
            if self._unclaimed_bytes > HEAD_BYTES:
                self._stop(HEAD_TOO_LARGE, "head_too_large")
        except (httptools.HttpParserError, _RefusedError) as error:
            ours = isinstance(error, httptools.HttpParserCallbackError)  # uvicorn's callbacks stop at the target only
            self._refuse(*(self._refusal or unreadable(TARGET if ours else str(error))))
        self._settle()

    def shutdown(self) -> None:
        super().shutdown()
        self._settle()

    def _parse(self, data: bytes) -> None:
        """Requests that ask for another protocol, as some clients do unasked (`Upgrade: h2c`), are answered in this one (RFC
        9110, 7.8). The parser would leave out their bodies, so it gets their heads again without that field.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as asked:
                kept = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(kept))
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._asks_upgrade = False
                self.parser.feed_data(head)
                data = data[asked.args[0] :]
            else:
                return

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
            if self.parser.get_method() == b"CONNECT":
                self._stop(TUNNEL, "tunnel")
            self._asks_upgrade = True
            return
        version = self.parser.get_http_version()
        refusal = fault_of_head(version, self.headers)
        if refusal is None and (host := host_of_target(self.url)) is not None:
            refusal = fault_of_target_host(host)
            self.headers[:] = [each for each in self.headers if each[0] != b"host"] + [(b"host", host)]
        if refusal is not None:
            self._stop(*refusal)
        if version == "1.0":
            self.expect_100_continue = False  # it cannot be told to go on, and does not wait for it
        if self._surplus and self.url.startswith(API):  # probes and operators are still answered
            self._stop(CROWDED, "crowded")
        if len(self._cycles) > PIPELINED:
            self._stop(PIPELINE, "pipeline")
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
        if self._asks_upgrade:
            return
        super().on_message_complete()
        self._reading = None
        self._forget_body()

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        self._ahead_bytes = 0
        super().on_response_complete()
        self._unset_keepalive_if_required()  # waiting is timed here
        if self._last_words is not None and not self._cycles and not self.transport.is_closing():
            self._leave_with(self._last_words)
        self._settle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        old = cycle.scope["http_version"] == "1.0"
        if not old and cycle.scope["method"] != "HEAD":
            cast(dict[str, Any], cycle.scope)[WRITER] = Writer(cycle)
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if old else app)

    def _grow_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > HEAD_BYTES:
            self._stop(HEAD_TOO_LARGE, "head_too_large")

    def _stop(self, fault: Fault, reason: str) -> None:
        self._refusal = (fault, reason)
        raise _RefusedError

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
        if self.transport.is_closing() and self._phase in ROOM:  # what it was sent is still on its way
            self._enter(Phase.ANSWER)
            return
        match self._phase:
            case Phase.HEAD:
                late = f"the head of the request did not come within {bounds.head_s:g} s"
                self._refuse(fault_of_protocol(408, late, "request_timeout"), "head_timeout")
            case Phase.BODY:
                late = f"the body of the request did not come within {bounds.body_s:g} s"
                self._refuse(fault_of_protocol(408, late, "request_timeout"), "body_timeout")
            case Phase.IDLE:
                self._count("idle")
                self.transport.close()
            case Phase.LEAVING if self.transport.get_write_buffer_size():
                self.since_s = self.loop.time()  # it reads what it was sent before; how fast, is looked at as ever
                self.check_reader(self.since_s)
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
        """Answers the request that is being read with `fault`, behind those that came whole, and closes the connection."""
        self._count(reason)
        if self._reading is not None and self.url.startswith(API) and fault is not CROWDED:  # which has to be cheap
            kind = Unavailable if fault.status == HTTPStatus.SERVICE_UNAVAILABLE else InvalidRequest
            self._crowd.note_refused(kind(fault.message))
        if self.transport.is_closing():
            return
        if self._answers_others():
            self._deafen(fault)
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
        self._leave_with(fault)

    def _leave_with(self, fault: Fault) -> None:
        self.transport.write(_raw(fault))
        if self.transport.can_write_eof():
            self.transport.write_eof()  # a plain close, with bytes unread, would take the answer back
        self._enter(Phase.LEAVING)

    def _deafen(self, fault: Fault | None = None) -> None:
        """Reads no more requests. Those that came whole are still answered; then comes `fault`, if any, and the end."""
        self._deaf = True
        self.flow.resume_reading()
        if self._reading is Phase.BODY:  # the newest, of which the rest does not come
            partial = self._cycles.pop()
            partial.disconnected = True
            partial.message_event.set()
            if self.pipeline and self.pipeline[0][0] is partial:
                self.pipeline.popleft()
            self._forget_body()
        self._reading = None
        self._last_words = fault
        if fault is None and self._cycles:
            self._cycles[-1].keep_alive = False

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
            info = self._tcp_info(192)
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

    def cut(self) -> None:
        self.transport.abort()


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
