"""Servicers that answer in the simplest way, and a channel to a real server of them."""

from __future__ import annotations

import contextlib

from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import LegEnd, LoadReport, Outcome, ServerHello, ServerState
from disagg.messages.link import Complete
from disagg.types.ids import FinishReason, Role
from disagg.wire import inference, pb, peer, server, services, status

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
