"""What stands between a client and every gRPC method of a server that clients reach: bounded waits, and errors in our words.

Left to itself, grpc.aio tells a client which Python class an undecodable message or a bug of ours raised (with status
UNKNOWN), waits for a request's message and for a reader without end, and says nothing of either to anybody. The guard takes
messages as bytes and decodes them itself.

Unary requests are taken as streams of one message: on the wire these are the same, but grpc.aio reads a unary message before
anything of ours runs, so nothing could bound how long it takes to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from disagg.telemetry.memory import GiveBack
from disagg.types.errors import InvalidRequest
from disagg.wire.status import abort_with

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
INTERNAL = "the server failed on this request; its log says why"
_LAST_WORDS_S = 1.0  # for the status of a call whose client does not read: it may never leave


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """request_s: within which a request's message comes. stall_s: within which a client takes one message of an answer.

    refused: told the method, why ("undecodable", "no_message", "request_timeout", "stalled", "failed") and the error that
    the client is given. open_calls: how many run now.
    """

    def __init__(
        self, request_s: float, stall_s: float, refused: Callable[[str, str, InvalidRequest | None], None]
    ) -> None:
        self._request_s = request_s
        self._stall_s = stall_s
        self._refused = refused
        self._give_back = GiveBack()
        self.open_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        return None if handler is None else self._guarded(cast(Any, handler), str(details.method))

    def _guarded(self, handler: Any, method: str) -> grpc.RpcMethodHandler:
        if handler.response_streaming:
            # A handler that writes by itself, rather than a generator: only then can a write be timed.
            async def stream(requests: object, context: Context) -> None:
                with self._counted():
                    await self._watched(self._stream(handler, method, context), method, context)

            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

        async def unary(requests: object, context: Context) -> object:
            with self._counted():
                return await self._watched(self._unary(handler, method, context), method, context)

        return grpc.stream_unary_rpc_method_handler(unary, None, handler.response_serializer)

    async def _unary(self, handler: Any, method: str, context: Context) -> object:
        assert not handler.request_streaming, "no method of ours takes a stream and answers with one message"
        return await handler.unary_unary(await self._request(handler, method, context), context)

    async def _stream(self, handler: Any, method: str, context: Context) -> None:
        if handler.request_streaming:
            answers = handler.stream_stream(self._requests(handler, method, context), context)
        else:
            answers = handler.unary_stream(await self._request(handler, method, context), context)
        async with aclosing(answers):
            async for answer in answers:
                await self._write(answer, method, context)

    async def _watched(self, call: Awaitable[object], method: str, context: Context) -> object:
        """What the call gives; a bug of ours is the log's business, and the client learns that there was one."""
        try:
            return await call
        except grpc.aio.BaseError:
            raise  # the call was ended with a status, or the client is gone
        except Exception:
            if context.done():
                raise
            logger.exception("%s failed", method)
            self._refused(method, "failed", None)
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)
            raise AssertionError("ServicerContext.abort raises") from None

    async def _request(self, handler: Any, method: str, context: Context) -> object:
        """The one message of a unary request."""
        try:
            async with asyncio.timeout(self._request_s):
                raw = await context.read()
        except TimeoutError:
            why = f"the message of the request did not come within {self._request_s:g} s"
            self._refused(method, "request_timeout", InvalidRequest(why))
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        if raw is grpc.aio.EOF:
            # None was sent, or one that gRPC itself has refused (with RESOURCE_EXHAUSTED) because it is too large.
            none = InvalidRequest("the request has no message that could be read")
            self._refused(method, "no_message", none)
            await abort_with(context, none)
        return await self._decoded(raw, handler, method, context)

    async def _requests(self, handler: Any, method: str, context: Context) -> AsyncIterator[object]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            yield await self._decoded(raw, handler, method, context)

    async def _decoded(self, raw: bytes, handler: Any, method: str, context: Context) -> object:
        self._give_back.after(len(raw))
        try:
            return handler.request_deserializer(raw)
        except DecodeError:
            error = InvalidRequest(
                f"the request's message is not what {method.lstrip('/')} takes: it cannot be decoded"
            )
            self._refused(method, "undecodable", error)
            await abort_with(context, error)

    async def _write(self, answer: object, method: str, context: Context) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(answer)
        except TimeoutError:
            logger.info("%s is given up: its client took nothing for %g s", method, self._stall_s)
            self._refused(method, "stalled", None)
            with contextlib.suppress(TimeoutError):  # the status waits behind what is not read
                async with asyncio.timeout(_LAST_WORDS_S):
                    why = f"nothing of the answer was taken for {self._stall_s:g} s"
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
            raise asyncio.CancelledError from None

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.open_calls += 1
        try:
            yield
        finally:
            self.open_calls -= 1
