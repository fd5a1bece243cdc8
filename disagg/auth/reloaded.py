"""A value that is read from files, and read again when they change. Knows files; nothing of what is in them.

What a new file makes wrong is said once, and the value stays what it was: nobody is locked out, or let in, by a file that is
half written. It is tried again until it can be used, since what is wrong may pass without a change of the file: a certificate
that is valid from the next minute on. Files are looked at, not watched, since what a Kubernetes secret shows changes by links
that are swapped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from disagg.types.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # how soon a change is seen: one stat for each file

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | str, ...]


class Reloaded(Generic[T]):
    """`value` is what `read` gave when the files were last as it wants them. what: for the log, such as "auth.api_keys_file"."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], what: str) -> None:
        """Reads at once. Raises ConfigError as `read` does."""
        self._paths = tuple(paths)
        self._read = read
        self._what = what
        self._wrong = ""  # with the files as they are now
        self._seen = _signature(self._paths)  # before it is read: what changes meanwhile is read again
        self.value = read()

    def look(self) -> bool:
        """Reads the files if they are not what they were, or could not be used. Whether there is another value now. Blocks for
        as long as reading takes."""
        now = _signature(self._paths)
        changed, self._seen = now != self._seen, now
        if not changed and not self._wrong:
            return False
        try:
            self.value = self._read()
        except ConfigError as error:
            if changed or str(error) != self._wrong:
                logger.error("%s has changed and cannot be used, so what was read before stays: %s", self._what, error)
            self._wrong = str(error)
            return False
        except Exception as error:
            # What a parser raises for content that nobody thought of must not end the task that looks: then no key could be
            # revoked and no certificate renewed any more.
            wrong = f"{type(error).__name__}: {str(error)[:400]}"
            if changed or wrong != self._wrong:
                logger.exception("%s has changed and cannot be used, so what was read before stays", self._what)
            self._wrong = wrong
            return False
        self._wrong = ""
        logger.info("%s has changed and was read again", self._what)
        return True

    async def look_always(self, every_s: float = LOOK_S) -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.look)


def _signature(paths: Sequence[Path]) -> Signature:
    found: list[tuple[int, int, int] | str] = []
    for path in paths:
        try:
            stat = os.stat(path)
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError as error:
            found.append(type(error).__name__)
    return tuple(found)
