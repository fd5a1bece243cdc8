"""What a router and its renderer say to each other: frames of a number, a length, and msgpack. No I/O.

    router   0 TemplateSource                        1 Ask   2 Ask   ...
    renderer 0 Reply (compiled, or why it cannot be)  1 Reply 2 Reply ...

The number is the request's; a reply has that of its request, so that an answer that nobody waits for any more is never
taken for another's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from disagg.types.errors import InvalidRequest

HEADER: Final = struct.Struct("<QQ")  # number, bytes that follow
UTF8_BYTES: Final = 4  # of a character, at most
BESIDE_BYTES: Final = 64 << 10  # of a reply, beside its text; an error's words are cut to far less

_T = TypeVar("_T")


class Ask(Struct, frozen=True, array_like=True):
    """messages: a list of any JSON values, as `packed` writes them. max_chars: of the text, at most."""

    messages: Raw
    add_generation_prompt: bool
    max_chars: int


class Reply(Struct, frozen=True, array_like=True):
    """text: rendered; or for `refused`, why. `late`, `memory`: the renderer's bounds ended it."""

    outcome: Literal["text", "refused", "late", "memory"]
    text: str = ""
    param: str | None = None


def packed(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Messages as an Ask takes them, about as many bytes as they had in JSON. Raises InvalidRequest."""
    try:
        return msgspec.msgpack.encode(messages)
    except (UnicodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(f"messages holds what no text can be made of: {error}", "messages") from error


def frame(number: int, content: Struct) -> bytes:
    """Raises UnicodeError where a text has halves of surrogate pairs."""
    encoded = msgspec.msgpack.encode(content)
    return HEADER.pack(number, len(encoded)) + encoded


def unpacked(content: bytes, to: type[_T]) -> _T:
    """Raises msgspec.MsgspecError, or RecursionError for values nested too deeply."""
    return msgspec.msgpack.decode(content, type=to)


def most_reply_bytes(max_chars: int) -> int:
    return max_chars * UTF8_BYTES + BESIDE_BYTES
