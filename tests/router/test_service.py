"""The router end to end: real gRPC, scripted servers. Every request ends in its tokens or in one clear error."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.memory.hashing import chain_root, extend_hashes
from disagg.messages.legs import (
    AbortLeg,
    GroupMemory,
    HostMemory,
    KvEvents,
    LegTokens,
    LoadReport,
    MemoryReport,
    Outcome,
    PeerRef,
    PrefixGroup,
    PrefixRules,
    ServerState,
    StartLeg,
    StorageState,
)
from disagg.messages.plan import TokenLogprobs
from disagg.router.requests import ChoiceDelta, Started
from disagg.router.streams import FIRST_BACKOFF_S, MAX_FRAME_TOKENS, num_tokens
from disagg.streams.state import frame_length
from disagg.types.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoCompatiblePeer,
    Overloaded,
    RequestFailed,
    Unavailable,
    UnknownModel,
)
from disagg.types.ids import FinishReason, LegKey
from disagg.types.sampling import SamplingParams
from tests.router.conftest import DEADLINE_S, NORMAL, SHORT_LEASE_S, Answer, Cluster, request
from tests.router.fake_server import (
    EOS,
    TOKENIZER,
    FakeServer,
    Script,
    answer,
    decode,
    decode_until,
    ending,
    first_index,
    prefill,
    silent,
    token,
    verdict,
)


async def test_a_request_is_answered_with_its_tokens_usage_and_timeline(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    got = await cluster.ask("hi there", n=2, logprobs=1)
    assert got.text == {0: answer(0, 8), 1: answer(1, 8)}
    assert {choice: delta.finish for choice, delta in got.last.items()} == dict.fromkeys((0, 1), FinishReason.LENGTH)
    assert got.started.prompt_token_ids == tuple(TOKENIZER.encode("hi there"))
    usage = got.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (8, 16, 1)
    assert got.finished.attempts == 1
    infos = [info for delta in got.deltas if delta.choice == 0 for info in delta.logprobs]
    assert [info.chosen.text for info in infos] == list(answer(0, 8))
    assert [info.text_offset for info in infos] == list(range(8))
    assert [[entry.logprob for entry in info.top] for info in infos] == [[-0.5]] * 8
    names = {event.name for event in got.finished.timeline}
    assert {"queued", "attempt 1", "p0/work", "d0/work"} <= names
    assert router.timeline(got.started.request_id) == got.finished.timeline
    assert cluster.metric("disagg_router_requests_total", outcome="ok") == 1
    assert cluster.metric("disagg_router_duplicate_tokens_total") == 2


async def test_the_first_token_does_not_wait_for_decode(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    updates = cluster.router.generate(request())
    assert isinstance(await anext(updates), Started)
    delta = await anext(updates)
    assert isinstance(delta, ChoiceDelta)
    assert delta.text == "a"
    await updates.aclose()
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))


async def test_many_requests_at_once_get_their_own_answers(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "p1": prefill, "d0": decode, "d1": decode}, max_inflight=7)
    lengths = list(range(1, 31))
    answers = await asyncio.gather(*(cluster.ask("x" * length, max_tokens=length) for length in lengths))
    assert [a.text[0] for a in answers] == [answer(0, length) for length in lengths]
    assert all(cluster.servers[name].started for name in cluster.servers)


# ---- what a client may get wrong


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ("hi", {"model": "other"}, UnknownModel, "'tiny' is"),
        ("", {}, InvalidRequest, "empty"),
        ((), {}, InvalidRequest, "empty"),
        ((1, 257), {}, InvalidRequest, "257"),
        ("\ud800", {}, InvalidRequest, "surrogate"),
        ("x" * 512, {}, InvalidRequest, "512"),
        ("x" * 500, {"max_tokens": 13}, InvalidRequest, "513 in all; the model's context holds 512"),
        ("hi", {"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ("hi", {"temperature": -1.0}, InvalidRequest, "temperature"),
        ("hi", {"deadline_s": 0.0}, InvalidRequest, "deadline_s"),
        ("hi", {"deadline_s": float("nan")}, InvalidRequest, "deadline_s"),
        ("hi", {"seed": -1}, InvalidRequest, "seed"),
        ("hi", {"cache_salt": "x" * 1025}, InvalidRequest, "cache_salt has 1025 characters; at most 1024"),
        ("hi", {"priority": 1001}, InvalidRequest, "priority is 1001; it must be from -1000 to 1000"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    cluster: Cluster, prompt: str, params: dict[str, object], error: type[Exception], says: str
) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(error, match=says):
        await cluster.ask(prompt, **params)
    assert not cluster.servers["p0"].started


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", r"prompt\[3\] is empty"),
        ("\ud800", r"prompt\[3\] has half of a surrogate pair"),
        ((1, 257), r"prompt\[3\] has token 257"),
        ("x" * 512, r"prompt\[3\] has 512 tokens; the model's context holds 512 tokens"),
        ("x" * 511, r"prompt\[3\] has 511 tokens and max_tokens is 8, 519 in all"),
    ],
)
async def test_a_wrong_prompt_of_several_is_named(cluster: Cluster, prompt: Any, says: str) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match=says):
        await cluster.ask(prompt, prompt_name="prompt[3]")


@pytest.mark.parametrize(
    ("biases", "says"),
    [
        (((5, 1.0), (6, 1.0), (5, 2.0)), "logit_bias names token 5 more than once"),
        (((5, 1.0), (6, 101.0)), "logit_bias of token 6 is 101.0; it must be between -100.0 and 100.0"),
    ],
)
async def test_a_bias_that_is_refused_is_named(cluster: Cluster, biases: Any, says: str) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match=says):
        await cluster.ask(logit_bias=biases)


async def test_a_number_that_nobody_asked_for_is_what_fits(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    found = await cluster.ask("x" * 500, max_tokens=16, min_tokens=16, ignore_eos=True, max_tokens_unasked=True)
    assert len(found.token_ids[0]) == 12
    found = await cluster.ask("x" * 400, max_tokens=16, ignore_eos=True, max_tokens_unasked=True)
    assert len(found.token_ids[0]) == 16
    with pytest.raises(InvalidRequest, match="the model's context holds 512 tokens, and at least one must be left"):
        await cluster.ask("x" * 512, max_tokens=16, max_tokens_unasked=True)


async def test_an_answer_that_the_face_could_not_hold_is_refused_once_all_else_is_in_order(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match="the model's context holds 512 tokens"):
        await cluster.ask("hi", max_tokens=511, too_large="too much")
    with pytest.raises(InvalidRequest, match="too much"):
        await cluster.ask("hi", max_tokens=510, too_large="too much")
    assert not cluster.servers["p0"].started


async def test_what_no_pool_can_hold_is_refused_with_both_numbers(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"d0": {"max_tokens_in_pool": 20}})
    with pytest.raises(InvalidRequest, match=r"21 in all; the servers can hold 20"):
        await cluster.ask("hi", max_tokens=19)
    got = await cluster.ask("hi", max_tokens=0)
    assert got.text[0] == answer(0, 18)


async def test_a_seed_is_drawn_unless_it_is_given(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    await asyncio.gather(cluster.ask(), cluster.ask(), cluster.ask(seed=7))
    seeds = [leg.params.seed for leg in cluster.servers["d0"].started]
    assert len(set(seeds)) == 3
    assert 7 in seeds


# ---- stops


async def test_a_stop_string_ends_the_text_and_aborts_decode(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    got = await cluster.ask(max_tokens=400, stop=("fgh", "zzz"), logprobs=0)
    assert got.text[0] == "abcde"
    assert got.token_ids[0] == tuple(token(0, i) for i in range(5))
    assert sum(len(delta.logprobs) for delta in got.deltas) == 5
    assert (got.last[0].finish, got.last[0].stop_reason) == (FinishReason.STOP, "fgh")
    assert got.finished.usage.completion_tokens == 5
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))


async def test_one_choice_may_stop_while_the_others_go_on(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    got = await cluster.ask(max_tokens=12, stop=("bc",), n=2)
    assert got.text == {0: "a", 1: answer(1, 12)}
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))
    assert [abort.choice for abort in cluster.servers["d0"].aborted] == [0]


async def test_no_stop_string_is_sought_before_min_tokens(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    got = await cluster.ask(max_tokens=60, min_tokens=10, stop=("fgh",))
    assert got.text[0] == answer(0, 31)


async def test_a_stop_token_is_counted_but_not_shown(cluster: Cluster) -> None:
    async def stops(server: FakeServer, leg: StartLeg) -> None:
        tail = LegTokens(leg.key, 0, 1, (token(0, 1), token(0, 2)), (), FinishReason.STOP)
        server.say(server.tokens(leg, 0, 0, 1), tail, server.end(leg))

    await cluster.up({"p0": prefill, "d0": stops})
    got = await cluster.ask(stop_token_ids=(token(0, 2),))
    assert (got.text[0], got.last[0].stop_reason, got.finished.usage.completion_tokens) == ("ab", token(0, 2), 3)
    got = await cluster.ask()
    assert (got.text[0], got.last[0].stop_reason) == ("ab", None)


async def test_the_first_token_may_be_the_last(cluster: Cluster) -> None:
    async def eos(server: FakeServer, leg: StartLeg) -> None:
        server.say(LegTokens(leg.key, 0, 0, (EOS,), (), FinishReason.STOP), server.end(leg))

    await cluster.up({"p0": eos, "d0": eos})
    got = await cluster.ask()
    assert (got.text[0], got.token_ids[0], got.finished.attempts) == ("", (EOS,), 1)


# ---- failures


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


# ---- waiting, limits, ends


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


async def test_a_server_that_comes_back_with_another_tokenizer_gets_nothing_until_it_has_ours(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"config.json": "c", "tokenizer.json": "t"}
    hello = {name: {"files": theirs, "weights_hash": "w"} for name in ("p0", "d0", "d1")}
    await cluster.up({**NORMAL, "d1": decode}, hello=hello, files=theirs)
    await cluster.until(lambda: [cluster.state(name) for name in ("p0", "d0", "d1")] == ["ready"] * 3)
    d1 = cluster.servers["d1"]
    d1.hello = replace(d1.hello, files={**theirs, "tokenizer.json": "other"})
    d1.new_incarnation()
    await cluster.until(lambda: cluster.state("d1") == "mismatch")
    status = next(server for server in cluster.router.status()["servers"] if server["name"] == "d1")
    assert "tokenizer.json" in status["reason"] and "restart" in status["reason"]
    assert "d1" in caplog.text and "tokenizer.json is not what this router has loaded" in caplog.text
    assert cluster.metric("disagg_router_servers_mismatched") == 1
    before = len(d1.started)
    for _ in range(4):
        assert (await cluster.ask()).text[0] == answer(0, 8)
    assert len(d1.started) == before
    await cluster.servers["d0"].kill()
    d1.hello = replace(d1.hello, files=theirs)
    d1.new_incarnation()
    await cluster.until(lambda: cluster.state("d1") == "ready")
    assert (await cluster.ask()).text[0] == answer(0, 8)
    assert len(d1.started) == before + 1


async def test_servers_that_all_have_another_tokenizer_are_no_reason_to_wait(cluster: Cluster) -> None:
    hello = {name: {"files": {"config.json": "c", "tokenizer.json": "t"}} for name in ("p0", "d0")}
    await cluster.up(NORMAL, hello=hello, ready=False, files={"config.json": "other", "tokenizer.json": "t"})
    await cluster.until(lambda: cluster.state("d0") == "mismatch" and cluster.state("p0") == "mismatch")
    with pytest.raises(NoCompatiblePeer, match="configuration than this router"):
        await cluster.ask()


async def test_an_answer_goes_on_with_the_weights_it_began_with_or_says_that_it_cannot(cluster: Cluster) -> None:
    """The decode server is lost after the first token, and comes back, as the prefill server does, with other weights."""
    old, new = ({"weights_hash": name, "fingerprint": name} for name in ("old", "new"))
    router = await cluster.up({"p0": prefill, "d0": silent}, hello={"p0": old, "d0": old})
    updates = router.generate(request())
    await anext(updates)
    assert isinstance(await anext(updates), ChoiceDelta)
    for server in cluster.servers.values():
        server.script = {"p0": prefill, "d0": decode}[server.name]
        server.hello = replace(server.hello, pid=server.hello.pid + 1, **new)
        server.new_incarnation()
    with pytest.raises(RequestFailed, match="other weights"):
        async for _ in updates:
            pass
    await cluster.until(lambda: {server["weights"] for server in router.status()["servers"]} == {"new"})
    assert (await cluster.ask()).text[0] == answer(0, 8)  # what begins now is the new model's


async def test_an_answer_that_waits_for_its_weights_keeps_no_other_from_being_run_again(cluster: Cluster) -> None:
    old, new = ({"weights_hash": name, "fingerprint": name} for name in ("old", "new"))
    scripts: dict[str, Script] = {"p0": prefill, "d0": silent, "p1": prefill, "d1": verdict(Outcome.PEER_LOST)}
    router = await cluster.up(scripts, hello={"p0": old, "d0": old, "p1": new, "d1": new})
    waits = router.generate(request())
    await anext(waits)
    assert isinstance(await anext(waits), ChoiceDelta)
    assert cluster.servers["d0"].started
    await cluster.servers["d0"].kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    got = await cluster.ask(timeout_s=DEADLINE_S)
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)
    await waits.aclose()


async def test_a_server_whose_process_came_back_with_other_weights_is_said_to_have(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The new process cannot know what the one before it had."""

    def reason() -> str:
        return next(server["reason"] for server in cluster.router.status()["servers"] if server["name"] == "d0")

    hello = {"p0": {"weights_hash": "a" * 64}, "d0": {"weights_hash": "a" * 64}}
    await cluster.up(NORMAL, hello=hello)
    d0 = cluster.servers["d0"]
    await d0.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    d0.hello = replace(d0.hello, weights_hash="b" * 64, fingerprint="other")
    await d0.restart()
    await cluster.until(lambda: cluster.state("d0") == "no-peer")
    assert reason() == "its weights were aaaaaaaaaaaa before, and are bbbbbbbbbbbb now"
    assert "server d0 came back with another model" in caplog.text
    d0.break_streams()  # the same workers, heard again
    await cluster.until(lambda: len(d0.greetings) >= 3 and cluster.state("d0") == "no-peer")
    assert "before" in reason()
    await d0.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    d0.hello = replace(d0.hello, weights_hash="a" * 64, fingerprint=cluster.servers["p0"].hello.fingerprint)
    await d0.restart()
    await cluster.until(lambda: cluster.state("d0") == "ready")
    assert reason() == "", "it has what it had"
    assert "its weights were bbbbbbbbbbbb before, and are aaaaaaaaaaaa now" in caplog.text


async def test_what_is_said_of_other_weights_goes_with_the_next_workers_that_have_them(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"d0": {"weights_hash": "a" * 64}})
    d0 = cluster.servers["d0"]
    d0.hello = replace(d0.hello, weights_hash="b" * 64)
    d0.new_incarnation()

    def reasons() -> set[object]:
        return {server["reason"] for server in cluster.router.status()["servers"]}

    await cluster.until(lambda: "its weights were aaaaaaaaaaaa before, and are bbbbbbbbbbbb now" in reasons())
    d0.new_incarnation()
    await cluster.until(lambda: reasons() == {""})


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


async def test_abort_ends_a_request_with_cancelled(cluster: Cluster) -> None:
    router = await cluster.up({"p0": prefill, "d0": silent})
    updates = router.generate(request())
    started = await anext(updates)
    assert isinstance(started, Started)
    assert not router.abort("unknown", started.abort_token)
    assert not router.abort(started.request_id, "unknown")
    assert router.abort(started.request_id, started.abort_token)
    with pytest.raises(Cancelled):
        async for _ in updates:
            pass


async def test_a_cancelled_client_frees_its_place(cluster: Cluster) -> None:
    router = await cluster.up({"p0": prefill, "d0": silent})
    asking = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: bool(cluster.servers["d0"].started))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert router.status()["routers"][0]["inflight"] == 0
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))


async def test_a_slow_client_gets_merged_deltas_and_blocks_nobody(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    slow = router.generate(request(max_tokens=60))
    started = await anext(slow)
    assert isinstance(started, Started)
    assert (await cluster.ask(max_tokens=60)).text[0] == answer(0, 60)
    await cluster.until(lambda: cluster.metric("disagg_router_requests_total", outcome="ok") == 2)
    rest = [update async for update in slow]
    assert len(rest) == 2
    assert isinstance(rest[0], ChoiceDelta)
    assert rest[0].text == answer(0, 60)


async def test_closing_lets_what_runs_finish_and_takes_nothing_new(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    running = asyncio.create_task(cluster.ask(max_tokens=20))
    await cluster.until(lambda: bool(cluster.servers["d0"].started))
    closing = asyncio.create_task(router.close(DEADLINE_S))
    await asyncio.sleep(0)
    assert not router.healthy() and not router.open()
    with pytest.raises(Unavailable, match="shutting down"):
        await cluster.ask()
    assert (await running).text[0] == answer(0, 20)
    await closing


async def test_closing_ends_the_rest_when_the_time_is_over(cluster: Cluster) -> None:
    router = await cluster.up({"p0": prefill, "d0": silent})
    running = asyncio.create_task(cluster.ask())
    await cluster.until(lambda: bool(cluster.servers["d0"].started))
    await router.close(0.1)
    await cluster.until(lambda: bool(cluster.servers["d0"].aborted))
    with pytest.raises(Unavailable):
        await running


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


async def test_a_server_with_another_name_or_model_is_not_used(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"p0": {"name": "p9"}, "d0": {"model": "other"}}, ready=False)
    servers = {"p0": "p9", "d0": "'other'"}
    await cluster.until(lambda: all(servers[s["name"]] in s["error"] for s in cluster.router.status()["servers"]))
    assert {cluster.state(name) for name in servers} == {"loading"}


async def test_text_and_tokens_are_turned_into_each_other(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    ids = await router.tokenize("tiny", "hi")
    assert await router.detokenize("tiny", ids) == "hi"
    with pytest.raises(UnknownModel):
        await router.tokenize("other", "hi")
    with pytest.raises(InvalidRequest):
        await router.detokenize("tiny", (999,))
    assert [(model.name, model.max_model_len) for model in router.models()] == [("tiny", 512)]


def test_a_frame_to_a_server_holds_what_it_reads_at_once_and_always_something() -> None:
    def leg(tokens: int) -> StartLeg:
        ids = range(tokens)  # stands for a tuple: only its length counts here
        peer = PeerRef("d", "d:1", "i")
        return StartLeg(LegKey("r", 1, 0), ids, tokens, SamplingParams(max_tokens=1), (0,), peer, 1.0)  # type: ignore[arg-type]

    assert frame_length([leg(MAX_FRAME_TOKENS // 2)] * 3, num_tokens, MAX_FRAME_TOKENS) == 2
    assert frame_length([leg(2 * MAX_FRAME_TOKENS)] * 2, num_tokens, MAX_FRAME_TOKENS) == 1
    assert frame_length([AbortLeg(LegKey("r", 1, 0))] * 5000, num_tokens, MAX_FRAME_TOKENS) == 256
    assert frame_length([leg(1), AbortLeg(LegKey("r", 1, 0))], num_tokens, MAX_FRAME_TOKENS) == 2


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
