"""Which requests are not taken, because their first token would come too late."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.router.admission import Expected, Queue, expected, refused, share_of
from disagg.router.policies import RequestFacts
from disagg.router.speeds import GUESS
from disagg.router.view import ClusterView
from disagg.types.errors import Overloaded, Shed

from .conftest import Cluster
from .fake_server import FakeServer, StartLeg, answer, decode, prefill
from .test_policies import d, m, p

SECONDS = st.floats(0.0, 1000.0)
PRIORITIES = st.integers(-1000, 1000)
FACTS = RequestFacts(prefill_tokens=1000, total_tokens=1001)
EXPECTED = st.builds(Expected, SECONDS, SECONDS)


@given(SECONDS, PRIORITIES, st.floats(-10.0, 1000.0), SECONDS)
def test_nobody_is_refused_where_nothing_waits(
    compute_s: float, priority: int, in_time_s: float, shed_wait_s: float
) -> None:
    assert refused(Expected(0.0, compute_s), priority, in_time_s, shed_wait_s) is None


@given(EXPECTED, PRIORITIES, PRIORITIES, SECONDS, SECONDS, SECONDS)
def test_who_is_more_urgent_or_waits_less_is_never_refused_where_another_is_taken(
    found: Expected, one: int, other: int, in_time_s: float, shed_wait_s: float, less_s: float
) -> None:
    urgent, patient = min(one, other), max(one, other)
    if refused(found, patient, in_time_s, shed_wait_s) is None:
        less = Expected(max(0.0, found.wait_s - less_s), found.compute_s)
        assert refused(found, urgent, in_time_s, shed_wait_s) is None
        assert refused(less, patient, in_time_s, shed_wait_s) is None


@given(EXPECTED, PRIORITIES, SECONDS, SECONDS)
def test_whoever_is_refused_is_told_when_to_try_again_and_is_taken_if_it_then_waits_so_much_less(
    found: Expected, priority: int, in_time_s: float, shed_wait_s: float
) -> None:
    said = refused(found, priority, in_time_s, shed_wait_s)
    if said is None:
        assert found.wait_s == 0 or found.wait_s + found.compute_s <= in_time_s
        return
    retry_after_s, _ = said
    assert retry_after_s > 0
    for _ in range(4):  # it may be too late for both reasons, and for each of them again by the last digit
        later = Expected(max(0.0, found.wait_s - retry_after_s), found.compute_s)
        again = refused(later, priority, in_time_s, shed_wait_s)
        if again is None:
            return
        retry_after_s += again[0]
    raise AssertionError("never taken")


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 20))
def test_a_tenant_waits_for_no_more_than_its_own_in_turns(own: int, others: int, tenants: int) -> None:
    share = share_of(own, own + others, tenants)
    assert 0 <= share <= 1
    assert (share == 0) == (own == 0), "another one's flood is no reason"
    if others == 0 and own:
        assert share == 1


def test_a_wait_is_what_the_best_server_has_and_what_waits_in_the_router() -> None:
    idle, busy = p("p0"), p("p1", outstanding_prompts=2, outstanding_prompt_tokens=4000)
    own_s = GUESS.seconds(1, 1000)
    assert expected(ClusterView((d("d0"),)), FACTS, Queue()) is None
    assert expected(ClusterView((idle, busy, d("d0"))), FACTS, Queue(0, 0)) == Expected(0.0, 0.0)
    found = expected(ClusterView((busy, d("d0"))), FACTS, Queue(0, 0))
    assert found == Expected(GUESS.seconds(2, 4000), pytest.approx(own_s))
    found = expected(ClusterView((busy, m("m0"))), FACTS, Queue(10, 5000))
    assert found is not None and found.wait_s == pytest.approx(GUESS.seconds(10, 5000) / 2)


async def gate_of(cluster: Cluster, **config: float) -> asyncio.Event:
    """A cluster whose prompts are computed when this is set."""
    gate = asyncio.Event()

    async def gated(server: FakeServer, leg: StartLeg) -> None:
        await gate.wait()
        await prefill(server, leg)

    async def after(server: FakeServer, leg: StartLeg) -> None:
        await gate.wait()
        await decode(server, leg)

    await cluster.up({"p0": gated, "d0": after}, **config)
    return gate


async def test_what_cannot_be_in_time_is_refused_at_once_and_the_rest_is_served(cluster: Cluster) -> None:
    gate = await gate_of(cluster)
    slow = asyncio.create_task(cluster.ask("x" * 200))
    await cluster.until(lambda: len(cluster.servers["d0"].started) == 1)
    with pytest.raises(Shed, match=r"is not taken: its first token is expected after .* no use after ") as caught:
        await cluster.ask("x" * 200, slo_ttft_s=0.001)
    assert isinstance(caught.value, Overloaded) and caught.value.retry_after_s > 0
    others = asyncio.create_task(cluster.ask("x" * 200, slo_ttft_s=0.001, tenant="another"))  # which has its turn next
    patient = asyncio.create_task(cluster.ask("x" * 200, slo_ttft_s=30.0))
    await cluster.until(lambda: len(cluster.servers["d0"].started) == 3)
    gate.set()
    assert [(await each).text[0] for each in (slow, others, patient)] == [answer(0, 8)] * 3
    assert cluster.metric("disagg_router_requests_total", outcome="shed") == 1


async def test_the_least_urgent_are_refused_first(cluster: Cluster) -> None:
    gate = await gate_of(cluster, shed_wait_s=0.03)  # a prompt takes some 6 ms by the first guess
    running = []
    taken: dict[int, int] = {}
    for priority in (5, 0, -5):
        while True:
            before = len(cluster.servers["d0"].started)
            asked = asyncio.create_task(cluster.ask(priority=priority))
            await cluster.until(lambda n=before, one=asked: one.done() or len(cluster.servers["d0"].started) > n)  # type: ignore[misc]
            if asked.done():
                with pytest.raises(Shed, match=r"router\.shed_wait_s"):
                    await asked
                break
            running.append(asked)
        taken[priority] = len(running)
    assert 1 <= taken[5] < taken[0] < taken[-5] < 20
    gate.set()
    assert {(await each).text[0] for each in running} == {answer(0, 8)}


async def test_what_still_waits_when_it_is_of_no_use_any_more_goes_and_what_runs_does_not(cluster: Cluster) -> None:
    gate = await gate_of(cluster, max_inflight=1)
    runs = asyncio.create_task(cluster.ask(slo_ttft_s=2.0))
    await cluster.until(lambda: len(cluster.servers["d0"].started) == 1)
    with pytest.raises(Shed, match=r"has waited for a place or a server for 3 s"):
        await cluster.ask(slo_ttft_s=3.0)
    assert cluster.router.status()["routers"][0]["queued"] == 0 and not runs.done()
    gate.set()
    assert (await runs).text[0] == answer(0, 8)
