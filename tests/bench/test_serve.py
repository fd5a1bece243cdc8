"""`disagg bench serve` against an endpoint that does what it is told, over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from disagg.auth.tls import open_certificates
from disagg.bench.serve.figures import Answered
from disagg.bench.serve.load import Load, OfferedLoad, Prompts
from disagg.bench.serve.target import Answer, Form, Target
from disagg.bench.serve.workload import Conversation, Part, Turn
from disagg.cli.main import cli
from tests.auth.certs import Authority
from tests.bench.fake_endpoint import (
    CLOSE,
    HANG,
    FakeEndpoint,
    Script,
    Step,
    answer,
    event,
    fake_endpoint,
    refusal,
    token,
    usage,
)

SHORT = ("--input-tokens", "8", "--output-tokens", "5", "--warmup", "0")


def bench(fake: FakeEndpoint, *flags: str, file: Path | None = None) -> Result:
    kept = () if file is None else ("--json", str(file))
    return CliRunner().invoke(cli, ["bench", "serve", "--url", fake.url, *flags, *kept])


def measured(tmp_path: Path, script: Script, *flags: str) -> tuple[dict[str, Any], FakeEndpoint, Result]:
    with fake_endpoint(script) as fake:
        done = bench(fake, *SHORT, *flags, file=tmp_path / "out.json")
        assert done.exit_code == 0, done.output
        return json.loads((tmp_path / "out.json").read_text()), fake, done


def test_the_percentiles_are_those_of_the_endpoints_delays(tmp_path: Path) -> None:
    """Three in ten wait 2 s for their first token, and have 0.4 s between tokens; the others have nothing to wait for."""

    def script(number: int, body: dict[str, Any]) -> list[Step]:
        return answer(body, 2.0, 0.4) if number % 10 < 3 else answer(body)

    found, _, done = measured(tmp_path, script, "--requests", "20", "--slo", "ttft=1s,itl=200ms")
    assert (found["completed"], found["failed"], found["output_tokens"]) == (20, 0, 100)
    for name, delay_s in (("ttft_s", 2.0), ("itl_s", 0.4), ("tpot_s", 0.4), ("e2e_s", 3.6)):
        times = found[name]
        assert times["p50"] < delay_s / 2 and times["p90"] >= 0.99 * delay_s <= times["p99"], name
        assert 0.29 * delay_s < times["mean"] < times["p90"], name
    assert found["requests_per_s"] == pytest.approx(20 / found["duration_s"]) and found["duration_s"] >= 3.6
    assert found["slo"]["good_requests"] <= 14 and set(found["slo"]["over"]) == {"ttft", "itl"}
    assert "20 requests completed, 0 failed" in done.output and "time to first token" in done.output


def test_each_failure_is_counted_with_its_cause_and_the_others_are_measured(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> list[Step]:
        failures: list[list[Step]] = [
            [(0.0, refusal(429, "too many"))],
            [(0.0, token()), (0.0, event(error={"message": "out of memory"}))],
            [(0.0, token()), (0.0, b"data: {nonsense}\n\n")],
            [(0.0, token()), (0.0, token())],
            [(0.0, token()), (0.0, CLOSE)],
            [(0.0, token()), (0.0, HANG)],
            [(0.0, b"data: [DONE]\n\n")],
            [(0.0, CLOSE)],  # not a failure, as nothing was heard: see below
            [(0.0, b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")],
            [(0.0, b"HTTP/nonsense\r\n\r\n")],
            [(0.0, token(finish="length")), (0.0, usage(8, -3)), (0.0, b"data: [DONE]\n\n")],
            [(0.0, token(finish="length")), (0.0, usage(10**18, 5)), (0.0, b"data: [DONE]\n\n")],
        ]
        return failures[number] if number < len(failures) else answer(body)

    found, fake, done = measured(tmp_path, script, "--concurrency", "1", "--requests", "15", "--timeout", "2")
    assert found["failures"] == {
        "connection": 2,
        "status 429": 1,
        "an error within the stream": 1,
        "a malformed stream": 3,
        "a stream that was cut off": 1,
        "no end within 2 s": 1,
        "no token": 1,
        "no stream": 1,
    }
    assert (found["completed"], found["failed"], found["unfinished"]) == (4, 11, 0)
    assert len(fake.bodies) == 16, "on a kept connection that closes before it says anything, one was sent again"
    assert "failed 1 times: status 429" in done.output and "too many" in done.output


def test_an_endpoint_of_tls_is_measured_by_who_trusts_its_authority_and_named_to_others(tmp_path: Path) -> None:
    files = Authority().write(tmp_path / "tls")
    certificates = open_certificates(files)
    assert certificates is not None
    with fake_endpoint(lambda number, body: answer(body), certificates.value.context) as fake:
        done = bench(fake, *SHORT, "--requests", "2", "--ca", files.ca)
        assert done.exit_code == 0 and "2 requests completed" in done.output, done.output
        for more in ((), ("--model", "fake"), ("--ca", Authority().write(tmp_path / "other").ca)):
            refused = bench(fake, *SHORT, "--requests", "2", *more)
            assert refused.exit_code == 1 and "--ca FILE must name who signed it" in refused.output
        none = bench(fake, *SHORT, "--ca", str(tmp_path / "none.pem"))
        assert none.exit_code == 2 and "none.pem has no certificates" in none.output


def test_every_command_that_asks_a_router_over_tls_can_be_told_whom_to_trust() -> None:
    def leaves(command: click.Command) -> Iterator[click.Command]:
        if isinstance(command, click.Group):
            for each in command.commands.values():
                yield from leaves(each)
        else:
            yield command

    asks = {"--http", "--grpc", "--url"}
    for command in leaves(cli):
        flags = {flag for each in command.params for flag in each.opts}
        assert not flags & asks or "--ca" in flags, command.name


def test_files_of_results_are_whole_or_as_they_were(tmp_path: Path) -> None:
    with fake_endpoint(lambda number, body: answer(body)) as fake:
        gone = fake.url
    new, old, plot = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "new.svg"
    old.write_text("old")
    files = ("--plot", str(plot), "--json")
    for file in (new, old):
        done = CliRunner().invoke(cli, ["bench", "serve", "--url", gone, *SHORT, *files, str(file)])
        assert done.exit_code == 1, done.output
    assert [each.name for each in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "old"
    with fake_endpoint(lambda number, body: answer(body)) as fake:
        done = bench(fake, *SHORT, "--requests", "2", "--plot", str(plot), file=old)
        assert done.exit_code == 0 and json.loads(old.read_text())["completed"] == 2
        nowhere = bench(fake, *SHORT, file=tmp_path / "none" / "new.json")
        assert nowhere.exit_code == 2 and "cannot be written: No such file or directory" in nowhere.output
        assert "2 requests completed" in bench(fake, *SHORT, "--requests", "2", file=Path("/dev/null")).output
    assert {each.name for each in tmp_path.iterdir()} == {"old.json", "new.svg"}
    assert Path("/dev/null").is_char_device()


def test_nobody_at_the_url_and_an_endpoint_that_refuses_all_are_one_line() -> None:
    with fake_endpoint(lambda number, body: answer(body)) as fake:
        gone = fake.url
    done = CliRunner().invoke(cli, ["bench", "serve", "--url", gone, *SHORT], catch_exceptions=True)
    assert done.exit_code == 1 and "nobody answers" in done.output
    for url in ("ftp://x", "http://", "http://a b", "http://x:99999"):
        assert CliRunner().invoke(cli, ["bench", "serve", "--url", url]).exit_code in (1, 2)


def test_an_endpoint_that_takes_neither_ids_nor_ignore_eos_is_asked_in_words(tmp_path: Path) -> None:
    def only_text(number: int, body: dict[str, Any]) -> list[Step]:
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            return [(0.0, refusal(400, "no such field"))]
        *tokens, _, end = answer(body)
        return [*tokens, (0.0, usage(10, body["max_tokens"])), end]

    with fake_endpoint(only_text) as fake:
        fake.probes = False
        done = bench(fake, *SHORT, "--requests", "3", file=tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["target"]["prompts"], found["target"]["ignore_eos"]) == (3, "text", False)
    assert all(isinstance(body["prompt"], str) for body in fake.bodies[-3:])
    assert "prompts had 10.0 tokens on average where 8.0 were asked for" in done.output


def test_ids_that_were_asked_for_are_not_replaced_by_text_and_a_refusal_is_called_one() -> None:
    def only_small_ids(number: int, body: dict[str, Any]) -> list[Step]:
        if not isinstance(body["prompt"], str) and max(body["prompt"]) >= 512:
            return [(0.0, refusal(400, "prompt names token 99999; the vocabulary has 512"))]
        return answer(body)

    with fake_endpoint(only_small_ids) as fake:
        fake.probes = False
        done = bench(fake, *SHORT, "--requests", "3", "--token-ids", "0-99999")
    assert done.exit_code == 1 and "refuses: status 400" in done.output and "the vocabulary has 512" in done.output
    assert not any(isinstance(body["prompt"], str) for body in fake.bodies)


def test_every_vocabulary_is_tried_where_answers_may_end_early() -> None:
    def small_ids(number: int, body: dict[str, Any]) -> list[Step]:
        if isinstance(body["prompt"], str) or max(body["prompt"]) >= 16_000:
            return [(0.0, refusal(400, "the vocabulary has 16000"))]
        return answer(body)

    with fake_endpoint(small_ids) as fake:
        fake.probes = False
        done = bench(fake, *SHORT, "--requests", "3", "--no-ignore-eos")
    assert done.exit_code == 0, done.output
    largest = max(max(body["prompt"]) for body in fake.bodies[2:])
    assert 1000 < largest < 8000 and not any(isinstance(body["prompt"], str) for body in fake.bodies)


@pytest.mark.parametrize(("status", "says"), [(503, "fails: status 503"), (200, "fails: no stream")])
def test_an_endpoint_that_answers_is_not_said_to_be_silent(status: int, says: str) -> None:
    with fake_endpoint(lambda number, body: [(0.0, refusal(status, "not now"))]) as fake:
        fake.probes = False
        done = bench(fake, *SHORT, "--requests", "3")
    assert done.exit_code == 1 and says in done.output and "does not answer" not in done.output, done.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--token-ids", "9" * 5000 + "-99"), "it must be a range such as 1000-30000"),
        (("--extra-body", '{"a":"\udcff"}'), "it is not UTF-8"),
        (("--model", "m\udcff"), "it is not UTF-8"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(flags: tuple[str, str], says: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "serve", "--url", "http://127.0.0.1:9", *SHORT, *flags])
    assert done.exit_code == 2 and flags[0] in done.output and says in " ".join(done.output.split()), done.output


def test_warm_up_is_not_counted_and_no_prompt_comes_twice(tmp_path: Path) -> None:
    found, fake, _ = measured(tmp_path, lambda n, body: answer(body), "--requests", "6", "--warmup", "4")
    assert (found["completed"], found["warm_up"]["requests"], len(fake.bodies)) == (6, 4, 10)
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 10
    assert all(len(body["prompt"]) == 8 and body["ignore_eos"] and body["max_tokens"] == 5 for body in fake.bodies)


def test_a_turn_begins_with_all_that_was_said(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> list[Step]:
        ids = [7000 + number, 7100 + number]
        said = event(choices=[{"text": "x", "token_ids": ids, "finish_reason": "length"}])
        return [(0.0, said if body.get("return_token_ids") else token(finish="length"))]

    flags = ("--requests", "3", "--turns", "3", "--prefix-tokens", "4", "--concurrency", "1")
    found, fake, done = measured(tmp_path, script, *flags)
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert [len(first), len(second), len(third)] == [12, 22, 32] and found["completed"] == 3
    assert second[:14] == [*first, 7000, 7100] and third[:24] == [*second, 7001, 7101]
    assert "stand for" not in done.output


def test_a_trace_is_sent_in_its_order_with_what_its_prompts_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 9000, "input_length": 600, "output_length": 3, "hash_ids": [1, 3]},
        {"timestamp": 5000, "input_length": 520, "output_length": 4, "hash_ids": [1, 2]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found, fake, _ = measured(
        tmp_path, lambda n, body: answer(body), "--speed", "4", "--trace", str(tmp_path / "trace.jsonl")
    )
    first, second = fake.bodies
    assert (first["max_tokens"], second["max_tokens"]) == (4, 3)
    assert first["prompt"][:512] == second["prompt"][:512] and first["prompt"][512:] != second["prompt"][512:520]
    assert found["completed"] == 2 and found["duration_s"] >= 0.5


def test_goodput_is_a_rate_that_was_within_and_none_where_nothing_is(tmp_path: Path) -> None:
    flags = ("--goodput", "--rate", "20", "--requests", "3", "--plot", str(tmp_path / "out.svg"), "--slo")
    found, fake, done = measured(tmp_path, lambda n, body: answer(body), *flags, "ttft=100s")
    assert found["goodput"]["requests_per_s"] == 30 and found["goodput"]["not_within_at"] is None
    assert [trial["rate"] for trial in found["goodput"]["trials"]] == [20, 30] and len(fake.bodies) == 6
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 6, "each trial has prompts of its own"
    assert "goodput: 30 requests/s" in done.output and "TTFT" in (tmp_path / "out.svg").read_text()
    found, _, done = measured(tmp_path, lambda n, body: answer(body), *flags, "ttft=1us")
    assert found["goodput"]["requests_per_s"] is None and "no rate meets" in done.output


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "1", "--concurrency", "1"),
        ("--goodput",),
        ("--goodput", "--slo", "ttft=1s", "--concurrency", "2"),
        ("--slo", "speed=3"),
        ("--input-tokens", "0"),
        ("--trace", "/nowhere"),
        ("--json", "/nowhere/x.json"),
        ("--extra-body", "[]"),
        ("--token-ids", "9"),
        ("--token-ids", "1-9", "--prompts", "text"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(flags: tuple[str, ...]) -> None:
    with fake_endpoint(lambda number, body: answer(body)) as fake:
        done = bench(fake, *flags)
    assert done.exit_code == 2 and fake.heads == [], done.output


class _Holds(Target):
    """Keeps the client's own loop for a while, as a client that is too slow does."""

    def __init__(self) -> None:
        pass

    async def ask(self, body: bytes, wanted_tokens: Any, due_s: float | None = None, keep: bool = False) -> Answer:
        sent_s = time.perf_counter()
        time.sleep(0.05)  # noqa: ASYNC251
        await asyncio.sleep(0)
        assert due_s is not None
        return Answer(Answered(sent_s, sent_s, sent_s, [], 1, 1, late_s=sent_s - due_s), [], "")


async def test_a_client_that_is_held_up_says_so() -> None:
    conversations = tuple(Conversation((Turn((Part("own", n, 4),), 1),)) for n in range(10))
    offered = OfferedLoad(conversations, moments_s=tuple(0.01 * n for n in range(10)))
    run = await Load(_Holds(), Prompts(Form("m", (0, 9), True), 1.0, 0), offered).run()
    late = run.client.send_late_s
    assert late["max"] is not None and late["max"] > 0.3, "the tenth was due 0.4 s before it could be sent"
    assert any("after their time" in each for each in run.client.warnings(0.5, 0.02))


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> list[Step]:
        return answer(body) if number < 3 else [(0.0, token()), (0.0, HANG)]

    with fake_endpoint(script) as fake:
        command = (sys.executable, "-m", "disagg.cli", "bench", "serve", "--url", fake.url, *SHORT)
        kept = tmp_path / "out.json"
        process = subprocess.Popen(
            (*command, "--requests", "9", "--concurrency", "2", "--json", str(kept)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 60
        while len(fake.bodies) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "3 requests completed, 0 failed" in output, output
    found = json.loads(kept.read_text())
    assert (found["completed"], found["unfinished"]) == (3, 6) and "6 requests were under way" in output
