"""A client with no protos: all that it needs to know comes from the server, on a real loopback port."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.wire import services
from tests.wire.servicers import CompletingPeer, EchoInference, EndingServer, serving

pytestmark = pytest.mark.timeout(120)


class Reflected:
    """A client that knows no protos: descriptors, message classes and methods all come from the server."""

    def __init__(self, channel):
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool()

    async def _ask(self, **request):
        call = reflection_pb2_grpc.ServerReflectionStub(self._channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(**request))
        reply = await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return reply

    async def services(self):
        reply = await self._ask(list_services="")
        return {service.name for service in reply.list_services_response.service}

    async def load(self, service):
        reply = await self._ask(file_containing_symbol=service)
        for raw in reply.file_descriptor_response.file_descriptor_proto:
            await self._add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        return self._pool.FindServiceByName(service)

    async def _add(self, file):
        for dependency in file.dependency:
            try:
                self._pool.FindFileByName(dependency)
            except KeyError:
                reply = await self._ask(file_by_filename=dependency)
                for raw in reply.file_descriptor_response.file_descriptor_proto:
                    await self._add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        self._pool.AddSerializedFile(file.SerializeToString())

    def unary_stream(self, method, request):
        """request: JSON. Yields JSON."""
        make_request = message_factory.GetMessageClass(method.input_type)
        make_reply = message_factory.GetMessageClass(method.output_type)
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = self._channel.unary_stream(path, make_request.SerializeToString, make_reply.FromString)
        return call(json_format.ParseDict(request, make_request()))


async def test_a_client_that_knows_only_reflection_can_generate():
    async def prepare(grpc_server):
        services.enable_reflection(grpc_server, [services.INFERENCE])

    async with serving(services.inference_handler(EchoInference()), prepare=prepare) as channel:
        client = Reflected(channel)
        assert services.INFERENCE in await client.services()
        service = await client.load(services.INFERENCE)
        assert {method.name for method in service.methods} == {
            "Generate",
            "Tokenize",
            "Detokenize",
            "ListModels",
            "Abort",
        }
        request = {"model": "m", "text": "one two", "sampling": {"maxTokens": 4, "temperature": 0}}
        call = client.unary_stream(service.methods_by_name["Generate"], request)
        replies = [json_format.MessageToDict(reply) async for reply in call]
        assert [list(reply) for reply in replies] == [["started"], ["delta"], ["delta"], ["finished"]]
        assert replies[1]["delta"]["text"] == "one"
        assert replies[2]["delta"]["finish"] == "FINISH_REASON_STOP"


async def test_reflection_serves_protos_with_all_that_they_import():
    async def prepare(grpc_server):
        services.enable_reflection(grpc_server, [services.SERVER, services.PEER])

    handlers = (services.server_handler(EndingServer()), services.peer_handler(CompletingPeer()))
    async with serving(*handlers, prepare=prepare) as channel:
        client = Reflected(channel)
        assert {services.SERVER, services.PEER, services.HEALTH} <= await client.services()
        service = await client.load(services.PEER)
        assert [method.name for method in service.methods] == ["Link"]
