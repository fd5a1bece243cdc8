"""Picks from children's log lines what an operator at the terminal should see: warnings and errors. Pure."""

from __future__ import annotations

import json
import re

from disagg.types.plain import one_line

MAX_LINE_CHARS = 200_000  # of a line that is looked at; ours are shorter
MAX_SHOWN_CHARS = 1000
_SHOWN = frozenset({"warning", "error", "critical"})
_TEXT_LINE = re.compile(r"\S+Z (WARNING|ERROR|CRITICAL) ")
_STANDARD = frozenset({"time", "level", "process", "logger", "message", "exception"})


def shown(line: str) -> str | None:
    """How a log line is echoed, or None if it is not. JSON lines of ours, text lines of ours; never foreign ones.

    What a client has said is in it, too: JSON hides line feeds and escape sequences until it is decoded.
    """
    if len(line) > MAX_LINE_CHARS:
        return None
    picked = _picked(line)
    return None if picked is None else one_line(picked, MAX_SHOWN_CHARS)


def _picked(line: str) -> str | None:
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or str(fields.get("level")) not in _SHOWN:
            return None
        extras = "".join(f" {name}={value}" for name, value in fields.items() if name not in _STANDARD)
        cause = str(fields.get("exception", "")).strip().rpartition("\n")[2]
        return f"{fields['level']}: {fields.get('message', '')}{extras}" + (f" ({cause})" if cause else "")
    return line if _TEXT_LINE.match(line) else None
