"""`disagg role --wait`: what it says, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from disagg.cli.answers import ClusterStatus
from disagg.cli.looks import Patience
from disagg.cli.role_change import wait_role
from disagg.types.errors import DeadlineExceeded, DisaggError
from disagg.types.status import DONE
from tests.cli.routers import status_of


def waited(looks: Iterable[dict[str, Any] | None], timeout_s: float = 100.0) -> int:
    """looks: what the router says of d0; None: nothing."""
    now_s, each = 0.0, iter(looks)

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def look(within_s: float) -> ClusterStatus:
        server = next(each)
        return status_of(*([] if server is None else [server]))

    return wait_role("d0", "prefill", Patience(timeout_s, lambda: now_s, sleep), look)


def says(role: str, state: str, becomes: str = "", failed: str = "", running: int = 0) -> dict[str, Any]:
    return {
        "name": "d0",
        "role": role,
        "state": state,
        "becomes": becomes,
        "role_failed": failed,
        "running": running,
        "waiting": 0,
    }


def test_it_waits_until_the_server_has_the_role_and_says_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    draining = says("decode", "draining", "prefill", running=2)
    assert waited([draining, draining, says("prefill", "loading", "prefill"), says("prefill", "ready")]) == DONE
    assert capsys.readouterr().out.splitlines() == [
        "d0: decode, draining, 2 running, 0 waiting",
        "d0: prefill, loading, 0 running, 0 waiting",
        "d0: prefill, ready",
    ]


def test_a_change_that_does_not_come_about_says_why() -> None:
    failed = "it could not become prefill, and is decode again: no room"
    with pytest.raises(DisaggError, match=f"d0 is a decode server: {failed}"):
        waited([says("decode", "draining", "prefill"), says("decode", "loading", failed=failed)])
    with pytest.raises(DisaggError, match="d0 is a decode server: it was begun anew meanwhile"):
        waited([says("decode", "draining", "prefill"), says("decode", "loading")])
    with pytest.raises(DisaggError, match="d0 is not there any more"):
        waited([says("decode", "draining", "prefill"), None])


def test_a_wait_ends_at_its_deadline() -> None:
    with pytest.raises(DisaggError, match=r"d0 is not a prefill server after 1 s: it is draining; the change goes on$"):
        waited([says("decode", "draining", "prefill")] * 10, timeout_s=1.0)


def test_a_look_that_the_deadline_cuts_short_is_none_and_what_was_seen_before_is_said() -> None:
    now_s, draining = 0.0, status_of(says("decode", "draining", "prefill"))

    def look(within_s: float) -> ClusterStatus:
        nonlocal now_s
        if now_s == 0.0:
            now_s += 0.9
            return draining
        now_s += within_s
        raise DeadlineExceeded(f"no whole answer within {within_s:.3g} s")

    def waited_for(timeout_s: float) -> int:
        return wait_role("d0", "prefill", Patience(timeout_s, lambda: now_s, lambda seconds: None), look)

    with pytest.raises(
        DisaggError, match=r"^d0 is not a prefill server after 1 s: it is draining; the change goes on$"
    ):
        waited_for(1.0)
    with pytest.raises(DisaggError, match=r"^d0 is not a prefill server after 0 s; the change goes on$"):
        waited_for(0.0)
    with pytest.raises(DeadlineExceeded, match=r"^d0 becomes a prefill server all the same, .*; --timeout is 1 s$"):
        waited_for(1.0)
