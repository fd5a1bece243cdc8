"""A body is measured before it is read: what a hostile one costs is its own bytes, and one clear refusal."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.api.bodies import parse_chat, parse_completion
from disagg.text.limits import MAX_MESSAGES, TextLimits
from disagg.types.errors import InvalidRequest
from disagg.types.sampling import MAX_STOP_CHARS
from tests.campaigns import Campaign, sizes

LIMITS = TextLimits(max_tokens=8192, max_chars=8192 * 81)
MAX_PROMPTS = 128
LARGE = 8 << 20
MIB = 1 << 20


def completion(body: bytes) -> object:
    return parse_completion(body, LIMITS, MAX_PROMPTS)


def chat(body: bytes) -> object:
    return parse_chat(body, LIMITS, True)


def fill(before: bytes, unit: bytes, after: bytes, size: int = LARGE) -> bytes:
    return before + unit * (size // len(unit)) + after


P, M = b'{"model":"m","prompt":', b'{"model":"m","messages":'
HOSTILE = {
    "one long text": (completion, fill(P + b'"', b"a", b'"}')),
    "a long text in escapes": (completion, fill(P + b'"', b"\\u0061", b'"}')),
    "ids without end": (completion, fill(P + b"[1", b",1", b"]}")),
    "prompts without end": (completion, fill(P + b'["a"', b',"a"', b"]}")),
    "prompts of ids without end": (completion, fill(P + b"[[1]", b",[1]", b"]}")),
    "empty prompts without end": (completion, fill(P + b"[[]", b",[]", b"]}")),
    "objects for prompts": (completion, fill(P + b"[{}", b",{}", b"]}")),
    "a prompt of lists in lists": (completion, fill(P, b"[", b"}")),
    "stop strings without end": (completion, fill(P + b'"a","stop":["b"', b',"b"', b"]}")),
    "one stop string without end": (completion, fill(P + b'"a","stop":"', b"b", b'"}')),
    "biases without end": (completion, fill(P + b'"a","logit_bias":{"1":1', b',"1":1', b"}}")),
    "metadata without end": (completion, fill(P + b'"a","metadata":{"a":"b"', b',"a":"b"', b"}}")),
    "a model name without end": (completion, fill(P + b'"a","model":"', b"m", b'"}')),
    "a number without end": (completion, fill(P + b'"a","seed":1', b"1", b"}")),
    "a name without end": (completion, fill(P + b'"a","', b"n", b'":1}')),
    "lists in an unknown field": (completion, fill(P + b'"a","x":[[]', b",[]", b"]}")),
    "names without end": (completion, P + b'"a"' + b"".join(b',"%x":1' % i for i in range(LARGE // 10)) + b"}"),
    "messages without end": (
        chat,
        fill(M + b'[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}', b"]}"),
    ),
    "null messages without end": (chat, fill(M + b"[null", b",null", b"]}")),
    "one long message": (chat, fill(M + b'[{"role":"user","content":"', b"a", b'"}]}')),
    "parts without end": (
        chat,
        fill(M + b'[{"role":"user","content":[{"type":"text","text":""}', b',{"type":"text","text":""}', b"]}]}"),
    ),
    "parts that are no parts": (chat, fill(M + b'[{"role":"user","content":[{}', b",{}", b"]}]}")),
    "a part of lists": (chat, fill(M + b'[{"role":"user","content":[{"type":"text","text":[[]', b",[]", b"]}]}]}")),
    "a message of lists": (chat, fill(M + b'[{"role":"user","content":"","name":[[]', b",[]", b"]}]}")),
    "a role without end": (chat, fill(M + b'[{"content":"","role":"', b"u", b'"}]}')),
    "an unknown field of a message": (chat, fill(M + b'[{"role":"user","content":"","x":[{}', b",{}", b"]}]}")),
    "messages that are a text": (chat, fill(M + b'"', b"a", b'"}')),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_for_what_its_own_bytes_cost(name: str) -> None:
    parse, body = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(body) + MIB
    assert len(str(caught.value)) < 500


def test_the_largest_legal_bodies_are_read() -> None:
    text = "x" * LIMITS.max_chars
    assert completion(json.dumps({"model": "m", "prompt": text}).encode())
    assert completion(json.dumps({"model": "m", "prompt": [[1] * LIMITS.max_tokens] * MAX_PROMPTS}).encode())
    stops = ["s" * (MAX_STOP_CHARS // 16)] * 16
    bias = {str(token): -12.345678901234567 for token in range(1024)}
    assert completion(json.dumps({"model": "m", "prompt": "a", "stop": stops, "logit_bias": bias}).encode())
    assert chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": text[10:]}]}).encode())
    parts = [{"type": "text", "text": "a"}] * (MAX_MESSAGES - 1)
    assert chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode())
    assert chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES}).encode())


def test_what_is_refused_is_said_with_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(
        InvalidRequest, match=f"prompt has {LIMITS.max_chars + 1} characters; at most {LIMITS.max_chars}"
    ):
        completion(json.dumps({"model": "m", "prompt": "x" * (LIMITS.max_chars + 1)}).encode())
    with pytest.raises(InvalidRequest, match=r"prompt\[1\] has 8193 token ids; the model's context holds 8192"):
        completion(json.dumps({"model": "m", "prompt": [[1], [1] * 8193]}).encode())
    with pytest.raises(InvalidRequest, match="more than 4096 messages"):
        chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * 4097}).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = (
    "prompt",
    "messages",
    "stop",
    "n",
    "logit_bias",
    "stop_token_ids",
    "stream_options",
    "logprobs",
    "echo",
    "tools",
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=5)
MESSAGES = st.lists(
    JSON | st.fixed_dictionaries({"role": JSON | st.just("user"), "content": JSON | st.text(max_size=5)}), max_size=4
)


@sizes()
def test_any_body_is_read_or_refused_in_our_words(examples: int) -> None:
    campaign = Campaign(examples)

    @settings(derandomize=True, deadline=None, database=None, max_examples=campaign.examples)
    @given(body=BODIES, prompt=JSON, messages=JSON | MESSAGES, cut=st.integers(0, 400) | st.none())
    def run(body: dict, prompt: object, messages: object, cut: int | None) -> None:
        campaign.begin()
        for parse, more in ((completion, {"prompt": prompt}), (chat, {"messages": messages})):
            raw = json.dumps({"model": "m", **body, **more}).encode()[:cut]
            with contextlib.suppress(InvalidRequest):
                parse(raw)

    run()
    campaign.check()
