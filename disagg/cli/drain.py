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


def run_drain(base_url: str, name: str, *, undo: bool, wait: bool, timeout_s: float) -> int:
    """The exit status. Raises DisaggError, also where it was waited for and something is left."""
    get_http(base_url, f"/servers/{quote(name, safe='')}/{'undrain' if undo else 'drain'}", method="POST")
    if undo or not wait:
        print(for_terminal(f"{name} {'takes requests again' if undo else 'drains'}", sys.stdout))
        return DONE
    return wait_drained(name, timeout_s, lambda: get_http(base_url, "/status"), time.monotonic, time.sleep)


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
        now = f"{name}: {state}, {server.get('running')} running, {server.get('waiting')} waiting"
        if now != said:
            said = now
            print(for_terminal(now, sys.stdout), flush=True)
        if clock() >= deadline_s:
            raise DisaggError(f"{name} is not empty after {timeout_s:g} s: {server.get('running')} running")
        sleep(LOOK_S)
