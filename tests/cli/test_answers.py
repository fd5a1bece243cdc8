"""What answers with status 200 and is no router: one line and status 2, whichever command asks, and nothing that it believes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from disagg.cli.main import cli
from tests.cli.routers import answering, port_that, status_dict

D0 = {"name": "d0", "role": "decode", "state": "drained"}
COMMANDS = {
    "status": ("status",),
    "status --json": ("status", "--json"),
    "status --memory": ("status", "--memory"),
    "drain": ("drain", "d0"),
    "undrain": ("drain", "d0", "--undo"),
    "drain --wait": ("drain", "d0", "--wait"),
    "role": ("role", "d0", "decode"),
    "role --wait": ("role", "d0", "decode", "--wait"),
    "debug dump": ("debug", "dump"),
}
NO_ROUTERS = {
    "nothing": b"",
    "an empty object": b"{}",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1",
    "a text": b'"ready"',
    "plain text": b"ready\n",
    "HTML": b"<html><body>It works!</body></html>",
    "another service's JSON": b'{"status": "ok", "servers": {}}',
    "deep lists": b"[" * 5_000,
    "deep objects": b'{"servers":' * 5_000,
    "bytes": b"\xff\xfe\x00\x80",
    "half of a pair": b'{"servers": "\\ud800"}',
    "a number of no size": b'{"state": 1e999}',
    "NaN": b'{"state": NaN, "servers": NaN}',
}


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, args)


def refused(result: Result) -> str:
    """The one line."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: http://127.0.0.1:") and len(line) < 600
    assert line.isprintable()
    return line


@pytest.mark.parametrize("body", NO_ROUTERS)
def test_who_says_what_no_router_says_is_not_believed(body: str) -> None:
    for kind in ("application/json", "text/html"):
        with port_that(answering(NO_ROUTERS[body], kind)) as url:
            for command in COMMANDS.values():
                line = refused(run(*command, "--http", url))
                assert "answered what no router says: " in line and line.endswith("; does --http name a router?")


def with_server(**fields: Any) -> dict[str, Any]:
    return status_dict({**D0, **fields})


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in status_dict(D0).items() if name != field}


BAD_STATUS = {
    "no servers": without("servers"),
    "no routers": without("routers"),
    "none of routers": {**status_dict(D0), "routers": []},
    "no state": without("state"),
    "a server that is a text": {**status_dict(), "servers": ["d0"]},
    "a server that is null": {**status_dict(), "servers": [None]},
    "a server without a name": {**status_dict(), "servers": [{"role": "decode", "state": "drained"}]},
    "a server without a state": {**status_dict(), "servers": [{"name": "d0", "role": "decode"}]},
    "a state of numbers": with_server(state=7),
    "a name with an escape": with_server(name="d0\x1b[2J"),
    "a name of two lines": with_server(name="d0\nd1: drained"),
    "a name of a megabyte": with_server(name="d" * 1_000_000),
    "a count that is a text": with_server(running="many"),
    "a count below nothing": with_server(running=-1),
    "memory of another kind": with_server(memory=[1]),
    "memory without pages": with_server(memory={"sizing": "lcm"}),
    "silence of no length": with_server(silent_s="long"),
    "carried by nobody": with_server(carried=[{}]),
    "servers without end": {**status_dict(), "servers": [D0] * 100_000},
}


@pytest.mark.parametrize("bad", BAD_STATUS)
def test_a_status_that_no_router_gives_is_not_believed(bad: str) -> None:
    body = json.dumps(BAD_STATUS[bad]).encode()
    told = json.dumps({"server": "d0", "drain": True, "role": "decode", "begun": True}).encode()

    def say(connection: Any, line: str) -> None:
        answering(told if line.startswith("POST") else body)(connection, line)

    with port_that(say) as url:
        for name in ("status", "status --json", "status --memory", "drain --wait", "role --wait"):
            assert "/status answered what no router says: " in refused(run(*COMMANDS[name], "--http", url))


@pytest.mark.parametrize("said", [{"server": "d1", "drain": True}, {"server": "d0", "drain": 1}, {"server": "d0"}])
def test_an_answer_to_another_question_is_not_believed(said: dict[str, object]) -> None:
    for answer in (said, {**said, "role": "prefill", "begun": True}, {**said, "role": "decode"}):
        with port_that(answering(json.dumps(answer).encode())) as url:
            for name in ("drain", "drain --wait", "role"):
                refused(run(*COMMANDS[name], "--http", url))


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "decode-0"),  # the first routers said no more
        ({"state": "hibernating", "moons": [{"of": "jupiter"}]}, "hibernating"),
        ({"becomes": None, "role_failed": None, "offload": None, "silent_s": None, "tp": None}, "decode-0"),
    ],
)
def test_older_and_newer_routers_are_understood(more: dict[str, Any], shown: str) -> None:
    server = {"name": "decode-0", "role": "decode", "state": "ready", **more}
    status = {**status_dict(server), "weather": {"wind": 1.5}}

    def say(connection: Any, line: str) -> None:
        told = {"server": "decode-0", "drain": True, "since": 1}  # the first that drained said no state
        answering(json.dumps(told if line.startswith("POST") else status).encode())(connection, line)

    with port_that(say) as url:
        assert shown in run("status", "--http", url).stdout
        assert json.loads(run("status", "--json", "--http", url).stdout) == status
        assert "decode-0, " in run("status", "--memory", "--http", url).stdout
        assert run("drain", "decode-0", "--http", url).stdout == "decode-0 drains\n"
        waited = run("drain", "decode-0", "--wait", "--timeout", "3", "--http", url)
        assert waited.exit_code == 1 and waited.stdout == f"decode-0: {server['state']}, 0 running, 0 waiting\n"


def test_what_a_router_says_of_a_server_forges_no_line() -> None:
    forged = "\x1b[2J\nd0: drained"
    server = {**D0, "state": forged, "role": forged, "reason": forged, "address": forged, "role_failed": forged}
    told = {"server": "d0", "drain": True, "becomes": forged, "role": "decode", "begun": True}

    def say(connection: Any, line: str) -> None:
        answering(json.dumps(told if line.startswith("POST") else status_dict(server)).encode())(connection, line)

    with port_that(say) as url:
        for command in ("status", "status --memory", "drain", "drain --wait", "role --wait"):
            more = ("--timeout", "3") if "--wait" in command else ()
            result = run(*COMMANDS[command], *more, "--http", url)
            assert not isinstance(result.exception, Exception), result.exception
            assert "\x1b" not in result.output
            assert "d0: drained" not in result.output.splitlines()


def test_a_dump_is_a_routers_or_a_servers() -> None:
    for body, kind in (
        (b'{"router": {}, "router_stacks": "", "servers": {}}', "application/json"),
        (b"== decode-0 (decode), pid 7\n{}", "text/plain"),
    ):
        with port_that(answering(body, kind)) as url:
            assert run("debug", "dump", "--http", url).exit_code == 0
    deep = b'{"router": {"a": ' + b"[" * 200 + b"]" * 200 + b'}, "servers": {}}'
    with port_that(answering(deep)) as url:
        assert "nested more than 64 deep" in refused(run("debug", "dump", "--http", url))


def test_the_path_of_a_text_in_a_dump_is_short_and_one_line() -> None:
    name = "n\n" * 100_000
    body = json.dumps({"router": {}, "servers": {name: "--- thread\nx", **dict.fromkeys("abc", "")}}).encode()
    with port_that(answering(body)) as url:
        result = run("debug", "dump", "--http", url)
    lines = result.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("==="))
    assert result.exit_code == 0 and len(lines[at]) < 500 and lines[at + 1] == "--- thread"


PLAN = ("plan", "--slo", "ttft=2s,itl=200ms", "--prefill", "1", "--decode", "1")


@pytest.mark.parametrize("body", NO_ROUTERS)
def test_a_plan_is_made_with_no_answer_but_a_routers(body: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 200, "output_length": 10}\n')
    with port_that(answering(NO_ROUTERS[body])) as url:
        refused(run(*PLAN, "--trace", str(trace), "--http", url))


@pytest.mark.parametrize("wrong", [{"token_s": 1e300}, {"fixed_s": -1.0}, {"chunk_tokens": -1}, {"kv_tokens": 1 << 62}])
def test_a_plan_is_made_with_no_step_that_nothing_can_take(wrong: dict[str, float], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 200, "output_length": 10}\n')
    counts = {"steps": 20, "chunk_tokens": 512, "kv_tokens": 9000, "max_running": 8}
    costs = {"fixed_s": 0.002, "token_s": 1e-4, "attended_s": 1e-9, **counts, **wrong}
    servers = ({**D0, "role": role, "tp": 1, "steps": costs} for role in ("prefill", "decode"))
    with port_that(answering(json.dumps(status_dict(*servers)).encode())) as url:
        assert "what it says of steps is of no server" in refused(run(*PLAN, "--trace", str(trace), "--http", url))
