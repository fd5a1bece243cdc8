"""What a log line holds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.telemetry.line_budget import LineBudget
from disagg.telemetry.logs import BoundedHandler, JsonFormatter, configure_logging

ROOT = Path(__file__).resolve().parents[2]


FORGED = "x\n2026-01-01T00:00:00.000Z ERROR   router disagg: forged \x1b[2J\x85\u2028\u202e\ud800\x7f\r"


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.data = b""

    def put(self, data: bytes) -> None:
        self.data += data

    @property
    def text(self) -> str:
        return self.data.decode()


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_has_the_fields_that_readers_filter_by_and_the_extras() -> None:
    out = Kept()
    configure_logging("prefill-0", "info", "json", sink=out)
    logging.getLogger("disagg.engine").warning("leg %s ended", "r1", extra={"request_id": "r1", "pages": 3})
    line = json.loads(out.text)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "process": "prefill-0",
        "logger": "disagg.engine",
        "message": "leg r1 ended",
        "request_id": "r1",
        "pages": 3,
    }


def test_a_record_is_one_json_line_even_with_an_exception_and_newlines() -> None:
    out = Kept()
    configure_logging("router", "info", "json", sink=out)
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        logging.getLogger("disagg").exception("it\nfailed", extra={"object": object()})
    (line,) = out.text.splitlines()
    assert "ValueError: bad\nthing" in json.loads(line)["exception"]


def test_an_extra_never_hides_a_standard_field() -> None:
    out = Kept()
    configure_logging("router", "info", "json", sink=out)
    logging.getLogger("x").info("hello", extra={"level": "fake", "logger": "fake"})
    line = json.loads(out.text)
    assert (line["level"], line["logger"]) == ("info", "x")


def test_records_below_the_level_are_not_written() -> None:
    out = Kept()
    configure_logging("router", "warning", "json", sink=out)
    logging.getLogger("disagg").info("quiet")
    assert out.text == ""


def test_text_is_for_people() -> None:
    out = Kept()
    configure_logging("router", "info", "text", sink=out)
    logging.getLogger("disagg.x").error("broken", extra={"request_id": "r9"})
    assert "ERROR   router disagg.x: broken request_id=r9" in out.text


def test_an_uncaught_exception_is_one_critical_record() -> None:
    code = (
        "from disagg.telemetry.logs import configure_logging, log_uncaught_exceptions; "
        "configure_logging('decode-0', 'info', 'json'); log_uncaught_exceptions(); {}['pages']"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    assert done.returncode == 1
    assert (record["level"], record["message"]) == ("critical", "the process ends: KeyError")
    assert record["exception"].endswith("KeyError: 'pages'")


@pytest.mark.parametrize("format", ["json", "text"])
def test_what_clients_say_forges_no_line_and_drives_no_terminal(format: str) -> None:
    out = Kept()
    configure_logging("router", "info", format, sink=out)  # type: ignore[arg-type]
    log = logging.getLogger("disagg")
    log.info("refused: %s", FORGED, extra={"client_request_id": FORGED, FORGED: 1, "several": [FORGED, 2]})
    log.error("failed", exc_info=(ValueError, ValueError(FORGED), None))
    first, *rest = out.text.removesuffix("\n").split("\n")
    assert out.text.isascii()
    assert not any(char < " " or char == "\x7f" for char in out.text.replace("\n", ""))
    if format == "json":
        assert json.loads(first)["client_request_id"] == FORGED  # escaped, not lost
        assert json.loads(first)["several"] == [FORGED, 2]
        assert len(rest) == 1
    else:
        assert "\\n2026" in first
        assert [line for line in rest if not line.startswith("  ")] == [rest[0]]


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_line_has_a_bounded_length(format: str) -> None:
    out = Kept()
    configure_logging("router", "info", format, sink=out)  # type: ignore[arg-type]
    long = "x" * (8 << 20)
    extras = {f"name{number}": long for number in range(100)}
    logging.getLogger("disagg").error("%s", long, extra=extras, exc_info=(ValueError, ValueError(long), None))
    assert 10_000 < len(out.data) < 100_000


def test_a_record_that_cannot_be_written_is_named_and_harms_nobody() -> None:
    out = Kept()
    configure_logging("router", "info", "json", sink=out)
    logging.getLogger("disagg.x").info("%d tokens", "many")
    logging.getLogger("disagg.x").info("next")
    first, second = map(json.loads, out.text.splitlines())
    assert (first["level"], first["message"]) == (
        "error",
        "a record of disagg.x cannot be written: %d tokens",
    )
    assert second["message"] == "next"


def test_lines_beyond_the_rate_are_left_out_and_counted_and_errors_last() -> None:
    now_s = [0.0]
    handler = BoundedHandler(LineBudget(8, 0.0), JsonFormatter("p"), lambda: now_s[0])
    out = handler.sink = Kept()
    log = logging.Logger("disagg")
    log.addHandler(handler)
    for number in range(100):
        log.info("info %d", number)
    for number in range(10):
        log.warning("warning %d", number)
    for number in range(10):
        log.error("error %d", number)
    lines = [json.loads(line) for line in out.text.splitlines()]
    assert [line["message"] for line in lines] == [
        *(f"info {number}" for number in range(4)),
        *(f"warning {number}" for number in range(2)),
        *(f"error {number}" for number in range(2)),
    ]
    handler.say_left_out()
    assert len(out.text.splitlines()) == 8  # still nothing to spare for it
    now_s[0] = 1.0
    handler.say_left_out()
    said = json.loads(out.text.splitlines()[-1])
    assert said["message"] == "112 lines left out: more than log.lines_per_s (8 error, 96 info, 8 warning)"
    assert said["level"] == "warning"


def test_a_reader_that_stalls_holds_nobody_and_is_told_what_it_missed() -> None:
    """The process logs more than pipe and queue hold together, and goes on; what is read then says how much is missing."""
    code = (
        "import logging, sys\n"
        "from disagg.telemetry.logs import configure_logging\n"
        "configure_logging('router', 'info', 'text', 1e9)\n"
        "log = logging.getLogger('disagg')\n"
        "for number in range(5000): log.info('%d %s', number, 'x' * 1000)\n"
        "print('on', flush=True)\n"
        "sys.stdin.read()\n"
        "log.info('last')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == b"on\n"  # though nothing was read yet
        process.stdin.close()
        lines = process.stderr.read().decode().splitlines()
        assert process.wait(60) == 0
    finally:
        process.kill()
    (said,) = [line for line in lines if "lines left out" in line]
    missing = int(said.partition(" lines left out")[0].rpartition(" ")[2])
    assert "the reader of this log did not keep up" in said
    assert missing > 3000
    assert len(lines) == 5000 + 1 + 1 - missing


def test_a_reader_that_is_gone_holds_nobody() -> None:
    code = (
        "import logging; from disagg.telemetry.logs import configure_logging; "
        "configure_logging('router', 'info', 'json'); "
        "[logging.getLogger('disagg').info('x' * 1000) for _ in range(2000)]; print('on')"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as stderr:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"on\n")
