"""Stubs, servicers' base classes and handlers of our three services on grpc.aio, and the options of every channel.

Written by hand, because the generated ones are untyped and add nothing. A servicer's methods take and give protobuf
messages; `wire.inference`, `wire.server` and `wire.peer` turn those into values.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from disagg.types.plain import quoted
from disagg.wire import pb
from disagg.wire.fields import Undecodable

INFERENCE = "disagg.v1.Inference"
SERVER = "disagg.v1.Server"
PEER = "disagg.v1.Peer"
HEALTH = health.SERVICE_NAME

MAX_MESSAGE_BYTES = 64 << 20
# What a server reads at once from a router or a peer. To decode it takes some 20 ms of its loop, and eight times the memory
# at worst (tokens of one byte); a prompt of a million tokens has 3 MiB.
MAX_FRAME_BYTES = 16 << 20
KEEPALIVE_MS = 5000

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A host that dies without closing its connections is noticed within twice this time. ping_timeout_ms is the one
    # that counts (seen with gRPC 1.85); it is a minute by default, whatever keepalive_timeout_ms says.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # peers are dialled as they say, whatever the environment
    # A restarted server is found again in about a second, not in gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, unless both say that they share it
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # or the keepalive above is taken for an attack
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """address: host:port. Connects lazily; in the clear without credentials. server_name: that the server's certificate must
    have in the place of the host; empty: the host."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *name))


def client_options(max_connections: int, max_calls: int, head_s: float, idle_s: float) -> tuple[tuple[str, int], ...]:
    """Bounds of a server that is open to clients, on top of SERVER_OPTIONS. max_calls: open at once on one connection.

    A connection that has not greeted within head_s, or had no call for idle_s, is closed; a client dials again by itself.
    """
    return (
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.server_handshake_timeout_ms", math.ceil(head_s * 1000)),
        ("grpc.max_connection_idle_ms", math.ceil(idle_s * 1000)),
    )


def make_server(
    *handlers: grpc.GenericRpcHandler,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: tuple[tuple[str, int], ...] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server that is not listening yet. What is larger than max_request_bytes is refused before it is read."""
    most = min(max_request_bytes, MAX_MESSAGE_BYTES)
    given = {
        **dict(SERVER_OPTIONS),
        **dict(options),
        "grpc.max_receive_message_length": most,
    }  # each once: the first counts
    server = grpc.aio.server(options=tuple(given.items()), interceptors=interceptors)
    server.add_generic_rpc_handlers(handlers)
    return server


def _reader(kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> Callable[[bytes], Any]:
    """Decodes messages of this kind. What is none, or too long, becomes Undecodable: to raise would end the call without
    a word on why, or the task that reads."""
    name = kind.DESCRIPTOR.name

    def read(data: bytes) -> Any:
        if len(data) > max_bytes:
            return Undecodable(f"a {name} of {len(data)} bytes came; at most {max_bytes} may be")
        try:
            return kind.FromString(data)
        except DecodeError:
            return Undecodable(f"what came is no {name}")

    return read


# ---- Inference: clients to routers


class InferenceServicer(ABC):
    """disagg.v1.Inference, to be implemented by the router's gRPC face."""

    @abstractmethod
    def generate(
        self, request: pb.inference.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.inference.GenerateResponse]:
        """An async generator."""

    @abstractmethod
    async def tokenize(
        self, request: pb.inference.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.inference.TokenizeResponse: ...

    @abstractmethod
    async def detokenize(
        self, request: pb.inference.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.inference.DetokenizeResponse: ...

    @abstractmethod
    async def list_models(
        self, request: pb.inference.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.inference.ListModelsResponse: ...

    @abstractmethod
    async def abort(
        self, request: pb.inference.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.inference.AbortResponse: ...


def inference_handler(servicer: InferenceServicer) -> grpc.GenericRpcHandler:
    messages = pb.inference
    return grpc.method_handlers_generic_handler(
        INFERENCE,
        {
            "Generate": grpc.unary_stream_rpc_method_handler(
                servicer.generate,
                messages.GenerateRequest.FromString,
                messages.GenerateResponse.SerializeToString,
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                servicer.tokenize,
                messages.TokenizeRequest.FromString,
                messages.TokenizeResponse.SerializeToString,
            ),
            "Detokenize": grpc.unary_unary_rpc_method_handler(
                servicer.detokenize,
                messages.DetokenizeRequest.FromString,
                messages.DetokenizeResponse.SerializeToString,
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                servicer.list_models,
                messages.ListModelsRequest.FromString,
                messages.ListModelsResponse.SerializeToString,
            ),
            "Abort": grpc.unary_unary_rpc_method_handler(
                servicer.abort,
                messages.AbortRequest.FromString,
                messages.AbortResponse.SerializeToString,
            ),
        },
    )


class InferenceStub:
    """Calls disagg.v1.Inference. Each attribute is a multi-callable of grpc.aio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        messages = pb.inference
        self.generate = channel.unary_stream(
            f"/{INFERENCE}/Generate",
            messages.GenerateRequest.SerializeToString,
            messages.GenerateResponse.FromString,
        )
        self.tokenize = channel.unary_unary(
            f"/{INFERENCE}/Tokenize",
            messages.TokenizeRequest.SerializeToString,
            messages.TokenizeResponse.FromString,
        )
        self.detokenize = channel.unary_unary(
            f"/{INFERENCE}/Detokenize",
            messages.DetokenizeRequest.SerializeToString,
            messages.DetokenizeResponse.FromString,
        )
        self.list_models = channel.unary_unary(
            f"/{INFERENCE}/ListModels",
            messages.ListModelsRequest.SerializeToString,
            messages.ListModelsResponse.FromString,
        )
        self.abort = channel.unary_unary(
            f"/{INFERENCE}/Abort",
            messages.AbortRequest.SerializeToString,
            messages.AbortResponse.FromString,
        )


# ---- Server: routers to servers


class ServerServicer(ABC):
    """disagg.v1.Server, to be implemented by prefill and decode servers."""

    @abstractmethod
    def attach(
        self, requests: AsyncIterator[pb.server.RouterFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.server.ServerFrame]:
        """An async generator; `requests` may be read by another task meanwhile."""

    @abstractmethod
    async def dump(
        self, request: pb.server.DumpRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.server.DumpResponse: ...


def server_handler(servicer: ServerServicer) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVER,
        {
            "Attach": grpc.stream_stream_rpc_method_handler(
                servicer.attach,
                _reader(pb.server.RouterFrame, MAX_FRAME_BYTES),
                pb.server.ServerFrame.SerializeToString,
            ),
            "Dump": grpc.unary_unary_rpc_method_handler(
                servicer.dump, _reader(pb.server.DumpRequest), pb.server.DumpResponse.SerializeToString
            ),
        },
    )


class ServerStub:
    """Calls disagg.v1.Server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.attach = channel.stream_stream(
            f"/{SERVER}/Attach", pb.server.RouterFrame.SerializeToString, _reader(pb.server.ServerFrame)
        )
        self.dump = channel.unary_unary(
            f"/{SERVER}/Dump", pb.server.DumpRequest.SerializeToString, pb.server.DumpResponse.FromString
        )


# ---- Peer: decode servers to prefill servers


class PeerServicer(ABC):
    """disagg.v1.Peer, to be implemented by prefill servers."""

    @abstractmethod
    def link(
        self, requests: AsyncIterator[pb.peer.LinkFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.peer.LinkFrame]:
        """An async generator; `requests` may be read by another task meanwhile."""


def peer_handler(servicer: PeerServicer) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        PEER,
        {
            "Link": grpc.stream_stream_rpc_method_handler(
                servicer.link,
                _reader(pb.peer.LinkFrame, MAX_FRAME_BYTES),
                pb.peer.LinkFrame.SerializeToString,
            )
        },
    )


class PeerStub:
    """Calls disagg.v1.Peer."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.link = channel.stream_stream(
            f"/{PEER}/Link", pb.peer.LinkFrame.SerializeToString, _reader(pb.peer.LinkFrame)
        )


# ---- health and reflection


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """grpc.health.v1 of a server that has not started: of each of `services`, and of the whole ("").

    All of them serve, or none does; at first none. (The servicer that comes with grpc_health begins as serving.)
    """

    def __init__(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        self._names = frozenset(("", *services))
        self._serving = False
        self._changed = asyncio.Condition()
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def set_serving(self, serving: bool) -> None:
        if serving == self._serving:
            return
        async with self._changed:
            self._serving = serving
            self._changed.notify_all()

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {quoted(request.service)} here")
        return self._status(request.service)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses={name: self._status(name) for name in self._names})

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            now = self._status(request.service)
            if now != last:
                yield now
                last = now
            async with self._changed:
                if self._status(request.service) == last:
                    await self._changed.wait()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        reply = health_pb2.HealthCheckResponse
        if service not in self._names:
            return reply(status=reply.SERVICE_UNKNOWN)
        return reply(status=reply.SERVING if self._serving else reply.NOT_SERVING)


def enable_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Lets a client that has no protos list and call `services`, health and reflection itself."""
    reflection.enable_server_reflection((*services, HEALTH, reflection.SERVICE_NAME), server)


async def read_message(call: Any) -> Any:
    """What a call receives next, or grpc.aio.EOF. Raises as `call.read`, and CancelledError whenever this task is cancelled:
    a read that still waits for the call to begin when the call ends swallows that (seen with gRPC 1.85), and a loop of
    calls would go on for ever.
    """
    try:
        message = await call.read()
    except grpc.aio.AioRpcError:
        _stop_if_cancelled()
        raise
    _stop_if_cancelled()
    return message


def _stop_if_cancelled() -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
