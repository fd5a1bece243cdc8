"""Structured logs: one line per record, JSON for machines or text for people. Knows no setting but level and format.

Extras of a record (`log.info("leg ended", extra={"request_id": ..., "outcome": ...})`) become fields of its JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from types import TracebackType
from typing import Any, Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]

# What every record has; anything else on it is an extra that its caller gave.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure_logging(process_name: str, level: Level, format: Format, stream: TextIO | None = None) -> None:
    """Makes the root logger write to `stream` (stderr), replacing what handlers it had. Call it once, at start."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(process_name) if format == "json" else TextFormatter(process_name))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Every request of a health probe or client is a line of these; below warning they say nothing of ours.
    for chatty in ("uvicorn", "httpx", "httpcore", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def log_uncaught_exceptions() -> None:
    """What would end the process with a bare traceback is logged as a record, so that it is found by its level."""
    plain = sys.excepthook

    def logged(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Exception):  # Ctrl-C
            plain(kind, error, trace)
            return
        logging.getLogger("disagg").critical("the process ends: %s", kind.__name__, exc_info=(kind, error, trace))

    sys.excepthook = logged


class JsonFormatter(logging.Formatter):
    """{"time": ISO 8601 UTC, "level": ..., "process": ..., "logger": ..., "message": ..., extras..., "exception": ...}"""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _iso_utc(record.created),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # An extra never overwrites one of the fields above: they are what readers sort and filter by.
        fields.update((name, value) for name, value in _extras(record).items() if name not in fields)
        exception = _exception(self, record)
        if exception:
            fields["exception"] = exception
        return json.dumps(fields, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000Z WARNING process logger: message key=value ..."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        head = f"{_iso_utc(record.created)} {record.levelname:<7} {self._process_name} {record.name}:"
        exception = _exception(self, record)
        return f"{head} {record.getMessage()}{extras}" + (f"\n{exception}" if exception else "")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _iso_utc(unix_s: float) -> str:
    milliseconds = min(999, int((unix_s % 1) * 1000))
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{milliseconds:03d}Z"
