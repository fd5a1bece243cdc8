"""The router's gRPC face where keys are asked for: every method that reflection names, and whose a call is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.auth.quotas import Limits, Quotas
from disagg.config.tree import AuthConfig, Config, ModelConfig, ServerRef
from disagg.router import grpc_service
from disagg.router.main import RunningRouter, run_router
from disagg.router.tenants import salt_of
from disagg.types.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated
from disagg.types.ids import Role
from disagg.types.sampling import MAX_CACHE_SALT_CHARS, SamplingParams
from disagg.wire.inference import generate_request_to_proto
from disagg.wire.services import HEALTH, InferenceStub, open_channel
from disagg.wire.status import error_of
from tests.router.conftest import CONFIG, DEADLINE_S
from tests.router.fake_server import FakeServer, decode, prefill, write_model
from tests.wire.serving import is_serving

A, B = (("authorization", "Bearer key-a"),), (("authorization", "Bearer key-b"),)


class Face:
    def __init__(self, running: RunningRouter, servers: list[FakeServer], channel: grpc.aio.Channel) -> None:
        self.running = running
        self.servers = servers
        self.channel = channel
        self.stub = InferenceStub(channel)


def config_with(keys: Path, *servers: ServerRef) -> Config:
    return Config(
        model=ModelConfig(name="tiny"),
        router=replace(CONFIG, servers=servers, grpc_port=0),
        auth=AuthConfig(api_keys_file=str(keys)),
    )


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    (tmp_path / "keys").write_text("key-a team-a\nkey-b team-b\n")
    servers = [FakeServer("p0", Role.PREFILL, prefill), FakeServer("d0", Role.DECODE, decode)]
    refs = []
    for server in servers:
        await server.start()
        refs.append(ServerRef(name=server.name, role=server.hello.role.value, address=f"127.0.0.1:{server.port}"))
    running = await run_router(
        config_with(tmp_path / "keys", *refs), write_model(tmp_path), registry=CollectorRegistry()
    )
    channel = open_channel(f"127.0.0.1:{running.grpc_port}")
    yield Face(running, servers, channel)
    await channel.close()
    await running.close(0.0)
    for server in servers:
        await server.kill()


async def reflected(face: Face, metadata: tuple[tuple[str, str], ...]) -> list[str]:
    """All methods, as /service/method, that the server says it has."""
    stub = reflection_pb2_grpc.ServerReflectionStub(face.channel)

    async def ask(**what: str) -> reflection_pb2.ServerReflectionResponse:
        def questions() -> Iterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(**what)

        async for answer in stub.ServerReflectionInfo(questions(), metadata=metadata, timeout=DEADLINE_S):
            return answer
        raise AssertionError("no answer")

    listed = await ask(list_services="")
    methods = []
    for service in listed.list_services_response.service:
        answer = await ask(file_containing_symbol=service.name)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            methods += [
                f"/{service.name}/{method.name}"
                for each in file.service
                if f"{file.package}.{each.name}" == service.name
                for method in each.method
            ]
    return methods


async def code_of(face: Face, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    """Of a call with one empty message."""

    # As one request: of a stream that ends while it is written to, gRPC may hide the status.
    call = face.channel.unary_stream(method)(b"", metadata=metadata, timeout=5)
    try:
        async for _ in call:
            break
        else:
            return grpc.StatusCode(await call.code())
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def test_no_method_answers_without_a_key(face: Face) -> None:
    methods = await reflected(face, A)
    assert {"/disagg.v1.Inference/Generate", "/disagg.v1.Inference/Abort"} <= set(methods)
    assert any("Reflection" in method for method in methods)
    methods += ["/disagg.v1.Inference/None", "/none.Service/None", f"/x{HEALTH}/Check", f"/{HEALTH}x/Check"]
    for method in methods:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "key-a"),), (*A, *B)):
            code = await code_of(face, method, metadata)
            if method.startswith(f"/{HEALTH}/"):
                assert code is not grpc.StatusCode.UNAUTHENTICATED
            else:
                assert code is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)
        assert await code_of(face, method, A) is not grpc.StatusCode.UNAUTHENTICATED
    assert not any(server.started for server in face.servers)
    await is_serving(face.channel, "disagg.v1.Inference")


def asked(salt: str = "") -> object:
    return generate_request_to_proto(model="tiny", prompt="hi", params=SamplingParams(max_tokens=1), cache_salt=salt)


async def test_a_client_is_told_in_our_words(face: Face) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await face.stub.generate(asked()).read()
    assert isinstance(error_of(caught.value), Unauthenticated)
    assert "authorization: Bearer KEY" in (caught.value.details() or "")


async def test_servers_are_given_a_salt_of_the_tenants_own(face: Face) -> None:
    """What a client says of itself changes nothing, and a salt that is another tenant's is not that here."""
    stolen = salt_of("team-a", "")
    for metadata, salt in (
        (A, ""),
        ((*A, ("x-tenant", "team-b")), ""),
        (B, ""),
        (B, stolen),
        (A, "mine"),
        (B, "mine"),
        (A, "m" * MAX_CACHE_SALT_CHARS),
    ):
        call = face.stub.generate(asked(salt), metadata=metadata, timeout=DEADLINE_S)
        while await call.read() is not grpc.aio.EOF:
            pass
    for server in face.servers:
        mine, same, other, thief, a, b, _ = (leg.cache_salt for leg in server.started)
        assert mine == same and len({mine, other, thief, a, b, ""}) == 6
        assert [leg.tenant == server.started[0].tenant for leg in server.started[:4]] == [True, True, False, False]


async def test_nothing_is_read_for_who_has_used_its_quota_up(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    face.running.router.quotas = quotas = Quotas(lambda: {"team-a": Limits(concurrent=1, requests_per_minute=1)})
    read = grpc_service.generate_request_from_proto
    seen: list[str] = []

    def noted(request: object, most: int) -> dict[str, object]:
        seen.append("read")
        return read(request, most)  # type: ignore[arg-type]

    monkeypatch.setattr(grpc_service, "generate_request_from_proto", noted)

    async def refusal(salt: str = "") -> BaseException:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await face.stub.generate(asked(salt), metadata=A, timeout=DEADLINE_S).read()
        return error_of(caught.value)

    assert isinstance(await refusal("m" * (MAX_CACHE_SALT_CHARS + 1)), InvalidRequest)  # which counts
    exceeded = await refusal()
    assert isinstance(exceeded, Overloaded) and "requests of team-a are used up" in str(exceeded)
    assert seen == ["read"] and quotas._tenants["team-a"].running == 0


async def test_a_router_with_no_keys_in_its_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="there is no key in it"):
        await run_router(config_with(tmp_path / "keys"), write_model(tmp_path), registry=CollectorRegistry())
