"""The official client against the face: what a user of any OpenAI backend counts on.

By default the backend is a scripted router behind a real server. Set DISAGG_TEST_OPENAI_URL (ending in /v1), and
DISAGG_TEST_OPENAI_MODEL unless it is the first one listed, to run the same assertions against a real cluster; those that
take a `script` need to know what will be said, and are skipped there.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.types import Receive, Scope, Send

from disagg.api.app import serve
from disagg.types.errors import DeadlineExceeded, DisaggError, Overloaded, RequestFailed
from tests.api.fakes import MODEL, FakeRouter

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = os.environ.get("DISAGG_TEST_OPENAI_URL", "")
PROMPT = "Once upon a time there was a fox who"
MESSAGES = [{"role": "user", "content": "Count from one to ten."}]


class Backend:
    """Who to call, and with which model. script: the router behind it, if it is a scripted one."""

    def __init__(self, client: AsyncOpenAI, model: str, script: FakeRouter | None) -> None:
        self.client = client
        self.model = model
        self.script = script


class Stage:
    """An ASGI application that is another one in each test: starting and stopping a server for each takes long."""

    def __init__(self) -> None:
        self.app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None, "no test is running"
        await self.app(scope, receive, send)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage_and_client() -> AsyncIterator[tuple[Stage, AsyncOpenAI]]:
    stage = Stage()
    server = None if URL else await serve(stage, "127.0.0.1", 0)
    async with AsyncOpenAI(
        base_url=URL if server is None else f"{server.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield stage, client
    if server is not None:
        await server.shutdown(grace_s=1.0)


@pytest_asyncio.fixture(loop_scope="module")
async def backend(stage_and_client: tuple[Stage, AsyncOpenAI], app: FastAPI, router: FakeRouter) -> Backend:
    stage, client = stage_and_client
    if URL:
        model = os.environ.get("DISAGG_TEST_OPENAI_MODEL", "") or (await client.models.list()).data[0].id
        return Backend(client, model, None)
    stage.app = app
    return Backend(client, MODEL, router)


@pytest.fixture
def script(backend: Backend) -> FakeRouter:
    if backend.script is None:
        pytest.skip("the backend is a real one: nobody knows what it will say")
    return backend.script


# ---- true of any backend


async def test_the_model_is_listed(backend: Backend) -> None:
    listed = await backend.client.models.list()
    assert backend.model in [model.id for model in listed.data]
    assert (await backend.client.models.retrieve(backend.model)).id == backend.model


async def test_a_completion_of_n_tokens_uses_n_tokens(backend: Backend) -> None:
    reply = await backend.client.completions.create(
        model=backend.model, prompt=PROMPT, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4
    assert reply.usage.prompt_tokens > 0
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 4
    assert reply.usage.prompt_tokens_details is not None
    assert 0 <= (reply.usage.prompt_tokens_details.cached_tokens or 0) <= reply.usage.prompt_tokens


async def test_a_completion_stream_says_what_the_whole_reply_says(backend: Backend) -> None:
    asked = {"model": backend.model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    whole = await backend.client.completions.create(**asked)
    text, finishes, usage, ids = "", [], None, set()
    stream = await backend.client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].text
    assert finishes == [whole.choices[0].finish_reason]
    assert len(ids) == 1
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def test_a_chat_replies_as_the_assistant(backend: Backend) -> None:
    reply = await backend.client.chat.completions.create(
        model=backend.model, messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert 1 <= reply.usage.completion_tokens <= 8


async def test_a_reply_can_be_sent_back_as_a_message_of_the_next_turn(backend: Backend) -> None:
    first = await backend.client.chat.completions.create(model=backend.model, messages=MESSAGES, max_tokens=4)
    turns = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    second = await backend.client.chat.completions.create(model=backend.model, messages=turns, max_tokens=4)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_a_chat_stream_says_what_the_whole_reply_says(backend: Backend) -> None:
    asked = {"model": backend.model, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    whole = await backend.client.chat.completions.create(**asked)
    stream = await backend.client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert all(c.usage is None for c in chunks)


async def test_equal_seeds_give_equal_text_and_choices_of_one_seed_differ(backend: Backend) -> None:
    asked = {"model": backend.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 1.5, "n": 4}
    first = await backend.client.completions.create(**asked, seed=42)
    again = await backend.client.completions.create(**asked, seed=42)
    other = await backend.client.completions.create(**asked, seed=-7)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts != [choice.text for choice in other.choices]
    assert len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]


async def test_streamed_choices_are_those_of_the_whole_reply(backend: Backend) -> None:
    asked = {"model": backend.model, "messages": MESSAGES, "max_tokens": 6, "temperature": 1.5, "n": 3, "seed": 9}
    whole = await backend.client.chat.completions.create(**asked)
    texts: dict[int, str] = defaultdict(str)
    async for chunk in await backend.client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


async def test_every_prompt_of_a_list_has_its_choices_in_order(backend: Backend) -> None:
    prompts = [PROMPT, "The capital of France is", "def main():"]
    asked = {"model": backend.model, "max_tokens": 4, "temperature": 0}
    together = await backend.client.completions.create(prompt=prompts, n=2, **asked)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert together.usage is not None
    alone = [await backend.client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    assert together.usage.prompt_tokens == sum(reply.usage.prompt_tokens for reply in alone if reply.usage)


async def test_token_ids_go_in_and_come_out(backend: Backend) -> None:
    asked = {"model": backend.model, "max_tokens": 3, "temperature": 0, "extra_body": {"return_token_ids": True}}
    by_ids = await backend.client.completions.create(prompt=[5, 6, 7], **asked)
    choice = by_ids.choices[0].model_dump()
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert by_ids.usage is not None
    assert len(choice["token_ids"]) == by_ids.usage.completion_tokens
    both = await backend.client.completions.create(prompt=[[5, 6, 7], [8, 9]], **asked)
    assert [c.model_dump()["prompt_token_ids"] for c in both.choices] == [[5, 6, 7], [8, 9]]


async def test_completion_logprobs_describe_each_token(backend: Backend) -> None:
    reply = await backend.client.completions.create(
        model=backend.model, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.top_logprobs
    assert logprobs.text_offset
    assert reply.usage is not None
    lengths = {len(x) for x in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)}
    assert lengths == {reply.usage.completion_tokens}
    assert all(lp <= 0 for lp in logprobs.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    for token, lp, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == pytest.approx(lp)
        assert lp == pytest.approx(max(top.values())), "a greedy token is the likeliest"
    assert logprobs.text_offset == sorted(logprobs.text_offset)


async def test_chat_logprobs_carry_bytes_and_alternatives(backend: Backend) -> None:
    reply = await backend.client.chat.completions.create(
        model=backend.model, messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content
    for entry in content:
        assert entry.bytes is not None
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert len(entry.top_logprobs) == 2
    said = b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "ignore")
    assert said.startswith(reply.choices[0].message.content or "?")


async def test_a_stop_string_never_reaches_the_client(backend: Backend) -> None:
    asked = {"model": backend.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    free = (await backend.client.completions.create(**asked)).choices[0].text
    stop = free[len(free) // 2 :][:3]
    assert stop
    for wanted in (stop, [stop, "\x00never\x00"]):
        choice = (await backend.client.completions.create(**asked, stop=wanted)).choices[0]
        assert choice.text == free[: free.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.model_dump()["stop_reason"] == stop
    streamed = ""
    async for chunk in await backend.client.completions.create(**asked, stop=stop, stream=True):
        streamed += chunk.choices[0].text if chunk.choices else ""
    assert streamed == free[: free.index(stop)]


async def test_every_sampling_field_of_the_client_is_accepted(backend: Backend) -> None:
    reply = await backend.client.chat.completions.create(
        model=backend.model,
        messages=MESSAGES,
        max_tokens=2,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        seed=1,
        stop=["\x00"],
        user="somebody",
        response_format={"type": "text"},
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 1, "cache_salt": "x"},
    )
    assert reply.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"extra_body": {"min_tokens": 20, "max_tokens": 4}}, "min_tokens"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"extra_body": {"stop_token_ids": "x"}}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_completion_is_refused_with_the_name_of_the_field(
    backend: Backend, fields: dict[str, object], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await backend.client.completions.create(
            model=backend.model,
            prompt=PROMPT,
            stream=stream,
            **fields,  # type: ignore[arg-type]
        )
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


async def test_tools_and_images_are_refused_not_ignored(backend: Backend) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        await backend.client.chat.completions.create(model=backend.model, messages=MESSAGES, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await backend.client.chat.completions.create(model=backend.model, messages=image)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        await backend.client.chat.completions.create(
            model=backend.model, messages=MESSAGES, response_format={"type": "json_object"}
        )


async def test_an_unknown_model_is_not_found(backend: Backend) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await backend.client.completions.create(model="no-such-model", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await backend.client.models.retrieve("no-such-model")


async def test_a_prompt_longer_than_the_context_is_refused(backend: Backend) -> None:
    longest = (await backend.client.models.retrieve(backend.model)).model_dump()["max_model_len"]
    with pytest.raises(openai.BadRequestError):
        await backend.client.completions.create(model=backend.model, prompt=[5] * longest, max_tokens=1)


async def test_a_stream_that_the_client_leaves_does_not_hold_up_the_next(backend: Backend) -> None:
    for _ in range(3):
        stream = await backend.client.completions.create(model=backend.model, prompt=PROMPT, max_tokens=64, stream=True)
        async for _chunk in stream:
            break
        await stream.close()
    reply = await backend.client.completions.create(model=backend.model, prompt=PROMPT, max_tokens=2)
    assert reply.choices[0].text


# ---- what only a script can know


async def test_the_words_are_those_of_the_router(backend: Backend, script: FakeRouter) -> None:
    reply = await backend.client.completions.create(model=backend.model, prompt="a", max_tokens=3, temperature=0)
    assert reply.choices[0].text == " one two three"
    assert reply._request_id == "r0"


async def test_a_stream_that_the_client_leaves_is_aborted(backend: Backend, script: FakeRouter) -> None:
    script.gate = asyncio.Event()
    stream = await backend.client.chat.completions.create(model=backend.model, messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(30.0):
        while script.aborted != ["r0"]:
            await asyncio.sleep(0.005)


async def test_an_error_in_mid_stream_raises_in_the_client(backend: Backend, script: FakeRouter) -> None:
    script.failure = RequestFailed("the request was tried 3 times")
    stream = await backend.client.completions.create(model=backend.model, prompt="a", temperature=0, stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="tried 3 times"):  # noqa: PT012  the loop is what raises
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
    assert texts == [" one", " two"]


@pytest.mark.parametrize("error", [RequestFailed("tried 3 times"), DeadlineExceeded("600 s are over")])
async def test_the_client_does_not_send_again_what_was_tried_to_the_end(
    backend: Backend, script: FakeRouter, error: DisaggError
) -> None:
    """By itself it would, up to twice, whatever fails with 5xx: a request that workers die of would be tried nine times."""
    script.refusal = error
    with pytest.raises(openai.InternalServerError):
        await backend.client.with_options(max_retries=2).completions.create(model=backend.model, prompt="a")
    assert len(script.requests) == 1


async def test_the_client_tries_again_when_the_cluster_is_full(backend: Backend, script: FakeRouter) -> None:
    script.refusal = Overloaded("the queue is full", retry_after_s=1.0)
    with pytest.raises(openai.RateLimitError) as caught:
        await backend.client.completions.create(model=backend.model, prompt="a")
    assert caught.value.response.headers["retry-after"] == "1"
    patient = backend.client.with_options(max_retries=1)
    asking = asyncio.create_task(patient.completions.create(model=backend.model, prompt="a"))
    async with asyncio.timeout(30.0):
        while len(script.requests) < 2:
            await asyncio.sleep(0.005)
        script.refusal = None
        assert (await asking).choices[0].text
