"""What a router knows and shows of itself and its servers: silences, memory, and what prefix caches have."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.messages.legs import (
    GroupMemory,
    HostMemory,
    KvEvents,
    LoadReport,
    MemoryReport,
    PrefixGroup,
    PrefixRules,
    ServerState,
    StorageState,
)
from disagg.types.errors import DeadlineExceeded
from tests.router.conftest import NORMAL, Cluster
from tests.router.fake_server import prefill, silent


async def test_silences_within_a_stream_are_measured(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    await cluster.ask(max_tokens=4)
    assert cluster.metric("disagg_router_longest_silence_seconds_count") == 1
    assert cluster.metric("disagg_router_silence_seconds") == 0, "nobody is being silent"
    await cluster.ask(max_tokens=4, n=2)
    assert cluster.metric("disagg_router_longest_silence_seconds_count") == 2


async def test_a_choice_that_says_nothing_for_long_is_seen_while_it_does(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    asked = asyncio.create_task(cluster.ask(deadline_s=1.5))
    await cluster.until(lambda: cluster.metric("disagg_router_silence_seconds") > 0.3)
    with pytest.raises(DeadlineExceeded):
        await asked
    assert cluster.metric("disagg_router_longest_silence_seconds_sum") > 0.3, "also if it never ends"
    assert cluster.metric("disagg_router_silence_seconds") == 0


async def test_status_is_what_operators_were_promised(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL, name="router-0")
    status = router.status()
    promised = {"name", "role", "tp", "pid", "worker_pids", "state", "running", "waiting", "pages_used", "pages_total"}
    assert [promised <= set(server) for server in status["servers"]] == [True, True]
    assert [(s["name"], s["role"], s["state"], s["pages_total"]) for s in status["servers"]] == [
        ("p0", "prefill", "ready", 64),
        ("d0", "decode", "ready", 64),
    ]
    [me] = status["routers"]
    assert (me["name"], me["pid"], me["inflight"], me["error"]) == ("router-0", os.getpid(), 0, "")


async def test_a_router_that_was_given_no_name_shows_the_one_that_servers_know_it_by(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    [me] = router.status()["routers"]
    assert me["name"].startswith("router-")
    assert {hello.router_name for server in cluster.servers.values() for hello in server.greetings} == {me["name"]}


async def test_status_shows_a_servers_memory_and_how_much_its_prefix_cache_has(cluster: Cluster) -> None:
    group = GroupMemory("full", "full", 1024, empty_pages=1, evictable_pages=2, used_pages=3)
    memory = MemoryReport("lcm", 4096, 10, 20, 34, 1024, (group,), HostMemory(3, 128, 128 * 4096))
    load = LoadReport(ServerState.READY, 0, 0, 34, 10, 20, 64, memory, StorageState.DEGRADED)
    await cluster.up(NORMAL, hello={"d0": {"load": load}})

    def shown(name: str) -> dict[str, Any]:
        return next(s for s in cluster.router.status()["servers"] if s["name"] == name)

    assert shown("p0")["memory"] is None
    assert (shown("d0")["memory"]["large_used"], shown("d0")["memory"]["groups"][0]["name"]) == (34, "full")
    assert shown("p0")["offload"] == {"host_pages_used": 0, "host_pages_total": 0, "store": "off"}
    assert shown("d0")["offload"] == {"host_pages_used": 3, "host_pages_total": 128, "store": "degraded"}
    assert shown("d0")["cached_pages"] == []
    cluster.servers["d0"].tell_cache(KvEvents(stored=((0, b"a"), (0, b"b"), (1, b"a"))), reset=True)
    await cluster.until(lambda: shown("d0")["cached_pages"] == [2, 1])
    cluster.servers["d0"].tell_cache(KvEvents(removed=((0, b"a"),)))
    await cluster.until(lambda: shown("d0")["cached_pages"] == [1, 1])
    assert shown("p0")["cached_pages"] == []


async def test_what_a_server_cached_outlives_a_broken_stream_and_ends_with_its_incarnation(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    server = cluster.servers["d0"]

    def cached() -> list[int]:
        return next(s for s in cluster.router.status()["servers"] if s["name"] == "d0")["cached_pages"]

    server.tell_cache(KvEvents(stored=((0, b"a"),)), reset=True)
    await cluster.until(lambda: cached() == [1])
    server.break_streams()
    await cluster.until(lambda: len(server.greetings) == 2)
    assert cached() == [1]
    server.new_incarnation()
    await cluster.until(lambda: cached() == [])
    server.tell_cache(KvEvents(stored=((0, b"b"),)), reset=True)
    await cluster.until(lambda: cached() == [1])
    await server.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    assert cached() == []


async def test_pages_are_named_with_the_salt_that_servers_are_told(cluster: Cluster) -> None:
    """With keys a tenant has a salt of its own, which its client does not say: its cached prefix is found under that."""
    rules = PrefixRules(("v1", "w"), 4, 16, (PrefixGroup("full"),))
    await cluster.up(NORMAL, hello={"p0": {"prefix": rules}})
    prompt = tuple(range(1, 41))
    await cluster.ask(prompt, owner="alice", cache_salt="mine")
    (leg,) = cluster.servers["p0"].started
    assert leg.cache_salt != "mine"
    pages: list[bytes] = []
    extend_hashes(pages, chain_root(*rules.root_parts, leg.cache_salt), prompt, rules.page_tokens)
    cluster.servers["p0"].tell_cache(KvEvents(tuple((0, page) for page in pages)))
    await cluster.until(lambda: cluster.router.status()["servers"][0]["cached_pages"] == [len(pages)])
    await cluster.ask(prompt, owner="bob", cache_salt="mine")
    assert cluster.metric("disagg_router_expected_cached_tokens_total") == 0
    await cluster.ask(prompt, owner="alice", cache_salt="mine")
    assert cluster.metric("disagg_router_expected_cached_tokens_total") >= len(prompt) - 4
