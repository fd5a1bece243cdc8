"""Whatever a client sends to either API of a router's process: a clear status, and nobody else notices.

The router is a process of its own, its servers and a client that reads streams are another (`tests.router.steady_cluster`),
and this one sends what hypothesis draws.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.cli.rundir import pick_ports
from disagg.config.tree import Config, ModelConfig, RouterConfig, ServerRef
from disagg.wire import pb
from tests.cli.test_router_process import ROOT, Running
from tests.router.fake_server import MODEL, write_model

EXAMPLES = 2_000
MANY_EXAMPLES = 50_000
WARM_UP = 200
MAX_GROWTH = 64 << 20
MAX_LATE_S = 0.25
DEADLINE_S = 60.0
# What a Python program says of itself. None of it may reach a client.
OURS = re.compile(
    r"Traceback|<class|object at 0x|\b\w+(Error|Exception|Warning)\b|msgspec|asyncio|google\.protobuf|\.py\b"
)


class Steady:
    """The process with the servers and the reader."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.steady_cluster"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: dict[str, int] = self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def tell(self, **what: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Target:
    """A running router, seen from outside."""

    def __init__(self, directory: Path) -> None:
        self.steady = Steady()
        http_port, grpc_port = pick_ports("127.0.0.1", 2)
        ports = self.steady.ports
        servers = (
            ServerRef(name="p0", role="prefill", address=f"127.0.0.1:{ports['p0']}"),
            ServerRef(name="d0", role="decode", address=f"127.0.0.1:{ports['d0']}"),
        )
        (directory / "model").mkdir()
        config = Config(
            model=ModelConfig(name=str(write_model(directory / "model")), served_name=MODEL),
            router=RouterConfig(http_port=http_port, grpc_port=grpc_port, servers=servers, request_deadline_s=20.0),
        )
        self.address = ("127.0.0.1", http_port)
        self.running = Running(config, directory)
        self.running.wait_until_it_answers()
        self.http = httpx.Client(base_url=self.running.url, trust_env=False, timeout=DEADLINE_S)
        self.until(lambda: self.http.get("/health").status_code == 200)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")

    def until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until_s, self.running.log.read_text()[-4000:]
            time.sleep(0.02)

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.running.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.running.process.pid}/fd"))

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def requests(self) -> int:
        return len(self.http.get("/debug/dump").json()["router"]["requests"])

    def tasks(self) -> int:
        return str(self.http.get("/debug/dump").json()["router_stacks"]).count("Task")

    def close(self) -> None:
        self.channel.close()
        self.http.close()
        self.running.close()
        self.steady.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


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


def check_error(body: bytes) -> None:
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] == "invalid_request_error"
    assert not OURS.search(error["message"]), error


def send(target: Target, path: str, body: bytes, named: dict[str, str]) -> None:
    """Over a socket of its own, because http clients refuse to send much of this."""
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close"]).encode("latin-1") + b"\r\n\r\n"
    with socket.create_connection(target.address, DEADLINE_S) as connection:
        connection.sendall(head + body)
        raw = b""
        while part := connection.recv(65536):
            raw += part
    reply = httpx.Response(int(raw.split(b" ", 2)[1]), content=raw.partition(b"\r\n\r\n")[2])
    assert reply.status_code in (200, 400, 404, 405, 413, 415), (body, raw)
    if reply.status_code != 200:
        check_error(reply.content)
    elif b"text/event-stream" in raw.partition(b"\r\n\r\n")[0]:
        assert b"data: [DONE]" in raw


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
        assert not OURS.search(status.details()), status.details()


# ---- and what comes of it


def many(examples: int) -> Callable[[Any], Any]:
    """No shrinking: an example depends on what the router went through before."""
    phases = (Phase.explicit, Phase.generate)
    checks = list(HealthCheck)
    bounded = settings(max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=checks)
    return lambda test: seed(20261122)(bounded(test))


def undisturbed(target: Target, warm_up: Callable[[], None], fuzz: Callable[[], None]) -> None:
    """Runs `fuzz`; fails if a stream, or the process itself, shows that it has."""
    warm_up()
    target.steady.tell(report=True)
    time.sleep(3.0)
    before = target.steady.tell(report=True)
    assert before["tokens"] > 20
    rss, files, tasks = target.rss_bytes(), target.files(), target.tasks()
    fuzz()
    during = target.steady.tell(report=True)
    print(f"\nundisturbed {before}\ndisturbed   {during}")
    assert not during["failed"], during
    allowed_s = before["worst_late_s"] + MAX_LATE_S + during["worst_lag_s"]
    assert during["worst_late_s"] <= allowed_s, (before, during)
    target.until(lambda: target.requests() <= 1)  # the steady one
    target.until(lambda: target.tasks() <= tasks + 4)  # that one comes and goes
    target.until(lambda: target.files() <= files + 2)
    growth = target.rss_bytes() - rss
    print(f"{growth / 2**20:.1f} MiB more than before")
    assert growth <= MAX_GROWTH
    assert target.running.process.poll() is None


@pytest.fixture(scope="module")
def watched(target: Target) -> Target:
    target.steady.tell(watch=target.address)
    return target


def fuzz_http(target: Target, examples: int) -> Callable[[], None]:
    @many(examples)
    @given(st.sampled_from(PATHS), http_bodies(), headers)
    def run(path: str, body: bytes, named: dict[str, str]) -> None:
        send(target, path, body, named)

    return run


def fuzz_grpc(target: Target, examples: int) -> Callable[[], None]:
    @many(examples)
    @given(grpc_messages())
    def run(drawn: tuple[str, bytes]) -> None:
        call(target, *drawn)

    return run


FUZZ = {"http": fuzz_http, "grpc": fuzz_grpc}


@pytest.mark.long
@pytest.mark.parametrize("face", FUZZ)
def test_whatever_a_client_sends_has_a_clear_answer_and_disturbs_nobody(watched: Target, face: str) -> None:
    undisturbed(watched, FUZZ[face](watched, WARM_UP), FUZZ[face](watched, EXAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("face", FUZZ)
def test_whatever_many_clients_send_has_a_clear_answer_and_disturbs_nobody(watched: Target, face: str) -> None:
    undisturbed(watched, FUZZ[face](watched, WARM_UP), FUZZ[face](watched, MANY_EXAMPLES))
