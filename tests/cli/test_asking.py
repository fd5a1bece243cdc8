"""An answer that drips ends at a command's deadline, and one that floods at its bound, wherever in the answer that is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from disagg.cli import asking
from disagg.cli.asking import Allowed, ask
from disagg.cli.main import cli
from disagg.types.errors import DeadlineExceeded, DisaggError
from tests.cli.routers import Say, answering, head_of, port_that, status_dict

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 8.0  # that a busy machine may take for what is over after one
DRAINS = json.dumps({"server": "d0", "drain": True}).encode()
SERVER = {"name": "d0", "role": "decode", "state": "draining", "running": 2, "waiting": 1}


def drips(first: bytes, each: bytes, every_s: float = 0.05) -> Say:
    """Never ends by itself."""

    def say(connection: socket.socket, _: str) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(each)
            time.sleep(every_s)

    return say


DRIPPING = {
    "a body": drips(head_of(None) + b'{"state": "', b"x"),
    "a body of which no part comes": drips(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1;"),
    "a status line": drips(b"HTTP/1.1 200 ", b"O"),
    "headers": drips(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
    "answers before the answer": drips(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
}


@pytest.mark.parametrize("where", DRIPPING)
def test_an_answer_that_drips_ends_at_the_deadline(where: str) -> None:
    begin_s = time.monotonic()
    with (
        port_that(DRIPPING[where]) as url,
        pytest.raises(DeadlineExceeded, match=r"^http://127.0.0.1:\d+/status: no whole answer within 1 s$"),
    ):
        ask(url, "/status", allowed=Allowed(1.0))
    assert time.monotonic() - begin_s < SOON_S


def test_a_handshake_and_a_name_that_are_not_done_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_s = time.monotonic()
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing of TLS
    with silent, pytest.raises(DeadlineExceeded):
        ask(f"https://127.0.0.1:{silent.getsockname()[1]}", "/status", allowed=Allowed(0.5))
    looked_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: looked_up.wait(60))
    with pytest.raises(DeadlineExceeded):
        ask("http://router.invalid", "/status", allowed=Allowed(0.5))
    looked_up.set()
    assert time.monotonic() - begin_s < SOON_S


def test_a_process_ends_though_a_router_still_drips() -> None:
    with port_that(DRIPPING["headers"]) as url:
        code = f"from disagg.cli import asking; asking.ask('{url}', '/status', allowed=asking.Allowed(1.0))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].endswith("no whole answer within 1 s")


@pytest.mark.parametrize("status", [200, 500])
def test_a_flood_ends_at_its_bound(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SMALL_BYTES", 4096)
    sent: list[int] = []

    def flood(connection: socket.socket, _: str) -> None:
        connection.sendall(head_of(None).replace(b"200", b"%d" % status))
        for _ in range(1000):
            sent.append(connection.send(b" " * 100_000))

    said = r"answered more than the 1000000 bytes that a router may$" if status == 200 else r"answered 500: $"
    with port_that(flood) as url, pytest.raises(DisaggError, match=said):
        ask(url, "/status", allowed=Allowed(30.0, 1_000_000))
    assert sum(sent) < 50_000_000, "what is beyond the bound is in no more than sockets' buffers"


def test_an_answer_in_a_coding_that_would_grow_is_not_unpacked() -> None:
    packed = answering(b"\x1f\x8b", more="content-encoding: gzip\r\n")
    with port_that(packed) as url, pytest.raises(DisaggError, match="in the coding gzip, which was not asked for"):
        ask(url, "/status")


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "127.0.0.1:8000", "localhost", "http://", "http://x:y", "http://x/?a=b", ""]
)
@pytest.mark.parametrize(
    "command",
    [("status",), ("drain", "d0"), ("role", "d0", "prefill"), ("debug", "dump"), ("plan", "--slo", "ttft=1s")],
)
def test_what_is_no_url_is_refused_and_what_one_looks_like_is_said(command: tuple[str, ...], url: str) -> None:
    trace = ("--trace", "none") if command[0] == "plan" else ()
    result, _ = run(*command, *trace, "--http", url)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --http '{url}': ") and line.endswith("; it must be like http://127.0.0.1:8000")


@pytest.mark.parametrize("url", ["http://x", "HTTPS://x:1/", "http://[::1]:8000/below"])
def test_what_is_a_url_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_within", lambda question, allowed: asking._Heard(200, "", "", question.url.encode()))
    assert ask(url, "/status").content.decode() == f"{url.rstrip('/')}/status"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error": {"message": "server d0 is\\nthe last", "type": "t", "param": null, "code": null}}',
            r"server d0 is\nthe last",
        ),
        (b'{"error": "x"}', '{"error": "x"}'),
        (b"<html>\xff", "<html>\N{REPLACEMENT CHARACTER}"),
        (b"[" * 10_000, "[" * 300 + "... (9700 more characters)"),
        (b'{"error": {"message": "%s"}}' % (b"x" * 10_000), "x" * 300 + "... (9700 more characters)"),
    ],
)
def test_of_a_routers_error_its_message_is_shown_and_of_others_what_they_say(body: bytes, said: str) -> None:
    refusal = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with port_that(lambda connection, _: connection.sendall(refusal)) as url:
        result, _ = run("drain", "d0", "--http", url)
    assert result.exit_code == 1
    assert result.stderr == f"error: {url}/servers/d0/drain answered 400: {said}\n"


def run(*args: str) -> tuple[Result, float]:
    begin_s = time.monotonic()
    return CliRunner().invoke(cli, args), time.monotonic() - begin_s


@pytest.mark.parametrize("command", [("drain", "d0"), ("role", "d0", "prefill")])
@pytest.mark.parametrize("drip", ["at once", "later"])
def test_timeout_is_the_longest_time_of_a_command(command: tuple[str, ...], drip: str) -> None:
    told = DRAINS if command[0] == "drain" else json.dumps({"server": "d0", "role": "prefill", "begun": True}).encode()

    def say(connection: socket.socket, line: str) -> None:
        if drip == "later" and line.startswith("POST"):
            answering(told)(connection, line)
        else:
            DRIPPING["headers"](connection, line)

    with port_that(say) as url:
        result, took_s = run(*command, "--http", url, "--wait", "--timeout", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert took_s < SOON_S
    (line,) = result.stderr.splitlines()
    assert "no whole answer within" in line and line.endswith("; --timeout is 1 s")
    assert ("it may be done all the same" in line) == (drip == "at once")
    goes_on = "d0 drains all the same" if command[0] == "drain" else "d0 becomes a prefill server all the same"
    assert line.startswith(f"error: {goes_on}, as far as is known: {url}/status: ") == (drip == "later")


def test_a_wait_says_what_is_left_when_its_time_is_over() -> None:
    def say(connection: socket.socket, line: str) -> None:
        answering(DRAINS if line.startswith("POST") else json.dumps(status_dict(SERVER)).encode())(connection, line)

    with port_that(say) as url:
        result, took_s = run("drain", "d0", "--http", url, "--wait", "--timeout", "2")
    assert result.exit_code == 1 and took_s < SOON_S
    assert result.stdout == "d0: draining, 2 running, 1 waiting\n"
    if "; --timeout is 2 s" not in result.stderr:  # else the last look was late
        assert result.stderr == "error: d0 is not empty after 2 s: 2 running, 1 waiting\n"


@pytest.mark.parametrize("command", [("status",), ("status", "--memory"), ("debug", "dump")])
def test_what_floods_is_no_router(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.cli.status.DUMP_BYTES", 1_000_000)
    with port_that(drips(head_of(None), b" " * (1 << 20), 0.0)) as url:
        result, _ = run(*command, "--http", url)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.endswith(" bytes that a router may")
