"""Whichever way a call ends, the router's iterators are closed. Real sockets: only they can break."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from typing import Any

import httpx
import pytest

from disagg.api.app import HttpServer, serve
from disagg.router.requests import ChoiceDelta, Started
from disagg.types.errors import ConfigError, DisaggError
from tests.api.fakes import MODEL, FakeRouter

DEADLINE_S = 30.0


async def until(condition: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def post(server: HttpServer, path: str, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request and leaves the answer unread."""
    prompt = {"prompt": "a b"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a b"}]}
    body = json.dumps({"model": MODEL, "temperature": 0, **prompt, **fields}).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST {path} HTTP/1.1\r\nhost: face\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def refusal(server: HttpServer) -> None:
    """Until nobody listens any more."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(server.host, server.port)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(
    server: HttpServer, router: FakeRouter, path: str, stream: bool
) -> None:
    router.gate = asyncio.Event()
    reader, writer = await post(server, path, stream=stream)
    await until(lambda: router.running)
    if stream:
        await reader.readuntil(b" two")
    writer.close()
    await until(lambda: router.aborted == ["r0"])
    assert not router.running


async def test_a_client_that_goes_away_before_acceptance_aborts_its_request(
    server: HttpServer, router: FakeRouter
) -> None:
    router.early_gate = asyncio.Event()
    _, writer = await post(server, "/v1/completions", stream=True)
    await until(lambda: router.running)
    writer.close()
    await until(lambda: router.aborted == ["r0"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_every_prompt(
    server: HttpServer, router: FakeRouter, stream: bool
) -> None:
    router.gate = asyncio.Event()
    _, writer = await post(server, "/v1/completions", stream=stream, prompt=["a", "b", "c"], n=2)
    await until(lambda: len(router.running) == 3)
    writer.close()
    await until(lambda: sorted(router.aborted) == ["r0", "r1", "r2"])
    assert not router.running


async def test_a_client_that_goes_away_in_its_own_body_starts_nothing(server: HttpServer, router: FakeRouter) -> None:
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: face\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    async with httpx.AsyncClient(base_url=server.base_url) as http:
        assert (await http.get("/health")).status_code == 200
    assert router.requests == []


async def test_a_request_that_ends_is_not_aborted_and_its_connection_serves_the_next(
    server: HttpServer, router: FakeRouter
) -> None:
    async with httpx.AsyncClient(base_url=server.base_url) as http:
        for stream in (False, True, False):
            body = {"model": MODEL, "prompt": ["a", "b"], "stream": stream}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert router.aborted == []
    assert not router.running


async def test_tokens_reach_the_client_before_the_next_are_there(server: HttpServer, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    reader, writer = await post(server, "/v1/completions", stream=True)
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b" two")
    router.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b"[DONE]")
    writer.close()


@pytest.mark.parametrize("at_once", [0, 1, 2, 3])
async def test_what_cannot_be_written_ends_its_own_answer_with_an_error(
    server: HttpServer, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Also where the router would have written it itself, among what it does for all requests."""
    raised: list[BaseException] = []
    written: list[int] = []

    async def generate(request: Any, use: Any, taker: Any = None) -> Any:
        yield Started("r", (1,), 1.0)
        for number, text in enumerate(["good", "good", "\ud800", "good"]):
            delta = ChoiceDelta(0, text, (number,))
            try:
                if number == at_once and taker(delta):
                    written.append(number)
                    continue
            except Exception as error:  # noqa: BLE001  none may come here
                raised.append(error)
            yield delta

    monkeypatch.setattr(router, "generate", generate)
    reader, writer = await post(server, "/v1/completions", stream=True)
    async with asyncio.timeout(DEADLINE_S):
        text = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    assert not raised and written == [at_once] * (
        at_once == 1
    )  # 0: nothing has been written yet; 3: it is over by then
    assert text.count(b'"text":"good"') == 2 and b'"error"' in text


async def test_a_body_over_the_limit_is_refused_on_a_real_connection(server: HttpServer) -> None:
    async with httpx.AsyncClient(base_url=server.base_url) as http:
        reply = await http.post("/v1/completions", content=b"x" * 3_000_000)
    assert reply.status_code == 413


async def test_shutdown_waits_for_calls_that_end_in_time(server: HttpServer, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    reader, _ = await post(server, "/v1/completions", stream=True)
    await reader.readuntil(b" two")
    stopping = asyncio.create_task(server.shutdown(grace_s=DEADLINE_S))
    await refusal(server)
    assert not stopping.done()
    router.gate.set()
    assert b"[DONE]" in await reader.read()
    await stopping
    assert router.aborted == []


async def test_shutdown_aborts_calls_that_do_not_end_in_time(server: HttpServer, router: FakeRouter) -> None:
    router.gate = asyncio.Event()
    reader, _ = await post(server, "/v1/completions", stream=True)
    await reader.readuntil(b" two")
    await server.shutdown(grace_s=0.05)
    assert router.aborted == ["r0"]
    assert b"[DONE]" not in await reader.read()


@pytest.fixture
def at_sigterm() -> Any:
    """Before a server is started."""
    return signal.getsignal(signal.SIGTERM)


async def test_the_server_leaves_signals_to_the_process(at_sigterm: Any, server: HttpServer) -> None:
    assert signal.getsignal(signal.SIGTERM) == at_sigterm
    assert server.port > 0


async def test_a_port_that_is_taken_may_be_free_later_and_a_host_that_is_not_there_is_a_mistake(
    server: HttpServer, app: object
) -> None:
    with pytest.raises(DisaggError, match="cannot listen") as taken:
        await serve(app, "127.0.0.1", server.port)  # type: ignore[arg-type]
    assert not isinstance(taken.value, ConfigError)
    with pytest.raises(ConfigError, match=r"router\.host = 'no\.such\.host\.invalid'"):
        await serve(app, "no.such.host.invalid", 0)  # type: ignore[arg-type]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_an_ipv6_address_is_served(app: object) -> None:
    try:
        running = await serve(app, "::1", 0)  # type: ignore[arg-type]
    except ConfigError:
        pytest.skip("this machine has no ::1")
    async with httpx.AsyncClient(base_url=running.base_url) as http:
        assert (await http.get("/version")).status_code == 200
    await running.shutdown(grace_s=1.0)
