"""The open HTTP port: slow, idle, too many and malformed clients. Real sockets; each answer is read as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.api import crowd
from disagg.api.app import HttpServer, create_app, serve
from disagg.api.connections import AHEAD_BYTES, HEAD_BYTES, PIPELINED
from disagg.api.crowd import Bounds, HttpMetrics, Phase, overdue
from disagg.api.heads import fault_of_head
from disagg.types.errors import InvalidRequest
from tests.api.fakes import MODEL, FakeChatTemplate, FakeRouter

DEADLINE_S = 30.0
BOUNDS = Bounds(max_connections=8, head_s=0.4, body_s=0.4, idle_s=0.6, stall_s=0.8)
PATIENT = replace(BOUNDS, head_s=DEADLINE_S, body_s=DEADLINE_S)  # for what comes in parts, and is not to be too slow


class Port:
    """A server with little patience, and raw connections to it."""

    def __init__(self, server: HttpServer, registry: CollectorRegistry) -> None:
        self.server = server
        self.registry = registry
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, sent: bytes = b"", **limits: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port, **limits)
        self._writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def answer(self, sent: bytes) -> tuple[int, bytes]:
        """The status and the whole of what came until the server closed the connection."""
        reader, _ = await self.open(sent)
        async with asyncio.timeout(DEADLINE_S):
            raw = await reader.read()
        return int(raw.split(b" ", 2)[1]), raw

    def ended(self, reason: str) -> float:
        return self.registry.get_sample_value("disagg_router_http_ended_total", {"reason": reason}) or 0.0

    def open_connections(self) -> float:
        return self.registry.get_sample_value("disagg_router_http_connections") or 0.0

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
def bounds() -> Bounds:
    return BOUNDS


@pytest.fixture
async def port(app: FastAPI, router: FakeRouter, bounds: Bounds) -> AsyncIterator[Port]:
    registry = CollectorRegistry()
    server = await serve(app, "127.0.0.1", 0, bounds, HttpMetrics(registry), router.note_refused)
    made = Port(server, registry)
    yield made
    made.close()
    await made.until(lambda: made.open_connections() == 0)
    await server.shutdown(grace_s=1.0)


def post(body: bytes = b"", *headers: bytes, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> bytes:
    lines = [b"POST " + path + b" HTTP/" + version, b"host: face", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def completion(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "a b", "temperature": 0, **fields}).encode()
    return post(body, b"content-length: %d" % len(body))


def error_of(raw: bytes) -> dict[str, object]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("path", [b"/health", b"/live"])
async def test_a_probe_may_ask_for_the_head_alone(port: Port, router: FakeRouter, path: bytes) -> None:
    for router.state, status in (("ready", 200), ("unavailable", 503 if path == b"/health" else 200)):
        heads = []
        for method in (b"HEAD ", b"GET "):
            came, raw = await port.answer(method + path + b" HTTP/1.1\r\nhost: face\r\nconnection: close\r\n\r\n")
            head, _, body = raw.partition(b"\r\n\r\n")
            heads.append(sorted(line for line in head.split(b"\r\n") if not line.startswith(b"date:")))
            assert (came, bool(body)) == (status, method == b"GET ")
        assert heads[0] == heads[1]


# ---- too slow


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nhost: face\r\nx-a: "])
async def test_a_head_that_does_not_come_is_refused(port: Port, sent: bytes) -> None:
    status, raw = await port.answer(sent)
    assert status == 408
    assert error_of(raw)["code"] == "request_timeout"
    assert port.ended("head_timeout") == 1


async def test_a_head_that_comes_byte_by_byte_is_refused(port: Port) -> None:
    reader, writer = await port.open()

    async def dribble() -> None:
        for byte in b"POST /v1/completions HTTP/1.1\r\nx-filler: " + b"x" * 10_000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    dribbling = asyncio.create_task(dribble())
    async with asyncio.timeout(DEADLINE_S):
        assert b" 408 " in await reader.read()
    dribbling.cancel()


@pytest.mark.parametrize("header", [b"content-length: 5000", b"transfer-encoding: chunked"])
async def test_a_body_that_comes_byte_by_byte_is_refused_and_starts_nothing(
    port: Port, router: FakeRouter, header: bytes
) -> None:
    reader, writer = await port.open(post(b"", header))

    async def dribble() -> None:
        for _ in range(1000):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.02)

    dribbling = asyncio.create_task(dribble())
    async with asyncio.timeout(DEADLINE_S):
        raw = await reader.read()
    dribbling.cancel()
    assert raw.startswith(b"HTTP/1.1 408 ")
    assert "0.4 s" in str(error_of(raw)["message"])
    assert len(router.noted) == 1
    assert port.ended("body_timeout") == 1
    assert router.requests == []


async def test_a_connection_without_a_request_is_closed_whatever_blank_lines_it_sends(port: Port) -> None:
    reader, writer = await port.open(b"GET /version HTTP/1.1\r\nhost: face\r\n\r\n")
    await reader.readuntil(b"}")

    async def blank() -> None:
        for _ in range(1000):
            writer.write(b"\r\n")
            await asyncio.sleep(0.02)

    blanks = asyncio.create_task(blank())
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):  # it may write as the other side closes
            await reader.read()
    blanks.cancel()
    assert port.ended("idle") + port.ended("head_timeout") == 1


async def test_a_request_under_way_is_never_too_slow_itself(port: Port, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    reader, _ = await port.open(completion())
    await port.until(lambda: router.running)
    await asyncio.sleep(3 * max(BOUNDS.head_s, BOUNDS.body_s, BOUNDS.idle_s))
    router.gate.set()
    assert b" one two three" in await reader.readuntil(b"]")


async def test_a_client_that_never_reads_is_given_up_and_its_request_is_aborted(port: Port, router: FakeRouter) -> None:
    router.words = [f" {'x' * 5000}{i}" for i in range(4000)]  # 20 MB: more than any socket holds
    sock = socket.create_connection((port.server.host, port.server.port))
    sock.sendall(completion(stream=True, max_tokens=190))
    await port.until(lambda: port.ended("stalled") == 1)
    await port.until(lambda: router.aborted == ["r0"])
    sock.close()


async def test_a_client_that_reads_a_little_is_not_given_up(port: Port, router: FakeRouter) -> None:
    router.words = [f" {'x' * 20_000}{i}" for i in range(190)]
    # A small window, so that the little that is read is seen on the other side.
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (port.server.host, port.server.port))
    await loop.sock_sendall(sock, completion(stream=True, max_tokens=190))
    for _ in range(24):  # three times stall_s
        assert await loop.sock_recv(sock, 4096)
        await asyncio.sleep(0.1)
    assert port.ended("stalled") == 0
    assert router.running == {"r0"}
    sock.close()
    await port.until(lambda: router.aborted == ["r0"])


# ---- too many


async def test_idle_connections_make_room_for_those_that_ask(port: Port) -> None:
    for _ in range(200):
        await port.open()
    status, _ = await port.answer(b"GET /version HTTP/1.0\r\n\r\n")
    assert status == 200
    assert port.open_connections() <= BOUNDS.max_connections + 1
    assert port.ended("crowded") >= 200 - BOUNDS.max_connections


async def test_who_is_being_served_stays_and_who_comes_is_told(port: Port, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    served = [await port.open(completion()) for _ in range(BOUNDS.max_connections)]
    await port.until(lambda: len(router.running) == BOUNDS.max_connections)
    status, raw = await port.answer(completion())
    assert status == 503
    assert error_of(raw)["code"] == "too_many_connections"
    assert b"retry-after: 1" in raw
    status, _ = await port.answer(b"GET /health HTTP/1.1\r\nhost: face\r\n\r\n")
    assert status == 200  # probes are answered
    router.gate.set()
    for reader, _ in served:
        assert b" one two three" in await reader.readuntil(b"]")


@pytest.mark.parametrize("bounds", [PATIENT])
async def test_unfinished_bodies_have_one_budget_and_the_slowest_gives_way(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "BODIES_BYTES", 50_000)
    slow, _ = await port.open(post(b" " * 30_000, b"content-length: 60000"))
    await asyncio.sleep(0.05)
    other, writer = await port.open(post(b" " * 25_000, b"content-length: 25001"))
    async with asyncio.timeout(DEADLINE_S):
        assert (await slow.read()).startswith(b"HTTP/1.1 503 ")
        writer.write(b" ")
        assert (await other.readline()).startswith(b"HTTP/1.1 400 ")  # it was read to its end, though it says nothing


# ---- too much


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * HEAD_BYTES,
        b"GET / HTTP/1.1\r\nx: " + b"x" * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (HEAD_BYTES // 5) + b"\r\n",
        b"GET /?" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nhost: face\r\n\r\n",
        post(b"1\r\nx\r\n0\r\nx: " + b"x" * (1 << 20), b"transfer-encoding: chunked"),  # trailers
        post(b"1\r\nx\r\n0\r\n" + b"x: y\r\n" * (HEAD_BYTES // 5), b"transfer-encoding: chunked"),
    ],
)
async def test_a_head_is_bounded(port: Port, sent: bytes) -> None:
    status, raw = await port.answer(sent)
    assert status == 431
    assert str(HEAD_BYTES) in str(error_of(raw)["message"])


async def test_a_chunked_body_is_read_to_the_limit_only(port: Port, router: FakeRouter) -> None:
    reader, writer = await port.open(post(b"", b"transfer-encoding: chunked"))
    head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))

    async def send() -> None:
        while True:
            writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send(), DEADLINE_S)
    assert (await head).startswith(b"HTTP/1.1 413 ")
    assert router.requests == []


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"content-length: 100001", 413),
        (b"content-length: 100001\r\nexpect: 100-continue", 413),
        (b"content-length: 5\r\ncontent-encoding: gzip", 415),
        (b"transfer-encoding: chunked\r\ncontent-encoding: br", 415),
        (b"content-length: 5\r\ncontent-encoding: identity\r\ncontent-encoding: gzip", 415),
        (b"content-length: 5\r\ncontent-encoding: gzip\r\ncontent-encoding: identity", 415),
        (b"content-length: 5\r\ncontent-encoding: identity, gzip", 415),
    ],
)
async def test_what_will_not_be_read_is_refused_before_it_comes(port: Port, header: bytes, status: int) -> None:
    reader, _ = await port.open(post(b"", header))
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert int(head.split(b" ", 2)[1]) == status
    assert (b"connection: close" in head) == (status == 413), "what is not read is known by nobody to have ended"


async def test_pipelined_requests_are_answered_in_order(port: Port) -> None:
    status, raw = await port.answer(
        b"GET /version HTTP/1.1\r\nhost: a\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: a\r\n\r\nGET /health HTTP/1.0\r\n\r\n"
    )
    assert status == 200
    assert raw.count(b"HTTP/1.1 200") == 3
    assert raw.index(b'"version"') < raw.index(b'"object":"list"') < raw.index(b'"healthy"')


async def test_more_is_not_taken_ahead_than_is_allowed(port: Port, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    _, writer = await port.open(completion())
    await port.until(lambda: router.running)
    writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n" * (AHEAD_BYTES // 10))
    await port.until(lambda: port.ended("pipeline") > 0)
    router.gate.set()


async def test_a_client_that_pipelines_and_goes_away_aborts_its_request(port: Port, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    _, writer = await port.open(completion() + completion())
    await port.until(lambda: router.running)
    writer.close()
    await port.until(lambda: router.aborted == ["r0"])
    assert len(router.requests) == 1


# ---- not HTTP, or HTTP that is not served


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET http://[::1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: a\r\nHost: b\r\n\r\n",
        post(b"", b"content-length: 5", b"content-length: 6"),
        post(b"", b"content-length: 5", b"transfer-encoding: chunked"),
        post(b"", b"transfer-encoding: chunked", b"content-length: 5"),
        post(b"", b"transfer-encoding: chunked, chunked"),
        post(b"0\r\n\r\n", b"transfer-encoding: chunked", version=b"1.0"),
        post(b"", b"content-length: -1"),
        post(b"zz\r\n", b"transfer-encoding: chunked"),
        b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_what_cannot_be_read_is_a_400_in_our_words(port: Port, sent: bytes) -> None:
    status, raw = await port.answer(sent)
    assert status == 400
    assert error_of(raw)["type"] == "invalid_request_error"
    assert "callback" not in str(error_of(raw)["message"])


@pytest.mark.parametrize(
    ("sent", "status", "reason", "says"),
    [
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505, "version", "HTTP/2.0"),
        (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 505, "version", "HTTP/0.9"),
        (b"GET /\r\n\r\n", 505, "version", "HTTP/1.1"),
        (b"GET / HTTP/9.9\r\n\r\n", 505, "version", "HTTP/1.1"),
        (b"GET / HTTP/3\r\n\r\n", 505, "version", "HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "version", "HTTP/1.1"),
        (post(b"", b"transfer-encoding: gzip, chunked"), 501, "transfer_encoding", "'gzip'"),
        (post(b"", b"transfer-encoding: identity"), 501, "transfer_encoding", "'identity'"),
        (post(b"", b"transfer-encoding: gzip", b"transfer-encoding: chunked"), 501, "transfer_encoding", "'gzip'"),
        (post(b"", b"transfer-encoding: " + b"x" * 3000), 501, "transfer_encoding", "characters"),
        (post(b"", b"content-length: 5", b"expect: 200-ok"), 417, "expectation", "'200-ok'"),
        (post(b"", b"expect: 100-continue, more", version=b"1.0"), 417, "expectation", "'more'"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "host", "no Host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, "host", "2 Host"),
        (post(b"0\r\n\r\n", b"transfer-encoding: chunked", version=b"1.0"), 400, "transfer_encoding", "HTTP/1.0"),
        (post(b"", b"content-length: 5", b"content-length: 5"), 400, "malformed", "Content-Length"),
    ],
)
async def test_what_http_does_not_allow_is_refused_with_its_own_status_and_counted(
    port: Port, router: FakeRouter, sent: bytes, status: int, reason: str, says: str
) -> None:
    got, raw = await port.answer(sent)
    assert got == status
    assert says in str(error_of(raw)["message"])
    assert port.ended(reason) == 1
    assert router.requests == []
    of_the_api = sent.startswith(b"POST /v1/")
    assert [type(error) for error, _ in router.noted] == [InvalidRequest] * of_the_api, "a request that was refused"


HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"host", b"transfer-encoding", b"content-length", b"expect", b"accept"]),
        st.sampled_from([b"", b"a", b"chunked", b"gzip", b"chunked, chunked", b"100-continue", b" , ", b"\xff", b"5"]),
    ),
    max_size=4,
)


@given(version=st.sampled_from(["0.9", "1.0", "1.1", "2.0"]), headers=HEADERS)
def test_a_head_that_is_taken_is_one_that_nobody_reads_otherwise(
    version: str, headers: list[tuple[bytes, bytes]]
) -> None:
    refusal = fault_of_head(version, headers)
    names = [name for name, _ in headers]
    if refusal is not None:
        assert refusal[0].status in (400, 417, 501, 505)
        return
    assert version in ("1.0", "1.1")
    assert names.count(b"host") == 1 or (version == "1.0" and b"host" not in names)
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding").replace(b" ", b"").strip(b",")
    assert codings in (b"", b"chunked")
    assert not codings or (version == "1.1" and b"content-length" not in names)


@pytest.mark.parametrize("garbage", [b"\x00\x01 garbage\r\n\r\n", b"GET / HTTP/2.0\r\n\r\n", b"x" * (1 << 20)])
@pytest.mark.parametrize("valid", [1, 3])
async def test_what_came_whole_is_answered_before_what_came_behind_it_is_refused(
    port: Port, garbage: bytes, valid: int
) -> None:
    status, raw = await port.answer(completion() * valid + garbage)
    assert status == 200
    assert raw.count(b"HTTP/1.1 200 ") == raw.count(b" one two three") == valid
    *_, last = re.split(rb"HTTP/1\.1 (?=\d)", raw)
    assert last.startswith((b"400 ", b"505 "))
    assert error_of(last)["type"] == "invalid_request_error"


async def test_part_of_a_body_behind_a_request_takes_no_answer_away(port: Port, router: FakeRouter) -> None:
    partial = post(b"zz\r\n", b"transfer-encoding: chunked")
    _, raw = await port.answer(completion() + completion(stream=True) + partial)
    assert raw.count(b" one two three") == 1 and raw.count(b"[DONE]") == 1
    assert raw.count(b"HTTP/1.1 200 ") == 2 and raw.count(b"HTTP/1.1 400 ") == 1
    assert len(router.requests) == 2


async def test_too_many_requests_ahead_are_answered_as_far_as_they_are_taken(port: Port) -> None:
    _, raw = await port.answer(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n" * 40)
    assert raw.count(b"HTTP/1.1 200 ") == PIPELINED + 1
    *_, last = re.split(rb"HTTP/1\.1 (?=\d)", raw)
    assert str(PIPELINED) in str(error_of(last)["message"])


async def test_who_reads_slowly_still_gets_all_before_the_refusal(
    port: Port, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "LINGER_S", 0.1)
    router.words = [f" {'x' * 20_000}{i}" for i in range(100)]
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (port.server.host, port.server.port))
    await loop.sock_sendall(sock, completion(max_tokens=100) + b"\x00\r\n")
    await port.until(lambda: port.ended("malformed") == 1)
    raw = b""
    while part := await loop.sock_recv(sock, 65536):
        raw += part
        await asyncio.sleep(0.01)
    sock.close()
    assert router.words[-1].encode() in raw
    assert raw.count(b"HTTP/1.1 400 ") == 1


async def test_garbage_behind_a_request_does_not_disturb_its_answer(port: Port, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    reader, writer = await port.open(completion(stream=True))
    await reader.readuntil(b" two")
    writer.write(b"\x00\x01 garbage\r\n\r\n")
    await port.until(lambda: port.ended("malformed") == 1)
    router.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        rest = await reader.read()
    answer, _, refusal = rest.partition(b"HTTP/1.1 400 ")
    assert answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert error_of(refusal)["code"] == "malformed_request"


@pytest.mark.parametrize("host", [b"[", b"a b", b"\xff\xfe", b"[::1", b"a:99999999"])
@pytest.mark.parametrize("path", [b"/nothing", b"/v1/models/x", b"/debug/timeline"])
async def test_a_host_header_of_nonsense_is_no_failure_of_ours(port: Port, host: bytes, path: bytes) -> None:
    status, _ = await port.answer(b"GET " + path + b" HTTP/1.0\r\nhost: " + host + b"\r\n\r\n")
    assert 400 <= status < 500


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://evil.com/debug/requests", 403),
        (b"http://evil.com:80/debug/requests?x=http://localhost/", 403),
        (b"HTTPS://EVIL.com/debug/requests", 403),
        (b"http://localhost/debug/requests", 200),
        (b"http://[::1]:8000/debug/requests", 200),
        (b"/debug/requests", 200),
        (b"http://127.0.0.1@evil.com/debug/requests", 400),
        (b"http://evil.com@127.0.0.1/debug/requests", 400),
        (b"http:///debug/requests", 400),
    ],
)
async def test_the_host_that_the_target_names_counts_and_not_the_header(port: Port, target: bytes, status: int) -> None:
    """RFC 9112, 3.2.2. A guard that looks at the header alone would let in who asked for another host."""
    came, raw = await port.answer(b"GET " + target + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert came == status, raw


UPGRADES = (
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk",
    b"Upgrade: websocket\r\nConnection: Upgrade",
)


@pytest.mark.parametrize("bounds", [PATIENT])
@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("part_bytes", [1, 7, 10_000])
async def test_who_asks_for_another_protocol_is_answered_in_this_one(
    port: Port, upgrade: bytes, part_bytes: int
) -> None:
    """Between requests that do not, with a body of known and of unknown length, however it comes in parts."""
    plain = b"GET /version HTTP/1.1\r\nhost: a\r\n"
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    asked = post(body, b"content-length: %d" % len(body), upgrade)
    chunked = post(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), b"transfer-encoding: chunked", upgrade)
    sent = plain + upgrade + b"\r\n\r\n" + plain + b"\r\n" + asked + plain + upgrade + b"\r\n\r\n" + chunked
    reader, writer = await port.open()
    for at in range(0, len(sent), part_bytes):
        writer.write(sent[at : at + part_bytes])
        await asyncio.sleep(0)
    writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(20):
        raw = await reader.read()
    writer.close()
    assert raw.count(b"HTTP/1.1 200 ") == raw.count(b"HTTP/1.1 ") == 6
    assert raw.count(b'{"version":"1.2.3"}') == 4
    assert raw.count(b'"object":"text_completion"') == 2


async def test_bounds_and_refusals_hold_for_who_asks_for_another_protocol(port: Port) -> None:
    upgrade = UPGRADES[0]
    status, raw = await port.answer(post(b"", b"content-length: 5", b"content-length: 6", upgrade))
    assert status == 400, raw
    status, raw = await port.answer(b"GET /version HTTP/1.1\r\n" + upgrade + b"\r\n\r\n")
    assert status == 400, "no host"
    status, raw = await port.answer(
        b"GET /version HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 40_000 + b"\r\n" + upgrade + b"\r\n\r\n"
    )
    assert status == 431, raw
    status, raw = await port.answer(post(b"", b"transfer-encoding: gzip, chunked", upgrade))
    assert status == 501, raw
    old = b"GET /version HTTP/1.0\r\nhost: a\r\n" + upgrade + b"\r\n\r\n"
    status, raw = await port.answer(old)
    assert status == 200 and b"connection: close" in raw


async def test_http_1_0_is_served(port: Port) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
    for more in ((), (b"connection: keep-alive",), (b"expect: 100-continue",)):
        status, raw = await port.answer(post(body, b"content-length: %d" % len(body), *more, version=b"1.0"))
        assert status == 200
        head, _, answer = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert answer.startswith(b"data: {") and answer.endswith(b"data: [DONE]\n\n"), "without chunks"
    status, raw = await port.answer(b"GET /version HTTP/1.0\r\n\r\n")
    assert (status, raw.partition(b"\r\n\r\n")[2]) == (200, b'{"version":"1.2.3"}')


# ---- who may debug


@pytest.mark.parametrize("path", ["/debug/dump", "/debug/requests", "/debug/timeline?request_id=r0"])
@pytest.mark.parametrize(
    ("peer", "served"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False), ("fe80::1", False)],
)
async def test_debug_answers_this_machine_only(router: FakeRouter, path: str, peer: str, served: bool) -> None:
    router.timelines["r0"] = ()
    for remote in (False, True):
        app = create_app(router, FakeChatTemplate(), CollectorRegistry(), version="1", debug_remote=remote)
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            reply = await http.get(path, headers={"x-forwarded-for": "127.0.0.1"})
            assert (reply.status_code == 200) == (served or remote)
            if reply.status_code != 200:
                assert reply.status_code == 403
                assert "debug.remote" in reply.json()["error"]["message"]
            for open_path in ("/", "/health", "/live", "/status", "/metrics"):
                assert (await http.get(open_path)).status_code == 200


@pytest.mark.parametrize("remote", [False, True])
async def test_a_page_of_another_origin_neither_reads_nor_drains(router: FakeRouter, remote: bool) -> None:
    app = create_app(router, FakeChatTemplate(), CollectorRegistry(), version="1", debug_remote=remote)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    pages = (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost"},
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for headers in pages:
            for method, path in (
                ("POST", "/servers/d/drain"),
                ("POST", "/servers/d/undrain"),
                ("POST", "/servers/d/role?role=prefill"),
                ("GET", "/debug/requests"),
            ):
                reply = await http.request(method, path, headers=headers)
                assert reply.status_code == 403 and "another origin" in reply.json()["error"]["message"], (
                    path,
                    headers,
                )
        assert router.drained == [] and router.roles == []
        own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
        assert (await http.get("/debug/requests", headers=own)).status_code == 200
        pointed_here = await http.get("/debug/requests", headers={"host": "evil.example:8000"})
        assert (pointed_here.status_code == 200) == remote


async def test_a_client_cannot_say_where_it_is(port: Port) -> None:
    """uvicorn believes X-Forwarded-For of a client on loopback, which is where reverse proxies are."""
    status, raw = await port.answer(b"GET /debug/dump HTTP/1.0\r\nx-forwarded-for: 10.0.0.7\r\n\r\n")
    assert status == 200, raw


# ---- counting and deciding


async def test_what_is_refused_while_parsing_is_told_to_the_router(http: httpx.AsyncClient, router: FakeRouter) -> None:
    headers = {"x-request-id": "mine"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for body in (b"{", b"[]", b'{"model": 1}', b"x" * 100_001):
            assert (await http.post(path, content=body, headers=headers)).status_code in (400, 413)
    assert len(router.noted) == 8
    assert {client_id for _, client_id in router.noted} == {"mine"}
    await http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert len(router.noted) == 8  # the router has refused that one itself


@given(st.sampled_from(Phase), st.floats(0, 1e6), st.floats(0.01, 1e3))
def test_only_answers_may_take_for_ever(phase: Phase, age_s: float, limit_s: float) -> None:
    bounds = Bounds(head_s=limit_s, body_s=limit_s, idle_s=limit_s, stall_s=limit_s)
    assert overdue(phase, age_s, bounds) <= (phase is not Phase.ANSWER)
    assert overdue(phase, 1e7, bounds) == (phase is not Phase.ANSWER)
    assert not overdue(phase, 0.0, bounds)


# ---- clients that say that they say nothing more


@pytest.mark.parametrize("asked", [completion(), completion(stream=True), b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_client_that_closes_its_half_gets_its_whole_answer(
    port: Port, router: FakeRouter, asked: bytes, late: bool
) -> None:
    router.gate = asyncio.Event()
    if not late:
        router.gate.set()
    reader, writer = await port.open(asked)
    writer.write_eof()
    if late and asked.startswith(b"POST"):
        await port.until(lambda: router.requests)
        await asyncio.sleep(0.2)
    router.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        raw = await reader.read()
    final = raw.rsplit(b"HTTP/1.1 100 Continue\r\n\r\n")[-1]
    assert final.startswith(b"HTTP/1.1 200 ")
    assert len(final.partition(b"\r\n\r\n")[2]) > 2
    assert await reader.read() == b""
