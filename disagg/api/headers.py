"""What clients say of a call in headers: who they are, and what they wish. Bounded here."""

from __future__ import annotations

from starlette.requests import Request

from disagg.api.entry import owner_of
from disagg.router.tenants import TENANT_HEADER, tenant_of
from disagg.types.addresses import unmapped
from disagg.types.errors import InvalidRequest
from disagg.types.plain import quoted
from disagg.types.sampling import MAX_SESSION_CHARS, MAX_SLO_MS
from disagg.types.trace_context import MAX_CHARS

CLIENT_REQUEST_ID_CHARS = 128
SESSION = "x-session-id"
SLO = "x-slo-ttft-ms"
# Headers that tell clients of one address apart; the first one counts.
CREDENTIALS = ("authorization", "api-key", "x-api-key")


def client_request_id(request: Request) -> str:
    """For the logs only, so cut rather than refused."""
    return request.headers.get("x-request-id", "")[:CLIENT_REQUEST_ID_CHARS]


def tenant(request: Request) -> str:
    """Raises InvalidRequest."""
    named = _one(request, TENANT_HEADER)
    if owner := owner_of(request):
        return tenant_of("", name=owner)
    address = unmapped(request.client.host) if request.client is not None else ""
    credentials = next((request.headers[name] for name in CREDENTIALS if name in request.headers), "")
    return tenant_of(address, credentials, name=named or "")


def _one(request: Request, name: str) -> str | None:
    """Without the blanks around it, which are no part of a header's value; None where it is not there. Raises InvalidRequest
    where it is there more than once: which one is meant, nobody knows."""
    given = request.headers.getlist(name)
    if len(given) > 1:
        raise InvalidRequest(f"{name} is there {len(given)} times: give it once", name)
    return given[0].strip(" \t") if given else None


def said(request: Request) -> dict[str, object]:
    """What GenerateRequest calls so, of what is said: a session's name in a header counts before one in the body. Raises
    InvalidRequest."""
    fields: dict[str, object] = {
        "owner": owner_of(request),
        "traceparent": request.headers.get("traceparent", "")[:MAX_CHARS],
    }
    if session := _one(request, SESSION):
        if len(session) > MAX_SESSION_CHARS:
            raise InvalidRequest(
                f"{SESSION} has {len(session)} characters; at most {MAX_SESSION_CHARS} are allowed", SESSION
            )
        fields["session"] = session
    slo = _one(request, SLO)
    if slo is not None:
        digits = slo.isascii() and slo.isdecimal() and len(slo) <= 10
        if not digits or not 1 <= int(slo) <= MAX_SLO_MS:
            raise InvalidRequest(
                f"{SLO} is {quoted(slo)}; it must be a whole number of milliseconds from 1 to {MAX_SLO_MS}", SLO
            )
        fields["slo_ttft_s"] = int(slo) / 1000
    return fields
