"""A streamed answer as bytes: server-sent events, one for each part of its text, with what was used so far if that is asked for.

Knows one call, its writer and its requests' updates; nothing of routers, tasks or who sends what.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from disagg.api.bodies import Call
from disagg.api.errors import Fault
from disagg.api.replies import ChatWriter, Chunk, ChunkUsage, CompletionWriter, UsageReply, usage_reply
from disagg.router.requests import ChoiceDelta, Started, Usage

# What `str.splitlines` and its like take for the end of a line, as UTF-8 and as JSON's escape.
_LINE_BREAKS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029")


class Events:
    """The events of one streamed answer, as bytes. started: one per prompt."""

    def __init__(self, call: Call, writer: ChatWriter | CompletionWriter, started: list[Started]) -> None:
        self.started = started
        self._call = call
        self._writer = writer
        self._usage = _RunningUsage(call, started)

    def opening(self) -> bytes:
        return _joined(self._writer.opening(self._usage.now()))

    def of(self, prompt: int, delta: ChoiceDelta) -> bytes:
        """Nothing, if the client is to see nothing of it."""
        self._usage.add(delta)
        if not _worth_sending(delta, self._call):
            return b""
        return _joined(self._writer.chunks(prompt, delta, self._usage.now()))

    def last(self, usages: Iterable[Usage]) -> bytes:
        last = [self._writer.usage(usage_reply(usages))] if self._call.usage_last else []
        return _joined(last) + b"data: [DONE]\n\n"


class _RunningUsage:
    """The `usage` of each chunk: left out, null (it comes at the end), or what was used so far."""

    def __init__(self, call: Call, started: Iterable[Started]) -> None:
        self._each = call.usage_each
        self._otherwise: UnsetType | None = None if call.usage_last else UNSET
        self._prompt = sum(len(s.prompt_token_ids) for s in started)
        self._completion = 0

    def add(self, delta: ChoiceDelta) -> None:
        self._completion += len(delta.token_ids)

    def now(self) -> ChunkUsage:
        if not self._each:
            return self._otherwise
        return UsageReply(self._prompt, self._completion, self._prompt + self._completion)


def error_event(fault: Fault) -> bytes:
    return _line(fault.body())


def _joined(chunks: list[Chunk]) -> bytes:
    return b"".join([_line(msgspec.json.encode(chunk)) for chunk in chunks])


def _line(data: bytes) -> bytes:
    """One event. Many clients split a stream where Unicode breaks lines, not only where server-sent events do, and would cut
    an answer's text in two: such characters are written as escapes. JSON has its own for those below U+0020."""
    for char, escape in _LINE_BREAKS:
        data = data.replace(char, escape)
    return b"data: " + data + b"\n\n"


def _worth_sending(delta: ChoiceDelta, call: Call) -> bool:
    """Tokens whose text is held back make no event, unless the client sees tokens."""
    return bool(delta.text or delta.finish or (delta.token_ids and (call.logprobs or call.return_token_ids)))
