"""The stubs and handlers on a real loopback port: streams both ways, statuses, health, and a client with no protos."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import AbortLeg, LegEnd, LoadReport, Outcome, ServerHello, ServerState
from disagg.messages.link import Complete, LinkHello, RankInfo, SentAll
from disagg.types import errors
from disagg.types.ids import FinishReason, LegKey, Role
from disagg.types.sampling import SamplingParams
from disagg.wire import inference, pb, peer, server, services, status
from tests.wire.serving import is_serving

pytestmark = pytest.mark.timeout(120)

KEY = LegKey("r", 1, 0)
LOAD = LoadReport(ServerState.READY, 0, 0, 0, 10, 0, 10)
HELLO = ServerHello("p", Role.PREFILL, 1, 7, (8,), "inc", "fp", "m", 100, 1000, "127.0.0.1:1", LOAD)


class EchoInference(services.InferenceServicer):
    """Answers with the prompt's words, one delta each; raises `failure` where one is set."""

    def __init__(self, failure=None):
        self.failure = failure

    async def generate(self, request, context):
        if self.failure is not None:
            await status.abort_with(context, self.failure)
        fields = inference.generate_request_from_proto(request, 1 << 24)
        yield inference.started_to_proto(inference.StartedView("id-1", (1, 2), 5.0))
        words = fields["prompt"].split()
        for number, word in enumerate(words):
            finish = FinishReason.STOP if number == len(words) - 1 else None
            yield inference.choice_delta_to_proto(inference.ChoiceDeltaView(0, word, (number,), finish=finish))
        usage = inference.UsageView(2, len(words), 0)
        yield inference.finished_to_proto(inference.FinishedView(usage, (), 1))

    async def tokenize(self, request, context):
        return inference.tokenize_response_to_proto([len(word) for word in request.text.split()])

    async def detokenize(self, request, context):
        return inference.detokenize_response_to_proto("-".join(map(str, request.token_ids)))

    async def list_models(self, request, context):
        return inference.list_models_response_to_proto([inference.ModelInfo("m", 100)])

    async def abort(self, request, context):
        return pb.inference.AbortResponse(found=inference.abort_request_from_proto(request) == ("id-1", "secret"))


class EndingServer(services.ServerServicer):
    """Ends every leg that it is asked to abort."""

    async def attach(self, requests, context):
        hello = server.router_frame_from_proto(await anext(requests))
        assert isinstance(hello, server.RouterHello)
        reply = server.AttachReply(hello.last_received, resumed=False)
        yield server.server_says_to_proto(server.ServerSays(Frame(0, 0, ()), None, HELLO, reply))
        channel = ReliableChannel()
        async for request in requests:
            ends = tuple(
                LegEnd(message.key, Outcome.ABORTED, "asked")
                for message in channel.take(server.router_frame_from_proto(request), now_s=0.0)
            )
            yield server.server_says_to_proto(server.ServerSays(channel.push(ends, now_s=0.0), LOAD))

    async def dump(self, request, context):
        return pb.server.DumpResponse(text="all quiet")


class CompletingPeer(services.PeerServicer):
    """Greets back, and completes every leg that was sent."""

    async def link(self, requests, context):
        greeting = peer.link_frame_from_proto(await anext(requests))
        assert isinstance(greeting, peer.LinkGreeting)
        yield peer.link_greeting_to_proto(greeting)
        channel = ReliableChannel()
        async for request in requests:
            taken = channel.take(peer.link_frame_from_proto(request), now_s=0.0)
            done = tuple(Complete(message.key) for message in taken)
            yield peer.link_frame_to_proto(channel.push(done, now_s=0.0))


@contextlib.asynccontextmanager
async def serving(*handlers, prepare=None):
    """A channel to a server of these handlers. prepare: awaited with the server before it starts."""
    grpc_server = services.make_server(*handlers)
    if prepare is not None:
        await prepare(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    channel = services.open_channel(f"127.0.0.1:{port}")
    try:
        yield channel
    finally:
        await channel.close()
        await grpc_server.stop(None)


async def test_a_router_attaches_and_its_messages_are_answered():
    async with serving(services.server_handler(EndingServer())) as channel:
        stub = services.ServerStub(channel)
        call = stub.attach()
        await call.write(server.router_hello_to_proto(server.RouterHello("r0", "ri", "s1", 0)))
        welcome = server.server_says_from_proto(await call.read())
        assert (welcome.hello, welcome.attached) == (HELLO, server.AttachReply(0, False))
        router = ReliableChannel()
        for attempt in range(3):
            frame = router.push((AbortLeg(LegKey("r", attempt, 0)),), now_s=0.0)
            await call.write(server.router_frame_to_proto(frame))
            says = server.server_says_from_proto(await call.read())
            assert router.take(says.frame, now_s=0.0) == (LegEnd(LegKey("r", attempt, 0), Outcome.ABORTED, "asked"),)
            assert says.load == LOAD
        assert router.unacked == 0
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert (await stub.dump(pb.server.DumpRequest())).text == "all quiet"


async def test_two_engines_link_and_complete_a_leg():
    async with serving(services.peer_handler(CompletingPeer())) as channel:
        call = services.PeerStub(channel).link()
        greeting = peer.LinkGreeting(
            LinkHello("d", "gen", "inc", "fp", 1, "host", (RankInfo(0, 1, 1, b"", 0, 0, 0),)), 0
        )
        await call.write(peer.link_greeting_to_proto(greeting))
        assert peer.link_frame_from_proto(await call.read()) == greeting
        decode = ReliableChannel()
        await call.write(peer.link_frame_to_proto(decode.push((SentAll(KEY, 3),), now_s=0.0)))
        frame = peer.link_frame_from_proto(await call.read())
        assert decode.take(frame, now_s=0.0) == (Complete(KEY),)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_client_generates_tokenizes_lists_and_aborts():
    async with serving(services.inference_handler(EchoInference())) as channel:
        stub = services.InferenceStub(channel)
        request = inference.generate_request_to_proto(
            model="m", prompt="alpha beta", params=SamplingParams(max_tokens=0)
        )
        updates = [inference.update_from_proto(response) async for response in stub.generate(request)]
        assert [type(update) for update in updates] == [
            inference.StartedView,
            inference.ChoiceDeltaView,
            inference.ChoiceDeltaView,
            inference.FinishedView,
        ]
        assert [update.text for update in updates[1:3]] == ["alpha", "beta"]
        assert updates[2].finish is FinishReason.STOP
        assert list((await stub.tokenize(pb.inference.TokenizeRequest(text="a bb ccc"))).token_ids) == [1, 2, 3]
        assert (await stub.detokenize(pb.inference.DetokenizeRequest(token_ids=[4, 5]))).text == "4-5"
        assert (await stub.list_models(pb.inference.ListModelsRequest())).models[0].name == "m"
        assert (await stub.abort(pb.inference.AbortRequest(request_id="id-1", abort_token="secret"))).found


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("top_p is 3", "top_p"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UnknownModel("no model x", "model"), grpc.StatusCode.NOT_FOUND),
        (errors.Overloaded("the queue is full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable("no server"), grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.Cancelled("aborted"), grpc.StatusCode.CANCELLED),
        (errors.RequestFailed("poison – thrice"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_an_error_reaches_the_client_as_its_status_and_comes_back_as_itself(error, code):
    async with serving(services.inference_handler(EchoInference(error))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in services.InferenceStub(channel).generate(pb.inference.GenerateRequest()):
                pass
        assert caught.value.code() is code
        back = status.error_of(caught.value)
        assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NoCompatiblePeer("layouts differ"), grpc.StatusCode.UNAVAILABLE),
        (errors.ProtocolError("nonsense"), grpc.StatusCode.INTERNAL),
        (errors.ConfigError("bad"), grpc.StatusCode.INTERNAL),
    ],
)
def test_errors_that_are_not_a_clients_have_a_status_too(error, code):
    assert status.status_of(error) is code
    assert status.trailers_of(error) == ()


def test_the_hint_to_retry_is_never_shorter_than_asked():
    assert status.trailers_of(errors.Overloaded("", 0.0001)) == (("retry-after-ms", "1"),)


async def test_health_follows_the_server():
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        await made[0].set_serving(True)
        assert await is_serving(channel)
        assert await is_serving(channel, services.SERVER)
        await made[0].set_serving(False)
        assert not await is_serving(channel, services.SERVER)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await is_serving(channel, services.PEER)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_lists_what_it_is_asked_of():
    """Or anybody could fill the log with a failure: health asks for no key."""
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        await made[0].set_serving(True)
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert {name: each.status for name, each in listed.statuses.items()} == {
            "": serving_now,
            services.SERVER: serving_now,
        }


async def test_health_begins_as_not_serving_and_can_be_watched():
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        assert not await is_serving(channel)
        reply = health_pb2.HealthCheckResponse
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=services.SERVER))
        unknown = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=services.PEER))
        assert (await call.read()).status == reply.NOT_SERVING
        await made[0].set_serving(True)
        assert (await call.read()).status == reply.SERVING
        await made[0].set_serving(False)
        assert (await call.read()).status == reply.NOT_SERVING
        assert (await unknown.read()).status == reply.SERVICE_UNKNOWN
        call.cancel()
        unknown.cancel()


async def test_messages_above_grpcs_default_of_4_mib_pass():
    async with serving(services.inference_handler(EchoInference())) as channel:
        request = pb.inference.TokenizeRequest(text="x" * (8 << 20))
        assert list((await services.InferenceStub(channel).tokenize(request)).token_ids) == [8 << 20]


async def test_a_second_server_on_the_same_port_is_refused():
    first = services.make_server()
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    try:
        with pytest.raises(RuntimeError, match="Failed to bind"):
            services.make_server().add_insecure_port(f"127.0.0.1:{port}")
    finally:
        await first.stop(None)


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


@pytest.mark.parametrize(
    ("service", "handler", "servicer"),
    [
        (pb.inference.DESCRIPTOR.services_by_name["Inference"], services.inference_handler, EchoInference()),
        (pb.server.DESCRIPTOR.services_by_name["Server"], services.server_handler, EndingServer()),
        (pb.peer.DESCRIPTOR.services_by_name["Peer"], services.peer_handler, CompletingPeer()),
    ],
    ids=["Inference", "Server", "Peer"],
)
def test_every_method_of_the_protos_is_handled_with_its_shape(service, handler, servicer):
    assert handler(servicer).service_name() == service.full_name
    for method in service.methods:

        class Details:
            invocation_metadata = ()

            def __init__(self, path):
                self.method = path

        found = handler(servicer).service(Details(f"/{service.full_name}/{method.name}"))
        assert found is not None, method.full_name
        assert (found.request_streaming, found.response_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
        request = message_factory.GetMessageClass(method.input_type)()
        assert type(found.request_deserializer(request.SerializeToString())).DESCRIPTOR is method.input_type


def test_a_servicer_that_lacks_a_method_cannot_be_made():
    class Half(services.ServerServicer):
        async def dump(self, request, context):
            return pb.server.DumpResponse()

    with pytest.raises(TypeError, match="attach"):
        Half()


def test_wire_does_not_load_torch():
    code = (
        "import sys, disagg.wire.services, disagg.wire.peer, disagg.wire.status;"
        "print(sorted({'torch', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keepalive_does_not_count_as_an_attack():
    options = dict(services.SERVER_OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < services.KEEPALIVE_MS


SILENT_SERVER = """
import asyncio
from disagg.wire import services

class Silent(services.ServerServicer):
    async def attach(self, requests, context):
        async for request in requests:
            yield services.pb.server.ServerFrame()

    async def dump(self, request, context):
        raise NotImplementedError

async def main():
    server = services.make_server(services.server_handler(Silent()))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_by_keepalive_and_an_idle_one_is_left_alone():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SILENT_SERVER, stdout=asyncio.subprocess.PIPE)
    try:
        channel = services.open_channel(f"127.0.0.1:{int(await process.stdout.readline())}")
        call = services.ServerStub(channel).attach()
        await call.write(pb.server.RouterFrame())
        await call.read()
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([reading], timeout=services.KEEPALIVE_MS / 1000 + 2)
        assert not done
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(reading, 2 * services.KEEPALIVE_MS / 1000 + 2)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
    finally:
        process.kill()
        await process.wait()


async def test_cancelling_a_call_ends_the_servicers_generator():
    ended = asyncio.Event()

    class Endless(EchoInference):
        async def generate(self, request, context):
            try:
                while True:
                    yield inference.choice_delta_to_proto(inference.ChoiceDeltaView(0, "x", (1,)))
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

    async with serving(services.inference_handler(Endless())) as channel:
        call = services.InferenceStub(channel).generate(pb.inference.GenerateRequest())
        await call.read()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 30)


class SwallowingCall:
    """What gRPC's call does when it ends just as a read that waits for it to begin is cancelled."""

    def __init__(self, ending: grpc.aio.AioRpcError | None) -> None:
        self.reads = 0
        self._ending = ending

    async def read(self):
        self.reads += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        if self._ending is not None:
            raise self._ending
        return grpc.aio.EOF


@pytest.mark.parametrize(
    "ending",
    [None, grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())],
    ids=["ended", "broken"],
)
async def test_who_is_cancelled_while_reading_ends_even_if_the_call_swallows_it(ending):
    call = SwallowingCall(ending)

    async def again_and_again():
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await services.read_message(call)

    task = asyncio.create_task(again_and_again())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert call.reads == 1


async def test_a_time_limit_that_a_call_swallows_is_a_time_limit_still():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await services.read_message(SwallowingCall(None))
