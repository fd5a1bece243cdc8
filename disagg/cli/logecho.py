"""Follows the children's log files and picks what an operator at the terminal should see: warnings and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_READ_BYTES = 1 << 20
_SHOWN = frozenset({"warning", "error", "critical"})
_TEXT_LINE = re.compile(r"\S+Z (WARNING|ERROR|CRITICAL) ")
_STANDARD = frozenset({"time", "level", "process", "logger", "message", "exception"})


def shown(line: str) -> str | None:
    """How a log line is echoed, or None if it is not. JSON lines of ours, text lines of ours; never foreign ones."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError:
            return None
        if not isinstance(fields, dict) or fields.get("level") not in _SHOWN:
            return None
        extras = "".join(f" {name}={value}" for name, value in fields.items() if name not in _STANDARD)
        cause = str(fields.get("exception", "")).strip().rpartition("\n")[2]
        return f"{fields['level']}: {fields.get('message', '')}{extras}" + (f" ({cause})" if cause else "")
    return line if _TEXT_LINE.match(line) else None


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a file, of its last 64 KiB at most; none if it is not there."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 65536))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:]


class LogFollower:
    """Remembers how far each file was read. logs: by the name that is printed before a line."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._logs = dict(logs)
        self._read_bytes = dict.fromkeys(logs, 0)

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(name, line as shown) of what was written since the last call; whole lines only."""
        for name, log in self._logs.items():
            try:
                with log.open("rb") as file:
                    file.seek(self._read_bytes[name])
                    read = file.read(MAX_READ_BYTES)
            except FileNotFoundError:
                continue  # its child has not started
            whole = read[: read.rfind(b"\n") + 1]
            if not whole and len(read) == MAX_READ_BYTES:
                whole = read  # one line longer than what is read at once: nobody wants to see it
            self._read_bytes[name] += len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                text = shown(line)
                if text is not None:
                    yield name, text
