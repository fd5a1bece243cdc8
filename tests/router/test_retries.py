"""How much a router runs again when servers are lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages.legs import Outcome
from disagg.router.retries import WINDOW_S, RetryBudget
from disagg.types.errors import RetriesSpent, Unavailable

from .conftest import Cluster
from .fake_server import answer, prefill, verdict

EVENTS = st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from(["ended", "replay"])), max_size=200)


@given(EVENTS, st.floats(0.0, 2.0), st.floats(0.0, 3.0), st.integers(0, 20))
def test_replays_of_a_window_stay_within_the_budget(
    events: list[tuple[float, str]], share: float, floor: float, running: int
) -> None:
    budget, now_s = RetryBudget(share, floor), 0.0
    ended: list[float] = []
    replays: list[float] = []
    for after_s, what in events:
        now_s += after_s
        if what == "ended":
            budget.request_ended(now_s)
            ended.append(now_s)
            continue
        lately = sum(int(at_s) > now_s - WINDOW_S for at_s in ended)
        before = sum(int(at_s) > now_s - WINDOW_S for at_s in replays)
        allowed = budget.allows(running, now_s)
        assert allowed == (before + 1 <= share * (running + lately) + floor * WINDOW_S)
        if allowed:
            replays.append(now_s)


def test_everything_that_runs_may_be_lost_once_in_ten_seconds_and_again_later() -> None:
    budget = RetryBudget(share=1.0, floor_per_s=0.0)
    assert [budget.allows(100, 5.0) for _ in range(101)] == [True] * 100 + [False]
    assert budget.allows(100, 5.0 + WINDOW_S)


async def test_what_is_lost_beyond_the_budget_ends_with_a_clear_error(cluster: Cluster) -> None:
    flaky = verdict(Outcome.PEER_LOST, times=9)
    await cluster.up({"p0": prefill, "d0": flaky}, retry_share=1.0, retry_floor=0.0)
    with pytest.raises(RetriesSpent, match=r"scripted peer_lost.*router\.retry_share = 1") as refused:
        await cluster.ask()
    assert isinstance(refused.value, Unavailable) and len(cluster.servers["d0"].started) == 2
    assert cluster.metric("disagg_router_requests_total", outcome="retries_spent") == 1
    await cluster.until(lambda: cluster.router.status()["routers"][0]["inflight"] == 0)


async def test_what_is_given_back_costs_nothing_of_the_budget(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": verdict(Outcome.GIVEN_BACK, times=3)}, retry_share=0.0, retry_floor=0.0)
    assert (await asyncio.wait_for(cluster.ask(), 30)).text[0] == answer(0, 8)
