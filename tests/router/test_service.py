"""The router end to end: real gRPC, scripted servers. Answers, where they stop, who takes them, and how a router closes."""

from __future__ import annotations

import asyncio

import pytest

from disagg.messages.legs import LegTokens, StartLeg
from disagg.router.requests import ChoiceDelta, Started
from disagg.types.errors import Cancelled, InvalidRequest, Unavailable, UnknownModel
from disagg.types.ids import FinishReason
from tests.router.conftest import DEADLINE_S, NORMAL, Cluster, request
from tests.router.fake_server import EOS, TOKENIZER, FakeServer, answer, decode, prefill, silent, token


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


async def test_a_seed_is_drawn_unless_it_is_given(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    await asyncio.gather(cluster.ask(), cluster.ask(), cluster.ask(seed=7))
    seeds = [leg.params.seed for leg in cluster.servers["d0"].started]
    assert len(set(seeds)) == 3
    assert 7 in seeds


async def test_text_and_tokens_are_turned_into_each_other(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    ids = await router.tokenize("tiny", "hi")
    assert await router.detokenize("tiny", ids) == "hi"
    with pytest.raises(UnknownModel):
        await router.tokenize("other", "hi")
    with pytest.raises(InvalidRequest):
        await router.detokenize("tiny", (999,))
    assert [(model.name, model.max_model_len) for model in router.models()] == [("tiny", 512)]


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


# ---- clients that leave, or are slow


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


# ---- closing


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
