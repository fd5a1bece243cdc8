"""Dials a server's `disagg.v1.Server/Attach` with gRPC. Knows the wire; nothing of channels, leases or requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from disagg.messages.channel import Frame
from disagg.messages.legs import RouterMessage
from disagg.router.streams import Connection, NameTaken, Refused, VersionRefused
from disagg.types.addresses import split
from disagg.types.errors import ProtocolError, Unavailable
from disagg.wire.server import (
    RouterHello,
    ServerSays,
    router_frame_to_proto,
    router_hello_to_proto,
    server_says_from_proto,
)
from disagg.wire.services import ServerStub, open_channel, read_message


class GrpcConnection:
    """One Attach call and the channel that it owns."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._channel = channel
        self._call = call

    async def write(self, frame: Frame[RouterMessage]) -> None:
        await self.write_message(router_frame_to_proto(frame))

    async def write_message(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _broken(error) from error
        except asyncio.InvalidStateError as error:  # the call had ended
            raise Unavailable("the stream has ended") from error

    async def heard(self) -> AsyncIterator[ServerSays]:
        while (says := await self.next()) is not None:
            yield says

    async def next(self) -> ServerSays | None:
        """None: the server has ended the stream."""
        try:
            message = await read_message(self._call)
        except grpc.aio.AioRpcError as error:
            raise _broken(error) from error
        return None if message is grpc.aio.EOF else server_says_from_proto(message)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def dial_server(
    address: str, hello: RouterHello, timeout_s: float, channel_to: Callable[[str], grpc.aio.Channel] = open_channel
) -> tuple[Connection, ServerSays]:
    """Opens the stream, on a channel of its own, and exchanges hellos. Raises Refused, NameTaken, VersionRefused,
    Unavailable or ProtocolError."""
    try:
        async with asyncio.timeout(timeout_s):
            await _probe(address)
            channel = channel_to(address)
            connection = GrpcConnection(channel, ServerStub(channel).attach())
            try:
                await connection.write_message(router_hello_to_proto(hello))
                first = await connection.next()
                if first is None:
                    raise Unavailable("the server ended the stream at once")
                if first.hello is None or first.attached is None:
                    raise ProtocolError("the server's first message is not a hello")
            except BaseException:
                await connection.close()
                raise
            return connection, first
    except TimeoutError as error:
        raise Unavailable(f"no answer within {timeout_s:g} s") from error


async def _probe(address: str) -> None:
    """Tells "nobody listens" from every other failure, which gRPC reports alike."""
    host, port = split(address)
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError as error:
        raise Refused("connection refused") from error
    except OSError as error:
        raise Unavailable(f"cannot connect: {error}") from error
    writer.close()


def _broken(error: grpc.aio.AioRpcError) -> Unavailable:
    if error.code() is grpc.StatusCode.ALREADY_EXISTS:
        return NameTaken(f"this router is refused: {error.details()}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return VersionRefused(f"this router is refused: {error.details()}")
    return Unavailable(f"{error.code().name}: {error.details()}")
