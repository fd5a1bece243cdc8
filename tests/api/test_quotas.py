"""What a call takes of its tenant's limits: before any work, as a whole; and what becomes of it however the call ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from disagg.api import app as app_module
from disagg.api.app import create_app, serve
from disagg.api.entry import require_credentials
from disagg.auth.audit import Audit
from disagg.auth.gate import open_gate
from disagg.auth.quotas import Limits
from disagg.config.tree import AuthConfig
from disagg.types.errors import (
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    NoCompatiblePeer,
    Overloaded,
    QuotaExceeded,
    RequestFailed,
    Shed,
    Unavailable,
)

from .fakes import MODEL, FakeChatTemplate, FakeRouter

A = {"authorization": "Bearer key-a"}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
THREE = {**COMPLETION, "prompt": ["one", "two", "three"]}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PER_MINUTE = 100
WAIT_S = 20


class Template(FakeChatTemplate):
    def __init__(self) -> None:
        self.rendered = 0
        self.failure: DisaggError | None = None

    async def render(self, messages: bytes, max_chars: int, tenant: str) -> str:
        self.rendered += 1
        if self.failure is not None:
            raise self.failure
        return await super().render(messages, max_chars, tenant)


@pytest.fixture
def router() -> FakeRouter:
    router = FakeRouter()
    router.quota["a"] = Limits(concurrent=4, requests_per_minute=PER_MINUTE)
    return router


@pytest.fixture
def template() -> Template:
    return Template()


@pytest.fixture
async def http(router: FakeRouter, template: Template, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "keys").write_text("key-a a\n")
    gate = open_gate(AuthConfig(api_keys_file=str(tmp_path / "keys")), Audit(CollectorRegistry()))
    assert gate is not None
    app = create_app(router, template, CollectorRegistry(), version="1")
    require_credentials(app, gate)
    running = await serve(app, "127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=running.base_url, trust_env=False, timeout=WAIT_S, headers=A) as client:
        yield client
    await running.shutdown(grace_s=1.0)


def used(router: FakeRouter) -> tuple[int, float]:
    """Requests under way, and those that count in this minute, in which no time passes."""
    tenant = router.quotas._tenants["a"]
    assert tenant.requests is not None
    return tenant.running, PER_MINUTE - tenant.requests.level


async def settled(router: FakeRouter, counted: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while router.running or used(router)[0]:
            await asyncio.sleep(0.01)
    assert used(router) == (0, counted)


async def test_a_call_of_more_prompts_than_may_be_under_way_is_refused_for_good(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    router.quota["a"] = Limits(concurrent=2, requests_per_minute=PER_MINUTE)
    refused = await http.post(COMPLETIONS, json=THREE)
    assert refused.status_code == 400 and "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
    assert "3 prompts" in error["message"] and "concurrent=2 in auth.limits_file" in error["message"]
    assert not router.requests and [type(error) for error, _ in router.noted] == [InvalidRequest]
    assert used(router) == (0, 0)
    assert (await http.post(COMPLETIONS, json={**THREE, "prompt": ["one", "two"]})).status_code == 200
    await settled(router, 2)


async def test_nothing_is_parsed_or_rendered_for_who_has_used_its_quota_up(
    http: httpx.AsyncClient, router: FakeRouter, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.quota["a"] = Limits(requests_per_minute=1)
    assert (await http.post(CHATS, json=CHAT)).status_code == 200
    parsed: list[object] = []
    for name in ("parse_chat", "parse_completion"):
        monkeypatch.setattr(app_module, name, lambda *args: parsed.append(args))
    for path, body in ((CHATS, CHAT), (COMPLETIONS, COMPLETION), (COMPLETIONS, THREE)):
        refused = await http.post(path, json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) == 60
    assert template.rendered == len(router.requests) == 1 and not parsed
    assert [type(error) for error, _ in router.noted] == [QuotaExceeded] * 3


REFUSALS = [
    (Shed("x", 1.0), 0),
    (Overloaded("x", 1.0), 0),
    (Unavailable("x"), 0),
    (NoCompatiblePeer("x"), 0),
    (InvalidRequest("x"), 1),
    (RequestFailed("x"), 1),
    (DeadlineExceeded("x"), 1),
]


@pytest.mark.parametrize(("error", "counts"), REFUSALS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["refusal", "early_failure", "failure"])
async def test_what_the_cluster_refuses_or_gives_up_does_not_count(
    http: httpx.AsyncClient, router: FakeRouter, error: DisaggError, counts: int, stream: bool, when: str
) -> None:
    setattr(router, when, error)
    for path, body, requests in ((COMPLETIONS, THREE, 3), (CHATS, CHAT, 1)):
        before = used(router)[1] if "a" in router.quotas._tenants else 0
        answer = await http.post(path, json={**body, "stream": stream})
        assert (answer.status_code == 200) is (stream and when == "failure")
        await settled(router, int(before) + requests * counts)
    setattr(router, when, None)
    assert (await http.post(COMPLETIONS, json=THREE)).status_code == 200
    await settled(router, 3 + 4 * counts)


async def test_what_cannot_be_read_counts_once_and_a_crowded_renderer_not_at_all(
    http: httpx.AsyncClient, router: FakeRouter, template: Template
) -> None:
    for path in (COMPLETIONS, CHATS):
        assert (await http.post(path, content=b"{")).status_code == 400
    await settled(router, 2)
    template.failure = Overloaded("too many chats are rendered", 1.0)
    assert (await http.post(CHATS, json=CHAT)).status_code == 429
    await settled(router, 2)
    template.failure = InvalidRequest("the template refuses it")
    assert (await http.post(CHATS, json=CHAT)).status_code == 400
    await settled(router, 3)


async def test_a_client_that_goes_away_leaves_its_places_and_has_been_counted(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    router.gate = asyncio.Event()
    async with http.stream("POST", COMPLETIONS, json={**THREE, "stream": True}) as answer:
        assert answer.status_code == 200 and used(router) == (3, 3)
        busy = await http.post(COMPLETIONS, json={**THREE, "prompt": ["one", "two"]})
        assert busy.status_code == 429 and "the call has 2 more" in busy.text
        assert used(router) == (3, 3)
    await settled(router, 3)
