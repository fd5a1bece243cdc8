"""Commands that talk to a router: `generate`, `status`, `debug dump` and the demo's HTTP half, against small fakes."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import convert
from rich.console import Console

from disagg.cli import generate as generate_module
from disagg.cli.answers import ServerSaid
from disagg.cli.demo import sse_events
from disagg.cli.generate import GenerateOptions, ask
from disagg.cli.router_process import dump_server
from disagg.cli.status import pool_table, print_pools, render_dump
from disagg.messages.legs import TimelineEvent
from disagg.types.errors import ConfigError, DisaggError, InvalidRequest, UnknownModel
from disagg.types.ids import FinishReason
from disagg.wire import pb
from disagg.wire.inference import (
    ChoiceDeltaView,
    FinishedView,
    ModelInfo,
    StartedView,
    UsageView,
    choice_delta_to_proto,
    finished_to_proto,
    list_models_response_to_proto,
    started_to_proto,
)
from disagg.wire.services import InferenceServicer, inference_handler, make_server
from disagg.wire.status import abort_with
from tests.cli.routers import status_of

EVENTS = (TimelineEvent("queued", 1.0, 1.5, "prefill-0"), TimelineEvent("decode", 1.5, 3.0))


class FakeRouter(InferenceServicer):
    """Answers "Paris." in two deltas, and remembers what it was asked."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.asked: list[pb.inference.GenerateRequest] = []
        self.refuses = ""

    async def generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        if self.refuses:
            await abort_with(context, InvalidRequest(self.refuses, "temperature"))
        yield started_to_proto(StartedView("r1", (1, 2, 3), 1.0))
        yield choice_delta_to_proto(ChoiceDeltaView(choice=0, text="Par", token_ids=(7,)))
        yield choice_delta_to_proto(ChoiceDeltaView(0, "is.", (8, 9), finish=FinishReason.STOP))
        yield finished_to_proto(FinishedView(UsageView(3, 3, 0), EVENTS, attempts=2))

    async def list_models(self, request: Any, context: Any) -> Any:
        return list_models_response_to_proto([ModelInfo(name, 64) for name in self.models])

    async def tokenize(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks for it")

    async def detokenize(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks for it")

    async def abort(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks for it")


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter("tiny")
    server = make_server(inference_handler(fake))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"  # type: ignore[attr-defined]
    await server.start()
    yield fake
    await server.stop(None)


def options(router: Any, **given: Any) -> GenerateOptions:
    return GenerateOptions(**{"address": router.address, "chat": False, **given})


async def test_generate_prints_text_as_it_comes_and_keeps_the_answer(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await ask("The capital?", options(router), echo=True)
    assert capsys.readouterr().out == "Paris.\n"
    assert (answer.request_id, answer.text, answer.token_ids, answer.finish) == ("r1", "Paris.", (7, 8, 9), "stop")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.attempts) == (3, 3, 2)
    assert answer.timeline == EVENTS
    assert 0 < answer.ttft_s <= answer.total_s


async def test_generate_sends_what_the_flags_say_and_no_more(router: FakeRouter) -> None:
    await ask("hello", options(router), echo=False)
    await ask("hello", options(router, max_tokens=5, temperature=0.0, stop=("x",), seed=7, deadline=2.0), echo=False)
    plain, full = router.asked
    assert (plain.model, plain.text, plain.add_special_tokens) == ("tiny", "hello", True)
    assert not plain.sampling.HasField("max_tokens")
    assert not plain.sampling.HasField("seed")
    assert (full.sampling.max_tokens, full.sampling.temperature, full.sampling.seed) == (5, 0.0, 7)
    assert (list(full.sampling.stop), full.deadline_ms) == (["x"], 2000)


async def test_a_chat_is_rendered_here_and_sent_without_more_special_tokens(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "_render", lambda prompt, model, chat: (f"<user>{prompt}", True))
    await ask("hello", options(router, chat=True), echo=False)
    assert (router.asked[0].text, router.asked[0].add_special_tokens) == ("<user>hello", False)


async def test_a_model_that_is_not_here_cannot_be_chatted_with_but_is_sent_raw_by_default(
    router: FakeRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="use --raw"):
        await ask("hello", options(router, chat=True), echo=False)
    await ask("hello", options(router, chat=None), echo=False)
    assert router.asked[0].text == "hello"
    assert "sending the prompt as it is" in capsys.readouterr().err


async def test_a_refusal_is_the_routers_own_words(router: FakeRouter) -> None:
    router.refuses = "temperature is 101.0; it must be between 0.0 and 100.0"
    with pytest.raises(InvalidRequest, match="must be between"):
        await ask("hello", options(router), echo=False)


async def test_several_models_must_be_chosen_from(router: FakeRouter) -> None:
    router.models = ("a", "b")
    with pytest.raises(UnknownModel, match="serves a, b; name one with --model"):
        await ask("hello", options(router), echo=False)


async def test_names_of_models_are_repeated_in_short_and_on_one_line(router: FakeRouter) -> None:
    router.models = ("a\nb" * 100_000, "c")
    with pytest.raises(UnknownModel, match="name one with --model") as caught:
        await ask("hello", options(router), echo=False)
    assert len(str(caught.value)) < 5000 and str(caught.value).isprintable()


async def test_no_router_is_said_so() -> None:
    with pytest.raises(DisaggError, match=r"no router answers at 127\.0\.0\.1:1; is `disagg up` running"):
        await ask("hello", GenerateOptions(address="127.0.0.1:1", model="m", chat=False), echo=False)


async def test_a_server_that_cannot_dump_does_not_hide_the_others() -> None:
    assert (await dump_server("127.0.0.1:1", timeout_s=2.0)).startswith("no dump: UNAVAILABLE")


def test_a_pool_shows_each_server_and_an_empty_one_says_so() -> None:
    server = {
        "name": "decode-0",
        "role": "decode",
        "state": "ready",
        "tp": 1,
        "running": 3,
        "waiting": 1,
        "pid": 42,
        "worker_pids": [43],
        "pages_used": 5,
        "pages_total": 10,
        "address": "127.0.0.1:5000",
    }
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(pool_table("decode", [convert(server, ServerSaid)]))
    console.print(pool_table("prefill", []))
    for each in ("decode pool", "decode-0", "ready", "5/10", "42", "43", "127.0.0.1:5000", "(empty)"):
        assert each in out.getvalue()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"tp": 2, "dp": 1, "pp": 1}, "tp2"),
        ({"tp": 2, "dp": 3, "pp": 1}, "tp2 dp3"),
        ({"tp": 1, "pp": 2}, "tp1 pp2"),
        ({}, ""),
    ],
)
def test_a_pool_shows_how_many_ranks_of_which_kind_a_server_has(said: dict[str, int], shown: str) -> None:
    table = pool_table("mixed", [convert({"name": "mixed-0", "role": "mixed", "state": "ready", **said}, ServerSaid)])
    (column,) = (column for column in table.columns if column.header == "ranks")
    assert [str(cell) for cell in column.cells] == [shown]


def test_a_pool_shows_what_its_servers_keep_beyond_the_gpu_where_any_does() -> None:
    def shown(**offload: object) -> str:
        out = io.StringIO()
        none = {"name": "decode-0", "role": "decode", "state": "ready"}
        some = {"name": "decode-1", "role": "decode", "state": "ready", "offload": offload}
        print_pools(Console(file=out, width=160), status_of(none, some))
        return out.getvalue()

    assert "host pages" not in shown(host_pages_used=0, host_pages_total=0, store="off")
    with_host = shown(host_pages_used=7, host_pages_total=12, store="off")
    assert "host pages" in with_host and "7/12" in with_host
    well = shown(host_pages_used=7, host_pages_total=12, store="ok")
    assert " ok " in well and "storage fails" not in well
    failing = shown(host_pages_used=7, host_pages_total=12, store="degraded").splitlines()
    assert "degraded" in "".join(failing) and failing[-2].startswith("decode-1: storage fails; until it works again")


@pytest.mark.parametrize(("state", "last"), [("ready", "2 queued"), ("draining", "2 queued, draining")])
def test_the_router_says_what_it_has_and_that_it_drains(state: str, last: str) -> None:
    out = io.StringIO()
    print_pools(Console(file=out, width=120), status_of(state=state, inflight=3, queued=2))
    assert out.getvalue().splitlines()[-1] == f"router router-0 (pid 7): 3 in flight, {last}"


def test_versions_are_shown_of_the_router_always_and_of_servers_where_several_serve_together() -> None:
    def shown(*versions: str) -> str:
        out = io.StringIO()
        facts = {"role": "decode", "state": "ready", "incarnation": "i", "protocol": 3}
        servers = [{**facts, "name": f"d{index}", "version": version} for index, version in enumerate(versions)]
        servers.append({**facts, "name": "gone", "state": "dead", "version": "old"})
        print_pools(Console(file=out, width=160), status_of(*servers, version="2+a", protocol=3))
        return out.getvalue()

    assert shown("2+a", "2+a").splitlines()[-1].endswith("0 queued, version 2+a, protocol 3")
    assert shown("2+a", "2+a").count("version") == 1
    several = shown("2+a", "1+b")
    assert several.count("version") > 1 and " 1+b " in several
    assert " - " in shown("2+a", "")


def test_a_router_that_is_refused_says_why() -> None:
    out = io.StringIO()
    print_pools(Console(file=out, width=120), status_of(error='the name "gateway" is held [by] another'))
    assert out.getvalue().splitlines()[-1] == 'the name "gateway" is held [by] another'


def test_what_the_operator_should_know_of_a_server_stands_below_its_pool() -> None:
    out = io.StringIO()
    server = {"name": "decode-0", "role": "decode", "state": "mismatch", "reason": "its tokenizer.json is [another]"}
    print_pools(Console(file=out, width=120), status_of(server))
    assert out.getvalue().splitlines()[-2] == "decode-0: its tokenizer.json is [another]"


def test_by_what_kv_goes_to_each_peer_stands_below_the_pool() -> None:
    out = io.StringIO()
    carried = [
        {"peer": "decode-0", "ways": ["zero-copy rc_mlx5/mlx5_0:1", "zero-copy tcp/[eth0]"], "slow": False},
        {"peer": "decode-1", "ways": ["zero-copy tcp/eth0"], "slow": True},
    ]
    server = {"name": "prefill-0", "role": "prefill", "state": "ready", "carried": carried}
    print_pools(Console(file=out, width=120), status_of(server))
    assert [line for line in out.getvalue().splitlines() if "KV to" in line] == [
        "prefill-0: KV to decode-0 goes by zero-copy rc_mlx5/mlx5_0:1 or zero-copy tcp/[eth0]",
        "prefill-0: KV to decode-1 goes by zero-copy tcp/eth0, though it computes on GPUs",
    ]


def test_stacks_in_a_dump_keep_their_lines() -> None:
    text = render_dump({"router": {"waiting": []}, "servers": {"p0": "--- thread main\n  File x\n"}})
    head, stacks = text.split("\n\n")
    assert json.loads(head)["servers"]["p0"] == "(see servers.p0 below)"
    assert stacks == "=== servers.p0\n--- thread main\n  File x"


async def lines(*given: str) -> AsyncIterator[str]:
    for line in given:
        yield line


async def test_events_of_a_stream_are_read_up_to_done() -> None:
    stream = lines('data: {"id": "1"}', "", ": comment", 'data: {"id": "2"}', "data: [DONE]", 'data: {"id": "3"}')
    assert [event["id"] async for event in sse_events(stream)] == ["1", "2"]


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    with pytest.raises(DisaggError, match="without"):
        [event async for event in sse_events(lines('data: {"id": "1"}'))]
