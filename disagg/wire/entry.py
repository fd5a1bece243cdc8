"""Who may call the router's gRPC face, where it asks for credentials. Stands before every method, known or not, and before
messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from disagg.types.errors import Unauthenticated
from disagg.wire.services import HEALTH
from disagg.wire.status import abort_with

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_OWNER: ContextVar[str] = ContextVar("owner", default="")


def owner_of_call() -> str:
    """Within a method: the tenant whose key the call showed; empty where none is asked for."""
    return _OWNER.get()


class Entry(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """The first of a server's interceptors. Health is anonymous: probes have no keys.

    tenant_of: whose the values of `authorization` are; raises Unauthenticated. admitted: told tenant and method; refused:
    told why, the method and the client's address.
    """

    def __init__(
        self,
        tenant_of: Callable[[Sequence[bytes]], str],
        admitted: Callable[[str, str], None],
        refused: Callable[[str, str, str], None],
    ) -> None:
        self._tenant_of = tenant_of
        self._admitted = admitted
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = str(details.method)
        if method.startswith(f"/{HEALTH}/"):
            return await continuation(details)
        shown = [_bytes(value) for name, value in details.invocation_metadata or () if name == "authorization"]
        try:
            tenant = self._tenant_of(shown)
        except Unauthenticated as error:
            return self._refusal(str(error), error.reason, method)
        self._admitted(tenant, method)
        _OWNER.set(tenant)  # for the task of this call, in which its method runs
        return await continuation(details)

    def _refusal(self, why: str, reason: str, method: str) -> grpc.RpcMethodHandler:
        async def refuse(requests: object, context: Context) -> None:
            self._refused(reason, method, context.peer())
            await abort_with(context, Unauthenticated(why, reason))

        return grpc.stream_stream_rpc_method_handler(refuse)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
