"""The HTTP face over a scripted router, beside its answers: models, health, headers, and what operators may do."""

from __future__ import annotations

import itertools

import httpx
import pytest
from fastapi import FastAPI

from disagg.types.errors import UnknownServer
from tests.api.calls import BODY, CHAT
from tests.api.fakes import MAX_MODEL_LEN, MODEL, FakeRouter


async def test_models_are_listed_and_found_by_names_with_slashes(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert listed["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]


async def test_health_says_which_state(http: httpx.AsyncClient, router: FakeRouter) -> None:
    reply = await http.get("/health")
    assert (reply.status_code, reply.json()) == (200, {"healthy": True, "state": "ready"})
    router.state = "no-peer"
    reply = await http.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"healthy": False, "state": "no-peer"})


async def test_a_router_in_which_requests_may_wait_is_ready_for_who_asks_for_that(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    assert (await http.get("/health?waiting")).status_code == 200
    router.state, router.is_open = "no-peer", True
    assert (await http.get("/health")).status_code == 503
    reply = await http.get("/health?waiting")
    assert (reply.status_code, reply.json()) == (200, {"healthy": False, "state": "no-peer"})
    router.is_open = False
    assert (await http.get("/health?waiting")).status_code == 503


async def test_a_router_that_is_not_ready_lives(http: httpx.AsyncClient, router: FakeRouter) -> None:
    for state in ("ready", "no-peer", "draining"):
        router.state = state
        reply = await http.get("/live")
        assert (reply.status_code, reply.json()) == (200, {"alive": True})


async def test_operators_can_look_inside(http: httpx.AsyncClient) -> None:
    assert (await http.get("/status")).json()["servers"][0]["name"] == "p0"
    assert (await http.get("/version")).json() == {"version": "1.2.3"}
    assert (await http.get("/debug/dump")).json() == {"running": []}
    metrics = await http.get("/metrics")
    assert "tests_run_total 1.0" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")


async def test_a_timeline_is_found_by_the_id_of_the_reply(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/chat/completions", json=CHAT)).json()
    found = (await http.get("/debug/timeline", params={"request_id": reply["id"]})).json()
    assert found["request_id"] == "r0"
    assert [event["name"] for event in found["events"]] == ["prefill", "decode"]


async def test_servers_are_drained_from_this_machine_only(router: FakeRouter, app: FastAPI) -> None:
    for client, status in (("127.0.0.1", 200), ("192.0.2.7", 403)):
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.post("/servers/d0/drain")).status_code == status
            assert (await http.post("/servers/d0/undrain")).status_code == status
            asked = await http.post("/servers/d0/role", params={"role": "prefill"})
            assert asked.status_code == status
            assert (await http.post("/servers/d0/role?role=decode&force=true")).status_code == status
            if status == 200:
                assert asked.json() == {"server": "d0", "role": "prefill", "begun": True}
                nonsense = await http.post("/servers/d0/role?role=decode&force=perhaps")
                assert nonsense.status_code == 400 and "true or false" in nonsense.json()["error"]["message"]
                twice = await http.post("/servers/d0/role?role=decode&role=prefill")
                assert twice.status_code == 400 and "2 times: give it once" in twice.json()["error"]["message"]
                forced = await http.post("/servers/d0/drain?force=true")
                assert forced.json() == {
                    "server": "d0",
                    "drain": True,
                    "state": "loading",
                    "becomes": "",
                    "silent_s": 0.0,
                }
    assert router.drained == [("d0", True, False), ("d0", False, False), ("d0", True, True)]
    assert router.roles == [("d0", "prefill", False), ("d0", "decode", True)]


async def test_a_server_that_is_not_there_is_a_404(
    http: httpx.AsyncClient, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(server: str, on: bool, force: bool) -> None:
        raise UnknownServer(f"there is no server {server}", "name")

    monkeypatch.setattr(router, "drain_server", refuse)
    for path in ("/servers/x/drain", "/servers/x/undrain"):
        reply = await http.post(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "server_not_found")


# ---- what clients say in headers


@pytest.mark.parametrize("header", ["Authorization", "api-key", "X-API-Key"])
async def test_clients_are_told_apart_by_what_they_show(
    http: httpx.AsyncClient, router: FakeRouter, header: str
) -> None:
    for headers in ({}, {header: "a"}, {header: "b"}, {header: "a"}, {"x-other": "c"}):
        await http.post("/v1/completions", json=BODY, headers=headers)
        await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    tenants = [request.tenant for request in router.requests]
    assert tenants[::2] == tenants[1::2], "whatever they ask"
    nobody, a, b, again, other = tenants[::2]
    assert a == again and nobody == other
    assert len({nobody, a, b}) == 3 and all((nobody, a, b))


async def test_the_clients_own_id_is_passed_on_for_the_logs(http: httpx.AsyncClient, router: FakeRouter) -> None:
    await http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine" * 100})
    assert router.requests[0].client_request_id == ("mine" * 100)[:128]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_a_session_and_an_slo_are_said_in_headers(
    http: httpx.AsyncClient, router: FakeRouter, path: str, body: dict[str, object]
) -> None:
    await http.post(path, json=body)
    await http.post(path, json={**body, "prompt_cache_key": "key"})
    headers = {"x-session-id": "s" * 256, "x-slo-ttft-ms": "1500"}
    await http.post(path, json={**body, "prompt_cache_key": "key"}, headers=headers)
    assert [(each.session, each.slo_ttft_s) for each in router.requests] == [
        ("", None),
        ("key", None),
        ("s" * 256, 1.5),
    ]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("x-session-id", "s" * 257, "has 257 characters; at most 256"),
        *(("x-slo-ttft-ms", value, "must be a whole number") for value in ("", "0", "-1", "1.5", "1e3", "x", "9" * 11)),
        ("x-slo-ttft-ms", "1000000001", "from 1 to 1000000000"),
    ],
)
async def test_a_header_beyond_its_bounds_is_refused_by_name(
    http: httpx.AsyncClient, router: FakeRouter, name: str, value: str, says: str
) -> None:
    reply = await http.post("/v1/completions", json=BODY, headers={name: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert says in reply.json()["error"]["message"] and not router.requests


async def test_blanks_around_a_header_are_no_part_of_it_and_two_of_it_are_refused(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    await http.post("/v1/completions", json=BODY, headers={"x-slo-ttft-ms": "5 \t", "x-session-id": " s "})
    assert [(each.session, each.slo_ttft_s) for each in router.requests] == [("s", 0.005)]
    paths = (("/v1/completions", BODY), ("/v1/chat/completions", CHAT))
    for name, (path, body) in itertools.product(("x-slo-ttft-ms", "x-session-id", "x-tenant"), paths):
        reply = await http.post(path, json=body, headers=[(name, "5"), (name, "6")])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert "2 times: give it once" in reply.json()["error"]["message"]
    assert len(router.requests) == 1
