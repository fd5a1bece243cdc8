"""Circuit breakers, alone, in placement, and in a router over fake servers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import Outcome, PeerRef, RoleChange
from disagg.router.blame import Charge
from disagg.router.circuits import (
    FAILED_SHARE,
    MAX_OPEN_S,
    MIN_FAILURES,
    OPEN_S,
    PROBE_S,
    WINDOW_S,
    Circuits,
    verdicts,
)
from disagg.router.view import Circuit, Pair, Work
from disagg.types.ids import Role

from .conftest import Cluster
from .fake_server import answer, decode, ending, prefill, verdict
from .test_policies import d, m, p, pick

D = Work.DECODE
PAIR = Pair(PeerRef("p", "", "i"), PeerRef("d", "", "i"), 10)
WHOLE = Pair(PeerRef("m", "", "i"), PeerRef("m", "", "i"), 10)
EVENTS = st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from(["done", "failed", "sent"])), min_size=1, max_size=80)


def opened(at_s: float = 0.0) -> Circuits:
    circuits = Circuits()
    assert [circuits.ended("s", D, False, at_s) for _ in range(MIN_FAILURES)] == [None, None, Circuit.OPEN]
    return circuits


def state(circuits: Circuits, now_s: float) -> Circuit:
    return circuits.of("s", now_s).get(D, Circuit.CLOSED)


def test_a_circuit_opens_lets_one_probe_through_and_closes_when_that_succeeds() -> None:
    circuits = opened()
    assert state(circuits, OPEN_S - 0.1) is Circuit.OPEN
    assert state(circuits, OPEN_S) is Circuit.HALF_OPEN
    circuits.sent("s", D, OPEN_S)
    assert state(circuits, OPEN_S) is Circuit.OPEN, "one probe at a time"
    assert circuits.ended("s", D, True, OPEN_S + 1) is Circuit.CLOSED
    assert circuits.of("s", OPEN_S + 1) == {}


def test_a_probe_that_fails_opens_it_for_longer_and_one_that_says_nothing_is_followed_by_another() -> None:
    circuits, now_s = opened(), 0.0
    for wait_s in (OPEN_S, 2 * OPEN_S, 4 * OPEN_S, 8 * OPEN_S, MAX_OPEN_S, MAX_OPEN_S):
        assert state(circuits, now_s + wait_s - 0.1) is Circuit.OPEN
        now_s += wait_s
        circuits.sent("s", D, now_s)
        assert circuits.ended("s", D, False, now_s) is None
    now_s += MAX_OPEN_S
    circuits.sent("s", D, now_s)
    assert state(circuits, now_s + PROBE_S - 0.1) is Circuit.OPEN
    assert state(circuits, now_s + PROBE_S) is Circuit.HALF_OPEN


def test_what_was_sent_before_a_circuit_opened_does_not_close_it() -> None:
    circuits = opened()
    assert circuits.ended("s", D, True, 1.0) is None and state(circuits, 1.0) is Circuit.OPEN


def test_workers_that_die_fail_once_however_many_legs_they_had() -> None:
    circuits = Circuits()
    assert [circuits.lost("s", "i1", D, 0.0) for _ in range(50)] == [None] * 50
    assert [circuits.lost("s", f"i{n}", D, 0.0) for n in (2, 3)] == [None, Circuit.OPEN]
    circuits.forget("s")
    assert state(circuits, 0.0) is Circuit.CLOSED


@given(EVENTS)
def test_a_circuit_that_opens_had_failures_and_one_that_is_open_ends_by_itself(
    events: list[tuple[float, str]],
) -> None:
    circuits, now_s = Circuits(), 0.0
    ends: list[tuple[float, bool]] = []
    for after_s, what in events:
        now_s += after_s
        before = state(circuits, now_s)
        if what == "sent":
            circuits.sent("s", D, now_s)
            assert state(circuits, now_s) is (Circuit.OPEN if before is Circuit.HALF_OPEN else before)
            continue
        ends.append((now_s, what == "done"))
        changed = circuits.ended("s", D, what == "done", now_s)
        if changed is Circuit.OPEN:
            lately = [done for at_s, done in ends if now_s - at_s < WINDOW_S]
            assert lately.count(False) >= MIN_FAILURES
        if changed is Circuit.CLOSED:
            assert what == "done" and before is not Circuit.CLOSED
        assert state(circuits, now_s + max(MAX_OPEN_S, PROBE_S)) is not Circuit.OPEN


@given(st.lists(st.booleans(), max_size=100))
def test_who_succeeds_more_often_than_not_stays_closed(fails: list[bool]) -> None:
    circuits = Circuits()
    for number, fail in enumerate(fails):  # whatever fails, two succeed before it
        for done in (True, True, False) if fail else (True,):
            circuits.ended("s", D, done, number / 100)
    assert FAILED_SHARE > 1 / 3 and state(circuits, 1.0) is Circuit.CLOSED


@pytest.mark.parametrize(
    ("pair", "server", "outcome", "said"),
    [
        (PAIR, "p", Outcome.DONE, [("p", Work.PREFILL, True)]),
        (PAIR, "d", Outcome.DONE, [("d", Work.DECODE, True)]),
        (WHOLE, "m", Outcome.DONE, [("m", Work.PREFILL, True), ("m", Work.DECODE, True)]),
        (PAIR, "d", Outcome.WORKER_LOST, [("d", Work.DECODE, False)]),
        (PAIR, "d", Outcome.BAD_TRANSFER, [("p", Work.PREFILL, False), ("d", Work.DECODE, False)]),
        (PAIR, "d", Outcome.PEER_LOST, [("p", Work.PREFILL, False), ("d", Work.DECODE, False)]),
        (replace(PAIR, moves=True), "d", Outcome.PEER_LOST, [("d", Work.DECODE, False)]),
        (PAIR, "p", Outcome.PEER_LOST, []),
        (PAIR, "other", Outcome.WORKER_LOST, []),
        *((PAIR, "d", outcome, []) for outcome in (Outcome.REFUSED, Outcome.ABORTED, Outcome.DRAINED)),
        *((PAIR, "d", outcome, []) for outcome in (Outcome.GIVEN_BACK, Outcome.HANDED_OVER)),
    ],
)
def test_only_what_is_a_servers_doing_counts(
    pair: Pair, server: str, outcome: Outcome, said: list[tuple[str, Work, bool]]
) -> None:
    assert list(verdicts(pair, server, outcome)) == said


def test_a_server_that_fails_is_taken_only_if_there_is_no_other() -> None:
    open_ = dict.fromkeys(Work, Circuit.OPEN)
    half = dict.fromkeys(Work, Circuit.HALF_OPEN)
    bad = d("d0", circuits=open_)
    assert pick(p("p0"), bad, d("d1", running=50)) == ("p0", "d1")
    assert pick(p("p0"), bad) == ("p0", "d0")
    assert pick(p("p0", circuits=open_), p("p1", waiting=9), d("d0")) == ("p1", "d0")
    assert pick(p("p0"), d("d0", circuits=half), d("d1", running=50)) == ("p0", "d0"), "a probe"
    assert pick(p("p0"), d("d0", circuits={Work.PREFILL: Circuit.OPEN}), d("d1", running=9)) == ("p0", "d0")
    assert pick(p("p0"), d("d0", running=9), m("m0", circuits={Work.PREFILL: Circuit.OPEN})) == ("p0", "d0")
    assert pick(p("p0"), bad, d("d1"), prefer_decode=bad.peer_ref) == ("p0", "d1"), "even where its KV has landed"


def test_a_half_open_circuit_closes_with_the_first_token_and_no_other_counts_it() -> None:
    circuits = opened()
    assert circuits.answers("s", D, 1.0) is None and state(circuits, 1.0) is Circuit.OPEN, "it was sent before"
    circuits.sent("s", D, OPEN_S)
    assert circuits.answers("s", D, OPEN_S + 1) is Circuit.CLOSED and circuits.of("s", OPEN_S + 1) == {}
    assert [circuits.ended("s", D, False, OPEN_S + 2) for _ in range(MIN_FAILURES)][-1] is Circuit.OPEN
    other = Circuits()
    assert other.answers("s", D, 0.0) is None
    assert [other.ended("s", D, False, 0.0) for _ in range(MIN_FAILURES)][-1] is Circuit.OPEN


async def test_a_decode_server_on_probation_is_used_again_as_soon_as_it_answers(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": verdict(Outcome.BAD_TRANSFER, times=MIN_FAILURES)}, max_attempts=9)
    fleet = cluster.router._dispatch.fleet
    assert (await cluster.ask()).text[0] == answer(0, 8)
    breaker = fleet.circuits._breakers["d0", D]
    breaker._opened, breaker._open_s = 1, cluster.router._dispatch._clock()  # its time is over
    asked = asyncio.create_task(cluster.ask(max_tokens=100))
    await cluster.until(lambda: breaker.closed)
    assert not asked.done(), "before the whole answer has ended"
    assert (await asked).text[0] == answer(0, 100)


async def test_a_prefill_server_that_drains_opens_no_circuit_of_decode_servers(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "p1": prefill, "d0": decode}, max_attempts=9)
    for outcome in (Outcome.DRAINED, Outcome.GIVEN_BACK):
        cluster.servers["p1"].script = ending(outcome)
        cluster.servers["d0"].script = verdict(Outcome.PEER_LOST, times=MIN_FAILURES)
        for _ in range(MIN_FAILURES):
            assert (await cluster.ask()).text[0] == answer(0, 8)
    failures = cluster.router._dispatch._failures
    failures._charge(failures._blame.due(1e12), 1e12)
    assert all(not server["circuits"] for server in cluster.router.status()["servers"])


async def test_verdicts_of_a_former_role_and_of_who_has_left_are_forgotten(cluster: Cluster) -> None:
    hello = {"d1": {"role_change": RoleChange(Role.DECODE)}}
    await cluster.up(
        {"p0": prefill, "d0": decode, "d1": verdict(Outcome.BAD_TRANSFER, times=99)}, hello, max_attempts=9
    )
    for _ in range(2 * MIN_FAILURES):
        assert (await cluster.ask()).text[0] == answer(0, 8)
    labels = {"server": "d1", "leg": "decode"}
    assert cluster.metric("disagg_router_circuit_open", **labels) == 1
    cluster.servers["d1"].become(Role.PREFILL, prefill)
    await cluster.until(lambda: cluster.router.status()["servers"][2]["role"] == "prefill")
    assert cluster.registry.get_sample_value("disagg_router_circuit_open", labels) is None
    assert "d1" not in {alarm["subject"] for alarm in cluster.router.status()["alarms"] if "fails too" in alarm["text"]}
    failures = cluster.router._dispatch._failures
    for name, work in (("d1", Work.DECODE), ("d9", Work.DECODE)):  # which has become another, and has left
        failures._charge([Charge(name, work, False)] * MIN_FAILURES, 0.0)
        assert (
            cluster.registry.get_sample_value("disagg_router_circuit_open", {"server": name, "leg": "decode"}) is None
        )
    assert not cluster.router.status()["servers"][2]["circuits"]


async def test_a_decode_server_that_fails_is_left_alone_and_said_to_be(cluster: Cluster) -> None:
    bad = verdict(Outcome.BAD_TRANSFER, times=MIN_FAILURES)
    await cluster.up({"p0": prefill, "p1": prefill, "d0": bad, "d1": decode}, policy="round_robin", max_attempts=9)
    for _ in range(8):  # half of them are sent to d0 until it is left alone
        assert (await cluster.ask()).text[0] == answer(0, 8)
    assert len(cluster.servers["d0"].started) == MIN_FAILURES
    [status] = [each for each in cluster.router.status()["servers"] if each["name"] == "d0"]
    assert status["circuits"] == {"decode": "open"}
    assert "d0" in {alarm["subject"] for alarm in cluster.router.status()["alarms"]}
    assert cluster.metric("disagg_router_circuit_open", server="d0", leg="decode") == 1
    assert cluster.metric("disagg_router_circuit_open", server="d1", leg="decode") == 0
