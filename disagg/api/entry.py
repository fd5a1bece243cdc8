"""Who may call the HTTP face, where the router asks for credentials. Stands before every route, known or not, and before
bodies."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.api.dashboard import Page, read_page
from disagg.api.errors import fault_of, fault_of_http
from disagg.auth.gate import Gate
from disagg.types.errors import Unauthenticated
from disagg.types.plain import one_line

ANONYMOUS = frozenset({"/health", "/live"})  # for probes, which have no keys
# What every tenant may ask: it says nothing of others. All else, known or not, is for operators.
OF_TENANTS = frozenset({"/", "/version"})
OF_TENANTS_UNDER = "/v1/"
_OWNER = "disagg.owner"  # in a scope: whose key the request showed


def require_credentials(app: FastAPI, gate: Gate) -> None:
    """From now on whoever shows none gets 401. Before the app serves."""
    app.add_middleware(_Entry, gate=gate)


def owner_of(request: Request) -> str:
    """The tenant whose key the request showed; empty where none is asked for."""
    return str(request.scope.get(_OWNER, ""))


class _Entry:
    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate
        self._page = read_page()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise AssertionError("only HTTP is served")
        if scope["path"] in ANONYMOUS:
            await self._app(scope, receive, send)
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        asked = one_line(f"{scope['method']} {scope['path']}", 200)
        client = scope["client"][0] if scope.get("client") else ""
        try:
            owner = self._gate.tenant_of(shown)
        except Unauthenticated as error:
            self._gate.audit.refused(error.reason, "http", asked, client)
            await _refuse(error, send, self._page if _is_browser_at_root(scope) else None)
            return
        if not (is_of_tenants(scope["path"]) or self._gate.may_operate(owner)):
            self._gate.audit.refused("no_operator", "http", asked, client)
            fault = fault_of_http(403, scope["method"], scope["path"], "for operators only (auth.operators)")
            await _send(send, fault.status, {"content-type": "application/json"}, fault.body())
            return
        self._gate.audit.admitted(owner, "http", asked, client)
        await self._app({**scope, _OWNER: owner}, receive, send)


def is_of_tenants(path: str) -> bool:
    """Whether whoever has a key may ask for it, operator or not."""
    return path in OF_TENANTS or path.startswith(OF_TENANTS_UNDER)


def _is_browser_at_root(scope: Scope) -> bool:
    """Whoever opens the dashboard cannot show a key yet."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] == "GET" and scope["path"] == "/" and b"text/html" in accepted


async def _refuse(error: Unauthenticated, send: Send, page: Page | None) -> None:
    """page: what the refusal says instead of an error: it holds no data, and asks for the key with which to get some."""
    fault = fault_of(error)
    body = fault.body() if page is None else page.body
    headers = {"content-type": "application/json"} if page is None else page.headers
    await _send(send, fault.status, {**headers, "www-authenticate": "Bearer"}, body)


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    every = {**headers, "content-length": str(len(body))}
    raw = [(name.encode(), value.encode()) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
