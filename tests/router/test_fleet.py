"""Servers that come and go under a router: nothing is lost that need not be, and what is gone leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from disagg.discovery.found import Found, Publish, by_key
from disagg.router.circuits import MIN_FAILURES
from disagg.router.fleet import UNLISTED, Fleet
from disagg.router.view import Circuit, Work
from disagg.types.ids import Role
from tests.router.conftest import DEADLINE_S, NORMAL, Cluster, request
from tests.router.fake_server import FakeServer, answer, decode, prefill, silent


def fleet(cluster: Cluster) -> Fleet:
    return cluster.router._dispatch.fleet


def found(cluster: Cluster, *names: str, uid: str = "", anonymous: bool = False) -> list[Found]:
    """As discovery would find these servers."""
    return [
        Found(
            name="" if anonymous else name,
            role=cluster.servers[name].hello.role.value,
            address=f"127.0.0.1:{cluster.servers[name].port}",
            uid=uid and f"{uid}-{name}",
        )
        for name in names
    ]


async def more(cluster: Cluster, name: str, role: Role) -> None:
    server = FakeServer(name, role, prefill if role is Role.PREFILL else decode)
    await server.start()
    cluster.servers[name] = server


def names(cluster: Cluster) -> set[str]:
    return {server["name"] for server in cluster.router.status()["servers"]}


def measured(cluster: Cluster) -> set[str]:
    """Servers that metrics have a series of."""
    samples = [sample for metric in cluster.registry.collect() for sample in metric.samples]
    return {sample.labels["server"] for sample in samples if "server" in sample.labels}


@pytest.mark.parametrize("anonymous", [False, True])
async def test_servers_that_are_found_later_serve(cluster: Cluster, anonymous: bool) -> None:
    await cluster.up({}, ready=False)
    waiting = asyncio.create_task(cluster.ask("hi"))
    await asyncio.sleep(0.1)
    assert not cluster.router.healthy() and not waiting.done()
    assert not cluster.router.open(), "it never had a pair"
    await more(cluster, "p0", Role.PREFILL)
    await more(cluster, "d0", Role.DECODE)
    fleet(cluster).update(by_key(found(cluster, "p0", "d0", anonymous=anonymous)))
    assert (await waiting).text[0] == answer(0, 8)
    assert names(cluster) == {"p0", "d0"}
    assert set((await cluster.router.dump())["choices_outstanding"]) == {"p0", "d0"}


async def test_a_router_that_has_had_a_pair_is_open_for_requests_that_wait_for_the_next(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode})
    fleet(cluster).update(by_key(found(cluster, "p0", "d0", uid="a")))
    await cluster.until(cluster.router.healthy)
    fleet(cluster).update(by_key(found(cluster, "p0", uid="a")))
    await cluster.until(lambda: names(cluster) == {"p0"})
    waiting = asyncio.create_task(cluster.ask("hi"))
    await asyncio.sleep(0.1)
    assert not cluster.router.healthy() and cluster.router.open() and not waiting.done()
    await more(cluster, "d1", Role.DECODE)
    fleet(cluster).update(by_key(found(cluster, "p0", "d1", uid="a")))
    assert (await waiting).text[0] == answer(0, 8)


async def test_a_pod_that_is_gone_is_lost_at_once_and_its_requests_go_on_elsewhere(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    fleet(cluster).update(by_key(found(cluster, "p0", "d0", uid="a")))
    await cluster.until(cluster.router.healthy)
    asked = asyncio.create_task(cluster.ask("hi"))
    await cluster.until(lambda: bool(cluster.servers["d0"].started))
    await more(cluster, "d1", Role.DECODE)
    fleet(cluster).update(by_key(found(cluster, "p0", "d1", uid="a")))
    got = await asked
    assert got.text[0] == answer(0, 8) and got.finished.attempts == 2
    assert names(cluster) == {"p0", "d1"}
    assert measured(cluster) == {"p0", "d1"}, "series of what is gone disappear"


async def test_another_pod_of_the_same_name_is_another_server(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    fleet(cluster).update(by_key(found(cluster, "p0", "d0", uid="a")))
    await cluster.until(cluster.router.healthy)
    asked = asyncio.create_task(cluster.ask("hi"))
    await cluster.until(lambda: bool(cluster.servers["d0"].started))
    old = cluster.servers["d0"]
    await more(cluster, "d0", Role.DECODE)
    fleet(cluster).update(by_key([*found(cluster, "p0", uid="a"), *found(cluster, "d0", uid="b")]))
    assert (await asked).text[0] == answer(0, 8)
    assert cluster.servers["d0"].started
    await old.kill()


async def test_who_is_not_listed_any_more_ends_what_it_has_and_gets_nothing_new(cluster: Cluster) -> None:
    await cluster.up({**NORMAL, "d1": decode})
    updates = cluster.router.generate(request(max_tokens=200))
    await anext(updates)
    await cluster.until(lambda: bool(cluster.servers["d0"].started) or bool(cluster.servers["d1"].started))
    busy, other = ("d0", "d1") if cluster.servers["d0"].started else ("d1", "d0")
    fleet(cluster).update(by_key(found(cluster, "p0", other)))
    assert cluster.state(busy) == "draining"
    reasons = {server["name"]: server["reason"] for server in cluster.router.status()["servers"]}
    assert reasons[busy] == UNLISTED
    before = len(cluster.servers[busy].started)
    for _ in range(4):
        assert (await cluster.ask("hi")).finished.attempts == 1
    assert len(cluster.servers[busy].started) == before
    async for _ in updates:
        pass
    await cluster.servers[busy].kill()
    await cluster.until(lambda: names(cluster) == {"p0", other})


async def test_a_server_that_is_held_gets_nothing_new_until_it_is_not(cluster: Cluster) -> None:
    await cluster.up({**NORMAL, "d1": decode})
    listed = found(cluster, "p0", "d0", "d1")
    held = [*listed[:2], replace(listed[2], held="its pod is not ready")]
    fleet(cluster).update(by_key(held))
    for _ in range(4):
        await cluster.ask("hi")
    assert not cluster.servers["d1"].started and cluster.state("d1") == "draining"
    fleet(cluster).update(by_key(listed))
    for _ in range(8):
        await cluster.ask("hi")
    assert cluster.servers["d1"].started and cluster.state("d1") == "ready"


async def test_a_second_holder_of_a_name_is_refused_aloud(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.up({}, ready=False)
    await more(cluster, "p0", Role.PREFILL)
    await more(cluster, "d0", Role.DECODE)
    first = found(cluster, "p0", "d0", anonymous=True)
    fleet(cluster).update(by_key(first))
    await cluster.until(cluster.router.healthy)
    original = cluster.servers["d0"]
    await more(cluster, "d0", Role.DECODE)
    with caplog.at_level("INFO"):
        fleet(cluster).update(by_key([*first, *found(cluster, "d0", anonymous=True)]))
        await cluster.until(lambda: any("says that it is d0, which is at" in each for each in caplog.messages))
    for _ in range(4):
        await cluster.ask("hi")
    assert original.started and not cluster.servers["d0"].started
    await original.kill()
    await cluster.until(
        lambda: names(cluster) == {"p0", "d0", f"127.0.0.1:{original.port}"} or cluster.router.healthy()
    )
    await cluster.ask("hi")


async def test_an_address_may_come_to_be_another_server(cluster: Cluster) -> None:
    """With DNS an address is all that is known; pods take over addresses."""
    await cluster.up({}, ready=False)
    await more(cluster, "p0", Role.PREFILL)
    await more(cluster, "d0", Role.DECODE)
    listed = by_key(found(cluster, "p0", "d0", anonymous=True))
    fleet(cluster).update(listed)
    await cluster.until(cluster.router.healthy)
    await cluster.ask("hi")
    await cluster.servers["d0"].kill()
    heir = FakeServer("d7", Role.DECODE, decode)
    heir.port = cluster.servers["d0"].port
    await heir.start()
    cluster.servers["d7"] = heir
    await cluster.until(lambda: names(cluster) == {"p0", "d7"})
    assert (await cluster.ask("hi")).text[0] == answer(0, 8)
    assert measured(cluster) == {"p0", "d7"}
    assert set(fleet(cluster)._roles) == {"p0", "d7"}


async def test_a_server_that_moved_keeps_what_is_known_of_it_when_its_old_address_goes(cluster: Cluster) -> None:
    await cluster.up({}, ready=False)
    await more(cluster, "p0", Role.PREFILL)
    await more(cluster, "d0", Role.DECODE)
    before = found(cluster, "p0", "d0", anonymous=True)
    fleet(cluster).update(by_key(before))
    await cluster.until(cluster.router.healthy)
    await cluster.servers["d0"].kill()
    await cluster.until(lambda: not cluster.router.healthy())
    await more(cluster, "d0", Role.DECODE)
    now = found(cluster, "p0", "d0", anonymous=True)
    fleet(cluster).update(by_key([*before, *now]))
    await cluster.until(cluster.router.healthy)
    for _ in range(MIN_FAILURES):
        fleet(cluster).circuits.ended("d0", Work.DECODE, False, time.monotonic())
    fleet(cluster).update(by_key(now))
    assert len(names(cluster)) == 2
    assert fleet(cluster).circuits.of("d0", time.monotonic()) == {Work.DECODE: Circuit.OPEN}
    assert fleet(cluster)._roles["d0"] is Role.DECODE


async def test_a_server_with_two_addresses_is_one_server(cluster: Cluster) -> None:
    """As where names give an address of each family. A server ends the stream of a router that begins another one there."""
    await cluster.up({}, ready=False)
    await more(cluster, "p0", Role.PREFILL)
    server = FakeServer("d0", Role.DECODE, decode)
    server.host, server.one_stream = "0.0.0.0", True
    await server.start()
    cluster.servers["d0"] = server
    listed = found(cluster, "p0", "d0", anonymous=True)
    addresses = [listed[1], replace(listed[1], address=f"127.0.0.2:{server.port}")]

    def known_to_be_one() -> bool:
        """It is heard at one address, and known to be the same at the other."""
        streams = [stream for stream in fleet(cluster)._streams.values() if stream.name != "p0"]
        heard = [
            s for s in streams if s.process is not None and s.process[0] == server.hello.incarnation and s.connected
        ]
        last = server.greetings[-1].stream_id if server.greetings else ""
        settled = [s for s in heard if s._stream_id == last and any(other.first is s for other in streams)]
        return cluster.router.healthy() and len(heard) == len(settled) == 1

    fleet(cluster).update(by_key([listed[0], *addresses]))
    await cluster.until(known_to_be_one)
    got = await cluster.ask("hi", max_tokens=400)  # which takes two seconds
    assert (got.text[0], got.finished.attempts) == (answer(0, 400), 1)
    assert names(cluster) == {"p0", "d0"}
    for address in addresses:  # it is still found at one of them
        fleet(cluster).update(by_key([listed[0], address]))
        await cluster.until(cluster.router.healthy)
        assert (await cluster.ask("hi")).text[0] == answer(0, 8)  # again, maybe, if it was heard at the other
        fleet(cluster).update(by_key([listed[0], *addresses]))
        await cluster.until(known_to_be_one)
        assert names(cluster) == {"p0", "d0"}
    server.new_incarnation()
    await cluster.until(known_to_be_one)
    assert (await cluster.ask("hi")).text[0] == answer(0, 8)


class Pods:
    """A discovery that knows which pods have ended."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.asked: list[str] = []

    async def run(self, publish: Publish) -> None:
        raise NotImplementedError

    def faults(self) -> Mapping[str, str]:
        return {"'web-0'": "it has no port"}

    async def gone(self, pod: str) -> bool:
        self.asked.append(pod)
        return pod in self.ended


async def test_a_server_is_told_which_pods_of_lost_peers_have_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.router.fleet.ASK_AGAIN_S", 0.1)
    await cluster.up(NORMAL)
    pods = Pods()
    monkeypatch.setattr(fleet(cluster), "_discovery", pods)
    assert {
        "level": "warn",
        "subject": "'web-0'",
        "text": "it can be no server: it has no port",
    } in cluster.router.status()["alarms"]
    pods.ended.add("models/p7/uid-1")
    server = cluster.servers["d0"]
    server.lose_pods("models/p7/uid-1", "models/p8/uid-2")
    await cluster.until(lambda: "models/p7/uid-1" in server.pods_gone)
    await cluster.until(lambda: pods.asked.count("models/p8/uid-2") > 1)
    assert set(server.pods_gone) == {"models/p7/uid-1"}
    pods.ended.add("models/p8/uid-2")
    await cluster.until(lambda: "models/p8/uid-2" in server.pods_gone)
    server.lose_pods()
    async with asyncio.timeout(DEADLINE_S):  # once that is heard, nobody asks any more
        asked = -1
        while asked != len(pods.asked):
            asked = len(pods.asked)
            await asyncio.sleep(0.3)
