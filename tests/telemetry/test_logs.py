"""What a log line holds."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.telemetry.logs import configure_logging

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_has_the_fields_that_readers_filter_by_and_the_extras() -> None:
    out = io.StringIO()
    configure_logging("prefill-0", "info", "json", out)
    logging.getLogger("disagg.engine").warning("leg %s ended", "r1", extra={"request_id": "r1", "pages": 3})
    line = json.loads(out.getvalue())
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
    out = io.StringIO()
    configure_logging("router", "info", "json", out)
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        logging.getLogger("disagg").exception("it\nfailed", extra={"object": object()})
    (line,) = out.getvalue().splitlines()
    assert "ValueError: bad\nthing" in json.loads(line)["exception"]


def test_an_extra_never_hides_a_standard_field() -> None:
    out = io.StringIO()
    configure_logging("router", "info", "json", out)
    logging.getLogger("x").info("hello", extra={"level": "fake", "logger": "fake"})
    line = json.loads(out.getvalue())
    assert (line["level"], line["logger"]) == ("info", "x")


def test_records_below_the_level_are_not_written() -> None:
    out = io.StringIO()
    configure_logging("router", "warning", "json", out)
    logging.getLogger("disagg").info("quiet")
    assert out.getvalue() == ""


def test_text_is_for_people() -> None:
    out = io.StringIO()
    configure_logging("router", "info", "text", out)
    logging.getLogger("disagg.x").error("broken", extra={"request_id": "r9"})
    assert "ERROR   router disagg.x: broken request_id=r9" in out.getvalue()


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
