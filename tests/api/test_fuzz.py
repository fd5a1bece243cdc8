"""Whatever a client sends to either API of a router's process: a clear status, and nobody else notices.

This process sends what hypothesis draws; `tests.api.target` has the others.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.wire import pb
from tests.api.target import DEADLINE_S, Target, make_target, make_watched, undisturbed  # noqa: F401  # two are fixtures
from tests.campaigns import MANY, MIDDLE, Campaign
from tests.router.fake_server import MODEL

WARM_UP = 200
# What a Python program says of itself. None of it may reach a client.
OURS = re.compile(
    r"Traceback|<class|object at 0x|\b\w+(Error|Exception|Warning)\b|msgspec|asyncio|google\.protobuf|\.py\b"
)


# ---- what is sent

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1e308])
texts = st.text(max_size=20) | st.sampled_from(["", MODEL, "\x00", "\u2028", "é", "😀", "<eos>", "1", "-1"])
plain = st.none() | st.booleans() | numbers | texts
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
FIELDS = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "user",
    "metadata",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "cache_salt",
    "priority",
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "best_of",
    "echo",
    "suffix",
    "tools",
    "response_format",
    "service_tier",
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(MODEL),
    "prompt": texts | st.lists(texts, max_size=3) | st.lists(st.integers(-1, 300), max_size=5),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": texts}),
        max_size=3,
    ),
    "max_tokens": st.integers(-1, 10),
    "n": st.integers(-1, 5),
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "stop": texts | st.lists(texts, max_size=18),
    "temperature": st.floats(-1, 3),
    "top_k": st.integers(-2, 10),
    "logprobs": st.integers(-1, 22) | st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=4),
}
bodies_of_fields = st.fixed_dictionaries(
    {"model": likely["model"]}, optional={name: likely.get(name, plain) for name in FIELDS if name != "model"}
) | st.dictionaries(st.sampled_from(FIELDS) | texts, anything, max_size=6)


@st.composite
def http_bodies(draw: st.DrawFn) -> bytes:
    body = json.dumps(draw(bodies_of_fields)).encode()
    match draw(st.sampled_from(["whole", "whole", "whole", "cut", "spoilt", "bytes", "deep"])):
        case "cut":
            return body[: draw(st.integers(0, len(body)))]
        case "spoilt":
            at = draw(st.integers(0, len(body) - 1))
            return body[:at] + draw(st.binary(max_size=3)) + body[at + 1 :]
        case "bytes":
            return draw(st.binary(max_size=100))
        case "deep":
            depth = draw(st.integers(1, 5000))
            return b'{"model": "tiny", "prompt": ' + b"[" * depth + b"]" * depth + b"}"
    return body


PATHS = ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/nothing", "/health")
headers = st.dictionaries(
    st.sampled_from(["content-type", "content-encoding", "x-request-id", "accept", "expect", "host", "te", "cookie"]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20),
    max_size=2,
)


def check_message(message: str, sent: bytes) -> None:
    """What the client itself has sent may be quoted to it; hypothesis draws from the constants of our code, too."""
    said = {match.group() for match in OURS.finditer(message)}
    assert not [word for word in said if word not in sent.decode("latin-1")], (message, sent)


def check_error(body: bytes, sent: bytes) -> None:
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] == "invalid_request_error"
    check_message(error["message"], sent)


def send(target: Target, path: str, body: bytes, named: dict[str, str]) -> None:
    """Over a socket of its own, because http clients refuse to send much of this."""
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {"host": "a", **named}.items())]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close"]).encode("latin-1") + b"\r\n\r\n"
    with socket.create_connection(target.address, DEADLINE_S) as connection:
        connection.sendall(head + body)
        raw = b""
        while part := connection.recv(65536):
            raw += part
    reply = httpx.Response(int(raw.split(b" ", 2)[1]), content=raw.partition(b"\r\n\r\n")[2])
    assert reply.status_code in (200, 400, 404, 405, 413, 415, 417, 501), (body, raw)
    if reply.status_code != 200:
        check_error(reply.content, head + body)
    elif b"text/event-stream" in raw.partition(b"\r\n\r\n")[0]:
        assert b"data: [DONE]" in raw


def test_what_a_client_sent_is_told_from_what_is_ours() -> None:
    check_message("Expect: '*.py' cannot be met", b"expect: *.py")
    for message in ("in disagg/router.py", "ValueError: '*.py'"):
        with pytest.raises(AssertionError):
            check_message(message, b"expect: Value")


def grpc_values(draw: st.DrawFn) -> pb.inference.GenerateRequest:
    out = pb.inference.GenerateRequest(model=draw(st.sampled_from([MODEL, MODEL, "", "other"])))
    if draw(st.booleans()):
        out.text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    elif draw(st.booleans()):
        out.token_ids.ids.extend(draw(st.lists(st.integers(0, 300) | st.integers(0, 2**32 - 1), max_size=5)))
    small = st.integers(-2, 6)
    for name in ("max_tokens", "min_tokens", "top_k", "logprobs", "n"):
        if draw(st.booleans()):
            setattr(out.sampling, name, draw(small | st.integers(-(2**31), 2**31 - 1)))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if draw(st.integers(0, 3)) == 0:
            setattr(out.sampling, name, draw(st.floats(0, 2) | st.floats()))
    out.sampling.stop.extend(draw(st.lists(st.sampled_from(["", "a", "b\x00", "zz"]), max_size=3)))
    out.sampling.stop_token_ids.extend(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3)))
    for token_id in draw(st.lists(st.integers(0, 300), max_size=3)):
        out.sampling.logit_bias.add(token_id=token_id, bias=draw(st.floats()))
    if draw(st.integers(0, 5)) == 0:
        out.deadline_ms = draw(st.integers(-(2**63), 2**63 - 1))
    return out


@st.composite
def grpc_messages(draw: st.DrawFn) -> tuple[str, bytes]:
    method = draw(st.sampled_from(["Generate", "Generate", "Tokenize", "Detokenize", "ListModels", "Abort", "Nothing"]))
    message = grpc_values(draw).SerializeToString()
    match draw(st.sampled_from(["whole", "whole", "cut", "spoilt", "bytes"])):
        case "cut":
            message = message[: draw(st.integers(0, len(message)))]
        case "spoilt":
            at = draw(st.integers(0, max(0, len(message) - 1)))
            message = message[:at] + draw(st.binary(max_size=3)) + message[at + 1 :]
        case "bytes":
            message = draw(st.binary(max_size=100))
    return method, message


CLEAR = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def call(target: Target, method: str, message: bytes) -> None:
    status = target.channel.unary_stream(f"/disagg.v1.Inference/{method}")(message, timeout=DEADLINE_S)
    try:
        for _ in status:
            pass
    except grpc.RpcError:
        assert status.code() in CLEAR, (method, message, status.code(), status.details())
        assert status.details()
        check_message(status.details(), message)


# ---- and what comes of it


def many(campaign: Campaign) -> Callable[[Any], Any]:
    """No shrinking: an example depends on what the router went through before."""
    phases = (Phase.explicit, Phase.generate)
    checks = list(HealthCheck)
    bounded = settings(
        max_examples=campaign.examples, deadline=None, database=None, phases=phases, suppress_health_check=checks
    )
    return lambda test: seed(20261122)(bounded(test))


def fuzz_http(target: Target, campaign: Campaign) -> Callable[[], None]:
    @many(campaign)
    @given(st.sampled_from(PATHS), http_bodies(), headers)
    def run(path: str, body: bytes, named: dict[str, str]) -> None:
        campaign.begin()
        send(target, path, body, named)

    return run


def fuzz_grpc(target: Target, campaign: Campaign) -> Callable[[], None]:
    @many(campaign)
    @given(grpc_messages())
    def run(drawn: tuple[str, bytes]) -> None:
        campaign.begin()
        call(target, *drawn)

    return run


FUZZ = {"http": fuzz_http, "grpc": fuzz_grpc}


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(MIDDLE, marks=pytest.mark.long),
        pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("face", FUZZ)
def test_whatever_clients_send_has_a_clear_answer_and_disturbs_nobody(
    watched: Target, face: str, examples: int
) -> None:
    campaign = Campaign(examples)
    undisturbed(watched, FUZZ[face](watched, Campaign(WARM_UP)), FUZZ[face](watched, campaign))
    campaign.check()
