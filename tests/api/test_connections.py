"""The open HTTP port: slow, idle, too many and too large clients. Real sockets; each answer is read as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import crowd
from disagg.api.connections import AHEAD_BYTES, HEAD_BYTES
from disagg.api.crowd import Bounds, Phase, overdue
from tests.api.fakes import FakeRouter
from tests.api.port import BOUNDS, DEADLINE_S, PATIENT, Port, completion, error_of, post


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


@given(st.sampled_from(Phase), st.floats(0, 1e6), st.floats(0.01, 1e3))
def test_only_answers_may_take_for_ever(phase: Phase, age_s: float, limit_s: float) -> None:
    bounds = Bounds(head_s=limit_s, body_s=limit_s, idle_s=limit_s, stall_s=limit_s)
    assert overdue(phase, age_s, bounds) <= (phase is not Phase.ANSWER)
    assert overdue(phase, 1e7, bounds) == (phase is not Phase.ANSWER)
    assert not overdue(phase, 0.0, bounds)


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
