"""`disagg drain`: has a server take nothing new and hand over what it has, and waits until it is empty."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from disagg.cli.answers import ClusterStatus, DrainSaid, ServerSaid, drain_said
from disagg.cli.asking import SMALL_BYTES, Allowed, Reply, ask
from disagg.cli.looks import Patience, look_at
from disagg.cli.terminal import result
from disagg.types.errors import DisaggError
from disagg.types.plain import NAME_CHARS, one_line
from disagg.types.status import DONE


def run_drain(base_url: str, name: str, *, undo: bool, force: bool, wait: bool, timeout_s: float) -> int:
    """The exit status. Raises DisaggError, also where it was waited for and something is left."""
    patience = Patience(timeout_s)
    asked = {"force": "true"} if force and not undo else None
    path = f"/servers/{quote(name, safe='')}/{'undrain' if undo else 'drain'}"

    def question(within_s: float) -> Reply:
        return ask(base_url, path, asked, method="POST", allowed=Allowed(within_s, SMALL_BYTES))

    said = drain_said(patience.asking(question), name, not undo)
    if undo or not wait:
        result(one_line(f"{name} {told(said, undo=undo)}"))
        return DONE
    return wait_drained(name, patience, look_at(base_url))


def told(server: DrainSaid, *, undo: bool) -> str:
    """What a server does that was told to drain, or not to. server: as it was before it heard of that."""
    if server.becomes:
        then = "it takes requests" if undo else "it drains"
        said = f"is becoming a {server.becomes} server: {then} as soon as it is one"
    elif server.state == "loading":
        said = f"is loading: it {'takes requests' if undo else 'drains'} as soon as it is up"
    else:
        said = "takes requests again" if undo else "drains"
    silent = _silent(server)
    return f"{said}, once it has heard of it: {silent}" if silent else said


def wait_drained(name: str, patience: Patience, look: Callable[[float], ClusterStatus]) -> int:
    """look: see `Patience.looks`. A server that is not found any more, or is dead, has nothing left either."""
    said = left = silent = ""
    for status in patience.looks(look, one_line(f"{name} drains")):
        server = status.server(name)
        if server is None or server.state in ("drained", "dead"):
            result(one_line(f"{name}: {'gone' if server is None else server.state}"))
            return DONE
        left, silent = f"{server.running} running, {server.waiting} waiting", _silent(server)
        now = one_line(f"{name}: {one_line(server.state, NAME_CHARS)}, {left}")
        if (since := f"{now}{', and is not heard' if silent else ''}") != said:
            said = since
            result(f"{now}; {silent}" if silent else now)
    if not left:
        raise DisaggError(f"{name} drains; {patience.timeout_s:g} s were over before anything was seen of that")
    raise DisaggError(f"{name} is not empty after {patience.timeout_s:g} s: {left}{f'; {silent}' if silent else ''}")


def _silent(server: ServerSaid | DrainSaid) -> str:
    """Empty while it is heard."""
    return f"nothing was heard of it for {server.silent_s:g} s" if server.silent_s else ""
