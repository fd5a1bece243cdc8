"""`disagg drain`: has a server take nothing new and hand over what it has, and waits until it is empty."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from disagg.cli.terminal import for_terminal, get_http
from disagg.types.errors import DisaggError
from disagg.types.status import DONE

LOOK_S = 0.5


def run_drain(base_url: str, name: str, *, undo: bool, force: bool, wait: bool, timeout_s: float) -> int:
    """The exit status. Raises DisaggError, also where it was waited for and something is left."""
    asked = {"force": "true"} if force and not undo else None
    path = f"/servers/{quote(name, safe='')}/{'undrain' if undo else 'drain'}"
    answer = get_http(base_url, path, asked, method="POST")
    if undo or not wait:
        print(for_terminal(f"{name} {told(answer if isinstance(answer, dict) else {}, undo=undo)}", sys.stdout))
        return DONE
    return wait_drained(name, timeout_s, lambda: get_http(base_url, "/status"), time.monotonic, time.sleep)


def told(server: Mapping[str, Any], *, undo: bool) -> str:
    """What a server does that was told to drain, or not to. server: as it was before it heard of that."""
    state, becomes = server.get("state"), server.get("becomes")
    if becomes:
        then = "it takes requests" if undo else "it drains"
        said = f"is becoming a {becomes} server: {then} as soon as it is one"
    elif state == "loading":
        said = f"is loading: it {'takes requests' if undo else 'drains'} as soon as it is up"
    else:
        said = "takes requests again" if undo else "drains"
    silent = _silent(server)
    return f"{said}, once it has heard of it: {silent}" if silent else said


def wait_drained(
    name: str,
    timeout_s: float,
    status: Callable[[], Mapping[str, Any]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """status: what the router says. One that is not found any more, or is dead, has nothing left either."""
    deadline_s, said = clock() + timeout_s, ""
    while True:
        server = next((each for each in status().get("servers", []) if each.get("name") == name), None)
        state = "gone" if server is None else server.get("state")
        if server is None or state in ("drained", "dead"):
            print(for_terminal(f"{name}: {state}", sys.stdout))
            return DONE
        left = f"{server.get('running')} running, {server.get('waiting')} waiting"
        now, silent = f"{name}: {state}, {left}", _silent(server)
        if (since := f"{now}{', and is not heard' if silent else ''}") != said:
            said = since
            print(for_terminal(f"{now}; {silent}" if silent else now, sys.stdout), flush=True)
        if clock() >= deadline_s:
            raise DisaggError(f"{name} is not empty after {timeout_s:g} s: {left}{f'; {silent}' if silent else ''}")
        sleep(LOOK_S)


def _silent(server: Mapping[str, Any]) -> str:
    """Empty while it is heard."""
    silent_s = server.get("silent_s")
    return f"nothing was heard of it for {silent_s:g} s" if isinstance(silent_s, int | float) and silent_s else ""
