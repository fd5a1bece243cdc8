"""Errors of the HTTP face: a status before the first token, an event in mid-stream, and in either no more than may be said."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    NoCompatiblePeer,
    Overloaded,
    ProtocolError,
    RequestFailed,
    Unavailable,
)
from tests.api.calls import BODY, CHAT, events
from tests.api.fakes import MAX_MODEL_LEN, FakeRouter


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (InvalidRequest("no", "top_k"), 400, "invalid_request_error", None, None),
        (Overloaded("full", retry_after_s=2.3), 429, "rate_limit_error", "rate_limit_exceeded", "3"),
        (Overloaded("full", retry_after_s=0.0), 429, "rate_limit_error", "rate_limit_exceeded", "1"),
        (Unavailable("empty"), 503, "service_unavailable_error", "service_unavailable", "1"),
        (NoCompatiblePeer("odd"), 503, "service_unavailable_error", "no_compatible_peer", "1"),
        (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded", None),
        (Cancelled("gone"), 499, "cancelled_error", "request_cancelled", None),
        (RequestFailed("poison"), 500, "server_error", "request_failed", None),
        (ProtocolError("odd"), 500, "server_error", "request_failed", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["refusal", "early_failure"])
async def test_an_error_before_the_first_token_is_an_http_status(
    http: httpx.AsyncClient,
    router: FakeRouter,
    error: DisaggError,
    status: int,
    kind: str,
    code: str | None,
    retry_after: str | None,
    stream: bool,
    when: str,
) -> None:
    setattr(router, when, error)
    reply = await http.post("/v1/completions", json={**BODY, "stream": stream})
    assert reply.status_code == status
    param = error.param if isinstance(error, InvalidRequest) else None
    assert reply.json() == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    assert reply.headers.get("retry-after") == retry_after
    assert not router.running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_in_mid_stream_is_the_last_event(http: httpx.AsyncClient, router: FakeRouter, path: str) -> None:
    router.failure = DeadlineExceeded("late")
    *chunks, last = events(
        await http.post(path, json={**(BODY if path == "/v1/completions" else CHAT), "stream": True})
    )
    assert len(chunks) >= 2
    assert last["error"]["code"] == "deadline_exceeded"


async def test_a_bug_in_mid_stream_is_an_event_too(http: httpx.AsyncClient, router: FakeRouter) -> None:
    router.failure = AssertionError("a secret of ours")
    reply = await http.post("/v1/completions", json={**BODY, "stream": True})
    assert events(reply)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in reply.text


async def test_a_bug_is_a_500_that_tells_no_secrets(http: httpx.AsyncClient, router: FakeRouter) -> None:
    router.failure = AssertionError("a secret of ours")
    reply = await http.post("/v1/completions", json=BODY)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text


async def test_one_refused_prompt_refuses_the_call_and_ends_the_others(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    prompts = [[1], [1] * (MAX_MODEL_LEN + 1), [2]]
    for stream in (False, True):
        reply = await http.post("/v1/completions", json={**BODY, "prompt": prompts, "stream": stream})
        assert reply.status_code == 400
        assert not router.running


async def test_too_many_prompts_are_refused_before_any_runs(http: httpx.AsyncClient, router: FakeRouter) -> None:
    reply = await http.post("/v1/completions", json={**BODY, "prompt": ["a"] * 9})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert router.requests == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(http: httpx.AsyncClient, chunked: bool) -> None:
    body = json.dumps({**BODY, "prompt": "x" * 200_000}).encode()

    async def pieces() -> Any:
        for at in range(0, len(body), 10_000):
            yield body[at : at + 10_000]

    reply = await http.post("/v1/completions", content=pieces() if chunked else body)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"


async def test_unreadable_json_is_a_400(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", content=b'{"model": ')
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/index.html", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_supported"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("DELETE", "/v1/models", 405, "method_not_supported"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/debug/timeline", 400, "missing_required_parameter"),
        ("GET", "/debug/timeline?request_id=x", 404, "unknown_url"),
    ],
)
async def test_wrong_urls_are_said_in_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    reply = await http.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["code"] == code
    assert ("allow" in reply.headers) == (status == 405)


async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/chat/completions", json={**CHAT, "model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert reply.json()["error"]["param"] == "model"


@pytest.mark.parametrize("said", ["x" * 50_000, "a\nb\x1b[2J\x85\u2028\u202e" * 1000, "\ud800" * 10])
async def test_errors_repeat_what_clients_say_clipped_and_escaped(
    http: httpx.AsyncClient, router: FakeRouter, said: str
) -> None:
    """Whichever error it is: half of a surrogate pair, which JSON cannot carry, made it a 500."""
    router.refusal = InvalidRequest(f"the field is {said}", said)
    reply = await http.post("/v1/completions", json=BODY)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["message"].isprintable() and error["param"].isprintable()
    assert len(reply.content) < 25_000


async def test_a_path_or_field_name_of_any_length_is_not_echoed_whole(http: httpx.AsyncClient) -> None:
    long = "x" * 60_000
    answers = [
        await http.get(f"/v1/models/{long}"),
        await http.get(f"/{long}"),
        await http.get("/debug/timeline", params={"request_id": long}),
        await http.post("/v1/completions", json={**BODY, long: 1}),
        await http.post("/v1/completions", json={**BODY, "logit_bias": {long: 1}}),
        await http.post(
            "/v1/chat/completions",
            json={**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "", long: 1}]}]},
        ),
        await http.post(
            "/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": [{"type": long}]}]}
        ),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404, 400, 400, 400, 400]
    assert all(len(answer.content) < 2500 for answer in answers)
