"""The HTTP face where keys are asked for: every route, and what a body, a header and a flood can do before it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import httpx
import pytest
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.entry import ANONYMOUS, require_credentials
from disagg.auth.audit import Audit
from disagg.auth.gate import Gate, open_gate
from disagg.config.tree import AuthConfig
from tests.api.fakes import MODEL, FakeChatTemplate, FakeRouter

A, B = {"authorization": "Bearer key-a"}, {"authorization": "bearer key-b"}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    (tmp_path / "keys").write_text("key-a team-a\nkey-b team-b\n")
    made = open_gate(AuthConfig(api_keys_file=str(tmp_path / "keys")), Audit(CollectorRegistry()))
    assert made is not None
    return made


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def app(router: FakeRouter, gate: Gate) -> FastAPI:
    made = create_app(router, FakeChatTemplate(), CollectorRegistry(), version="1", debug_remote=True)
    require_credentials(made, gate)
    return made


@pytest.fixture
async def server(app: FastAPI) -> AsyncIterator[HttpServer]:
    running = await serve(app, "127.0.0.1", 0)
    yield running
    await running.shutdown(grace_s=1.0)


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.base_url, trust_env=False, timeout=30) as client:
        yield client


def calls_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of whatever the app routes, and of what it does not."""
    routed = [
        (method, re.sub(r"\{.*?\}", "x", route.path))  # type: ignore[attr-defined]
        for route in app.routes
        for method in (*(getattr(route, "methods", None) or ()), "HEAD", "OPTIONS", "DELETE")
    ]
    unknown = (
        "/",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/v1/none",
        "/healthy",
        "/health/",
        "/HEALTH",
        "//health",
        "/%68ealth/x",
    )
    return [*routed, *(("GET", path) for path in unknown)]


async def test_no_route_answers_without_a_key(app: FastAPI, http: httpx.AsyncClient, router: FakeRouter) -> None:
    calls = calls_of(app)
    assert {"/v1/completions", "/v1/chat/completions", "/status", "/metrics", "/debug/dump"} <= {
        path for _, path in calls
    }
    tried = 0
    for method, path in calls:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "key-a"},
            {"authorization": "Basic key-a"},
        ):
            answer = await http.request(method, path, headers=headers)
            if path in ANONYMOUS:
                assert answer.status_code != 401
                continue
            tried += 1
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert tried >= 40 and not router.requests
    assert (await http.get("/health")).status_code == 200


async def test_with_a_key_every_route_answers(app: FastAPI, http: httpx.AsyncClient) -> None:
    for method, path in calls_of(app):
        assert (await http.request(method, path, headers=A)).status_code != 401


async def test_whoever_is_no_operator_gets_what_is_of_tenants_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-a team-a\nkey-b team-b\n")
    auth = AuthConfig(api_keys_file=str(tmp_path / "keys"), operators=("team-b",))
    gate, router = open_gate(auth, Audit(CollectorRegistry())), FakeRouter()
    assert gate is not None
    app = create_app(router, FakeChatTemplate(), CollectorRegistry(), version="1", debug_remote=True)
    require_credentials(app, gate)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(base_url="http://127.0.0.1", transport=transport) as client:
        refused = set()
        for method, path in calls_of(app):
            path = path.replace("//", "/./")  # which httpx would take for a host
            assert (await client.request(method, path, headers=B)).status_code != 403
            answer = await client.request(method, path, headers=A)
            if answer.status_code == 403:
                refused.add(path)
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "forbidden"
                    assert "team" not in answer.text
        served = {path for _, path in calls_of(app) if "//" not in path} - refused
        assert {path for path in served if not path.startswith("/v1/")} == {"/", "/version", *ANONYMOUS}
        assert {"/status", "/metrics", "/debug/requests", "/servers/x/drain", "/openapi.json"} <= refused
        assert (await client.post("/v1/completions", json=COMPLETION, headers=A)).status_code == 200
    assert router.drained == [("x", True, False), ("x", False, False)]  # by the operator alone


def test_without_operators_every_key_is_one_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("key-a team-a\n")
    for operators, warned, may in (((), True, True), (("team-b",), False, False), (("team-a",), False, True)):
        caplog.clear()
        auth = AuthConfig(api_keys_file=str(tmp_path / "keys"), operators=operators)
        gate = open_gate(auth, Audit(CollectorRegistry()))
        assert gate is not None and gate.may_operate("team-a") is may
        assert ("auth.operators is empty" in caplog.text) is warned


@pytest.mark.parametrize("shown", ["Bearer", "key-a", "Bearer key-a key-a", "Bearer key-a,", "Bearer " + "k" * 20_000])
async def test_what_is_no_bearer_of_a_key_is_refused(http: httpx.AsyncClient, shown: str) -> None:
    assert (await http.get("/status", headers={"authorization": shown})).status_code == 401


async def test_two_keys_are_none(http: httpx.AsyncClient) -> None:
    headers = [("authorization", "Bearer key-a"), ("authorization", "Bearer key-b")]
    assert (await http.get("/status", headers=headers)).status_code == 401


async def test_a_request_is_its_keys_whatever_its_headers_say(http: httpx.AsyncClient, router: FakeRouter) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        router.requests.clear()
        for headers in (A, {**A, "x-tenant": "team-b"}, B):
            assert (await http.post(path, json=body, headers=headers)).status_code == 200
        assert [request.owner for request in router.requests] == ["team-a", "team-a", "team-b"]
        mine, named, other = (request.tenant for request in router.requests)
        assert mine == named != other


async def test_no_body_is_waited_for_and_the_connection_serves_on(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_the_log_names_tenants_and_no_keys(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await http.get("/status", headers=A)
        await http.get("/status", headers={"authorization": "Bearer SECRET-WRONG"})
        await http.get("/status")
    said = [vars(record) for record in caplog.records if record.name == "disagg.auth.audit"]
    assert [record.get("tenant", record.get("reason")) for record in said] == ["team-a", "unknown_key", "missing"]
    assert all(record["asked"] == "GET /status" and record["client"] == "127.0.0.1" for record in said)
    assert "key-a" not in str(said) and "SECRET" not in str(said)


async def test_a_flood_with_wrong_keys_leaves_others_served(http: httpx.AsyncClient, server: HttpServer) -> None:
    stop = asyncio.Event()
    refused = 0

    async def flood() -> None:
        nonlocal refused
        ask = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\ncontent-length: 0\r\n\r\n"
        reader, writer = await asyncio.open_connection(server.host, server.port)
        while not stop.is_set():
            writer.write(ask)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
            refused += 1
        writer.close()

    floods = [asyncio.create_task(flood()) for _ in range(32)]
    try:
        begin_s = time.monotonic()
        for _ in range(20):
            assert (await http.post("/v1/completions", json=COMPLETION, headers=A)).status_code == 200
        assert time.monotonic() - begin_s < 60
        async with asyncio.timeout(60):
            while refused < 500:
                await asyncio.sleep(0.01)
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*floods)


async def test_keys_that_change_count_from_then_on(http: httpx.AsyncClient, gate: Gate, tmp_path: Path) -> None:
    looking = asyncio.create_task(gate.look_always(0.01))
    try:
        (tmp_path / "keys").write_text("key-c team-a\n")
        async with asyncio.timeout(10):
            while (await http.get("/status", headers={"authorization": "Bearer key-c"})).status_code != 200:
                await asyncio.sleep(0.01)
        assert (await http.get("/status", headers=A)).status_code == 401
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
