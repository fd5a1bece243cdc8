from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import httpx
import pytest
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.crowd import Bounds, HttpMetrics
from tests.api.fakes import FakeChatTemplate, FakeRouter
from tests.api.port import BOUNDS, Port


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], object]]:
    """What the router's process runs on: its transports differ from asyncio's, for one, in how they treat slow clients."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def app(router: FakeRouter) -> FastAPI:
    registry = CollectorRegistry()
    Counter("tests_run", "Tests run", registry=registry).inc()
    return create_app(router, FakeChatTemplate(), registry, version="1.2.3", max_prompts=8, max_body_bytes=100_000)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the app in memory. Replies come whole: what needs real streams uses `server`."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def server(app: FastAPI) -> AsyncIterator[HttpServer]:
    running = await serve(app, "127.0.0.1", 0)
    yield running
    await running.shutdown(grace_s=1.0)


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
