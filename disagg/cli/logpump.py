"""Reads what the children of `disagg up` write to stdout and stderr, in a thread, and keeps it in files that rotate.

What libraries and native code print goes the same way as log lines, so the files stay bounded whoever writes. Nobody waits
for anybody: a child's end of its pipe does not block, so while this thread is held up (by a disk that hangs, or because
`up` is stopped) children drop what does not fit and count it; supervision runs in another thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from disagg.telemetry.line_writer import Target

PIPE_BYTES = 1 << 20  # what Linux grants without privileges; a worker's longest line is then never torn by another's
READ_BYTES = 1 << 16
MAX_PARTIAL_BYTES = 1 << 16  # of a line that has not ended
TICK_S = 1.0
LAST_LINES = 15

Show = Callable[[str, str], None]  # (name of the child, one of its lines)


class _Stream:
    """One life of one child."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.partial = b""


class LogPump:
    """files: by child. show: gets every whole line. Lives until `close`."""

    def __init__(self, files: Mapping[str, Target], show: Show) -> None:
        self._files = dict(files)
        self._show = show
        self._last = {name: deque[str](maxlen=LAST_LINES) for name in files}
        self._open = dict.fromkeys(files, 0)  # lives whose pipe has not ended
        self._changed = threading.Condition()
        self._new: list[_Stream] = []
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._thread.start()

    def open(self, name: str) -> int:
        """The end of a new pipe into which this child is to write. The caller closes it. Raises OSError."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        with contextlib.suppress(OSError):  # a user has a limit of such memory: then it stays at 64 KiB
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with self._changed:
            self._open[name] += 1
            self._new.append(_Stream(name, reading))
        os.eventfd_write(self._wake, 1)
        return writing

    def last_lines(self, name: str, wait_s: float) -> list[str]:
        """The last lines of a child that has ended. They may be on their way: waits for the end of its pipe."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open[name], wait_s)
            return list(self._last[name])

    def close(self, wait_s: float) -> None:
        """Reads what is left, so long at most, and ends the thread."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            self._changed.wait_for(lambda: not any(self._open.values()), wait_s)
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(max(0.0, until_s - time.monotonic()) + 0.1)

    def _run(self) -> None:
        tick_s = time.monotonic() + TICK_S
        while True:
            for key, _ in self._selector.select(max(0.0, tick_s - time.monotonic())):
                if key.data is None:
                    os.eventfd_read(self._wake)
                else:
                    self._read(key.data)
            with self._changed:
                new, self._new = self._new, []
                if self._closing:
                    return
            for stream in new:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            if time.monotonic() >= tick_s:
                self._tick()
                tick_s = time.monotonic() + TICK_S

    def _tick(self) -> None:
        """A line that has not ended for a while is written as it is; and files say what they lost."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data.partial:
                self._files[key.data.name].put(key.data.partial)
                key.data.partial = b""
        for target in self._files.values():
            if target.lost:
                target.put(b"")

    def _read(self, stream: _Stream) -> None:
        try:
            read = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        data = stream.partial + read
        end = data.rfind(b"\n") + 1
        if not read or len(data) - end > MAX_PARTIAL_BYTES:
            end = len(data)
        lines, stream.partial = data[:end], data[end:]
        if lines and not read:
            lines = lines.rstrip(b"\n") + b"\n"  # its last words
        if lines:
            self._files[stream.name].put(lines)
            self._tell(stream.name, lines)
        if not read:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            with self._changed:
                self._open[stream.name] -= 1
                self._changed.notify_all()

    def _tell(self, name: str, data: bytes) -> None:
        lines = data.decode("utf-8", "replace").split("\n")[:-1]
        with self._changed:
            self._last[name].extend(lines)
        for line in lines:
            self._show(name, line)
