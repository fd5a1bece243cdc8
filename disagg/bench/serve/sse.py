"""Server-sent events, and what a completion's events say. Pure: bytes in, events out.

A peer may cut bytes anywhere. Comments and fields that are not `data` are passed over; a line beyond LINE_BYTES, or data that is
no JSON of a completion, is a `MalformedStream`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

LINE_BYTES = 1 << 20
DONE = b"[DONE]"
Count = Annotated[int, Meta(ge=0, le=1 << 31)]  # of tokens, or one's id: what is beyond is no answer's


class MalformedStream(Exception):
    """What came is no stream of completions."""


class EventParser:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that is whole now."""
        *lines, self._rest = (self._rest + received if self._rest else received).split(b"\n")
        if len(self._rest) > LINE_BYTES:
            raise MalformedStream(f"a line has more than {LINE_BYTES} bytes")
        out = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                out.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return out

    @property
    def partial(self) -> bool:
        """It ends within an event."""
        return bool(self._rest.strip() or self._data)


class Choice(Struct):
    text: str | None = None
    token_ids: list[Count] | None = None
    finish_reason: str | None = None


class Usage(Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Event(Struct):
    """Of a stream of /v1/completions; what else servers add is passed over. error: in any form."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


def decode_event(data: bytes) -> Event:
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedStream(f"an event is no completion: {error}") from error


def error_text(body: bytes | Any) -> str:
    """What an error of a server says, whatever form it has."""
    value: Any = body
    if isinstance(body, bytes):
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body.decode("utf-8", "replace").strip()
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return value if isinstance(value, str) else str(value)
