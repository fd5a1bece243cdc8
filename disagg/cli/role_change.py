"""`disagg role`: has a server become one of another role, and waits until it is."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from disagg.cli.answers import ClusterStatus, role_said
from disagg.cli.asking import SMALL_BYTES, Allowed, Reply, ask
from disagg.cli.looks import Patience, look_at
from disagg.cli.terminal import result
from disagg.types.errors import DisaggError
from disagg.types.plain import NAME_CHARS, one_line
from disagg.types.status import DONE


def run_role_change(base_url: str, name: str, role: str, *, force: bool, wait: bool, timeout_s: float) -> int:
    """The exit status. Raises DisaggError, also where it was waited for and does not come about."""
    patience = Patience(timeout_s)
    asked = {"role": role, "force": "true" if force else "false"}
    path = f"/servers/{quote(name, safe='')}/role"

    def question(within_s: float) -> Reply:
        return ask(base_url, path, asked, method="POST", allowed=Allowed(within_s, SMALL_BYTES))

    said = role_said(patience.asking(question), name, role)
    if wait:
        return wait_role(name, role, patience, look_at(base_url))
    has = f"{name} becomes a {role} server" if said.begun else f"{name} is a {role} server already, or becomes one"
    result(one_line(has))
    return DONE


def wait_role(name: str, role: str, patience: Patience, look: Callable[[float], ClusterStatus]) -> int:
    """look: see `Patience.looks`."""
    said, seen, state = "", False, ""
    for status in patience.looks(look, one_line(f"{name} becomes a {role} server")):
        server = status.server(name)
        if server is None:
            raise DisaggError(f"{name} is not there any more")
        is_now, state = one_line(server.role, NAME_CHARS), one_line(server.state, NAME_CHARS)
        becomes = bool(server.becomes)
        if not becomes and server.role == role:
            result(one_line(f"{name}: {is_now}, {state}"))
            return DONE
        if not becomes and (server.role_failed or seen):  # else another router has not heard of it yet
            why = one_line(server.role_failed or "it was begun anew meanwhile")
            raise DisaggError(f"{name} is a {is_now} server: {why}")
        seen |= becomes
        now = one_line(f"{name}: {is_now}, {state}, {server.running} running, {server.waiting} waiting")
        if now != said:
            said = now
            result(now)
    now = f": it is {state}" if state else ""
    raise DisaggError(f"{name} is not a {role} server after {patience.timeout_s:g} s{now}; the change goes on")
