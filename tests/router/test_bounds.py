"""What comes from clients is measured before work is done on it, ids are checked whoever made them, and what is shared is."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.config.tree import Config, ModelConfig
from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import AbortLeg, KvEvents, PeerRef, StartLeg
from disagg.router import grpc_service, view
from disagg.router.beside import THREADS, Beside
from disagg.router.main import run_router
from disagg.router.requests import Update
from disagg.router.service import Router
from disagg.router.streams import MAX_FRAME_TOKENS, num_tokens
from disagg.streams.state import frame_length
from disagg.text import stops
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import InvalidRequest, Overloaded, Unavailable
from disagg.types.ids import LegKey
from disagg.types.sampling import MAX_STOP_CHARS, SamplingParams
from disagg.wire import pb
from disagg.wire.inference import (
    generate_request_to_proto,
)
from tests.router.conftest import CONFIG, NORMAL, Cluster, request
from tests.router.fake_server import TOKENIZER, prefill, silent
from tests.router.test_grpc_face import Face, face, model_dir  # noqa: F401  fixtures
from tests.wire.tokenizing import detokenize_request_to_proto, tokenize_request_to_proto

BEYOND = "<image>"


def with_a_token_beyond() -> Tokenizer:
    """The fake servers' tokenizer, with an added token for which their model has no row."""
    inner = tokenizers.Tokenizer.from_str(TOKENIZER._inner.to_str())
    inner.add_tokens([tokenizers.AddedToken(BEYOND, special=False, normalized=False)])
    return Tokenizer(inner, vocab_size=TOKENIZER.vocab_size)


async def test_a_text_whose_token_the_model_has_no_row_for_is_refused_and_reaches_no_server(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    router._intake.tokenizer = with_a_token_beyond()
    for text in (BEYOND, f"what is {BEYOND}?", "a" * 400 + BEYOND):
        with pytest.raises(InvalidRequest, match="prompt has token 257; the vocabulary has ids 0 to 256"):
            await cluster.ask(text)
    assert not any(server.started for server in cluster.servers.values())
    assert (await cluster.ask("well")).text


async def test_a_router_says_at_start_which_tokens_its_model_has_no_row_for(
    model_dir: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_a_token_beyond()._inner.save(str(model_dir / "tokenizer.json"))
    config = Config(model=ModelConfig(name="tiny"), router=replace(CONFIG, grpc_port=0))
    with caplog.at_level(logging.WARNING):
        running = await run_router(config, model_dir, registry=CollectorRegistry())
    await running.close(0.0)
    assert "the tokenizer has 1 tokens beyond the model's vocabulary of 257: '<image>' (257)" in caplog.text


def refuse_to_read(*_: Any, **__: Any) -> None:
    raise AssertionError("the text was read")


async def test_a_text_that_is_too_long_is_refused_before_it_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await cluster.up(NORMAL)
    most = router.limits.max_chars
    assert most == 512 * len("<eos>")
    monkeypatch.setattr(Tokenizer, "encoding", refuse_to_read)
    with pytest.raises(InvalidRequest, match=f"the prompt has {most + 1} characters; at most {most} are read"):
        await cluster.ask("a" * (most + 1))
    with pytest.raises(InvalidRequest, match=f"the text has {most + 1} characters"):
        await router.tokenize("tiny", "a" * (most + 1))
    with pytest.raises(InvalidRequest, match="token_ids has 513 token ids; the model's context holds 512"):
        await router.detokenize("tiny", (1,) * 513)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"stop": ("a" * (MAX_STOP_CHARS // 2),) * 3},
        {"stop": ("a" * 5_000_000,)},
        {"logit_bias": ((257, 1.0),)},
        {"n": 65},
    ],
)
async def test_nothing_is_read_for_a_request_that_cannot_be_served(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    await cluster.up(NORMAL)
    monkeypatch.setattr(Tokenizer, "encoding", refuse_to_read)
    monkeypatch.setattr(stops, "StopTable", refuse_to_read)
    with pytest.raises(InvalidRequest):
        await cluster.ask("a" * 1000, **wrong)


async def test_requests_whose_text_is_being_read_have_their_place_in_the_queue(cluster: Cluster) -> None:
    """A client whose texts are being read leaves room for another one's, and that is the last."""
    router = await cluster.up({"p0": prefill, "d0": silent}, max_inflight=1, max_queued=2)
    gate = asyncio.Event()

    async def encoded(*_: Any) -> tuple[int, ...]:
        await gate.wait()
        return (1,)

    router._intake.encoded = encoded  # type: ignore[method-assign]
    tasks = [asyncio.create_task(anext(router.generate(request("hi")))) for _ in range(2)]
    await cluster.until(lambda: router._dispatch.places.arriving == 2)
    with pytest.raises(Overloaded, match="this client's 2 that are being read are its share"):
        await anext(router.generate(request("hi")))
    tasks.append(asyncio.create_task(anext(router.generate(request("hi", tenant="other")))))
    await cluster.until(lambda: router._dispatch.places.arriving == 3)
    with pytest.raises(Overloaded, match=r"3 are waiting; at most 1 and 2 may$"):
        await anext(router.generate(request("hi", tenant="third")))
    gate.set()
    await asyncio.gather(*tasks)
    assert router._dispatch.places.arriving == 0
    await router.close(0.0)


async def test_one_table_of_stop_strings_serves_all_choices_of_all_prompts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await cluster.up(NORMAL)
    made: list[object] = []

    class Counted(stops.StopTable):
        def __init__(self, strings: tuple[str, ...]) -> None:
            made.append(strings)
            super().__init__(strings)

    monkeypatch.setattr("disagg.router.intake.StopTable", Counted)
    monkeypatch.setattr("disagg.router.choice_text.StopTable", Counted)
    strings = tuple(f"stop{number}" for number in range(16))
    await asyncio.gather(*(cluster.ask(f"prompt {number}", n=4, stop=strings) for number in range(32)))
    assert made == [strings]
    gc.collect()
    assert not router._intake.stop_tables


async def test_a_choice_that_has_said_nothing_costs_nothing(cluster: Cluster) -> None:
    router = await cluster.up({"p0": silent, "d0": silent})
    updates = router.generate(request("hi", n=64))
    await anext(updates)
    [live] = router._dispatch.live.values()
    assert live.texts == {}
    await updates.aclose()


# ---- gRPC

LARGE = 10 << 20


@pytest.mark.parametrize("method", ["generate", "tokenize", "detokenize", "generate ids"])
async def test_a_message_larger_than_any_legal_one_is_refused_before_it_is_read(
    face: Face,  # noqa: F811
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Router, "generate", refuse_to_read)
    monkeypatch.setattr(Router, "tokenize", refuse_to_read)
    monkeypatch.setattr(Router, "detokenize", refuse_to_read)
    asked = {
        "generate": lambda: face.stub.generate(generate("a" * LARGE)).read(),
        "generate ids": lambda: face.stub.generate(generate((1,) * LARGE)).read(),
        "tokenize": lambda: face.stub.tokenize(tokenize_request_to_proto(model="tiny", text="a" * LARGE)),
        "detokenize": lambda: face.stub.detokenize(detokenize_request_to_proto(model="tiny", token_ids=(1,) * LARGE)),
    }[method]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_lists_that_are_too_long_are_refused_by_their_length(face: Face) -> None:  # noqa: F811
    cases = (
        (generate((1,) * 257), "prompt holds 257 token ids; at most 256"),
        (generate("a", stop=("s",) * 17), "stop holds 17 strings; at most 16"),
        (generate("a", stop_token_ids=(1,) * 5000), "stop_token_ids holds 5000 ids; at most 256"),
        (generate("a", logit_bias=((1, 1.0),) * 5000), "logit_bias holds 5000 entries; at most 1024"),
        (generate("a", logit_bias=((7, 1.0), (8, 1.0), (7, 1.0))), "logit_bias names token 7 more than once"),
        (generate("a", logit_bias=((7, 1.0), (8, 1000.0))), "logit_bias of token 8 is 1000.0"),
        (generate("a", stop=("s" * 1025, "t" * 1024)), "stop holds 2049 characters in all; at most 2048"),
    )
    for message, words in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await face.stub.generate(message).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")


def generate(prompt: str | tuple[int, ...], **params: Any) -> pb.inference.GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": 4, **params})
    return generate_request_to_proto(model="tiny", prompt=prompt, params=sampling)


class Words(str):
    """A text of which one can know whether it is still there."""

    __slots__ = ("__weakref__",)


async def test_nothing_of_a_refused_call_is_left_though_no_garbage_is_collected(
    face: Face,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: list[weakref.ref[Any]] = []

    def remembered(asked: dict[str, Any], field: str) -> dict[str, Any]:
        asked[field] = Words(asked[field])
        there.append(weakref.ref(asked[field]))
        return asked

    of_generate, of_tokenize = grpc_service.generate_request_from_proto, grpc_service.tokenize_request_from_proto
    monkeypatch.setattr(
        grpc_service, "generate_request_from_proto", lambda *args: remembered(of_generate(*args), "prompt")
    )
    monkeypatch.setattr(
        grpc_service, "tokenize_request_from_proto", lambda *args: remembered(of_tokenize(*args), "text")
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await face.stub.generate(generate("a" * 1000, temperature=-1.0)).read()
            with pytest.raises(grpc.aio.AioRpcError):
                await face.stub.generate(generate("a" * 1000)).read()  # longer than the context
            with pytest.raises(grpc.aio.AioRpcError):
                await face.stub.tokenize(tokenize_request_to_proto(model="tiny", text="a" * 1000))
            with pytest.raises(grpc.aio.AioRpcError):
                await face.stub.tokenize(tokenize_request_to_proto(model="other", text="a" * 1000))
        assert len(there) == 20
        async with asyncio.timeout(30):  # what ended lets go of it when its last tasks have run
            while any(words() is not None for words in there):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


def test_a_frame_to_a_server_carries_as_many_legs_as_its_loop_reads_at_once() -> None:
    def leg(tokens: int) -> StartLeg:
        peer = PeerRef("d0", "h:1", "i")
        return StartLeg(LegKey("r", 1, 0), (1,) * tokens, tokens, SamplingParams(max_tokens=1), (0,), peer, 1.0)

    abort = AbortLeg(LegKey("r", 1, 0))
    assert frame_length([leg(10), abort, leg(20)], num_tokens, MAX_FRAME_TOKENS) == 3
    half = MAX_FRAME_TOKENS // 2
    assert frame_length([leg(half), abort, leg(half), leg(1), abort], num_tokens, MAX_FRAME_TOKENS) == 3
    assert frame_length([leg(2 * MAX_FRAME_TOKENS), leg(1)], num_tokens, MAX_FRAME_TOKENS) == 1
    assert frame_length([abort] * 3000, num_tokens, MAX_FRAME_TOKENS) == 256


async def test_many_long_prompts_reach_a_server_in_several_frames(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.router.streams.MAX_FRAME_TOKENS", 1000)
    await cluster.up(NORMAL)
    prompt = tuple(range(250)) * 2
    answers = await asyncio.gather(*(cluster.ask(prompt, max_tokens=1) for _ in range(20)))
    assert all(answer.text for answer in answers)


class Deaf(ReliableChannel[Any]):
    """Takes everything and acknowledges nothing."""

    def ack_frame(self) -> Frame[Any]:
        return replace(super().ack_frame(), ack=0)

    def push(self, messages: tuple[Any, ...], now_s: float) -> Frame[Any]:
        return replace(super().push(messages, now_s), ack=0)


async def test_a_server_that_acknowledges_nothing_is_lost_before_what_is_kept_for_it_grows_large(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.router.fake_server.ReliableChannel", Deaf)
    monkeypatch.setattr("disagg.router.streams.MAX_KEPT_TOKENS", 400)
    await cluster.up(NORMAL)
    for _ in range(2):
        assert (await cluster.ask(tuple(range(250)), max_tokens=1)).text
    async with asyncio.timeout(30):
        while "more legs unacknowledged than are kept for it" not in caplog.text:
            await asyncio.sleep(0.01)


def test_what_a_server_says_of_its_cache_is_kept_within_a_bound() -> None:
    cached = view.CachedPages(10)
    for start in range(0, 40, 4):
        cached.apply(KvEvents(stored=tuple((n % 2, b"%d" % n) for n in range(start, start + 4))))
    assert sum(cached.counts()) == 10
    cached.apply(KvEvents(removed=((0, b"0"),)))
    cached.apply(KvEvents(stored=((0, b"new"),)))
    assert cached.holds(0, b"new") and sum(cached.counts()) == 10
    assert cached.holds(1, b"39") and not cached.holds(1, b"1"), "what was heard of last"


async def test_tenants_take_turns_where_requests_are_taken(cluster: Cluster) -> None:
    """One is taken at each turn of the loop: not all of a client's hundreds before another one's."""
    router, order = await cluster.up({"p0": prefill, "d0": silent}), list[str]()

    async def begin(tenant: str) -> AsyncGenerator[Update, None]:
        updates = router.generate(request("hi", tenant=tenant))
        await anext(updates)
        order.append(tenant)
        return updates

    many = [asyncio.create_task(begin("many")) for _ in range(200)]
    leaves = asyncio.create_task(begin("leaves"))
    await asyncio.sleep(0)
    leaves.cancel()
    one = await begin("one")
    assert order.index("one") < 20
    for updates in (one, *await asyncio.gather(*many)):
        await updates.aclose()
    assert len(order) == 201


async def test_tenants_take_turns_where_long_texts_are_read() -> None:
    """Hundreds of prompts of one client keep another one's waiting for one of them, and whoever leaves takes no turn."""
    beside, order = Beside(), list[str]()

    def read(tenant: str) -> None:
        time.sleep(0.002)
        order.append(tenant)

    try:
        many = [asyncio.create_task(beside.run("many", 10_000, read, "many")) for _ in range(200)]
        leaves = asyncio.create_task(beside.run("leaves", 10_000, read, "leaves"))
        await asyncio.sleep(0)
        leaves.cancel()
        await beside.run("one", 10_000, read, "one")
        assert order.index("one") <= 2 * THREADS
        await asyncio.gather(*many)
        assert len(order) == 201 and "leaves" not in order
    finally:
        beside.close()


async def test_what_waits_to_be_read_ends_with_the_router_and_fails_alone() -> None:
    beside, began, go_on = Beside(), list[int](), threading.Event()

    def read() -> None:
        began.append(1)
        go_on.wait(10.0)

    with pytest.raises(ZeroDivisionError):
        await beside.run("a", 1, divmod, 1, 0)
    reading = [asyncio.create_task(beside.run("a", 1, read)) for _ in range(THREADS + 2)]
    while len(began) < THREADS:
        await asyncio.sleep(0.001)
    beside.close()
    go_on.set()
    ends = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None)] * THREADS + [Unavailable] * 2
    with pytest.raises(Unavailable):
        await beside.run("a", 1, read)


def test_all_threads_for_text_are_there_from_the_start() -> None:
    """What grows with the hours is a leak to whoever watches."""
    before = set(threading.enumerate())  # by name and not by number: those of other tests may end meanwhile
    beside = Beside()
    try:
        names = [thread.name for thread in set(threading.enumerate()) - before if "text_" in thread.name]
        assert len(names) == 2 * THREADS and {name.partition("_")[0] for name in names} == {"text", "long-text"}
    finally:
        beside.close()
