"""Errors in OpenAI's shape: which HTTP status, type and code each one of ours has. Pure.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    DisaggError,
    InvalidRequest,
    NoCompatiblePeer,
    Overloaded,
    RequestError,
    RequestFailed,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownServer,
)
from disagg.types.plain import NAME_CHARS, one_line

UNAVAILABLE_RETRY_AFTER_S = 1.0


class BadField(InvalidRequest):
    """A field that this API refuses. code: OpenAI's word for why, e.g. "unknown_parameter"."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message, param)
        self.code = code


class BodyTooLarge(InvalidRequest):
    """The request's body has more bytes than are allowed."""


class UnreadableBody(InvalidRequest):
    """The request's body is encoded in a way that is not served."""


class Fault(Struct, frozen=True):
    """One error as HTTP says it. retry_after_s: whole seconds, where trying again may help. final: it was tried here as often as
    it may be, and OpenAI's clients, which send again whatever fails with 5xx, are told not to.
    """

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    final: bool = False

    def body(self) -> bytes:
        """Clipped and escaped here: messages and params repeat what clients said, which may be any text of any length."""
        param = None if self.param is None else one_line(self.param, NAME_CHARS)
        error = {"message": one_line(self.message), "type": self.type, "param": param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**headers, "x-should-retry": "false"} if self.final else headers


# The first row whose class fits counts, so subclasses come before their bases.
_ROWS: tuple[tuple[type[DisaggError], int, str, str | None], ...] = (
    (BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (UnreadableBody, 415, "invalid_request_error", "unsupported_encoding"),
    (Unauthenticated, 401, "invalid_request_error", "invalid_api_key"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (UnknownServer, 404, "invalid_request_error", "server_not_found"),
    (RequestError, 400, "invalid_request_error", None),
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (NoCompatiblePeer, 503, "service_unavailable_error", "no_compatible_peer"),
    (Unavailable, 503, "service_unavailable_error", "service_unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Cancelled, 499, "cancelled_error", "request_cancelled"),
    (DisaggError, 500, "server_error", "request_failed"),
)

INTERNAL = Fault(500, "server_error", "the server failed on this request; its log says why", code="internal_error")

_HTTP_CODES = {403: "forbidden", 404: "unknown_url", 405: "method_not_supported"}


def fault_of(error: DisaggError) -> Fault:
    """How HTTP says this error."""
    status, kind, code = next(row[1:] for row in _ROWS if isinstance(error, row[0]))
    retry_after_s = None
    if isinstance(error, Overloaded):
        retry_after_s = max(1, math.ceil(error.retry_after_s))
    elif isinstance(error, Unavailable):
        retry_after_s = math.ceil(UNAVAILABLE_RETRY_AFTER_S)
    return Fault(
        status,
        kind,
        str(error),
        param=error.param if isinstance(error, RequestError) else None,
        code=error.code if isinstance(error, BadField) else code,
        retry_after_s=retry_after_s,
        final=isinstance(error, DeadlineExceeded | RequestFailed),
    )


def fault_of_http(status: int, method: str, path: str, detail: str) -> Fault:
    """How an error of HTTP itself (no such path, wrong method) is said."""
    message = f"{method} {path}: {detail.lower()}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Fault(status, kind, message, code=_HTTP_CODES.get(status))
