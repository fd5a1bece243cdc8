"""One end of a stream that outlives its connections: what goes out next, what has come in, and what is overdue. No I/O.

    put ──> outbox ── flush ──> frames ──> connection ──> the other end ──> messages, each once and in order
               |                  ^  │
               └──── counted ─────┤  └── kept until acknowledged; all of them again on a new connection,
                                  │      or when nothing was acknowledged for too long
    beat: a frame without messages, every `heartbeat_s`; it acknowledges, and says that this end lives.
    An acknowledgement waits `ACK_DELAY_S` for a frame with messages to ride on.

One connection serves at a time: the newest. What comes from an older one is not for this stream any more, since whoever made
the newer one has said there what it has. Silence and a backlog that nobody takes are noticed by `verdict`; what follows from
them is the owner's business. Knows frames and times; nothing of messages, peers or sockets.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from disagg.messages.channel import FRAME_MESSAGES, Frame, ReliableChannel

ACK_DELAY_S = 0.1
MAX_KEPT_MESSAGES = 1 << 16  # beside what their sizes allow; each costs some hundred bytes, whatever its size says
_ENDED = -1

S = TypeVar("S")  # what this end sends
R = TypeVar("R")  # what it receives


class Outbox(Protocol[S]):
    """Messages that wait. size: of all of them, in whatever unit the owner bounds its backlog in."""

    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...

    def put(self, message: S) -> None: ...

    def take(self) -> tuple[S, ...]:
        """The first of them, as many as go into one frame; at least one if there is one."""


class Queue(Generic[S]):
    """An outbox of messages as they are. size_of: one message; frame_size: of a frame, unless one message has more."""

    def __init__(self, size_of: Callable[[S], int] = lambda message: 1, frame_size: int = FRAME_MESSAGES) -> None:
        self.size = 0
        self._size_of = size_of
        self._frame_size = frame_size
        self._messages: list[S] = []

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: S) -> None:
        self._messages.append(message)
        self.size += self._size_of(message)

    def take(self) -> tuple[S, ...]:
        count = frame_length(self._messages, self._size_of, self._frame_size)
        messages = tuple(self._messages[:count])
        del self._messages[:count]
        self.size -= sum(map(self._size_of, messages))
        return messages


def frame_length(messages: Sequence[S], size_of: Callable[[S], int], frame_size: int) -> int:
    """How many of the first messages go into one frame: at most FRAME_MESSAGES, and what exceeds `frame_size` goes alone."""
    total = 0
    for count, message in enumerate(messages):
        total += size_of(message)
        if count == FRAME_MESSAGES or (count and total > frame_size):
            return count
    return len(messages)


class Verdict(enum.Enum):
    """Why the other end is given up."""

    SILENT = "silent"  # nothing was heard from it for too long
    OVERFULL = "overfull"  # more waits for it, or for its acknowledgement, than is kept


class StreamState(Generic[S, R]):
    """See the module. max_kept: size of the messages that wait, and of those that were sent and not acknowledged."""

    def __init__(self, outbox: Outbox[S], heartbeat_s: float, max_kept: int, now_s: float) -> None:
        self.outbox = outbox
        self.heard_s = now_s  # when a frame came last
        self.served = False  # the newest connection is not known to be broken
        self._began_s = now_s
        self._heartbeat_s = heartbeat_s
        self._max_kept = max_kept
        self._connection = 0
        self._channel: ReliableChannel[Any] = ReliableChannel()  # one type each way
        self._ready = False  # what waits may go out
        self._settles = False  # a frame is to go out, also with nothing in it
        self._repeats: deque[Frame[S]] = deque()
        self._sent: deque[tuple[int, int]] = deque()  # of each frame that is not acknowledged: size, number of messages
        self._sent_size = self._sent_messages = 0  # their sums
        self._beat_due_s = now_s + heartbeat_s
        self._ack_due_s = math.inf

    @property
    def lived_s(self) -> float:
        """From its beginning to when a frame came last."""
        return self.heard_s - self._began_s

    # ---- connections

    def connect(self, last_received: int, now_s: float) -> int:
        """A connection was made, on which the other end said that it has frames up to last_received. Its number; older
        ones are over. The greetings that it began with were a beat, each way."""
        assert not self.ended
        self._connection += 1
        self.served = True
        self.heard_s = now_s
        self._beat_due_s = now_s + self._heartbeat_s
        self._channel.take(Frame(number=0, ack=last_received, messages=()), now_s)
        self._repeats = deque(self._channel.repeat(now_s))
        return self._connection

    def disconnect(self, connection: int) -> None:
        """This connection is broken. What was kept waits for the next one."""
        if connection == self._connection:
            self.served = False

    def end(self) -> None:
        """For good: no connection serves this stream any more, and nothing that waits goes out."""
        self._connection = _ENDED
        self.served = False

    @property
    def ended(self) -> bool:
        return self._connection == _ENDED

    def serves(self, connection: int) -> bool:
        """Whether this connection is the newest, and not known to be broken."""
        return self.served and connection == self._connection

    # ---- what comes in

    def hear(self, frame: Frame[R], now_s: float) -> tuple[R, ...]:
        """A frame came on the connection that serves. Its messages, unless they were here before."""
        self.heard_s = now_s
        owed = self._channel.ack_owed
        messages = self._channel.take(frame, now_s)
        if self._channel.ack_owed and not owed:
            self._ack_due_s = now_s + ACK_DELAY_S
        return messages

    # ---- what goes out

    def put(self, message: S) -> None:
        """Queue a message, which goes after the next `flush` at the latest."""
        self.outbox.put(message)

    def flush(self) -> bool:
        """Let all that is queued go. False if there is nothing."""
        self._ready = len(self.outbox) > 0
        return self._ready

    def settle(self) -> None:
        """Once this end is `idle`, the other one has heard whatever its owner has said on the connection until now, and what that
        one had sent before it heard is here: a frame goes out that has to be acknowledged, though there be nothing to say."""
        self._settles = True

    def next_frame(self, now_s: float) -> Frame[S] | None:
        """What to write now, on the connection that serves; to be asked again after it was written. None: nothing, until
        `due_s`. What it repeats goes before anything new, since the other end takes the next frame only."""
        if now_s >= self._beat_due_s:
            return self.beat(now_s)
        if not self._repeats:
            self._repeats.extend(self._channel.overdue(now_s))
        if self._repeats:
            return self._repeats.popleft()
        if self._ready or self._settles:
            return self._push(now_s)
        if self._channel.ack_owed and now_s >= self._ack_due_s:
            return self.beat(now_s)
        return None

    def _push(self, now_s: float) -> Frame[S]:
        before = self.outbox.size
        messages = self.outbox.take()
        self._forget_acknowledged()
        self._sent.append((before - self.outbox.size, len(messages)))
        self._sent_size += self._sent[-1][0]
        self._sent_messages += len(messages)
        self._ready, self._settles = len(self.outbox) > 0, False
        return self._channel.push(messages, now_s)

    def beat(self, now_s: float) -> Frame[S]:
        """A frame without messages, to be written now."""
        self._beat_due_s = now_s + self._heartbeat_s
        return self._channel.ack_frame()

    def acknowledgement(self) -> Frame[S]:
        """A frame without messages that is no beat: for what a writer has to say of its own, written now."""
        return self._channel.ack_frame()

    @property
    def due_s(self) -> float:
        """When `next_frame` has something, if nothing comes in and nothing is put until then."""
        if self._ready or self._settles or self._repeats:
            return -math.inf
        acknowledge_s = self._ack_due_s if self._channel.ack_owed else math.inf
        return min(self._beat_due_s, acknowledge_s, self._channel.overdue_s)

    # ---- what there is

    @property
    def received(self) -> int:
        """Number of the last frame taken from the other end: what a greeting says."""
        return self._channel.received

    @property
    def unacked(self) -> int:
        """Frames that the other end has not acknowledged."""
        return self._channel.unacked

    @property
    def idle(self) -> bool:
        """The other end has everything."""
        return not (len(self.outbox) or self._settles or self._channel.unacked)

    @property
    def kept(self) -> int:
        """Size of what waits, and of what was sent and may have to be sent again."""
        self._forget_acknowledged()
        return self.outbox.size + self._sent_size

    def _forget_acknowledged(self) -> None:
        while len(self._sent) > self._channel.unacked:
            size, messages = self._sent.popleft()
            self._sent_size -= size
            self._sent_messages -= messages

    @property
    def overfull(self) -> bool:
        return self.kept > self._max_kept or len(self.outbox) + self._sent_messages > MAX_KEPT_MESSAGES

    def verdict(self, lease_s: float, now_s: float, *, awake: bool = True) -> Verdict | None:
        """Whether the other end is to be given up. awake: this end has been able to hear (`Awake`)."""
        if awake and now_s - self.heard_s > lease_s:
            return Verdict.SILENT
        if self.overfull:
            return Verdict.OVERFULL
        return None
