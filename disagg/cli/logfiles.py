"""Log files of a run: NAME.log, and as NAME.log.1 (the newest), .2, ... what came before it. Knows bytes and sizes only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class RotatedFile:
    """Appends; the file and each of `keep` older ones have at most max_bytes, and end with a whole line where they can.

    It is opened when something is written, and again if somebody has removed or moved it, or its directory. Raises OSError
    for what it cannot write; then a part may be there, and the next write begins on a new line.
    """

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._at_line_start = True
        self._failed = False

    def __call__(self, data: bytes) -> None:
        if self._failed and not self._at_line_start:
            data = b"\n" + data
        self._failed = True  # until all of it is written
        while data:
            room = self._max_bytes - self._open()
            take = self._fitting(data, room)
            if take:
                self._write(data[:take])
                data = data[take:]
            if data:
                self._rotate()
        self._failed = False

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _fitting(self, data: bytes, room: int) -> int:
        """How much goes into this file: all, or whole lines; part of a line only if it is longer than a file."""
        if len(data) <= room:
            return len(data)
        lines = data.rfind(b"\n", 0, max(0, room)) + 1
        return lines if lines or room < self._max_bytes else room

    def _open(self) -> int:
        """The size of the file, which is open then."""
        if self._fd is not None:
            there = os.fstat(self._fd)
            if there.st_nlink:
                return there.st_size
            self.close()
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags, 0o666)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, flags, 0o666)
        return os.fstat(self._fd).st_size

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        left = memoryview(data)
        while left:
            written = os.write(self._fd, left)
            self._at_line_start = left[written - 1] == ord("\n")
            left = left[written:]

    def _rotate(self) -> None:
        self.close()
        self._at_line_start = True
        if not self._keep:
            self._path.unlink(missing_ok=True)
            return
        for number in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
