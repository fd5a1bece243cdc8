"""Conversion of what several messages have in common: keys, finish reasons, log-probabilities, frames.

`fill_*` writes a value into an empty protobuf message (filling in place costs less than half of building and copying, and
a server does it for every token); `read_*` is its inverse and raises ProtocolError, naming the field, for what no sender
of any version may say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import Message
from msgspec import Struct

from disagg.messages.channel import MAX_FRAME_MESSAGES, Frame
from disagg.messages.legs import TimelineEvent
from disagg.messages.plan import TokenLogprobs
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason, LegKey
from disagg.wire import pb

T = TypeVar("T")

MAX_REQUEST_ID_CHARS = 256  # an id is kept for as long as its leg, and for a while after
MAX_POD_CHARS = 512  # of a namespace, a name and a uid
MAX_NAME_CHARS = 256  # of names and drawn ids of processes, which are kept and logged

FINISH_TO_PROTO: dict[FinishReason | None, pb.inference.FinishReason] = {
    None: pb.inference.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.inference.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.inference.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.inference.FINISH_REASON_ABORT,
}
FINISH_FROM_PROTO: dict[int, FinishReason | None] = {int(v): k for k, v in FINISH_TO_PROTO.items()}


class Undecodable(Struct, frozen=True):
    """What a stream gives in place of a message that cannot be read, so that its reader ends it with a reason."""

    reason: str


def refuse_undecodable(message: object) -> None:
    """Raises ProtocolError."""
    if isinstance(message, Undecodable):
        raise ProtocolError(message.reason)


def refuse(message: Message, field: str, why: str) -> NoReturn:
    """Raises ProtocolError: "LegTokens.key is missing"."""
    raise ProtocolError(f"{message.DESCRIPTOR.name}.{field} {why}")


def require(message: Message, field: str) -> None:
    """The sub-message `field` must be there."""
    if not message.HasField(field):
        refuse(message, field, "is missing")


def refuse_long(message: Message, *fields: str) -> None:
    """Each of these texts has at most MAX_NAME_CHARS characters."""
    for field in fields:
        if len(getattr(message, field)) > MAX_NAME_CHARS:
            refuse(message, field, f"has {len(getattr(message, field))} characters; at most {MAX_NAME_CHARS} may be")


def read_pod(message: Message, pod: str) -> str:
    """NAMESPACE/NAME/UID, or empty."""
    if len(pod) > MAX_POD_CHARS:
        refuse(message, "pod", f"has {len(pod)} characters; at most {MAX_POD_CHARS} may be")
    return pod


def read_enum(message: Message, field: str, known: Mapping[int, T]) -> T:
    """The value of an enum field, which must be one that this version knows."""
    number = getattr(message, field)
    try:
        return known[number]
    except KeyError:
        refuse(message, field, "is missing" if number == 0 else f"is {number}, which this version does not know")


def read_seconds(message: Message, field: str) -> float:
    """A finite number; a NaN deadline or time would never compare as past."""
    value: float = getattr(message, field)
    if value - value != 0.0:
        refuse(message, field, f"is {value}; it must be a finite number of seconds")
    return value


def fill_key(out: pb.server.LegKey, key: LegKey) -> None:
    out.request_id = key.request_id
    out.attempt = key.attempt
    out.trunk = key.prefix_no


def read_key(message: Any) -> LegKey:
    """The `key` of any message about a leg."""
    key = message.key
    request_id = key.request_id
    if not request_id:
        require(message, "key")
        refuse(message, "key.request_id", "is empty")
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        refuse(message, "key.request_id", f"has {len(request_id)} characters; at most {MAX_REQUEST_ID_CHARS} may be")
    return LegKey(request_id, key.attempt, key.trunk)


def read_finish(message: Any) -> FinishReason | None:
    return read_enum(message, "finish", FINISH_FROM_PROTO)


def fill_logprobs(out: pb.server.LogprobTable, rows: Sequence[TokenLogprobs]) -> None:
    """One row per token. Values become 32-bit floats, which is what workers compute."""
    out.chosen.extend(row.logprob for row in rows)
    if any(row.top for row in rows):
        out.top_counts.extend(len(row.top) for row in rows)
        for row in rows:
            out.top_ids.extend(token_id for token_id, _ in row.top)
            out.top_logprobs.extend(logprob for _, logprob in row.top)


def read_logprobs(table: pb.server.LogprobTable, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """num_tokens: how many rows there must be."""
    if len(table.chosen) != num_tokens:
        refuse(table, "chosen", f"has {len(table.chosen)} rows for {num_tokens} tokens")
    if not table.top_counts:
        if table.top_ids or table.top_logprobs:
            refuse(table, "top_counts", "is missing, but there are rows for it")
        return tuple(TokenLogprobs(logprob) for logprob in table.chosen)
    if len(table.top_counts) != num_tokens:
        refuse(table, "top_counts", f"has {len(table.top_counts)} rows for {num_tokens} tokens")
    total = sum(table.top_counts)
    for field in ("top_ids", "top_logprobs"):
        if len(getattr(table, field)) != total:
            refuse(table, field, f"has {len(getattr(table, field))} rows where top_counts promises {total}")
    top = list(zip(table.top_ids, table.top_logprobs, strict=True))
    rows = []
    start = 0
    for logprob, count in zip(table.chosen, table.top_counts, strict=True):
        rows.append(TokenLogprobs(logprob, tuple(top[start : start + count])))
        start += count
    return tuple(rows)


def fill_timeline(out: Any, timeline: Iterable[TimelineEvent]) -> None:
    """out: a repeated field of TimelineEvent."""
    for event in timeline:
        out.add(name=event.name, start_unix_s=event.start_unix_s, end_unix_s=event.end_unix_s, detail=event.detail)


def read_timeline(timeline: Iterable[pb.inference.TimelineEvent]) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(event.name, read_seconds(event, "start_unix_s"), read_seconds(event, "end_unix_s"), event.detail)
        for event in timeline
    )


Fill = Callable[[Any, Any], None]
Read = Callable[[Any], T]


def fill_frame(out: Any, frame: Frame[Any], kinds: Mapping[type, tuple[str, Fill]]) -> None:
    """Number, acknowledgement and messages of a frame. kinds: per message type, its name in the oneof and how to fill it."""
    out.number = frame.number
    out.ack = frame.ack
    add = out.messages.add
    for message in frame.messages:
        name, fill = kinds[type(message)]
        added = getattr(add(), name)
        added.SetInParent()  # a message whose fields are all zero is a message too
        fill(added, message)


def read_opening(
    message: Any, kinds: Mapping[str, Read[T]], names: Sequence[str], also: Sequence[str]
) -> Frame[T] | None:
    """A stream's message: its frame, or None if it is a hello, which comes alone. names: fields of a hello that say something.
    also: more fields whose length is bounded. Raises ProtocolError."""
    refuse_undecodable(message)
    if not message.HasField("hello"):
        return read_frame(message, kinds)
    for field in names:
        if not getattr(message.hello, field):
            refuse(message.hello, field, "is empty")
    refuse_long(message.hello, *names, *also)
    if message.number or message.messages:
        refuse(message, "hello", "comes with a frame; it must come alone")
    return None


def read_frame(frame: Any, kinds: Mapping[str, Read[T]]) -> Frame[T]:
    """Inverse of fill_frame. A kind out of a newer version is an error: skipping it would lose a message silently.

    Its messages are counted before any of them is read; to read one costs some ten microseconds and what it holds.
    """
    if len(frame.messages) > MAX_FRAME_MESSAGES:
        refuse(frame, "messages", f"are {len(frame.messages)}; at most {MAX_FRAME_MESSAGES} may be in one frame")
    messages: list[T] = []
    for message in frame.messages:
        kind = message.WhichOneof("kind")
        if kind is None:
            at = len(messages)
            refuse(frame, f"messages[{at}]", f"of frame {frame.number} is of no kind that this version knows")
        messages.append(kinds[kind](getattr(message, kind)))
    if frame.number == 0 and messages:
        refuse(frame, "number", f"is 0, but the frame has {len(messages)} messages")
    return Frame(number=frame.number, ack=frame.ack, messages=tuple(messages))
