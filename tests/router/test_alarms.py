"""What operators are told: of servers, of requests in the last minute, and no more than can be shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages.legs import ArenaReport, CarriedBy, LoadReport, ServerHello, ServerState, StorageState
from disagg.router.alarms import MAX_ALARMS, Alarm, Level, Recent, alarms
from disagg.router.view import ClusterView, ServerView
from disagg.types.ids import Role


def server(name: str = "m0", state: ServerState = ServerState.READY, lost: bool = False, **load: Any) -> ServerView:
    report = LoadReport(**{**dict.fromkeys(NUMBERS, 0), "pages_total": 100, "state": state, **load})
    hello = ServerHello(
        name=name,
        role=Role.MIXED,
        tp=1,
        pid=1,
        worker_pids=(),
        incarnation="i",
        fingerprint="f",
        model="m",
        max_model_len=10,
        max_tokens_in_pool=10,
        link_address="",
        load=report,
    )
    return ServerView(
        name=name, role=Role.MIXED, address="a", hello=hello, load=report, connected=not lost, lost=lost, error="why"
    )


NUMBERS = ("running", "waiting", "pages_used", "pages_free", "pages_evictable", "pages_total")


def told(*servers: ServerView, ended: dict[str, int] | None = None, gap_s: float = 0.0, rival: str = "") -> list[Alarm]:
    return list(alarms(ClusterView(servers), ended or {}, gap_s, rival))


def test_a_cluster_that_is_well_is_not_spoken_of() -> None:
    assert told(server(), server("m1", waiting=3, running=200, pages_used=50), ended={"ok": 9, "invalid": 2}) == []


@pytest.mark.parametrize(
    ("one", "level", "words"),
    [
        (server("x", lost=True), Level.BAD, "is lost"),
        (server("x", ServerState.LOADING), Level.WARN, "is loading: why"),
        (server("x", ServerState.DRAINING, running=1), Level.WARN, "draining"),
        (server("x", ServerState.DRAINING), Level.WARN, "drained"),
        (server("x", store=StorageState.DEGRADED), Level.WARN, "storage for KV fails"),
        (server("x", arena=ArenaReport(0, 0, 3 << 20)), Level.WARN, "3.0 MiB"),
        (server("x", pages_used=99, waiting=7), Level.WARN, "7 wait"),
        (server("x", loop_gap_s=0.4), Level.WARN, "0.40 s"),
        (
            server("x", carried=(CarriedBy("y", ("zero-copy tcp/eth0",), slow=True),)),
            Level.WARN,
            "KV to y goes over TCP",
        ),
    ],
)
def test_what_is_wrong_with_a_server_is_said_of_that_server(one: ServerView, level: Level, words: str) -> None:
    [alarm] = told(server(), one)
    assert (alarm.subject, alarm.level) == ("x", level) and words in alarm.text


def test_what_a_lost_server_last_said_is_not_told_as_if_it_were_so_now() -> None:
    [alarm] = told(server(), server("x", lost=True, arena=ArenaReport(0, 0, 1), store=StorageState.DEGRADED))
    assert "is lost" in alarm.text and "why" in alarm.text


def test_requests_that_failed_are_bad_and_the_worst_comes_first() -> None:
    found = told(server("x", ServerState.LOADING), server(), ended={"ok": 5, "failed": 2, "overloaded": 3}, gap_s=0.3)
    assert [alarm.level for alarm in found] == [Level.BAD, Level.WARN, Level.WARN, Level.WARN]
    assert found[0].text.startswith("2 of 10 in the last minute failed")


def test_without_a_pair_and_with_a_rival_it_is_bad() -> None:
    found = told(server("x", ServerState.LOADING), rival="another router has this name")
    assert {alarm.subject for alarm in found if alarm.level is Level.BAD} == {"requests", "router"}


@pytest.mark.parametrize(
    ("left_s", "level", "words"),
    [(3 * 86400.0, Level.WARN, "in 3.0 days"), (5400.0, Level.WARN, "in 1.5 hours"), (-1.0, Level.BAD, "has expired")],
)
def test_a_certificate_is_told_of_before_it_expires(left_s: float, level: Level, words: str) -> None:
    [alarm] = alarms(ClusterView((server(),)), {}, 0.0, certificate_left_s=left_s)
    assert (alarm.subject, alarm.level) == ("router", level) and words in alarm.text


def test_what_can_be_no_server_is_told_by_its_name() -> None:
    [alarm] = alarms(ClusterView((server(),)), {}, 0.0, no_servers={"'x'": "its label is wrong"})
    assert alarm == Alarm(Level.WARN, "'x'", "it can be no server: its label is wrong")


@given(st.integers(0, 3 * MAX_ALARMS))
def test_there_are_never_more_than_can_be_shown(count: int) -> None:
    found = told(server(), *(server(f"x{n}", ServerState.LOADING) for n in range(count)))
    assert len(found) == min(count, MAX_ALARMS)
    if count > MAX_ALARMS:
        assert f"{count - MAX_ALARMS + 1} alarms more" in found[-1].text


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from(["ok", "failed"])), max_size=40), st.floats(0, 100))
def test_recent_counts_are_those_of_the_window(notes: list[tuple[float, str]], after_s: float) -> None:
    recent, now_s, at = Recent(60), 0.0, []
    for wait_s, outcome in notes:
        now_s += wait_s
        recent.note(outcome, now_s)
        at.append((now_s, outcome))
    now_s += after_s
    expected: dict[str, int] = {}
    for noted_s, outcome in at:
        if int(noted_s) > int(now_s) - 60:
            expected[outcome] = expected.get(outcome, 0) + 1
    assert recent.counts(now_s) == expected
