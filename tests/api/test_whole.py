"""Answers that are not streamed: the same JSON as if they were put together at once, in bounded memory, refused up front."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.api.answer import in_parts
from disagg.api.bodies import parse_chat, parse_completion
from disagg.api.replies import ChatWriter, CompletionWriter, UsageReply, chat_logprobs, completion_logprobs
from disagg.api.whole import PART_BYTES, WholeAnswer, least_bytes, sized
from disagg.router.requests import ChoiceDelta, LogprobEntry, Started, TokenLogprobInfo
from disagg.text.limits import TextLimits
from disagg.types.errors import InvalidRequest
from disagg.types.ids import FinishReason
from tests.api.fakes import MODEL, FakeRouter

LIMITS = TextLimits(max_tokens=8192, max_chars=100_000)
USAGE = UsageReply(1, 2, 3)
MIB = 1 << 20


def call(kind: str, prompts: int = 1, **fields: Any) -> Any:
    if kind == "chat":
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
        return parse_chat(json.dumps(body).encode(), LIMITS, True).call
    body = {"model": "m", "prompt": ["a"] * prompts, **fields}
    return parse_completion(json.dumps(body).encode(), LIMITS, 128)


ENTRIES = st.builds(
    LogprobEntry,
    token_id=st.integers(0, 99),
    text=st.text(max_size=3),
    raw=st.binary(max_size=3),
    logprob=st.floats(-50, 0),
)
ROWS = st.builds(
    TokenLogprobInfo, chosen=ENTRIES, top=st.lists(ENTRIES, max_size=2).map(tuple), text_offset=st.integers(0, 9)
)
PIECES = st.lists(
    st.tuples(st.text(max_size=5), st.lists(st.tuples(st.integers(0, 9), ROWS), max_size=3)), min_size=1, max_size=5
)


@given(kind=st.sampled_from(["chat", "completion"]), pieces=PIECES, logprobs=st.booleans(), ids=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_an_answer_in_pieces_is_the_answer(
    kind: str, pieces: list[tuple[str, list[tuple[int, TokenLogprobInfo]]]], logprobs: bool, ids: bool
) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    of = call(kind, n=2, return_token_ids=ids, **(asked if logprobs else {}))
    writer = (ChatWriter if kind == "chat" else CompletionWriter)(of, [Started("r", (1, 2), 5.0)], "f")
    whole = WholeAnswer(of, 1, MIB)
    for choice in (1, 0):
        for at, (text, tokens) in enumerate(pieces):
            rows = tuple(row for _, row in tokens) if logprobs else ()
            finish = FinishReason.STOP if at == len(pieces) - 1 else None
            whole.add(
                0,
                ChoiceDelta(choice, text, tuple(token for token, _ in tokens), rows, finish, "end" if finish else None),
            )
    reply = json.loads(b"".join(whole.parts(writer, USAGE)))
    infos = [row for _, tokens in pieces for _, row in tokens]
    written = chat_logprobs(infos) if kind == "chat" else completion_logprobs(infos)
    for choice in (0, 1):
        got = reply["choices"][choice]
        assert got["index"] == choice
        assert (got["finish_reason"], got["stop_reason"]) == ("stop", "end")
        assert (got["message"]["content"] if kind == "chat" else got["text"]) == "".join(text for text, _ in pieces)
        assert got["logprobs"] == (json.loads(msgspec.json.encode(written)) if logprobs else None)
        assert got.get("token_ids") == ([t for _, tokens in pieces for t, _ in tokens] if ids else None)
    assert reply["usage"]["total_tokens"] == 3


@pytest.mark.parametrize(
    ("kind", "prompts", "fields"),
    [
        ("completion", 1, {"n": 64, "logprobs": 20, "max_tokens": 8000}),
        ("completion", 128, {"n": 64, "max_tokens": 8000}),
        ("completion", 128, {"n": 64, "max_tokens": 3000, "return_token_ids": True}),
        ("chat", 1, {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 2048}),
    ],
)
def test_an_answer_that_could_not_be_held_is_refused_up_front_and_may_be_streamed(
    kind: str, prompts: int, fields: dict[str, Any]
) -> None:
    says = re.compile(
        rf"{prompts} prompts x {fields['n']} choices \(n\) x {fields['max_tokens']} tokens \(max_tokens\).* come to an answer "
        r"of some .*router\.answer_bytes = 128MiB.*or set stream"
    )
    whole = sized(call(kind, prompts, **fields), 128 * MIB)
    assert [bool(says.match(request.too_large)) for request in whole.requests] == [True] * prompts
    assert not any("None" in request.too_large for request in whole.requests)
    streamed = call(kind, prompts, stream=True, **fields)
    assert sized(streamed, 128 * MIB) == streamed


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("completion", {"n": 64, "max_tokens": 8000}),
        ("completion", {"n": 4, "logprobs": 20, "max_tokens": 8000}),
        ("chat", {"n": 1, "logprobs": True, "top_logprobs": 20, "max_tokens": 8000}),
        ("chat", {"n": 64, "logprobs": True, "top_logprobs": 20}),  # as long as fits: counted as it grows
    ],
)
def test_what_people_ask_for_is_not_refused(kind: str, fields: dict[str, Any]) -> None:
    asked = call(kind, **fields)
    assert sized(asked, 128 * MIB) == asked


@pytest.mark.parametrize("prompt", ["a b", [1, 2], ["a b"] * 3])
async def test_what_no_context_holds_is_said_before_what_no_memory_does(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    monkeypatch.setattr("disagg.api.whole._TEXT_BYTES", 1 << 20)
    body = {"model": MODEL, "prompt": prompt, "n": 3}
    messages = [
        (await http.post("/v1/completions", json={**body, "max_tokens": many})).json()["error"]["message"]
        for many in (199, 198)
    ]
    assert "context of 200 tokens" in messages[0]
    assert "router.answer_bytes" in messages[1]


def test_the_estimate_is_below_what_an_answer_takes_and_memory_near_it() -> None:
    of = call("chat", logprobs=True, top_logprobs=20, max_tokens=2000)
    entry = LogprobEntry(1, " the", b" the", -12.345678901234567)
    row = TokenLogprobInfo(entry, (entry,) * 20, 0)
    whole = WholeAnswer(of, 1, 128 * MIB)
    tracemalloc.start()
    grown = sum(whole.add(0, ChoiceDelta(0, " the", (1,), (row,))) for _ in range(2000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert least_bytes(of) < grown < 2 * least_bytes(of)
    assert held < 1.3 * grown


def test_an_answer_that_grows_too_large_ends_with_what_to_do() -> None:
    whole = WholeAnswer(call("chat"), 1, 1000)
    with pytest.raises(InvalidRequest, match=r"has grown to .*router\.answer_bytes = .*set max_tokens, or set stream"):
        whole.add(0, ChoiceDelta(0, "x" * 1001, (1,)))


@given(sizes=st.lists(st.sampled_from([0, 1, 100, PART_BYTES - 1, PART_BYTES, 3 * PART_BYTES + 7]), max_size=6))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_a_body_is_written_in_parts_that_are_neither_large_nor_many(sizes: list[int]) -> None:
    pieces = [bytes([65 + at]) * size for at, size in enumerate(sizes)]
    parts = list(in_parts(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert all(0 < len(part) <= PART_BYTES for part in parts)
    assert len(parts) <= 2 * (sum(sizes) // PART_BYTES) + 1


async def test_a_call_gives_back_what_it_held_of_the_router(http: httpx.AsyncClient, router: FakeRouter) -> None:
    body = {"model": MODEL, "prompt": "a b", "max_tokens": 3}
    for more in ({}, {"stream": True}, {"n": 65}, {"max_tokens": 10**6}, {"logprobs": -1}, {"x": 1}):
        await http.post("/v1/completions", json={**body, **more})
        assert router.budget.used_bytes == 0
    router.failure = RuntimeError("bug")
    await http.post("/v1/completions", json=body)
    assert router.budget.used_bytes == 0


async def test_a_router_without_memory_says_so(http: httpx.AsyncClient, router: FakeRouter) -> None:
    router.budget.total_bytes = 1
    reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a b", "max_tokens": 3})
    assert reply.status_code == 200  # a small one is always served
    app_limit = 90_000
    router.budget.used_bytes = 1
    import disagg.router.budget as budget

    before, budget.SMALL_BYTES = budget.SMALL_BYTES, 1000
    try:
        reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "a" * app_limit, "max_tokens": 3})
    finally:
        budget.SMALL_BYTES = before
    assert reply.status_code == 429
    assert "router.memory_bytes" in reply.json()["error"]["message"]
