"""Writes records into Parquet files, on a thread of its own: whoever has something to record never waits for a disk.

    rows ──loop──> columns ──put──> thread ──> .steps-NAME-INCARNATION-00001.parquet.part ──rename──> steps-....parquet

A file is whole when it has its name: of a process that is killed, at most what was not yet put is lost. What a disk does not
take, or what waits behind it beyond MOST_WAITING, is dropped, counted and said. Knows tables; nothing of what they hold.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disagg.types.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_WAITING = 8  # tables, each of bounded size
SAY_EVERY_S = 10.0
PART = ".part"


def require_pyarrow() -> None:
    """Raises ConfigError where Parquet can be neither written nor read. Imports nothing."""
    try:
        found = importlib.util.find_spec("pyarrow") is not None
    except ValueError:
        found = False
    if not found:
        raise ConfigError("records need pyarrow, which `pip install disagg[records]` installs")


def require_directory(directory: Path) -> None:
    """Make it, if it is not there. Raises ConfigError if no records can be written there."""
    require_pyarrow()
    try:
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no directory")
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "it may not be written to")
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise ConfigError(f"record.dir = {directory}: {getattr(error, 'strerror', None) or error}") from error


class RecordFiles:
    """`put` returns at once; `close` waits for what was put."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if nothing can be written there."""
        require_directory(directory)
        self._directory = directory
        self._queue: queue.Queue[tuple[str, Callable[[], Any]] | None] = queue.Queue(MOST_WAITING)
        self._lost = 0
        self._said_s = 0.0
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def put(self, name: str, table: Callable[[], Any]) -> None:
        """Has the thread write what `table` returns to a new file of this name. `table` is called on the thread."""
        try:
            self._queue.put_nowait((name, table))
        except queue.Full:
            self._lose(name, "the disk does not keep up")

    def close(self, timeout_s: float) -> None:
        """Waits for all that was put, so long at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        from pyarrow import ArrowException
        from pyarrow.parquet import write_table

        while (item := self._queue.get()) is not None:
            name, table = item
            part = self._directory / f".{name}{PART}"
            try:
                write_table(table(), part, compression="zstd")
                part.rename(self._directory / name)
            except (OSError, ValueError, ArrowException) as error:
                self._lose(name, str(error))
                with contextlib.suppress(OSError):
                    part.unlink()

    def _lose(self, name: str, why: str) -> None:
        self._lost += 1
        if time.monotonic() - self._said_s > SAY_EVERY_S:
            self._said_s = time.monotonic()
            logger.warning("%d files of records are lost, the last %s: %s", self._lost, name, why)
