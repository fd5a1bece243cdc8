"""Legs that fail and servers that die: a request ends in its right tokens or in one clear error."""

from __future__ import annotations

import asyncio
import random

import pytest

from disagg.messages.legs import Outcome, StartLeg
from disagg.types.errors import InvalidRequest, RequestFailed
from tests.router.conftest import NORMAL, SHORT_LEASE_S, Cluster
from tests.router.fake_server import (
    FakeServer,
    answer,
    decode,
    decode_until,
    ending,
    first_index,
    prefill,
    silent,
    verdict,
)


@pytest.mark.parametrize("outcome", [Outcome.PEER_LOST, Outcome.BAD_TRANSFER, Outcome.DRAINED, Outcome.WORKER_LOST])
@pytest.mark.parametrize("after", [0, 3])
async def test_decodes_verdict_leads_to_the_same_answer_on_another_attempt(
    cluster: Cluster, outcome: Outcome, after: int
) -> None:
    bad = verdict(outcome, times=1, after=after)
    await cluster.up({"p0": prefill, "p1": prefill, "d0": bad, "d1": bad})
    got = await cluster.ask(n=2)
    assert got.text == {0: answer(0, 8), 1: answer(1, 8)}
    assert got.finished.attempts == 2
    used = {name for name in ("d0", "d1") if cluster.servers[name].started}
    assert len(used) == (1 if outcome in (Outcome.PEER_LOST, Outcome.BAD_TRANSFER) else 2)
    assert cluster.metric("disagg_router_attempts_total", cause=outcome.value) == 1


async def test_after_three_attempts_the_request_fails(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": verdict(Outcome.PEER_LOST, times=9)})
    with pytest.raises(RequestFailed, match="3 times"):
        await cluster.ask()
    assert len(cluster.servers["d0"].started) == 3


async def test_what_prefill_gives_back_is_not_counted(cluster: Cluster) -> None:
    left = [4]

    async def gives_back(server: FakeServer, leg: StartLeg) -> None:
        left[0] -= 1
        await (ending(Outcome.GIVEN_BACK)(server, leg) if left[0] >= 0 else prefill(server, leg))

    await cluster.up({"p0": gives_back, "d0": verdict(Outcome.GIVEN_BACK, times=4)})
    got = await cluster.ask()
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 1)


@pytest.mark.parametrize("who", ["p0", "d0"])
async def test_refused_is_an_invalid_request(cluster: Cluster, who: str) -> None:
    await cluster.up({**NORMAL, who: ending(Outcome.REFUSED)})
    with pytest.raises(InvalidRequest, match="scripted refused"):
        await cluster.ask()


async def test_a_request_that_is_there_when_two_worker_groups_die_is_poison(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": ending(Outcome.WORKER_LOST), "d1": ending(Outcome.WORKER_LOST)})
    with pytest.raises(RequestFailed, match="d0, d1"):
        await cluster.ask()


async def test_a_killed_decode_server_is_replaced_at_once(cluster: Cluster) -> None:
    async def dies(server: FakeServer, leg: StartLeg) -> None:
        await decode_until(server, leg, first_index(leg) + 3)
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().create_task(server.kill())

    await cluster.up({"p0": prefill, "d0": dies, "d1": decode}, lease_s=3600.0)
    got, _ = await asyncio.gather(cluster.ask(), cluster.ask())
    assert got.text[0] == answer(0, 8)
    assert cluster.state("d0") == "dead"
    await cluster.servers["d0"].restart()
    await cluster.until(lambda: cluster.state("d0") == "ready")


async def test_choices_that_went_apart_are_replayed_as_prefixes_of_their_own(cluster: Cluster) -> None:
    async def apart(server: FakeServer, leg: StartLeg) -> None:
        for choice in leg.choices:
            server.say(server.tokens(leg, choice, 0, 2 + choice))
        server.say(server.end(leg, Outcome.WORKER_LOST))

    await cluster.up({"p0": prefill, "d0": apart, "d1": decode})
    got, _ = await asyncio.gather(cluster.ask(n=3), cluster.ask(n=3))
    assert got.text == {choice: answer(choice, 8) for choice in range(3)}
    replayed = [leg for leg in cluster.servers["d1"].started if leg.key.attempt == 2]
    assert [(leg.key.prefix_no, leg.choices, first_index(leg)) for leg in replayed] == [
        (0, (0,), 2),
        (1, (1,), 3),
        (2, (2,), 4),
    ]


async def test_a_killed_prefill_server_is_replaced_after_decodes_verdict(cluster: Cluster) -> None:
    async def dies(server: FakeServer, leg: StartLeg) -> None:
        asyncio.get_running_loop().create_task(server.kill())

    await cluster.up({"p0": dies, "p1": prefill, "d0": verdict(Outcome.PEER_LOST)})
    got = await cluster.ask()
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)


async def test_a_retry_goes_to_the_decode_server_that_has_what_landed(cluster: Cluster) -> None:
    async def fails(server: FakeServer, leg: StartLeg) -> None:
        server.say(server.end(leg, Outcome.WORKER_LOST))

    servers = {"p0": fails, "p1": prefill, "d0": verdict(Outcome.PEER_LOST), "d1": verdict(Outcome.PEER_LOST)}
    await cluster.up(servers)
    for _ in range(4):
        assert (await cluster.ask()).text[0] == answer(0, 8)
    attempts: dict[str, list[str]] = {}
    for name in ("d0", "d1"):
        for leg in cluster.servers[name].started:
            attempts.setdefault(leg.key.request_id, []).append(name)
    assert sorted(map(len, attempts.values())) == [1, 1, 2, 2]
    assert all(len(set(names)) == 1 for names in attempts.values())


async def test_a_decode_server_without_a_verdict_is_given_up_after_the_lease(cluster: Cluster) -> None:
    async def dies(server: FakeServer, leg: StartLeg) -> None:
        asyncio.get_running_loop().create_task(server.kill())

    await cluster.up({"p0": dies, "d0": silent, "p1": prefill, "d1": decode}, lease_s=SHORT_LEASE_S)
    got = await cluster.ask()
    assert got.text[0] == answer(0, 8)
    assert cluster.metric("disagg_router_attempts_total", cause="no_verdict") == 1


async def test_a_storm_of_failures_leaves_right_answers_or_one_clear_error(cluster: Cluster) -> None:
    """Streams break and are forgotten, workers crash, processes die and come back, while requests keep coming.

    The next thing goes wrong when three more requests have ended, so that a slow machine has as much go wrong as a fast one.
    """
    chance = random.Random(7)
    await cluster.up({"p0": prefill, "p1": prefill, "d0": decode, "d1": decode}, max_inflight=20, max_attempts=6)

    ended = 0

    async def storm() -> None:
        for enough in range(3, 80, 3):
            await cluster.until(lambda enough=enough: ended >= enough)
            server = cluster.servers[chance.choice(["p0", "p1", "d0", "d1"])]
            match chance.choice(["break", "break", "forget", "crash", "kill"]):
                case "break":
                    server.break_streams()
                case "forget":
                    server.forget_channels()
                    server.break_streams()
                case "crash":
                    server.new_incarnation()
                case "kill":
                    await server.kill()
                    await asyncio.sleep(0.15)
                    await server.restart()

    async def one(number: int) -> str:
        nonlocal ended
        await asyncio.sleep(number * 0.02)
        try:
            got = await cluster.ask("x" * number, max_tokens=12, n=1 + number % 3)
        except RequestFailed:
            return "failed"
        finally:
            ended += 1
        assert got.text == {choice: answer(choice, 12) for choice in range(1 + number % 3)}
        return "right"

    weather = asyncio.create_task(storm())
    ends = await asyncio.gather(*(one(number) for number in range(1, 81)))
    await weather
    assert ends.count("right") >= 60
    assert cluster.metric("disagg_router_contradictions_total") == 0
