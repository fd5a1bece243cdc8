"""The public gRPC API on a router with fake servers: answers, statuses, cancellation, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, ModelConfig, ServerRef
from disagg.convert.inspect import inspect_model
from disagg.router.main import RunningRouter, max_model_len, run_router
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.ids import FinishReason, Role
from disagg.types.sampling import SamplingParams
from disagg.wire import pb
from disagg.wire.inference import (
    ChoiceDeltaView,
    FinishedView,
    StartedView,
    generate_request_to_proto,
    update_from_proto,
)
from disagg.wire.services import InferenceStub, open_channel
from disagg.wire.status import PARAM_KEY
from tests.router.conftest import CONFIG, DEADLINE_S
from tests.router.fake_server import FakeServer, answer, decode, prefill, silent, write_model
from tests.router.test_request_spans import PARENT, TRACE, Kept
from tests.wire.serving import is_serving
from tests.wire.tokenizing import detokenize_request_to_proto, tokenize_request_to_proto


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path)


class Face:
    def __init__(self, running: RunningRouter, servers: dict[str, FakeServer], channel: grpc.aio.Channel) -> None:
        self.running = running
        self.servers = servers
        self.channel = channel
        self.stub = InferenceStub(channel)

    def generate(self, timeout: float | None = None, **params: int) -> grpc.aio.UnaryStreamCall:
        sampling = SamplingParams(**{"max_tokens": 4, **params})
        return self.stub.generate(
            generate_request_to_proto(model="tiny", prompt="hi", params=sampling), timeout=timeout
        )

    async def until(self, serving: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await is_serving(self.channel, "disagg.v1.Inference") is not serving:
                await asyncio.sleep(0.01)


@pytest.fixture
async def face(model_dir: Path) -> AsyncIterator[Face]:
    servers = {"p0": FakeServer("p0", Role.PREFILL, prefill), "d0": FakeServer("d0", Role.DECODE, decode)}
    refs = []
    for name, server in servers.items():
        await server.start()
        refs.append(ServerRef(name=name, role=server.hello.role.value, address=f"127.0.0.1:{server.port}"))
    config = Config(model=ModelConfig(name="tiny"), router=replace(CONFIG, servers=tuple(refs), grpc_port=0))
    running = await run_router(config, model_dir, registry=CollectorRegistry())
    channel = open_channel(f"127.0.0.1:{running.grpc_port}")
    made = Face(running, servers, channel)
    await made.until(serving=True)
    yield made
    async with asyncio.timeout(DEADLINE_S):
        while (await running.router.dump())["requests"]:
            await asyncio.sleep(0.01)
    await channel.close()
    await running.close(0.0)
    for server in servers.values():
        await server.kill()


async def test_generate_streams_started_deltas_and_finished(face: Face) -> None:
    updates = [update_from_proto(message) async for message in face.generate()]
    assert isinstance(updates[0], StartedView)
    assert isinstance(updates[-1], FinishedView)
    deltas = [update for update in updates if isinstance(update, ChoiceDeltaView)]
    assert "".join(delta.text for delta in deltas) == answer(0, 4)
    assert deltas[-1].finish is FinishReason.LENGTH
    assert updates[-1].usage.completion_tokens == 4


async def test_the_cache_salt_reaches_both_servers_as_it_was_given(face: Face) -> None:
    for salt in ("", "tenant-a", "tenant-b"):
        await read_to_end(face.stub.generate(salted(salt)))
    for server in face.servers.values():
        assert [leg.cache_salt for leg in server.started] == ["", "tenant-a", "tenant-b"]


async def test_servers_are_told_whose_a_request_is(face: Face) -> None:
    for key in (None, "Bearer a", "Bearer b", "Bearer a"):
        metadata = (("authorization", key),) if key is not None else None
        await read_to_end(face.stub.generate(salted(""), metadata=metadata))
    await read_to_end(face.stub.generate(salted("")))
    for server in face.servers.values():
        nobody, a, b, again, connection = (leg.tenant for leg in server.started)
        assert a == again and nobody == connection
        assert len({nobody, a, b}) == 3 and all((nobody, a, b))


async def test_a_tenant_that_is_named_twice_is_refused_by_name(face: Face) -> None:
    metadata = (("x-tenant", "a"), ("x-tenant", "b"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(face.stub.generate(salted(""), metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-tenant is there 2 times: give it once" in (caught.value.details() or "")
    assert dict(caught.value.trailing_metadata() or ())[PARAM_KEY] == "x-tenant"
    await read_to_end(face.stub.generate(salted(""), metadata=metadata[:1]))
    assert [len(server.started) for server in face.servers.values()] == [1] * len(face.servers)


def salted(salt: str) -> pb.inference.GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return generate_request_to_proto(model="tiny", prompt="hi", params=sampling, cache_salt=salt)


async def test_a_deadline_of_a_millisecond_is_said_to_have_passed(face: Face) -> None:
    face.servers["d0"].script = silent
    asked = generate_request_to_proto(
        model="tiny", prompt="a" * 200, params=SamplingParams(max_tokens=4), deadline_s=0.001
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(face.stub.generate(asked))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    details = caught.value.details() or ""
    assert "deadline of 0.001 s passed" in details and "loading" not in details


async def test_max_tokens_left_out_means_as_many_as_fit(face: Face) -> None:
    updates = [update_from_proto(message) async for message in face.generate(max_tokens=0)]
    assert isinstance(updates[-1], FinishedView)
    assert updates[-1].usage.completion_tokens + updates[-1].usage.prompt_tokens == 256


async def test_a_wrong_field_is_named_in_the_status(face: Face) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.generate(n=1000).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata() or ())[PARAM_KEY] == "n"


async def test_the_deadline_of_the_call_is_the_requests(face: Face) -> None:
    face.servers["d0"].script = silent
    started = face.servers["d0"].started
    while not started:  # a machine that stands still may not come to it before the deadline
        call = face.generate(timeout=1.0)  # travels rounded up, and is otherwise the 60 s of the configuration
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    [leg] = started
    assert leg.deadline_s < 10.0
    await freed(face)


@pytest.mark.parametrize(("named_s", "call_s"), [(None, 20.0), (0.2, 20.0), (0.2, None), (None, None)])
async def test_a_deadline_of_the_call_that_is_later_changes_nothing(
    face: Face, named_s: float | None, call_s: float | None
) -> None:
    router, face.servers["d0"].script = face.running.router, silent
    router._config = replace(router._config, request_deadline_s=30.0 if named_s else 0.2)
    params = SamplingParams(max_tokens=4)
    asked = generate_request_to_proto(model="tiny", prompt="hi", params=params, deadline_s=named_s)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(face.stub.generate(asked, timeout=call_s))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "deadline of 0.2 s passed" in (caught.value.details() or "")


async def test_a_cancelled_call_frees_the_request(face: Face) -> None:
    face.servers["d0"].script = silent
    call = face.generate()
    await call.read()
    call.cancel()
    await freed(face)


async def read_to_end(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def freed(face: Face) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await face.running.router.dump())["requests"] or not face.servers["d0"].aborted:
            await asyncio.sleep(0.01)


async def test_abort_names_a_running_request(face: Face) -> None:
    face.servers["d0"].script = silent
    call = face.generate()
    started = update_from_proto(await call.read())
    assert isinstance(started, StartedView)
    answer = await face.stub.abort(abort_request(started.request_id, started.abort_token))
    assert answer.found
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await read_to_end(call)
    assert await call.code() is grpc.StatusCode.CANCELLED


def abort_request(request_id: str, abort_token: str) -> pb.inference.AbortRequest:
    return pb.inference.AbortRequest(request_id=request_id, abort_token=abort_token)


async def test_abort_takes_only_what_its_caller_began(face: Face) -> None:
    """Whoever knows only the id, which logs and answers show, ends nothing, and does not learn whether it runs."""
    face.servers["d0"].script = silent
    mine, other = face.generate(), face.generate()
    started, of_other = [update_from_proto(await call.read()) for call in (mine, other)]
    assert isinstance(started, StartedView)
    assert isinstance(of_other, StartedView)
    refusals = []
    for named in (
        abort_request(started.request_id, of_other.abort_token),
        abort_request("0" * 24, started.abort_token),
        abort_request(started.request_id, "\u00e9"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await face.stub.abort(named)
        refusals.append((caught.value.code(), caught.value.details()))
    assert refusals == [refusals[0]] * 3
    assert refusals[0][0] is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.stub.abort(abort_request(started.request_id, ""))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len((await face.running.router.dump())["requests"]) == 2
    async with open_channel(f"127.0.0.1:{face.running.grpc_port}") as elsewhere:  # as through a load balancer
        assert (await InferenceStub(elsewhere).abort(abort_request(started.request_id, started.abort_token))).found
    other.cancel()


async def test_tokens_text_and_models(face: Face) -> None:
    tokenized = await face.stub.tokenize(tokenize_request_to_proto(model="tiny", text="hi"))
    back = await face.stub.detokenize(detokenize_request_to_proto(model="tiny", token_ids=tokenized.token_ids))
    assert back.text == "hi"
    models = await face.stub.list_models(pb.inference.ListModelsRequest())
    assert [model.name for model in models.models] == ["tiny"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.stub.tokenize(tokenize_request_to_proto(model="other", text="hi"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_the_pools(face: Face) -> None:
    await face.servers["d0"].kill()
    await face.until(serving=False)
    await face.servers["d0"].restart()
    await face.until(serving=True)


async def test_reflection_lists_the_service(face: Face) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(face.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    reply = await call.read()
    assert "disagg.v1.Inference" in {service.name for service in reply.list_services_response.service}


async def test_a_port_that_is_taken_is_named_and_may_be_free_later(face: Face, model_dir: Path) -> None:
    taken = Config(model=ModelConfig(name="tiny"), router=replace(CONFIG, grpc_port=face.running.grpc_port))
    with pytest.raises(DisaggError, match=r"router\.grpc_port") as refused:
        await run_router(taken, model_dir, registry=CollectorRegistry())
    assert not isinstance(refused.value, ConfigError)


def test_names_and_lengths_come_from_the_configuration_or_the_model(model_dir: Path) -> None:
    assert ModelConfig(name="/models/llama/").public_name == "llama"
    assert ModelConfig(name="/models/llama", served_name="chat").public_name == "chat"
    facts = inspect_model(model_dir)
    assert max_model_len(ModelConfig(), facts) == 256
    assert max_model_len(ModelConfig(max_model_len=100), facts) == 100
    assert max_model_len(ModelConfig(max_model_len=1000), facts) == 256


@pytest.mark.parametrize(
    "name", ["x" * (64 << 10), "\x1b[2J\n2026-01-01T00:00:00.000Z ERROR forged\u202e" * 300, "北" * 5000]
)
async def test_a_model_name_of_any_length_and_content_is_refused_in_our_words(
    face: Face, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Echoed whole it would not fit into the status' headers, and the client would see a reset stream."""
    with caplog.at_level("INFO"), pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.stub.generate(
            generate_request_to_proto(model=name, prompt="hi", params=SamplingParams(max_tokens=1))
        ).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    details = caught.value.details() or ""
    assert "is not served here; 'tiny' is" in details
    assert details.isprintable()
    assert len(details.encode()) < 2000
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)


async def test_the_trace_that_a_caller_names_goes_on_to_the_servers(face: Face) -> None:
    kept = face.running.router._dispatch.outcomes.traces = Kept()
    sampling = SamplingParams(max_tokens=4)
    asked = generate_request_to_proto(model="tiny", prompt="hi", params=sampling)
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    async for _ in face.stub.generate(asked, metadata=metadata):
        pass
    assert {span.context.trace_id for span in kept.spans} == {TRACE} and kept.spans[0].parent_span_id == PARENT
    assert all(TRACE in server.started[0].traceparent for server in face.servers.values())
