"""Errors to gRPC statuses, at the router's face, and back, in a client of ours."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import grpc

from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    Overloaded,
    RequestError,
    RequestFailed,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from disagg.types.plain import fit_for_header, fit_for_status

RETRY_AFTER_KEY = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED: when to try again
PARAM_KEY = "error-param"  # trailing metadata of INVALID_ARGUMENT and NOT_FOUND: the field at fault

MAX_DETAILS_BYTES = 3000  # percent-encoded; beyond 8 KiB of headers a client sees a reset stream, not our words

# First match by class wins. What has no row (ConfigError, ProtocolError) is no fault of a client's: INTERNAL.
_CODES: tuple[tuple[type[DisaggError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (RequestFailed, grpc.StatusCode.INTERNAL),
)


def status_of(error: DisaggError) -> grpc.StatusCode:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def trailers_of(error: DisaggError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that a client may act on."""
    if isinstance(error, Overloaded):
        return ((RETRY_AFTER_KEY, str(math.ceil(error.retry_after_s * 1000))),)
    if isinstance(error, RequestError) and error.param is not None:
        return ((PARAM_KEY, fit_for_header(error.param)),)
    return ()


def details_of(error: object) -> str:
    """What the status says: one line that fits with the trailers into what HTTP/2 allows of headers."""
    return fit_for_status(str(error), MAX_DETAILS_BYTES)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: DisaggError) -> NoReturn:
    """Ends the call with the error's status. Never returns. Call it outside of `except`, without the request at hand.

    gRPC keeps the exception that ends the call, and that the frames that it passed, in a circle that only the garbage
    collector opens: what those frames, or the error's own, still name would stay in memory until it runs.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    await context.abort(status_of(error), details_of(error), trailers_of(error))
    raise AssertionError("ServicerContext.abort raises")


def error_of(call_error: grpc.aio.AioRpcError) -> DisaggError:
    """The error that a failed call means to a client of ours."""
    code = call_error.code()
    text = call_error.details() or code.name
    trailers = {key: value for key, value in call_error.trailing_metadata() or () if isinstance(value, str)}
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(text, trailers.get(PARAM_KEY))
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(text, trailers.get(PARAM_KEY))
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(text, "refused")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if trailers.get(RETRY_AFTER_KEY, "").isdecimal():
            return Overloaded(text, int(trailers[RETRY_AFTER_KEY]) / 1000)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: the message is larger than is allowed
            return InvalidRequest(text)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(text)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(text)
        case grpc.StatusCode.CANCELLED:
            return Cancelled(text)
        case _:
            return RequestFailed(text)
