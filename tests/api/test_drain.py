"""A drain waits for whoever reads, over both faces; what does not end in time is ended with words, not cut."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.crowd import HttpMetrics
from disagg.cli.router_process import RouterFace, end_faces
from disagg.config.tree import Config, ModelConfig, ServerRef
from disagg.messages.legs import StartLeg
from disagg.router.main import RunningRouter, run_router
from disagg.types.ids import FinishReason, Role
from disagg.types.sampling import SamplingParams
from disagg.wire.inference import (
    ChoiceDeltaView,
    FinishedView,
    StartedView,
    generate_request_to_proto,
    update_from_proto,
)
from disagg.wire.services import InferenceStub
from tests.router.conftest import CONFIG, DEADLINE_S
from tests.router.fake_server import FakeServer, answer, first_index, prefill
from tests.router.test_grpc_face import model_dir, read_to_end  # noqa: F401  # the first is a fixture

LENGTH = 200
LOGPROBS = 2  # makes much of few tokens
HALF = [LENGTH // 2] * 16  # tokens of each choice, after which the engine waits


class Faces:
    def __init__(self, running: RunningRouter, http: HttpServer, servers: dict[str, FakeServer]) -> None:
        self.running = running
        self.http = http
        self.servers = servers
        self.gate = asyncio.Event()  # decode goes on from its second half

    async def until_engines_are_done(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.running.router.dump())["requests"] or not self.servers["d0"].started:
                await asyncio.sleep(0.01)


@pytest.fixture
async def faces(model_dir: Path) -> AsyncIterator[Faces]:  # noqa: F811
    async def decode(server: FakeServer, leg: StartLeg) -> None:
        for index in range(first_index(leg), leg.params.max_tokens):
            if index == leg.params.max_tokens // 2:
                await made.gate.wait()
            finish = FinishReason.LENGTH if index + 1 == leg.params.max_tokens else None
            server.say(*(server.tokens(leg, choice, index, index + 1, finish) for choice in leg.choices))
            await asyncio.sleep(0)
        server.say(server.end(leg))

    servers = {"p0": FakeServer("p0", Role.PREFILL, prefill), "d0": FakeServer("d0", Role.DECODE, decode)}
    refs = []
    for name, server in servers.items():
        await server.start()
        refs.append(ServerRef(name=name, role=server.hello.role.value, address=f"127.0.0.1:{server.port}"))
    config = Config(model=ModelConfig(name="tiny"), router=replace(CONFIG, servers=tuple(refs), grpc_port=0))
    registry = CollectorRegistry()
    running = await run_router(config, model_dir, registry=registry)
    app = create_app(RouterFace(running.router), None, registry, version="1")
    http = await serve(app, "127.0.0.1", 0, metrics=HttpMetrics(registry))
    made = Faces(running, http, servers)
    async with asyncio.timeout(DEADLINE_S):
        while not running.router.healthy():
            await asyncio.sleep(0.01)
    yield made
    await end_faces(running, http, 0.0)
    for server in servers.values():
        await server.kill()


class SlowReader:
    """An HTTP client with a small window, which reads when it is told to."""

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._sock.setblocking(False)
        self.came = b""

    async def ask(self, faces: Faces, stream: bool) -> None:
        body = json.dumps(
            {"model": "tiny", "prompt": "hi", "max_tokens": LENGTH, "logprobs": LOGPROBS, "n": 16, "stream": stream}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._sock, (faces.http.host, faces.http.port))
        await loop.sock_sendall(self._sock, head + body)

    async def read(self, pace: Callable[[], Awaitable[None]] | None = None) -> bytes:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DEADLINE_S):
            while part := await loop.sock_recv(self._sock, 16384):
                self.came += part
                if pace is not None:
                    await pace()
        self._sock.close()
        return self.came


async def slowly() -> None:
    await asyncio.sleep(0.002)


def texts_of(raw: bytes) -> tuple[dict[int, str], str]:
    """The text of each choice of a stream, and its last event."""
    lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    texts: dict[int, str] = {}
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, lines[-1]


ALL = {choice: answer(choice, LENGTH) for choice in range(16)}


async def test_a_drain_waits_for_a_slow_reader_of_a_stream(faces: Faces) -> None:
    reader = SlowReader()
    await reader.ask(faces, stream=True)
    faces.gate.set()
    await faces.until_engines_are_done()
    draining = asyncio.create_task(end_faces(faces.running, faces.http, DEADLINE_S))
    await asyncio.sleep(2.5)  # longer than anything but the drain waits
    assert not draining.done()
    texts, last = texts_of(await reader.read(slowly))
    assert last == "[DONE]"
    assert texts == ALL
    await asyncio.wait_for(draining, DEADLINE_S / 2)


async def test_a_drain_waits_for_a_slow_reader_of_a_whole_answer(faces: Faces) -> None:
    reader = SlowReader()
    await reader.ask(faces, stream=False)
    faces.gate.set()
    await faces.until_engines_are_done()
    draining = asyncio.create_task(end_faces(faces.running, faces.http, DEADLINE_S))
    await asyncio.sleep(2.5)
    assert not draining.done()
    raw = await reader.read(slowly)
    choices = json.loads(raw.partition(b"\r\n\r\n")[2])["choices"]
    assert {choice["index"]: choice["text"] for choice in choices} == ALL
    await asyncio.wait_for(draining, DEADLINE_S / 2)


async def test_what_a_stalled_reader_has_not_read_when_the_drain_ends_is_delivered_later(faces: Faces) -> None:
    reader = SlowReader()
    await reader.ask(faces, stream=True)
    faces.gate.set()
    await faces.until_engines_are_done()
    await asyncio.wait_for(end_faces(faces.running, faces.http, 0.5), DEADLINE_S)
    texts, last = texts_of(await reader.read())
    assert last == "[DONE]"
    assert texts == ALL


async def test_a_stream_that_does_not_end_in_time_ends_with_an_error_event(faces: Faces) -> None:
    """The engine never finishes, and the client reads nothing until all is over."""
    reader = SlowReader()
    await reader.ask(faces, stream=True)
    async with asyncio.timeout(DEADLINE_S):
        while not faces.servers["d0"].started:
            await asyncio.sleep(0.01)
        while [request["accepted_tokens"] for request in (await faces.running.router.dump())["requests"]] != [HALF]:
            await asyncio.sleep(0.01)
    await asyncio.wait_for(end_faces(faces.running, faces.http, 0.5), DEADLINE_S)
    texts, last = texts_of(await reader.read())
    error = json.loads(last)["error"]
    assert (error["message"], error["code"]) == ("the router is shutting down", "service_unavailable")
    assert texts == {choice: answer(choice, LENGTH // 2) for choice in range(16)}


async def test_a_whole_answer_that_does_not_end_in_time_is_a_503(faces: Faces) -> None:
    reader = SlowReader()
    await reader.ask(faces, stream=False)
    async with asyncio.timeout(DEADLINE_S):
        while not faces.servers["d0"].started:
            await asyncio.sleep(0.01)
    await asyncio.wait_for(end_faces(faces.running, faces.http, 0.2), DEADLINE_S)
    raw = await reader.read()
    assert raw.startswith(b"HTTP/1.1 503 ")
    assert b"the router is shutting down" in raw


def call(faces: Faces, channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    params = SamplingParams(max_tokens=LENGTH, n=16, logprobs=LOGPROBS)
    return InferenceStub(channel).generate(generate_request_to_proto(model="tiny", prompt="hi", params=params))


SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))


async def test_a_drain_waits_for_a_slow_reader_over_grpc(faces: Faces) -> None:
    address = f"127.0.0.1:{faces.running.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        reading = call(faces, channel)
        assert isinstance(update_from_proto(await reading.read()), StartedView)
        faces.gate.set()
        await faces.until_engines_are_done()
        draining = asyncio.create_task(end_faces(faces.running, faces.http, DEADLINE_S))
        await asyncio.sleep(2.5)
        assert not draining.done()
        texts: dict[int, str] = {}
        last = None
        while (message := await reading.read()) is not grpc.aio.EOF:
            last = update_from_proto(message)
            if isinstance(last, ChoiceDeltaView):
                texts[last.choice] = texts.get(last.choice, "") + last.text
            await slowly()
        assert isinstance(last, FinishedView)
        assert texts == ALL
        await asyncio.wait_for(draining, DEADLINE_S / 2)


async def test_a_call_that_does_not_end_in_time_is_told_why(faces: Faces) -> None:
    address = f"127.0.0.1:{faces.running.grpc_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        reading = call(faces, channel)
        await reading.read()
        ending = asyncio.create_task(end_faces(faces.running, faces.http, 0.5))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(reading)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the router is shutting down"
        await asyncio.wait_for(ending, DEADLINE_S)
