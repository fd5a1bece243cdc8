"""`disagg drain --wait`: what it says, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from disagg.cli.answers import ClusterStatus, DrainSaid
from disagg.cli.drain import told, wait_drained
from disagg.cli.looks import Patience
from disagg.types.errors import DisaggError
from disagg.types.status import DONE
from tests.cli.routers import status_of


def waited(states: Iterator[dict[str, Any] | None], timeout_s: float = 100.0) -> int:
    """states: what the router says of d0, look by look; None: nothing."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def look(within_s: float) -> ClusterStatus:
        assert 0 < within_s <= timeout_s - now_s
        server = next(states)
        return status_of(*([] if server is None else [server]))

    return wait_drained("d0", Patience(timeout_s, lambda: now_s, sleep), look)


def says(state: str, running: int = 0, waiting: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": "d0", "role": "decode", "state": state, "running": running, "waiting": waiting, **more}


def test_it_waits_until_nothing_is_left_and_says_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    states = [says("draining", 2), says("draining", 2), says("draining", 1), says("drained")]
    assert waited(iter(states)) == DONE
    assert capsys.readouterr().out.splitlines() == [
        "d0: draining, 2 running, 0 waiting",
        "d0: draining, 1 running, 0 waiting",
        "d0: drained",
    ]


def test_a_server_that_is_gone_has_nothing_left() -> None:
    assert waited(iter([says("draining", 1), None])) == DONE


def test_a_wait_ends_at_its_deadline() -> None:
    with pytest.raises(DisaggError, match=r"d0 is not empty after 1 s: 3 running, 2 waiting$"):
        waited(iter([says("draining", 3, 2)] * 10), timeout_s=1.0)
    with pytest.raises(DisaggError, match=r"^d0 drains; 0 s were over before anything was seen of that$"):
        waited(iter([]), timeout_s=0.0)


def test_a_server_that_does_not_answer_is_said_to_be_silent_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    silent = [says("ready", 0, 3, silent_s=4.5 + look / 2) for look in range(4)]
    with pytest.raises(DisaggError, match=r"1 s: 0 running, 3 waiting; nothing was heard of it for 5 s"):
        waited(iter(silent), timeout_s=1.0)
    assert capsys.readouterr().out == "d0: ready, 0 running, 3 waiting; nothing was heard of it for 4.5 s\n"


def test_what_was_told_is_said_as_it_is() -> None:
    def of(state: str, **more: Any) -> DrainSaid:
        return DrainSaid("d0", True, state, **more)

    assert told(of("ready"), undo=False) == "drains"
    assert told(of("drained"), undo=True) == "takes requests again"
    assert told(of("loading"), undo=False) == "is loading: it drains as soon as it is up"
    becoming = of("draining", becomes="prefill")
    assert told(becoming, undo=True) == "is becoming a prefill server: it takes requests as soon as it is one"
    assert told(of("ready", silent_s=4.0), undo=False) == (
        "drains, once it has heard of it: nothing was heard of it for 4 s"
    )
