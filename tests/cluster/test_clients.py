"""Third-party clients: gRPC with nothing but reflection, and the official `openai` client's own test file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.cluster.cluster import Cluster


class ReflectionClient:
    """Knows an address; learns services and messages from the server."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self._stub = reflection_pb2_grpc.ServerReflectionStub(self.channel)
        self._pool = descriptor_pool.DescriptorPool()
        self._known: set[str] = set()

    def _ask(self, **request: str) -> reflection_pb2.ServerReflectionResponse:
        return next(self._stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)])))

    def services(self) -> list[str]:
        return [s.name for s in self._ask(list_services="").list_services_response.service]

    def _add(self, raw: bytes) -> None:
        file = descriptor_pb2.FileDescriptorProto.FromString(raw)
        if file.name in self._known:
            return
        self._known.add(file.name)
        for needed in file.dependency:
            for each in self._ask(file_by_filename=needed).file_descriptor_response.file_descriptor_proto:
                self._add(each)
        self._pool.Add(file)

    def load(self, symbol: str) -> None:
        for raw in self._ask(file_containing_symbol=symbol).file_descriptor_response.file_descriptor_proto:
            self._add(raw)

    def message(self, name: str) -> type:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))


def test_a_client_with_nothing_but_reflection_lists_services_and_streams_a_generation(cluster: Cluster) -> None:
    client = ReflectionClient(cluster.grpc)
    assert "disagg.v1.Inference" in client.services()
    assert "grpc.health.v1.Health" in client.services()
    client.load("disagg.v1.Inference")
    request_type = client.message("disagg.v1.GenerateRequest")
    response_type = client.message("disagg.v1.GenerateResponse")
    call = client.channel.unary_stream(
        "/disagg.v1.Inference/Generate",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    request = request_type(model=cluster.model, text="The capital of France is")
    request.sampling.max_tokens = 6
    request.sampling.temperature = 0
    text = "".join(update.delta.text for update in call(request, timeout=240) if update.HasField("delta"))
    assert "Paris" in text


@pytest.mark.timeout(600)
def test_the_official_openai_client_passes_its_test_file(cluster: Cluster) -> None:
    env = {**os.environ, "DISAGG_TEST_OPENAI_URL": f"{cluster.http}/v1", "DISAGG_TEST_OPENAI_MODEL": cluster.model}
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/api/test_openai_client.py"],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert result.returncode == 0, result.stdout[-5000:]
