"""A router keeps tenants to what they may ask for, whichever face they come by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from disagg.auth.quotas import Limits, Quotas
from disagg.messages.legs import Outcome
from disagg.router.requests import Started
from disagg.types.errors import InvalidRequest, Overloaded, QuotaExceeded, Shed, Unavailable

from .conftest import Cluster, request
from .fake_server import answer, decode, ending, prefill, silent


async def test_a_router_counts_what_runs_what_ended_and_what_was_never_begun(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode})
    cluster.router.quotas = Quotas(lambda: {"a": Limits(concurrent=1, tokens_per_minute=20, requests_per_minute=4)})
    with pytest.raises(InvalidRequest):
        await cluster.ask((), owner="a")  # which counts as a request, and leaves nothing running
    assert (await cluster.ask("hi", owner="a")).text[0] == answer(0, 8)  # 2 + 8 tokens
    assert (await cluster.ask("hi", owner="a", max_tokens=12)).text[0] == answer(0, 12)
    with pytest.raises(QuotaExceeded, match="tokens of a are used up: 20 a minute") as refused:
        await cluster.ask("hi", owner="a")
    assert isinstance(refused.value, Overloaded) and 0 < refused.value.retry_after_s <= 60
    assert cluster.metric("disagg_router_requests_total", outcome="quota_exceeded") == 1
    assert (await cluster.ask("hi", owner="b")).text[0] == answer(0, 8)


async def test_a_request_that_fails_or_whose_client_goes_leaves_its_place(cluster: Cluster) -> None:
    await cluster.up({"p0": ending(Outcome.REFUSED), "d0": silent})
    cluster.router.quotas = Quotas(lambda: {"*": Limits(concurrent=1)})
    with pytest.raises(InvalidRequest, match="scripted refused"):
        await cluster.ask(owner="a")
    cluster.servers["p0"].script = silent
    async with asyncio.timeout(30), aclosing(cluster.router.generate(request(owner="a"))) as updates:
        assert isinstance(await anext(updates), Started)
        with pytest.raises(QuotaExceeded):
            await cluster.ask(owner="a")
    cluster.servers["p0"].script, cluster.servers["d0"].script = prefill, decode
    assert (await cluster.ask(owner="a")).text[0] == answer(0, 8)


async def test_what_the_router_itself_refuses_does_not_count(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode})
    cluster.router.quotas = quotas = Quotas(lambda: {"a": Limits(concurrent=1, requests_per_minute=1)})

    def refuses(error: Exception) -> Callable[..., None]:
        def check_room(tenant: str) -> None:
            raise error

        return check_room

    for error in (Shed("x", 1.0), Overloaded("x", 1.0), Unavailable("x")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cluster.router._dispatch, "check_room", refuses(error))
            with pytest.raises(type(error)):
                await cluster.ask(owner="a")
    assert quotas._tenants["a"].running == 0
    assert (await cluster.ask(owner="a")).text[0] == answer(0, 8)
    with pytest.raises(QuotaExceeded, match="requests of a are used up: 1 a minute"):
        await cluster.ask(owner="a")
