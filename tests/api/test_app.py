"""The HTTP face over a scripted router: shapes of replies, streams and errors."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from disagg.api.app import create_app
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
    UnknownServer,
)
from tests.api.fakes import MAX_MODEL_LEN, MODEL, FakeRouter

BODY = {"model": MODEL, "prompt": "to be or not", "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello you"}], "temperature": 0}


def events(reply: httpx.Response) -> list[Any]:
    """The data of a stream's events; [DONE] as it is."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# ---- completions


async def test_a_completion_has_the_shape_of_openai(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json={**BODY, "max_tokens": 3})
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == "r0"
    assert reply.json() == {
        "id": "cmpl-r0",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": "disagg-1.2.3",
        "choices": [
            {"index": 0, "text": " one two three", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_a_stop_string_ends_the_text_before_it(http: httpx.AsyncClient) -> None:
    choice = (await http.post("/v1/completions", json={**BODY, "stop": "ee"})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one two thr", "stop", "ee")


async def test_choice_c_of_prompt_p_has_index_p_times_n_plus_c(http: httpx.AsyncClient, router: FakeRouter) -> None:
    prompts = ["a", "a b", "a b c"]
    reply = (await http.post("/v1/completions", json={**BODY, "prompt": prompts, "n": 2, "max_tokens": 1})).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 1 + 2 + 3
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["id"] == "cmpl-r0"
    assert [request.prompt for request in router.requests] == prompts


async def test_token_ids_are_returned_on_request(http: httpx.AsyncClient) -> None:
    body = {**BODY, "prompt": [[7, 8], [9]], "max_tokens": 2, "return_token_ids": True}
    choices = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7, 8], [9]]
    assert [choice["token_ids"] for choice in choices] == [[0, 1], [0, 1]]
    streamed = events(await http.post("/v1/completions", json={**body, "stream": True}))[:-1]
    of_second = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == 1]
    assert [choice["token_ids"] for choice in of_second] == [[0], [1]]
    assert of_second[0]["prompt_token_ids"] == [9]
    assert "prompt_token_ids" not in of_second[1]


async def test_completion_logprobs_are_parallel_lists(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/completions", json={**BODY, "max_tokens": 2, "logprobs": 2})).json()
    assert reply["choices"][0]["logprobs"] == {
        "text_offset": [0, 4],
        "token_logprobs": [-0.5, -0.5],
        "tokens": [" one", " two"],
        "top_logprobs": [{" one": -0.5, " two": -1.5}, {" two": -0.5, " one": -1.5}],
    }


async def test_the_chosen_token_is_among_the_top_ones_even_when_none_are_asked_for(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/completions", json={**BODY, "max_tokens": 1, "logprobs": 0})).json()
    assert reply["choices"][0]["logprobs"]["top_logprobs"] == [{" one": -0.5}]


async def test_a_token_that_is_part_of_a_character_is_named_by_its_bytes(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    router.raw = {" one": b"\xe2\x82"}
    reply = (await http.post("/v1/completions", json={**BODY, "max_tokens": 1, "logprobs": 1})).json()
    assert reply["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2\\x82"]
    chat = (await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1, "logprobs": True})).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xE2, 0x82]


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


async def test_a_completion_stream_ends_with_the_finish_the_usage_and_done(http: httpx.AsyncClient) -> None:
    body = {**BODY, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    reply = await http.post("/v1/completions", json=body)
    *chunks, last, done = events(reply)
    assert done == "[DONE]"
    assert reply.headers["x-request-id"] == "r0"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" one", " two"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert all(chunk["usage"] is None and chunk["id"] == "cmpl-r0" for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 2)


async def test_no_character_of_an_answer_ends_a_line_for_clients_that_split_where_unicode_does(
    http: httpx.AsyncClient, router: FakeRouter
) -> None:
    router.words = [f" a{char}b" for char in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"]
    body = {**BODY, "max_tokens": len(router.words), "stream": True}
    reply = await http.post("/v1/completions", json=body)
    *lines, done = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert done == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "".join(router.words)


async def test_a_stream_says_nothing_of_usage_unless_asked(http: httpx.AsyncClient) -> None:
    *chunks, _ = events(await http.post("/v1/completions", json={**BODY, "stream": True}))
    assert chunks
    assert not any("usage" in chunk for chunk in chunks)


async def test_continuous_usage_counts_up(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, _ = events(await http.post("/v1/chat/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


async def test_a_stream_of_several_prompts_carries_what_each_alone_would(http: httpx.AsyncClient) -> None:
    body = {**BODY, "prompt": ["a", "b", "c"], "n": 2, "temperature": 1, "seed": 5}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"]
    *chunks, _ = events(await http.post("/v1/completions", json={**body, "stream": True}))
    texts = {choice["index"]: "" for choice in whole}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole}


# ---- chats


async def test_a_chat_has_the_shape_of_openai(http: httpx.AsyncClient, router: FakeRouter) -> None:
    body = {**CHAT, "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    one = {"token": " one", "logprob": -0.5, "bytes": list(b" one")}
    two = {"token": " two", "logprob": -0.5, "bytes": list(b" two")}
    assert reply == {
        "id": "chatcmpl-r0",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": "disagg-1.2.3",
        "choices": [
            {
                "index": 0,
                "message": {"content": " one two", "role": "assistant", "refusal": None},
                "logprobs": {
                    "content": [{**one, "top_logprobs": [one]}, {**two, "top_logprobs": [two]}],
                    "refusal": None,
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [0, 1],
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "prompt_token_ids": [0, 1],
    }
    assert router.requests[0].prompt == "<user>hello you<assistant>"


async def test_a_chat_stream_begins_with_roles_and_ends_each_choice_once(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "n": 2, "max_tokens": 2, "stream": True, "return_token_ids": True}
    *chunks, done = events(await http.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    assert deltas[:2] == [(0, {"role": "assistant", "content": ""}), (1, {"role": "assistant", "content": ""})]
    assert [delta["content"] for index, delta in deltas[2:] if index == 1 and delta] == [" one", " two"]
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [(end["index"], end["delta"], end["finish_reason"]) for end in ends] == [
        (0, {}, "length"),
        (1, {}, "length"),
    ]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[0, 1]] + [None] * (len(chunks) - 1)


async def test_a_model_without_a_template_cannot_chat_but_completes(router: FakeRouter) -> None:
    app = create_app(router, None, CollectorRegistry(), version="1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        reply = await http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 400
        assert "/v1/completions works" in reply.json()["error"]["message"]
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


# ---- errors


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


# ---- everything else


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
