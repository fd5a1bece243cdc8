"""Who may call the HTTP face, where the router asks for credentials. Stands before every route, known or not, and before
bodies."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.api.dashboard import Page, read_page
from disagg.api.errors import fault_of
from disagg.auth.gate import Gate
from disagg.types.errors import Unauthenticated
from disagg.types.plain import one_line

ANONYMOUS = frozenset({"/health", "/live"})  # for probes, which have no keys
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
        self._gate.audit.admitted(owner, "http", asked, client)
        await self._app({**scope, _OWNER: owner}, receive, send)


def _is_browser_at_root(scope: Scope) -> bool:
    """Whoever opens the dashboard cannot show a key yet."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] == "GET" and scope["path"] == "/" and b"text/html" in accepted


async def _refuse(error: Unauthenticated, send: Send, page: Page | None) -> None:
    """page: what the refusal says instead of an error: it holds no data, and asks for the key with which to get some."""
    fault = fault_of(error)
    body = fault.body() if page is None else page.body
    headers = {"content-type": "application/json"} if page is None else page.headers
    headers = {**headers, "content-length": str(len(body)), "www-authenticate": "Bearer"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
