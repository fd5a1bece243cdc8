"""What commands share at the terminal: progress on stderr, results on stdout, and talking HTTP to a router."""

from __future__ import annotations

import sys
import threading
from typing import Any

from disagg.types.errors import DisaggError, Unavailable

HTTP_TIMEOUT_S = 35.0  # a dump gathers from servers that may hang


def note(text: str) -> None:
    """One line for the person who waits; on stderr, so that stdout holds results only."""
    print(text, file=sys.stderr, flush=True)


def problem(text: str) -> None:
    """One line about something that went wrong."""
    print(f"disagg: {text}", file=sys.stderr, flush=True)


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


def get_http(base_url: str, path: str, params: dict[str, str] | None = None) -> Any:
    """The router's answer: decoded if it is JSON, else text. Raises DisaggError saying what to check."""
    import httpx

    url = base_url.rstrip("/") + path
    try:
        answer = httpx.get(url, params=params, timeout=HTTP_TIMEOUT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise DisaggError(f"{url} is not a URL: {error}") from error
    except httpx.HTTPError as error:
        raise Unavailable(f"no router answers at {base_url} ({error}); is `disagg up` running?") from error
    if answer.status_code != 200:
        raise DisaggError(f"{url} answered {answer.status_code}: {answer.text.strip()[:300]}")
    if answer.headers.get("content-type", "").startswith("application/json"):
        return answer.json()
    return answer.text
