"""Writes lines from a thread of its own, so that whoever has something to say never waits for who reads it.

A reader that stalls, a pipe without a reader, a closed terminal and a full disk cost lines, never time: what could not be
kept or written is counted, and said as soon as something can be written again. Knows bytes; nothing of what they say.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_QUEUED_BYTES = 1 << 20  # of lines that wait for their reader
IDLE_S = 1.0
GATHER_S = 0.01  # a line waits so long for others: to wake the thread costs whoever logs more than all else of a line
MOST_AT_ONCE_BYTES = 64 << 10
_OURS = {errno.EPIPE: "nobody reads", errno.EIO: "the terminal or disk is gone"}

Notice = Callable[[int, str], bytes]  # (lines lost, why) -> the line that says so


class Target:
    """Where bytes go: a function that writes all of them or raises OSError. What it did not take is counted."""

    def __init__(self, write: Callable[[bytes], None], notice: Notice) -> None:
        self._write = write
        self._notice = notice
        self._lost = 0
        self._why = ""

    @property
    def lost(self) -> int:
        """Lines lost of which nothing has been said yet."""
        return self._lost

    def lose(self, lines: int, why: str) -> None:
        """Counts lines that were lost before they came here."""
        self._lost += lines
        self._why = why

    def put(self, data: bytes) -> bool:
        """Writes what is to be said of lost lines, then this. False if it, too, is lost."""
        try:
            if self._lost:
                lost, why = self._lost, self._why
                self._write(self._notice(lost, why))
                self._lost -= lost
            if data:
                self._write(data)
        except OSError as error:
            self.lose(data.count(b"\n"), why_not(error))
            return False
        return True


class DescriptorWriter:
    """Writes to a descriptor, whichever mode it is in; waits for its reader, so it belongs into a thread.

    Others may write to the same pipe, as stdout and stderr often are one. What is at most PIPE_BUF is there whole or not at all,
    so that no line of theirs comes into the middle of one of ours, but for lines that are longer.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_pipe = _is_pipe(fd)
        self._torn = False  # the last line is there in part

    def __call__(self, data: bytes) -> None:
        data = b"\n" + data if self._torn else data
        start = 0
        while start < len(data):
            stop = _end_of_piece(data, start) if self._is_pipe else len(data)
            self._write(memoryview(data)[start:stop])
            start = stop

    def _write(self, piece: memoryview) -> None:
        left, whole = piece, len(piece)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll(1000 * IDLE_S)
            except OSError:
                self._torn = self._torn or len(left) < whole
                raise
        self._torn = False


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:  # which whoever writes is told
        return False


def _end_of_piece(data: bytes, start: int) -> int:
    """Behind the last line that ends within PIPE_BUF of the start; of a longer one behind its own end."""
    most = start + select.PIPE_BUF
    if len(data) <= most:
        return len(data)
    end = data.rfind(b"\n", start, most) + 1 or data.find(b"\n", most) + 1
    return end or len(data)


class LineWriter:
    """`put` returns at once. on_idle: called in the thread about every second in which nothing was put."""

    def __init__(
        self, target: Target, on_idle: Callable[[], None] = lambda: None, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self._target = target
        self._on_idle = on_idle
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition(threading.RLock())  # a line may be logged while one is being put (by gc)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._writing = False
        self._idle = False  # the thread sleeps until something is put
        self._hurried = 0  # who wait until all is written
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Whole lines, to be written after what was put before; counted and dropped if too much waits already."""
        with self._changed:
            if self._queued_bytes + len(data) > self._max_queued_bytes:
                self._dropped += data.count(b"\n")
                return
            self._queue.append(data)
            self._queued_bytes += len(data)
            if self._idle:
                self._idle = False
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is written, so long at most. False if something is left."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            self._hurried += 1
            self._changed.notify_all()
            try:
                while self._queue or self._writing or self._dropped:
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    self._changed.wait(left_s)
            finally:
                self._hurried -= 1
        return True

    def _run(self) -> None:
        while True:
            data, dropped = self._next()
            if dropped:
                self._target.lose(dropped, "the reader of this log did not keep up")
            if data or dropped or self._target.lost:
                self._target.put(data)
            else:
                self._on_idle()

    def _next(self) -> tuple[bytes, int]:
        """What is to be written, and how many lines were dropped; nothing after a second without either."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            if not self._queue and not self._dropped:
                self._idle = True
                self._changed.wait(IDLE_S)
                self._idle = False
            if self._queue and not self._hurried:
                self._changed.wait(GATHER_S)
            self._writing = True
            data = self._take()
            dropped = 0
            if self._queued_bytes <= self._max_queued_bytes // 2:  # not with every line while it goes on
                dropped, self._dropped = self._dropped, 0
            return data, dropped

    def _take(self) -> bytes:
        lines: list[bytes] = []
        size = 0
        while self._queue and (not lines or size + len(self._queue[0]) <= MOST_AT_ONCE_BYTES):
            lines.append(self._queue.popleft())
            size += len(lines[-1])
        self._queued_bytes -= size
        return b"".join(lines)


def why_not(error: OSError) -> str:
    """Why something could not be written, for people."""
    return _OURS.get(error.errno or 0) or error.strerror or str(error)
