"""A numbered, acknowledged, repeating message channel over any stream that may break, drop, repeat or delay. No I/O.

What `streams/state` numbers frames with. One object per end and per link generation; it outlives reconnects. Go-back-N:
the receiver takes only the next frame, so what it hands on is exactly once and in order; the sender repeats everything
unacknowledged when an acknowledgement is overdue, or at once after a reconnect.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")

FRAME_MESSAGES = 256  # that are put into one frame; more make several, so that reading one holds no loop for long
MAX_FRAME_MESSAGES = 8192  # that are read from one


class Frame(Struct, Generic[T], frozen=True):
    """number: from 1, without gaps; 0: carries only an acknowledgement. ack: highest number taken from the other side."""

    number: int
    ack: int
    messages: tuple[T, ...]


class ReliableChannel(Generic[T]):
    """Numbers outgoing frames, keeps them until acknowledged, and lets each incoming one through once."""

    def __init__(self, retransmit_s: float = 0.5) -> None:
        self._retransmit_s = retransmit_s
        self._unacked: deque[tuple[int, tuple[T, ...]]] = deque()
        self._next_number = 1
        self._received = 0
        self._acked = 0
        self._last_activity_s = 0.0
        self._ack_owed = False

    @property
    def received(self) -> int:
        """Number of the last frame taken from the other side."""
        return self._received

    @property
    def unacked(self) -> int:
        """How many of our frames the other side has not acknowledged."""
        return len(self._unacked)

    @property
    def overdue_s(self) -> float:
        """When `overdue` will have something to repeat, if nothing is acknowledged until then; inf: nothing is kept."""
        return self._last_activity_s + self._retransmit_s if self._unacked else math.inf

    @property
    def ack_owed(self) -> bool:
        """A frame was taken (or repeated) since we last sent one: an acknowledgement should go out soon."""
        return self._ack_owed

    def push(self, messages: tuple[T, ...], now_s: float) -> Frame[T]:
        """A frame to put on the stream now; kept until acknowledged."""
        number = self._next_number
        self._next_number += 1
        if not self._unacked:
            self._last_activity_s = now_s
        self._unacked.append((number, messages))
        self._ack_owed = False
        return Frame(number=number, ack=self._received, messages=messages)

    def ack_frame(self) -> Frame[T]:
        self._ack_owed = False
        return Frame(number=0, ack=self._received, messages=())

    def take(self, frame: Frame[T], now_s: float) -> tuple[T, ...]:
        """The frame's messages if it is the next one, else nothing. Also applies its acknowledgement."""
        if frame.ack > self._acked:
            self._acked = min(frame.ack, self._next_number - 1)
            self._last_activity_s = now_s
            while self._unacked and self._unacked[0][0] <= self._acked:
                self._unacked.popleft()
        if frame.number == 0:
            return ()
        self._ack_owed = True
        if frame.number != self._received + 1:
            return ()
        self._received = frame.number
        return frame.messages

    def overdue(self, now_s: float) -> tuple[Frame[T], ...]:
        """Everything unacknowledged, when nothing has been acknowledged for `retransmit_s`; else nothing."""
        if now_s < self.overdue_s:
            return ()
        return self.repeat(now_s)

    def repeat(self, now_s: float) -> tuple[Frame[T], ...]:
        """Everything unacknowledged, now: after a reconnect."""
        self._last_activity_s = now_s
        self._ack_owed = False
        return tuple(Frame(number=number, ack=self._received, messages=m) for number, m in self._unacked)
