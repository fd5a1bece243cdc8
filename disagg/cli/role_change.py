"""`disagg role`: has a server become one of another role, and waits until it is."""

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


def run_role_change(base_url: str, name: str, role: str, *, force: bool, wait: bool, timeout_s: float) -> int:
    """The exit status. Raises DisaggError, also where it was waited for and does not come about."""
    asked = {"role": role, "force": "true" if force else "false"}
    answer = get_http(base_url, f"/servers/{quote(name, safe='')}/role", asked, method="POST")
    if wait:
        return wait_role(name, role, timeout_s, lambda: get_http(base_url, "/status"), time.monotonic, time.sleep)
    begun = isinstance(answer, dict) and answer.get("begun")
    _say(f"{name} becomes a {role} server" if begun else f"{name} is a {role} server already, or becomes one")
    return DONE


def wait_role(
    name: str,
    role: str,
    timeout_s: float,
    status: Callable[[], Mapping[str, Any]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """status: what the router says."""
    deadline_s, said, seen = clock() + timeout_s, "", False
    while True:
        server = next((each for each in status().get("servers", []) if each.get("name") == name), None)
        if server is None:
            raise DisaggError(f"{name} is not there any more")
        is_now, state, failed = server.get("role"), server.get("state"), server.get("role_failed")
        becomes = bool(server.get("becomes"))
        if not becomes and is_now == role:
            _say(f"{name}: {is_now}, {state}")
            return DONE
        if not becomes and (failed or seen):  # else another router has not heard of it yet
            raise DisaggError(f"{name} is a {is_now} server: {failed or 'it was begun anew meanwhile'}")
        seen |= becomes
        now = f"{name}: {is_now}, {state}, {server.get('running')} running, {server.get('waiting')} waiting"
        if now != said:
            said = now
            _say(now)
        if clock() >= deadline_s:
            raise DisaggError(f"{name} is not a {role} server after {timeout_s:g} s: it is {state}")
        sleep(LOOK_S)


def _say(line: str) -> None:
    print(for_terminal(line, sys.stdout), flush=True)
