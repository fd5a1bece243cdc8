"""Structured logs: one line per record, JSON for machines or text for people. Knows no setting but those of `log`.

Extras of a record (`log.info("leg ended", extra={"request_id": ..., "outcome": ...})`) become fields of its JSON object.
Whatever a record holds, it is one line (in text format its traceback follows, indented), of bounded length and without
control characters: clients' and peers' words are in messages, extras and exceptions, whoever logs them. Lines per second
are bounded, too, and nobody who logs waits for who reads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol

from disagg.telemetry.line_budget import LineBudget
from disagg.telemetry.line_writer import DescriptorWriter, LineWriter, Notice, Target
from disagg.types.plain import clip, one_line, printable, printable_text

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]

LINES_PER_S = 1000.0
MESSAGE_CHARS = 4000
EXTRA_CHARS = 1000
TRACEBACK_CHARS = 32_000
MAX_EXTRAS = 32  # so a line has at most 68,000 characters, before what is unfit is escaped
LAST_WORDS_S = 2.0  # how long the end of a process waits for a reader

# What every record has; anything else on it is an extra that its caller gave.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# JSON escapes C0 and quotes by itself; what is left of the unfit stands inside strings, where JSON may escape it.
_UNFIT_IN_JSON = re.compile(r"[^ -~]")


class Sink(Protocol):
    """Where lines go. `put` returns at once."""

    def put(self, data: bytes) -> None: ...


def configure_logging(
    process_name: str, level: Level, format: Format, lines_per_s: float = LINES_PER_S, sink: Sink | None = None
) -> None:
    """Makes the root logger write to stderr, or to `sink`, replacing what handlers it had. Call it once, at start."""
    handler = BoundedHandler(LineBudget(lines_per_s, time.monotonic()), _formatter(process_name, format))
    if sink is None and sys.stderr is not None:
        target = Target(DescriptorWriter(sys.stderr.fileno()), notice_of(process_name, format))
        writer = LineWriter(target, handler.say_left_out)
        atexit.register(writer.flush, LAST_WORDS_S)
        sink = writer
    handler.sink = sink
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Every request of a health probe or client is a line of these; below warning they say nothing of ours.
    for chatty in ("uvicorn", "httpx", "httpcore", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def notice_of(process_name: str, format: Format) -> Notice:
    """Makes the log line that says how many could not be written, and why."""
    formatter = _formatter(process_name, format)
    return lambda count, why: _encoded(_own_line(formatter, logging.WARNING, f"{count} lines left out: {why}"))


def _formatter(process_name: str, format: Format) -> logging.Formatter:
    return JsonFormatter(process_name) if format == "json" else TextFormatter(process_name)


def _own_line(formatter: logging.Formatter, level: int, text: str) -> str:
    return formatter.format(logging.LogRecord("disagg.telemetry", level, "", 0, "%s", (text,), None))


class BoundedHandler(logging.Handler):
    """Hands records to a sink as lines, as many as the budget allows, and says how many it left out."""

    def __init__(
        self, budget: LineBudget, formatter: logging.Formatter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.sink: Sink | None = None  # None: nobody can read, because the process was started without a stderr
        self._budget = budget
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        if self.sink is None or not self._budget.allows(record.levelno, self._clock()):
            return
        self.say_left_out()
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  an argument whose __str__ fails, or that does not fit the message
            line = self._own(logging.ERROR, f"a record of {record.name} cannot be written: {one_line(str(record.msg))}")
        self.sink.put(_encoded(line))

    def say_left_out(self) -> None:
        """Writes how many lines were left out, once there is room for it. Also called while nothing is logged."""
        with self.lock or contextlib.nullcontext():
            left_out = self._budget.take_left_out(self._clock())
            if left_out and self.sink is not None:
                by_level = ", ".join(f"{count} {level}" for level, count in sorted(left_out.items()))
                total = sum(left_out.values())
                text = f"{total} lines left out: more than log.lines_per_s ({by_level})"
                self.sink.put(_encoded(self._own(logging.WARNING, text)))

    def _own(self, level: int, text: str) -> str:
        assert self.formatter is not None
        return _own_line(self.formatter, level, text)


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
            "message": clip(record.getMessage(), MESSAGE_CHARS),
        }
        # An extra never overwrites one of the fields above: they are what readers sort and filter by.
        fields.update((name, value) for name, value in _extras(record) if name not in fields)
        exception = _exception(self, record)
        if exception:
            fields["exception"] = exception
        return _UNFIT_IN_JSON.sub(_escaped_in_json, json.dumps(fields, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000Z WARNING process logger: message key=value ...

    Every line that begins otherwise is indented and belongs to the record above it.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value}" for name, value in _extras(record))
        head = f"{_iso_utc(record.created)} {record.levelname:<7} {self._process_name} {record.name}:"
        line = printable(f"{head} {clip(record.getMessage(), MESSAGE_CHARS)}{extras}")
        exception = _exception(self, record)
        indented = printable_text(exception).replace("\n", "\n  ")
        return f"{line}\n  {indented}" if exception else line


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _escaped_in_json(found: re.Match[str]) -> str:
    """Letters stay as they are; a control or half of a surrogate pair becomes an escape that JSON knows."""
    char = found[0]
    if printable(char) == char:
        return char
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def _extras(record: logging.LogRecord) -> list[tuple[str, Any]]:
    """Names and values, as many as are allowed, each of bounded length."""
    found = [(name, value) for name, value in vars(record).items() if name not in _STANDARD]
    return [(clip(name, 64), _bounded(value)) for name, value in found[:MAX_EXTRAS]]


def _bounded(value: object) -> object:
    """Numbers and short lists as they are, everything else as text that is not too long."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return clip(value, EXTRA_CHARS)
    if isinstance(value, list | tuple) and len(value) <= MAX_EXTRAS:
        return [_bounded(each) if not isinstance(each, list | tuple) else clip(str(each), 64) for each in value]
    return clip(str(value), EXTRA_CHARS)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback. Of one that is too long the beginning and the end: the end names the cause."""
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    text = "\n".join(parts)
    if len(text) <= TRACEBACK_CHARS:
        return text
    half = TRACEBACK_CHARS // 2
    return f"{text[:half]}\n... ({len(text) - TRACEBACK_CHARS} more characters)\n{text[-half:]}"


def _iso_utc(unix_s: float) -> str:
    milliseconds = min(999, int((unix_s % 1) * 1000))
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{milliseconds:03d}Z"
