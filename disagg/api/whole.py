"""An answer that is not streamed, put together as it comes: JSON text per choice, an eighth of what the values would take.

    deltas ── add ──> per choice: text, ids, log-probabilities, each a growing piece of JSON ── parts ──> the body, in parts

Nothing here takes time that grows with the whole answer but the last copy (16 ms for 128 MiB). Pure; what fields are
called is known to `replies` alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from disagg.api.bodies import Call
from disagg.api.replies import (
    ChatLogprobs,
    ChatWriter,
    CompletionLogprobs,
    CompletionWriter,
    UsageReply,
    WholeChoice,
    chat_logprobs,
    completion_logprobs,
)
from disagg.config.sizes import format_size
from disagg.router.requests import ChoiceDelta
from disagg.types.errors import InvalidRequest
from disagg.types.ids import FinishReason

PART_BYTES = 1 << 20  # of the body, written at once
# What one token takes in JSON, roughly and rather too little: who is refused for it is refused rightly.
_TEXT_BYTES, _ID_BYTES = 4, 6
_CHAT_ENTRY_BYTES, _COMPLETION_ENTRY_BYTES = 60, 24
_NO_CHOICES = b'"choices":[]'


def least_bytes(call: Call) -> int:
    """What the answer takes if every choice is as long as it may be; 0 where it may be as long as fits."""
    params = call.requests[0].params
    per_token = _TEXT_BYTES + _ID_BYTES * call.return_token_ids
    if params.logprobs is not None:
        entry = _CHAT_ENTRY_BYTES if call.kind == "chat" else _COMPLETION_ENTRY_BYTES
        per_token += entry * (1 + params.logprobs)
    return len(call.requests) * call.n * params.max_tokens * per_token


def sized(call: Call, most_bytes: int) -> Call:
    """The call, with the reason why its answer could not be held, if so: nothing is computed for it then."""
    least = least_bytes(call)
    if call.stream or least <= most_bytes:
        return call
    params = call.requests[0].params
    beside = "" if params.logprobs is None else f" with the {params.logprobs} most likely at each"
    why = (
        f"{len(call.requests)} prompts x {call.n} choices (n) x {params.max_tokens} tokens (max_tokens){beside} come to an "
        f"answer of some {format_size(least)}; at most router.answer_bytes = {format_size(most_bytes)} are held: ask for "
        "less, or set stream"
    )
    return replace(call, requests=tuple(replace(request, too_large=why) for request in call.requests))


class WholeAnswer:
    """The choices of one call so far."""

    def __init__(self, call: Call, prompts: int, most_bytes: int) -> None:
        self._call = call
        self._most_bytes = most_bytes
        self._bytes = 0
        self._choices = {(p, c): _Choice(call) for p in range(prompts) for c in range(call.n)}

    def add(self, prompt: int, delta: ChoiceDelta) -> int:
        """By how many bytes the answer has grown. Raises InvalidRequest where it has become too large to be held."""
        grown = self._choices[prompt, delta.choice].add(delta)
        self._bytes += grown
        if self._bytes > self._most_bytes:
            raise InvalidRequest(
                f"the answer has grown to {format_size(self._bytes)}; at most router.answer_bytes = "
                f"{format_size(self._most_bytes)} are held: set max_tokens, or set stream",
                "max_tokens",
            )
        return grown

    def parts(self, writer: ChatWriter | CompletionWriter, usage: UsageReply) -> Iterator[bytes]:
        """The body. Each choice is let go of as it is written."""
        head, tail = msgspec.json.encode(writer.without_choices(usage)).split(_NO_CHOICES)
        yield head + b'"choices":['
        for at, key in enumerate(list(self._choices)):
            choice = self._choices.pop(key)
            yield (b"," if at else b"") + msgspec.json.encode(writer.whole(key[0], choice.whole(key[1])))
        yield b"]" + tail


class _Choice:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._text = bytearray()
        self._ids = bytearray()
        self._logprobs: tuple[bytearray, ...] = ()
        if call.logprobs:
            self._logprobs = tuple(bytearray() for _ in range(1 if call.kind == "chat" else 4))
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> int:
        before = self._size()
        self._text += msgspec.json.encode(delta.text)[1:-1]
        if self._call.return_token_ids:
            _append(self._ids, delta.token_ids)
        if self._logprobs:
            for column, values in zip(self._logprobs, self._columns(delta), strict=True):
                _append(column, values)
        self._finish, self._stop_reason = delta.finish, delta.stop_reason
        return self._size() - before

    def whole(self, choice: int) -> WholeChoice:
        columns = [_list(column) for column in self._logprobs]
        logprobs: ChatLogprobs | CompletionLogprobs | None = None
        if columns:
            logprobs = ChatLogprobs(columns[0]) if self._call.kind == "chat" else CompletionLogprobs(*columns)
        text = Raw(b'"' + self._text + b'"')
        return WholeChoice(choice, text, _list(self._ids), logprobs, self._finish, self._stop_reason)

    def _columns(self, delta: ChoiceDelta) -> tuple[object, ...]:
        if self._call.kind == "chat":
            return (chat_logprobs(delta.logprobs).content,)
        found = completion_logprobs(delta.logprobs)
        return (found.text_offset, found.token_logprobs, found.tokens, found.top_logprobs)

    def _size(self) -> int:
        return len(self._text) + len(self._ids) + sum(map(len, self._logprobs))


def _append(column: bytearray, values: object) -> None:
    written = msgspec.json.encode(values)[1:-1]
    if written:
        column += b"," + written if column else written


def _list(column: bytearray) -> Raw:
    return Raw(b"[" + column + b"]")
