"""Requests that wait: for a pool, a place in flight or their tenant's turn, and no longer than until their deadline."""

from __future__ import annotations

import asyncio

import pytest

from disagg.messages.legs import ServerState, StartLeg
from disagg.types.errors import DeadlineExceeded, NoCompatiblePeer, Overloaded
from tests.router.conftest import NORMAL, Cluster
from tests.router.fake_server import FakeServer, answer, decode, prefill, silent


async def test_requests_wait_for_a_pool_that_loads_and_are_then_served(cluster: Cluster) -> None:
    await cluster.up(NORMAL, ready=False)
    cluster.servers["d0"].set_state(ServerState.LOADING)
    await cluster.until(lambda: cluster.state("d0") == "loading" and cluster.state("p0") == "no-peer")
    assert not cluster.router.healthy()
    waiting = asyncio.create_task(cluster.ask())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    cluster.servers["d0"].set_state(ServerState.READY)
    assert (await waiting).text[0] == answer(0, 8)


async def test_an_empty_pool_ends_a_request_at_its_deadline_with_the_reason(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    await cluster.servers["d0"].kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    with pytest.raises(DeadlineExceeded, match="no server of one role is ready"):
        await cluster.ask(deadline_s=0.2)


async def test_servers_that_do_not_fit_are_no_reason_to_wait(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"d0": {"fingerprint": "other"}}, ready=False)
    await cluster.until(lambda: cluster.state("d0") == "no-peer" and cluster.state("p0") == "no-peer")
    with pytest.raises(NoCompatiblePeer):
        await cluster.ask()


async def test_a_deadline_that_has_passed_at_once_says_so_with_its_number(cluster: Cluster) -> None:
    await cluster.up(NORMAL, max_inflight=1)
    with pytest.raises(DeadlineExceeded, match=r"deadline of 1e-06 s passed \((?!.*loading)"):
        await cluster.ask("x" * 400, deadline_s=1e-6)
    cluster.servers["d0"].script = silent
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0.5 s passed \(running, with 1 tokens"):
        await cluster.ask(deadline_s=0.5)


async def test_the_deadline_ends_a_running_request_and_frees_the_servers(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    with pytest.raises(DeadlineExceeded, match="running, with 1 tokens"):
        await cluster.ask(deadline_s=1.0)
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))


async def test_a_full_queue_refuses_and_says_when_to_try_again(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent}, max_inflight=1, max_queued=2)
    asked = [asyncio.create_task(cluster.ask(deadline_s=deadline_s)) for deadline_s in (1.6, 1.2, 1.2)]
    await cluster.until(lambda: cluster.router.status()["routers"][0]["queued"] == 2)
    with pytest.raises(Overloaded) as caught:
        await cluster.ask()
    assert caught.value.retry_after_s > 0
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert ["limit of requests in flight" in str(result) for result in results] == [False, True, True]


async def test_requests_wait_for_a_place_in_order(cluster: Cluster) -> None:
    await cluster.up(NORMAL, max_inflight=1)
    await asyncio.gather(*(cluster.ask("x" * length, max_tokens=2) for length in range(1, 6)))
    assert [leg.num_prompt for leg in cluster.servers["d0"].started] == [1, 2, 3, 4, 5]


# ---- tenants and calls beside each other


async def test_one_tenants_many_requests_do_not_stand_before_anothers_one(cluster: Cluster) -> None:
    await cluster.up(NORMAL, max_inflight=1)
    flood = [asyncio.create_task(cluster.ask("x" * length, max_tokens=2, tenant="a")) for length in range(1, 31)]
    await cluster.until(lambda: cluster.router.status()["routers"][0]["queued"] >= 25)
    before = len(cluster.servers["d0"].started)
    await cluster.ask("y" * 50, max_tokens=2, tenant="b")
    started = [(leg.tenant, leg.num_prompt) for leg in cluster.servers["d0"].started]
    assert ("b", 50) in started[before : before + 4]
    await asyncio.gather(*flood)
    ours = [length for tenant, length in ((leg.tenant, leg.num_prompt) for leg in cluster.servers["d0"].started)]
    assert [length for length in ours if length != 50] == list(range(1, 31)), "each tenant's in their order"


async def test_a_queue_that_one_tenant_has_filled_takes_another_one(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent}, max_inflight=1, max_queued=3)
    queued = lambda: cluster.router.status()["routers"][0]["queued"]  # noqa: E731
    flood = []
    for number in range(4):
        flood.append(asyncio.create_task(cluster.ask(deadline_s=3.0, tenant="a")))
        await cluster.until(lambda number=number: queued() == number)
    with pytest.raises(Overloaded):
        await cluster.ask(deadline_s=3.0, tenant="a")
    with pytest.raises(DeadlineExceeded):
        await cluster.ask(deadline_s=1.0, tenant="b")
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineExceeded] * 3 + [Overloaded], "the youngest went for it"


async def test_one_tenant_leaves_places_for_others(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent}, max_inflight=4)
    inflight = lambda: cluster.router.status()["routers"][0]["inflight"]  # noqa: E731
    flood = [asyncio.create_task(cluster.ask(deadline_s=4.0, tenant="a")) for _ in range(3)]
    await cluster.until(lambda: len(cluster.servers["d0"].started) == 3)
    flood += [asyncio.create_task(cluster.ask(deadline_s=1.5, tenant="a")) for _ in range(5)]
    await cluster.until(lambda: cluster.router.status()["routers"][0]["queued"] == 5)
    assert inflight() == 3
    other = asyncio.create_task(cluster.ask(deadline_s=0.4, tenant="b"))
    await cluster.until(lambda: [leg.tenant for leg in cluster.servers["d0"].started] == ["a", "a", "a", "b"])
    results = await asyncio.gather(other, *flood, return_exceptions=True)
    assert all(isinstance(result, DeadlineExceeded) for result in results)
    assert sum("share of the router's requests in flight" in str(result) for result in results) == 5


async def test_the_prompts_of_one_call_go_to_prefill_as_others_of_it_are_done(cluster: Cluster) -> None:
    """And a single prompt of the same client does not wait for those that are held back."""
    gate = asyncio.Event()

    async def slow(server: FakeServer, leg: StartLeg) -> None:
        if leg.num_prompt > 1:
            await gate.wait()
        await prefill(server, leg)

    async def quiet(server: FakeServer, leg: StartLeg) -> None:
        if leg.num_prompt > 1:
            await gate.wait()
        await decode(server, leg)

    await cluster.up({"p0": slow, "d0": quiet})
    many = [asyncio.create_task(cluster.ask("xx", n=8, max_tokens=2, tenant="a", call="c")) for _ in range(10)]
    await cluster.until(lambda: len(cluster.servers["p0"].started) == 4)
    assert (await cluster.ask("y", max_tokens=2, tenant="a")).text[0] == answer(0, 2)
    assert len(cluster.servers["p0"].started) == 5
    with pytest.raises(DeadlineExceeded, match="other prompts of the same call or client"):
        await cluster.ask("xx", n=8, tenant="a", call="c", deadline_s=1.0)
    gate.set()
    assert all(got.text[7] == answer(7, 2) for got in await asyncio.gather(*many))


async def test_many_choices_of_one_tenant_leave_prefill_to_others(cluster: Cluster) -> None:
    """Each of its requests takes 64 slots there: while others are there, one follows another."""
    gate = asyncio.Event()

    async def slow(server: FakeServer, leg: StartLeg) -> None:
        if leg.tenant == "a":
            await gate.wait()
        await prefill(server, leg)

    async def quiet(server: FakeServer, leg: StartLeg) -> None:
        if leg.tenant == "a" or leg.params.max_tokens == 9:
            await gate.wait()
        await decode(server, leg)

    await cluster.up({"p0": slow, "d0": quiet})
    other = asyncio.create_task(cluster.ask("y", max_tokens=9, tenant="b"))
    await cluster.until(lambda: len(cluster.servers["p0"].started) == 1)
    many = [asyncio.create_task(cluster.ask("xx", n=64, max_tokens=1, tenant="a")) for _ in range(4)]
    await cluster.until(lambda: len(cluster.servers["p0"].started) == 2)
    assert (await cluster.ask("y", max_tokens=2, tenant="b")).text[0] == answer(0, 2)
    assert [leg.tenant for leg in cluster.servers["p0"].started] == ["b", "a", "b"]
    gate.set()
    assert all(len(got.text) == 64 for got in await asyncio.gather(*many))
    assert (await other).text[0] == answer(0, 9)
