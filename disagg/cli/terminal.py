"""What commands share at the terminal: progress on stderr, results on stdout, and talking HTTP to a router."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

from disagg.telemetry.line_writer import DescriptorWriter, LineWriter, Target
from disagg.types.plain import printable, printable_text

LAST_WORDS_S = 2.0  # how long the end of a process waits for a reader


def note(text: str) -> None:
    """One line for the person who waits; on stderr, so that stdout holds results only."""
    _say(sys.stderr, printable_text(text))


def problem(text: str) -> None:
    """One line about something that went wrong."""
    _say(sys.stderr, f"disagg: {printable(text)}")


def result(text: str) -> None:
    """One line that scripts wait for; on stdout."""
    _say(sys.stdout, text)


def write_whatever_is_said() -> None:
    """What stdout and stderr cannot encode is escaped there, instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def full_block(encoding: str) -> str:
    """What bars are drawn with: a block, where it can be written."""
    try:
        "█".encode(encoding)
    except UnicodeEncodeError:
        return "#"
    return "█"


def for_terminal(text: str, stream: TextIO | None) -> str:
    """What a model or a server says, to be written to `stream`: on a terminal it must not drive it, elsewhere it stays."""
    return printable_text(text) if stream is not None and stream.isatty() else text


def _say(stream: TextIO | None, line: str) -> None:
    if stream is not None:  # None: the process was started without it
        stream.write(line + "\n")
        stream.flush()


class UnblockedStream(io.TextIOBase):
    """Takes the place of sys.stdout or sys.stderr where nobody may wait for a reader, nor end because there is none.

    A reader that stalls loses lines and is told how many; once it is gone, or where there never was one, what is said is
    kept nowhere but in `copy`.
    """

    def __init__(self, fd: int | None) -> None:
        """fd: None for a process that was started without this stream."""
        self._fd = fd
        self._writer = LineWriter(Target(DescriptorWriter(fd), _missed)) if fd is not None else None
        self.copy: LineWriter | None = None  # of everything that is written

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        for writer in (self._writer, self.copy):
            if writer is not None:
                writer.put(data)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def fileno(self) -> int:
        if self._fd is None:
            raise io.UnsupportedOperation("the process was started without this stream")
        return self._fd

    def settle(self, timeout_s: float) -> None:
        """Waits until all is written, so long at most."""
        until_s = time.monotonic() + timeout_s
        for writer in (self._writer, self.copy):
            if writer is not None:
                writer.flush(max(0.0, until_s - time.monotonic()))


def unblock_streams() -> tuple[UnblockedStream, ...]:
    """From now on nothing in this process waits for who reads its stdout and stderr. Returns what stands for them, also
    for one that it was started without."""
    unblocked = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        fd = None
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # it has none, or one without a descriptor
            stream.flush()
            fd = stream.fileno()
        if fd is None and stream is not None:
            continue
        unblocked.append(UnblockedStream(fd))
        setattr(sys, name, unblocked[-1])
    atexit.register(_settle, unblocked)
    return tuple(unblocked)


def _settle(streams: Iterable[UnblockedStream]) -> None:
    until_s = time.monotonic() + LAST_WORDS_S
    for stream in streams:
        stream.settle(max(0.0, until_s - time.monotonic()))


def _missed(lines: int, why: str) -> bytes:
    return f"disagg: {lines} lines left out here: {why}\n".encode()


class StageProgress:
    """Progress of a conversion: one line per stage, and on a terminal a percentage that is written over."""

    def __init__(self) -> None:
        self._stage = ""
        self._lock = threading.Lock()

    def __call__(self, stage: str, fraction: float) -> None:
        with self._lock:
            percent = f"{min(1.0, max(0.0, fraction)) * 100:3.0f}%"
            if sys.stderr.isatty():
                print(f"\r\x1b[Kmodel: {stage} {percent}", file=sys.stderr, end="", flush=True)
            elif stage != self._stage:
                note(f"model: {stage}")
            self._stage = stage

    def close(self) -> None:
        """Ends the line that was written over."""
        if self._stage and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        self._stage = ""


def get_http(base_url: str, path: str) -> Any:
    """What a router answers to GET, as JSON that nothing is known of. Raises DisaggError saying what to check."""
    from disagg.cli.answers import read_json
    from disagg.cli.asking import ask

    return read_json(ask(base_url, path))
