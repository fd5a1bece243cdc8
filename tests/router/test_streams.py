"""A router's stream to a server: broken, resumed, silent or forgotten, and what is believed of what comes on it."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from disagg.messages.legs import AbortLeg, LegTokens, PeerRef, StartLeg
from disagg.messages.plan import TokenLogprobs
from disagg.router.requests import ChoiceDelta
from disagg.router.streams import FIRST_BACKOFF_S, MAX_FRAME_TOKENS, num_tokens
from disagg.streams.state import frame_length
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams
from tests.router.conftest import DEADLINE_S, NORMAL, SHORT_LEASE_S, Answer, Cluster, request
from tests.router.fake_server import FakeServer, answer, decode, decode_until, prefill, token


async def test_a_silent_server_is_given_up_when_its_lease_ends(cluster: Cluster) -> None:
    async def freezes(server: FakeServer, leg: StartLeg) -> None:
        server.frozen = True

    await cluster.up({"p0": prefill, "d0": freezes, "d1": decode}, lease_s=SHORT_LEASE_S)
    got, _ = await asyncio.gather(cluster.ask(), cluster.ask())
    assert got.text[0] == answer(0, 8)
    assert cluster.state("d0") == "dead"
    cluster.servers["d0"].frozen = False
    await cluster.until(lambda: cluster.state("d0") == "ready")


async def test_workers_that_come_back_as_a_new_incarnation_lost_their_requests(cluster: Cluster) -> None:
    async def crashes_once(server: FakeServer, leg: StartLeg) -> None:
        if len(server.started) > 1:
            await decode(server, leg)
            return
        await decode_until(server, leg, 3)
        asyncio.get_running_loop().call_soon(server.new_incarnation)

    await cluster.up({"p0": prefill, "d0": crashes_once})
    got = await cluster.ask()
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)
    first, second = cluster.servers["d0"].started
    assert len(second.token_ids) - second.num_prompt == 3
    assert cluster.servers["p0"].started[1].peer.incarnation == cluster.servers["d0"].hello.incarnation
    assert first.key.attempt == 1


async def test_a_broken_stream_is_resumed_without_a_new_attempt(cluster: Cluster) -> None:
    async def hiccups(server: FakeServer, leg: StartLeg) -> None:
        await decode_until(server, leg, 3)
        server.break_streams()
        await decode_until(server, replace_start(leg, 3), leg.params.max_tokens)
        server.say(server.end(leg))

    await cluster.up({"p0": prefill, "d0": hiccups})
    got = await cluster.ask(max_tokens=40)
    assert (got.text[0], got.finished.attempts) == (answer(0, 40), 1)
    assert len(cluster.servers["d0"].greetings) == 2


def replace_start(leg: StartLeg, count: int) -> StartLeg:
    """The same leg, as if `count` more of its tokens were known."""
    return replace(leg, token_ids=leg.token_ids + tuple(token(0, i) for i in range(count)))


async def test_a_server_that_keeps_ending_the_stream_is_not_dialled_without_a_pause(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    server = cluster.servers["d0"]
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(DEADLINE_S):
        while len(server.greetings) < 4:
            server.break_streams()
            await asyncio.sleep(0.001)
    assert asyncio.get_running_loop().time() - began_s >= 3 * FIRST_BACKOFF_S


async def test_a_server_that_is_gone_is_known_to_be_long_before_its_lease_ends_however_often_its_streams_broke(
    cluster: Cluster,
) -> None:
    await cluster.up(NORMAL, lease_s=3600.0)
    server = cluster.servers["d0"]
    for number in range(1, 6):  # after which pauses are as long as they get
        await cluster.until(lambda number=number: len(server.greetings) >= number and cluster.state("d0") == "ready")
        server.break_streams()
    await server.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")


async def test_a_server_that_forgot_the_stream_lost_its_requests(cluster: Cluster) -> None:
    async def forgets_once(server: FakeServer, leg: StartLeg) -> None:
        if len(server.started) > 1:
            await decode(server, leg)
            return
        asyncio.get_running_loop().call_soon(server.forget_channels)
        asyncio.get_running_loop().call_soon(server.break_streams)
        await asyncio.sleep(0)

    await cluster.up({"p0": prefill, "d0": forgets_once})
    got = await cluster.ask()
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)


async def test_tokens_said_twice_and_out_of_order_are_told_once(cluster: Cluster) -> None:
    async def stutters(server: FakeServer, leg: StartLeg) -> None:
        for index in (2, 0, 1, 1, 0, 4, 5, 3):
            server.say(server.tokens(leg, 0, index, index + 1), server.tokens(leg, 0, max(0, index - 1), index + 1))
        server.say(server.tokens(leg, 0, 0, 8, FinishReason.LENGTH), server.end(leg))

    await cluster.up({"p0": prefill, "d0": stutters})
    got = await cluster.ask()
    assert got.text[0] == answer(0, 8)
    assert got.token_ids[0] == tuple(token(0, i) for i in range(8))


async def test_a_decode_that_contradicts_the_first_token_is_not_believed(cluster: Cluster) -> None:
    told = asyncio.Event()

    async def lies_once(server: FakeServer, leg: StartLeg) -> None:
        if len(server.started) > 1:
            await decode(server, leg)
            return
        await told.wait()
        wrong = LegTokens(leg.key, 0, 0, (token(0, 9), token(0, 10)), (), None)
        server.say(wrong, server.tokens(leg, 0, 2, 8, FinishReason.LENGTH), server.end(leg))

    router = await cluster.up({"p0": prefill, "d0": lies_once})
    updates = []
    async with asyncio.timeout(DEADLINE_S):
        async for update in router.generate(request()):
            updates.append(update)
            if isinstance(update, ChoiceDelta):
                told.set()
    got = Answer(updates)
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)
    assert cluster.metric("disagg_router_contradictions_total") == 1


async def test_a_server_that_says_what_makes_no_sense_is_lost_and_what_it_had_runs_again(cluster: Cluster) -> None:
    """What it said was not acknowledged, so it would say it again on every connection of that stream."""

    async def nonsense_once(server: FakeServer, leg: StartLeg) -> None:
        if len(server.started) > 1:
            await decode(server, leg)
            return
        server.say(LegTokens(leg.key, 0, 1, (token(0, 1), token(0, 2)), (TokenLogprobs(-1.0, ()),), None))

    await cluster.up({"p0": prefill, "d0": nonsense_once})
    got = await cluster.ask()
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)
    assert cluster.metric("disagg_router_servers_lost_total", server="d0") == 1


async def test_a_server_with_another_name_or_model_is_not_used(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"p0": {"name": "p9"}, "d0": {"model": "other"}}, ready=False)
    servers = {"p0": "p9", "d0": "'other'"}
    await cluster.until(lambda: all(servers[s["name"]] in s["error"] for s in cluster.router.status()["servers"]))
    assert {cluster.state(name) for name in servers} == {"loading"}


def test_a_frame_to_a_server_holds_what_it_reads_at_once_and_always_something() -> None:
    def leg(tokens: int) -> StartLeg:
        ids = range(tokens)  # stands for a tuple: only its length counts here
        peer = PeerRef("d", "d:1", "i")
        return StartLeg(LegKey("r", 1, 0), ids, tokens, SamplingParams(max_tokens=1), (0,), peer, 1.0)  # type: ignore[arg-type]

    assert frame_length([leg(MAX_FRAME_TOKENS // 2)] * 3, num_tokens, MAX_FRAME_TOKENS) == 2
    assert frame_length([leg(2 * MAX_FRAME_TOKENS)] * 2, num_tokens, MAX_FRAME_TOKENS) == 1
    assert frame_length([AbortLeg(LegKey("r", 1, 0))] * 5000, num_tokens, MAX_FRAME_TOKENS) == 256
    assert frame_length([leg(1), AbortLeg(LegKey("r", 1, 0))], num_tokens, MAX_FRAME_TOKENS) == 2
