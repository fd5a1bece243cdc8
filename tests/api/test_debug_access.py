"""Who may look inside and drain: this machine only, and no page of another origin."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from disagg.api.app import create_app
from tests.api.fakes import FakeChatTemplate, FakeRouter
from tests.api.port import Port


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
