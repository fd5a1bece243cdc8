"""The probes' and operators' HTTP server, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from disagg.telemetry import http as telemetry_http
from disagg.telemetry.http import TelemetryServer
from disagg.telemetry.metrics import EngineMetrics
from disagg.telemetry.near import Asker, fault_of_asker


class Probed:
    """A server whose health and dump a test may change."""

    def __init__(self) -> None:
        self.health = (200, "ready")
        self.dump_takes_s = 0.0
        self.text = "everything"
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry)
        self.server = TelemetryServer(self.registry, lambda: self.health, self.dump)
        self.port = 0

    async def dump(self) -> str:
        await asyncio.sleep(self.dump_takes_s)
        return self.text

    async def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers)


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    probed = Probed()
    probed.port = await probed.server.start("127.0.0.1", 0)
    yield probed
    await probed.server.close()


async def test_metrics_are_served_in_prometheus_format(probed: Probed) -> None:
    probed.metrics.decode_tokens.inc(7)
    answer = await probed.get("/metrics")
    assert answer.status_code == 200
    assert "disagg_decode_tokens_total 7.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


async def test_health_follows_what_the_process_says(probed: Probed) -> None:
    assert ((await probed.get("/health?verbose=1")).status_code, (await probed.get("/health")).text) == (200, "ready\n")
    probed.health = (503, "loading")
    answer = await probed.get("/health")
    assert (answer.status_code, answer.text) == (503, "loading\n")


async def test_a_process_that_is_not_ready_lives(probed: Probed) -> None:
    for health in ((200, "ready"), (503, "loading"), (503, "draining")):
        probed.health = health
        answer = await probed.get("/live")
        assert (answer.status_code, answer.text) == (200, "alive\n")


async def test_the_dump_is_awaited_and_bounded_in_time(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await probed.get("/debug/dump")).text == "everything"
    monkeypatch.setattr(telemetry_http, "DUMP_TIMEOUT_S", 0.05)
    probed.dump_takes_s = 5.0
    assert (await probed.get("/debug/dump")).status_code == 504


async def test_a_head_request_gets_no_body(probed: Probed) -> None:
    answer = await probed.get("/health", method="HEAD")
    assert (answer.status_code, answer.text) == (200, "")


@pytest.mark.parametrize(("path", "method", "status"), [("/", "GET", 404), ("/metrics", "POST", 405)])
async def test_anything_else_is_refused(probed: Probed, path: str, method: str, status: int) -> None:
    assert (await probed.get(path, method=method)).status_code == status


async def test_nonsense_is_answered_or_dropped_and_the_server_lives_on(probed: Probed) -> None:
    for sent in (b"\x00\x01\x02 nonsense\r\n\r\n", b"A" * 100_000, b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", probed.port)
        writer.write(sent)
        writer.write_eof()
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        writer.close()
    assert (await probed.get("/health")).status_code == 200


async def test_a_silent_client_is_dropped(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_http, "REQUEST_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", probed.port)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_closing_twice_is_closing_once(probed: Probed) -> None:
    await probed.server.close()
    await probed.server.close()


# ---- clients that do not keep up


def stalled(port: int, request: bytes) -> socket.socket:
    """A client that asks and does not read, with as little room for the answer as can be."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    return client


async def until_no_one_is_connected(probed: Probed) -> None:
    async with asyncio.timeout(30):
        while probed.server.connections:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_does_not_read_its_answer_is_dropped(
    run: Callable[[Coroutine[None, None, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loop that servers run on, too: transports differ in how they end."""
    monkeypatch.setattr(telemetry_http, "REQUEST_TIMEOUT_S", 0.2)
    wrong: list[object] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        probed = Probed()
        probed.port = await probed.server.start("127.0.0.1", 0)
        probed.text = "x" * (64 << 20)  # more than any buffer of the system's
        clients = [stalled(probed.port, b"GET /debug/dump HTTP/1.1\r\n\r\n") for _ in range(3)]
        async with asyncio.timeout(30):
            while probed.server.connections < 3:
                await asyncio.sleep(0.01)
        await until_no_one_is_connected(probed)
        async with asyncio.timeout(30):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        for client in clients:
            client.close()
        probed.text = "everything"
        assert (await probed.get("/debug/dump")).text == "everything"
        await probed.server.close()

    run(body())
    assert not wrong


async def test_closing_waits_for_no_client(probed: Probed) -> None:
    probed.text = "x" * (64 << 20)
    client = stalled(probed.port, b"GET /debug/dump HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(30):
        while not probed.server.connections:
            await asyncio.sleep(0.01)
        await probed.server.close()
    await until_no_one_is_connected(probed)
    client.close()


async def test_connections_are_few_and_those_that_are_too_many_are_told(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_http, "MAX_CONNECTIONS", 2)
    idle = [await asyncio.open_connection("127.0.0.1", probed.port) for _ in range(2)]
    async with asyncio.timeout(30):
        while probed.server.connections < 2:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", probed.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
    writer.close()
    for _, each in idle:
        each.close()
    await until_no_one_is_connected(probed)
    assert (await probed.get("/health")).status_code == 200


# ---- who may look inside


async def test_debug_answers_clients_on_this_host_only_unless_it_is_opened(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await probed.get("/debug/dump")).status_code == 200
    monkeypatch.setattr(telemetry_http, "_asker", lambda writer, head: Asker("10.0.0.7"))
    for path in ("/debug/dump", "/debug/anything"):
        answer = await probed.get(path)
        assert answer.status_code == 403
        assert "debug.remote" in answer.text
    assert (await probed.get("/metrics")).status_code == 200
    assert (await probed.get("/health")).status_code == 200
    opened = TelemetryServer(probed.registry, lambda: probed.health, probed.dump, debug_remote=True)
    probed.port = await opened.start("127.0.0.1", 0)
    assert (await probed.get("/debug/dump")).text == "everything"
    await opened.close()


async def test_debug_is_not_answered_to_pages_of_others(probed: Probed) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        answer = await probed.get("/debug/dump", headers)
        assert answer.status_code == 403 and "everything" not in answer.text
        assert (await probed.get("/metrics", headers)).status_code == 200
    assert (await probed.get("/debug/dump", {"sec-fetch-site": "none"})).text == "everything"


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.8.8", 1), True),
        (("::1", 1, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), True),
        (("::ffff:10.0.0.1", 1, 0, 0), False),
        (("10.0.0.1", 1), False),
        (("fe80::1%eth0", 1, 0, 2), False),
        (("", 0), False),
        ((), False),
        (None, False),
    ],
)
def test_which_clients_are_on_this_host(peer: object, local: bool) -> None:
    writer = SimpleNamespace(get_extra_info=lambda name: peer if name == "peername" else None)
    asker = telemetry_http._asker(writer, b"GET / HTTP/1.1\r\n\r\n")
    assert (fault_of_asker(asker, remote=False) is None) is local
