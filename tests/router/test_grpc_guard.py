"""What a hostile, slow or broken client of the gRPC API gets: a clear status in our words, and nothing that is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, ModelConfig, ServerRef
from disagg.router.main import RunningRouter, run_router
from disagg.types.ids import Role
from disagg.types.sampling import SamplingParams
from disagg.wire import pb
from disagg.wire.inference import generate_request_to_proto
from disagg.wire.services import MAX_MESSAGE_BYTES, InferenceStub, open_channel
from tests.router.conftest import CONFIG, DEADLINE_S
from tests.router.fake_server import FakeServer, decode, prefill, silent
from tests.router.test_grpc_face import model_dir  # noqa: F401  # a fixture

GENERATE = "/disagg.v1.Inference/Generate"
UNARY = ("/disagg.v1.Inference/Tokenize", "/disagg.v1.Inference/Abort", "/grpc.health.v1.Health/Check")
STREAMED = (
    GENERATE,
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


class Open:
    """A router on fake servers, with short patience, and a client that sends bytes."""

    def __init__(self, running: RunningRouter, servers: dict[str, FakeServer], registry: CollectorRegistry) -> None:
        self.running = running
        self.servers = servers
        self.registry = registry
        self.channel = open_channel(f"127.0.0.1:{running.grpc_port}")

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def status(self, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
        call = self.channel.stream_stream(method)(iter([message]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        return caught.value.code(), caught.value.details() or ""


@pytest.fixture
async def opened(model_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Open]:  # noqa: F811
    """A parameter: settings of its patience."""
    servers = {"p0": FakeServer("p0", Role.PREFILL, prefill), "d0": FakeServer("d0", Role.DECODE, decode)}
    refs = []
    for name, server in servers.items():
        await server.start()
        refs.append(ServerRef(name=name, role=server.hello.role.value, address=f"127.0.0.1:{server.port}"))
    patience = {"body_s": 0.3, "stall_s": 0.5, "head_s": 0.5, "idle_s": 1.0, **getattr(request, "param", {})}
    config = Config(
        model=ModelConfig(name="tiny"), router=replace(CONFIG, servers=tuple(refs), grpc_port=0, **patience)
    )
    registry = CollectorRegistry()
    running = await run_router(config, model_dir, registry=registry)
    made = Open(running, servers, registry)
    await made.until(running.router.healthy)
    yield made
    await made.until(lambda: made.metric("disagg_router_grpc_calls") == 0)
    assert not (await running.router.dump())["requests"]
    await made.channel.close()
    await running.close(0.0)
    for server in servers.values():
        await server.kill()


@pytest.mark.parametrize("method", UNARY + STREAMED)
@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x02\xff\xff", b"\x0a\x7fshort"])
async def test_a_message_that_cannot_be_decoded_is_an_invalid_argument(
    opened: Open, method: str, message: bytes
) -> None:
    code, details = await opened.status(method, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert method.lstrip("/") in details
    assert not any(word in details for word in ("class", "Error", "Exception", "google", "Traceback"))
    assert opened.metric("disagg_router_grpc_ended_total", reason="undecodable") == 1
    assert opened.metric("disagg_router_requests_total", outcome="invalid") == (method == GENERATE)


async def test_a_request_that_its_fields_refuse_is_counted(opened: Open) -> None:
    code, _ = await opened.status(GENERATE, pb.inference.GenerateRequest(text="no model").SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert opened.metric("disagg_router_requests_total", outcome="invalid") == 1


# In this one loop a client copies 64 MiB, which may take longer than the server is patient.
@pytest.mark.parametrize("opened", [{"body_s": 30.0}], indirect=True)
async def test_a_message_that_is_too_large_is_refused_and_counted(opened: Open) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.running.grpc_port}", options=options) as channel:
        call = channel.stream_stream(GENERATE)(iter([bytes(MAX_MESSAGE_BYTES + 1)]))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await opened.until(lambda: opened.metric("disagg_router_grpc_ended_total", reason="no_message") == 1)
    assert opened.metric("disagg_router_requests_total", outcome="invalid") == 1


@pytest.mark.parametrize("method", [GENERATE, "/disagg.v1.Inference/Tokenize"])
async def test_a_message_that_does_not_come_ends_the_call(opened: Open, method: str) -> None:
    call = opened.channel.stream_stream(method)()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.3 s" in await call.details()
    assert opened.metric("disagg_router_grpc_ended_total", reason="request_timeout") == 1


async def test_a_bug_of_ours_shows_no_class_names(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("secret of ours")

    monkeypatch.setattr(opened.running.router, "tokenize", broken)
    message = pb.inference.TokenizeRequest(model="tiny", text="x").SerializeToString()
    code, details = await opened.status("/disagg.v1.Inference/Tokenize", message)
    assert (code, details) == (grpc.StatusCode.INTERNAL, "the server failed on this request; its log says why")
    assert opened.metric("disagg_router_grpc_ended_total", reason="failed") == 1


async def test_a_client_that_never_reads_is_given_up_and_its_request_is_aborted(opened: Open) -> None:
    async def flood(server: FakeServer, leg: Any) -> None:
        for index in range(1, 400):
            server.say(server.tokens(leg, 0, index, index + 1))
            await asyncio.sleep(0.002)
        await silent(server, leg)

    opened.servers["d0"].script = flood
    sampling = SamplingParams(max_tokens=0, n=1, logprobs=2)
    request = generate_request_to_proto(model="tiny", prompt="x" * 100, params=sampling)
    # Its own channel, with the smallest window, so that a short answer fills it.
    options = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.running.grpc_port}", options=options) as channel:
        call = InferenceStub(channel).generate(request)
        await call.read()
        await opened.until(lambda: opened.metric("disagg_router_grpc_ended_total", reason="stalled") == 1)
        await opened.until(lambda: bool(opened.servers["d0"].aborted))
        assert opened.metric("disagg_router_requests_total", outcome="cancelled") == 1


async def test_a_connection_that_says_nothing_is_closed(opened: Open) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.running.grpc_port)
    async with asyncio.timeout(DEADLINE_S):
        while await reader.read(65536):
            pass
    writer.close()


async def test_a_connection_without_calls_is_closed_and_a_client_dials_again(opened: Open) -> None:
    stub = InferenceStub(opened.channel)
    await stub.list_models(pb.inference.ListModelsRequest())
    opened_at = opened.channel.get_state()
    assert opened_at is grpc.ChannelConnectivity.READY
    await opened.until(lambda: opened.channel.get_state() is not grpc.ChannelConnectivity.READY)
    assert (await stub.list_models(pb.inference.ListModelsRequest())).models[0].name == "tiny"
