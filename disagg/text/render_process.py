"""The process that compiles and renders a model's chat template, for one router: `python -m disagg.text.render_process PID`.

A template is a program by whoever made the model. Here it can loop, grow and crash as it likes: memory is limited by the
kernel, time by the router, which kills this process. It reads frames from the socket that is its stdin and writes one reply
to each there (`render_messages`), and ends with its router. It imports as little as it can: it must be there soon again.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO

import msgspec

from disagg.telemetry.process import die_with_parent, leave_signals_to_parent, limit_resources
from disagg.text.chat import ChatTemplate, OutOfTime, TemplateSource
from disagg.text.render_messages import HEADER, Ask, Reply, frame, unpacked
from disagg.types.errors import ConfigError, InvalidRequest

SPARE_BYTES = 256 << 20  # for one template: what it compiles to, the messages, and what it makes of them
DESCRIPTORS = 16
_SOCKET = 0


def main(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    limit_resources(SPARE_BYTES, DESCRIPTORS)
    with open(_SOCKET, "rb", closefd=False) as asked:
        template = None
        while (found := _next(asked)) is not None:
            number, content = found
            if template is None:
                template, reply = _compiled(content)
            else:
                reply = answer(template, content)
            del content  # else it would take its memory from the next one
            _write(_framed(number, reply))
            del reply


def answer(template: ChatTemplate, content: bytes) -> Reply:
    """Renders what an Ask brings."""
    try:
        ask = unpacked(content, Ask)
        messages: list[Any] = unpacked(bytes(ask.messages), list)
        text = template.render(messages, add_generation_prompt=ask.add_generation_prompt, max_chars=ask.max_chars)
        return Reply("text", text)
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError):
            return Reply("memory")
        if isinstance(error.__cause__, OutOfTime):
            return Reply("late")
        return Reply("refused", str(error), error.param)
    except MemoryError:
        return Reply("memory")
    except (RecursionError, msgspec.MsgspecError) as error:
        return Reply("refused", f"messages cannot be read: {error}", "messages")


def _compiled(content: bytes) -> tuple[ChatTemplate | None, Reply]:
    source = unpacked(content, TemplateSource)
    try:
        return ChatTemplate(source.text, source.special_tokens), Reply("text")
    except ConfigError as error:
        return None, Reply("refused", str(error))


def _framed(number: int, reply: Reply) -> bytes:
    try:
        return frame(number, reply)
    except UnicodeError:
        why = "the model's chat template makes characters of the messages that are none: halves of surrogate pairs"
        return frame(number, Reply("refused", why, "messages"))
    except MemoryError:
        return frame(number, Reply("memory"))


def _next(asked: BinaryIO) -> tuple[int, bytes] | None:
    """The next frame; None at the end. The router bounds what it sends."""
    header = asked.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, size = HEADER.unpack(header)
    content = asked.read(size)
    return (number, content) if len(content) == size else None


def _write(framed: bytes) -> None:
    left = memoryview(framed)
    while left:
        left = left[os.write(_SOCKET, left) :]


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the router has gone, or has given this process up
