"""The open HTTP port: what is not HTTP, or HTTP that is not served. Real sockets; each answer is read as bytes."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api import crowd
from disagg.api.connections import PIPELINED
from disagg.api.heads import fault_of_head
from disagg.types.errors import InvalidRequest
from tests.api.fakes import MODEL, FakeRouter
from tests.api.port import DEADLINE_S, PATIENT, Port, completion, error_of, post


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


async def test_what_is_refused_while_parsing_is_told_to_the_router(http: httpx.AsyncClient, router: FakeRouter) -> None:
    headers = {"x-request-id": "mine"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for body in (b"{", b"[]", b'{"model": 1}', b"x" * 100_001):
            assert (await http.post(path, content=body, headers=headers)).status_code in (400, 413)
    assert len(router.noted) == 8
    assert {client_id for _, client_id in router.noted} == {"mine"}
    await http.post("/v1/completions", json={"model": "other", "prompt": "a"})
    assert len(router.noted) == 8  # the router has refused that one itself
