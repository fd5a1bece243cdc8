"""One question to a router over HTTP: all of it within a time, and no more of its answer than a size.

httpx's timeouts are of one read each, and name resolution has none at all: who sends a byte now and then holds a command for
ever. So the question is asked by a thread that nobody waits for once the time is over. Knows HTTP; nothing of what is asked.
"""

from __future__ import annotations

import queue
import ssl
import threading
import time
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from disagg.auth.tls import trusting
from disagg.cli.flags import given_ca, given_key
from disagg.types.errors import ConfigError, DeadlineExceeded, DisaggError, Unavailable
from disagg.types.plain import NAME_CHARS, one_line, quoted

EXCHANGE_S: Final = 35.0  # from the look-up of the name to the answer's end; a dump gathers from servers that may hang
# What 64 prefill and 256 decode servers say: 4.5 MiB where KV goes from each of those to each of these by two devices,
# 19 MiB where it has also gone from each decode server to each other, and some 33 by eight devices. Parsed JSON takes
# up to 25 times the bytes of its text.
STATUS_BYTES: Final = 64 << 20
DUMP_BYTES: Final = 256 << 20  # the same, 500 KiB of text from each of these servers, and the router's requests
SMALL_BYTES: Final = 64 << 10  # of what is said to a change that was asked for, and of an error
_ERROR_CHARS = 300  # of an error, as it is repeated


class Allowed(Struct, frozen=True):
    """What an answer may take: seconds from the question to its end, and bytes of its body."""

    within_s: float = EXCHANGE_S
    most_bytes: int = STATUS_BYTES


class Reply(Struct, frozen=True):
    """An answer with status 200, as it came. url: that was asked, without parameters."""

    url: str
    content_type: str
    content: bytes


class _Question(Struct, frozen=True):
    method: str
    url: str
    params: dict[str, str] | None
    headers: dict[str, str]
    verify: bool | ssl.SSLContext


class _Heard(Struct, frozen=True):
    """content: of an error, its beginning; of other answers all of it, or more than is allowed."""

    status: int
    content_type: str
    coding: str
    content: bytes


def ask(
    base_url: str,
    path: str,
    params: dict[str, str] | None = None,
    *,
    method: str = "GET",
    allowed: Allowed = Allowed(),  # noqa: B008  frozen
) -> Reply:
    """What is answered with status 200. Raises DeadlineExceeded where that is not whole in time, ConfigError where it is too
    large or coded or base_url is none, Unavailable where nobody answers, DisaggError for another status; each says what to check.
    """
    import httpx

    _check_url(base_url)
    url = base_url.rstrip("/") + path
    key, ca = given_key(), given_ca()  # here: they are of this thread's command
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    question = _Question(method, url, params, headers, True if ca is None else trusting(ca))
    try:
        heard = _within(question, allowed)
    except (TimeoutError, httpx.TimeoutException) as error:
        late = f"{url}: no whole answer within {allowed.within_s:.3g} s"
        raise DeadlineExceeded(late if method == "GET" else f"{late}; it may be done all the same") from error
    except httpx.InvalidURL as error:
        raise _no_url(base_url, str(error)) from error
    except httpx.HTTPError as error:
        hint = "" if _nobody(error) else _tls_hint(base_url)
        said = one_line(str(error), _ERROR_CHARS)
        raise Unavailable(f"no router answers at {base_url} ({said}); is `disagg up` running?{hint}") from error
    if heard.status != 200:
        raise DisaggError(f"{url} answered {heard.status}: {one_line(_message(heard.content), _ERROR_CHARS)}")
    if heard.coding not in ("", "identity"):
        raise ConfigError(f"{url} answered in the coding {one_line(heard.coding, NAME_CHARS)}, which was not asked for")
    if len(heard.content) > allowed.most_bytes:
        raise ConfigError(f"{url} answered more than the {allowed.most_bytes} bytes that a router may")
    return Reply(url, heard.content_type, heard.content)


def _check_url(base_url: str) -> None:
    """Raises ConfigError for what names no router."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise _no_url(base_url, str(error)) from error
    if parts.scheme not in ("http", "https"):
        raise _no_url(base_url, "it does not begin with http:// or https://")
    if not parts.hostname or port == 0:
        raise _no_url(base_url, "it names no host" if not parts.hostname else "there is no port 0")
    if parts.query or parts.fragment:
        raise _no_url(base_url, "nothing may follow its path")


def _no_url(base_url: str, why: str) -> ConfigError:
    return ConfigError(
        f"--http {quoted(base_url)}: {one_line(why, _ERROR_CHARS)}; it must be like http://127.0.0.1:8000"
    )


class _ErrorSaid(Struct, frozen=True):
    message: str


class _ErrorBody(Struct, frozen=True):
    """What a router answers instead of what was asked for (api/errors)."""

    error: _ErrorSaid


def _message(content: bytes) -> str:
    """Of an error: the words that are for people, or all of it where it is no router's."""
    try:
        return msgspec.json.decode(content, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return content.decode("utf-8", "replace").strip()


def _within(question: _Question, allowed: Allowed) -> _Heard:
    """Raises TimeoutError once the time is over, wherever the question is then; and what httpx raises."""
    until_s = time.monotonic() + allowed.within_s
    came: queue.SimpleQueue[_Heard | Exception] = queue.SimpleQueue()

    def hear() -> None:
        try:
            came.put(_hear(question, allowed, until_s))
        except Exception as error:  # noqa: BLE001  raised again by who waits
            came.put(error)

    threading.Thread(target=hear, name="ask", daemon=True).start()
    try:
        heard = came.get(timeout=max(0.0, until_s - time.monotonic()))
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(heard, Exception):
        raise heard
    return heard


def _hear(question: _Question, allowed: Allowed, until_s: float) -> _Heard:
    """Reads no further than to the bound, nor after the time, when nobody waits for it any more."""
    import httpx

    asked: dict[str, Any] = {"params": question.params, "headers": question.headers, "verify": question.verify}
    content = bytearray()
    with httpx.stream(question.method, question.url, timeout=allowed.within_s, trust_env=False, **asked) as answer:
        most_bytes = allowed.most_bytes if answer.status_code == 200 else min(SMALL_BYTES, allowed.most_bytes)
        for part in answer.iter_raw():
            content += part
            if len(content) > most_bytes:
                break
            if time.monotonic() > until_s:
                raise TimeoutError
        kind, coding = (answer.headers.get(f"content-{each}", "") for each in ("type", "encoding"))
        return _Heard(answer.status_code, kind, coding, bytes(content))


def _nobody(error: Exception) -> bool:
    return "refused" in str(error).lower()


def _tls_hint(base_url: str) -> str:
    """Something is there, and speaks otherwise than it was spoken to."""
    if base_url.lower().startswith("https:"):
        return (
            " If it speaks no TLS, say --http http://...; if it does, --ca FILE must name who signed its certificate."
        )
    return " If it speaks TLS, say --http https://... and --ca FILE."
