"""The stubs and handlers on a real loopback port: streams both ways, statuses, and what is handled at all."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from google.protobuf import message_factory

from disagg.messages.channel import ReliableChannel
from disagg.messages.legs import AbortLeg, LegEnd, Outcome
from disagg.messages.link import Complete, LinkHello, RankInfo, SentAll
from disagg.types import errors
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams
from disagg.wire import inference, pb, peer, server, services, status
from tests.wire.servicers import HELLO, LOAD, CompletingPeer, EchoInference, EndingServer, serving

pytestmark = pytest.mark.timeout(120)

KEY = LegKey("r", 1, 0)


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
