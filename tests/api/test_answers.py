"""Completions and chats of the HTTP face over a scripted router: shapes of replies and streams."""

from __future__ import annotations

import json

import httpx
from prometheus_client import CollectorRegistry

from disagg.api.app import create_app
from tests.api.calls import BODY, CHAT, events
from tests.api.fakes import MODEL, FakeRouter

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
