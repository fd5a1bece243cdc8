"""Directories that belong to a living process, and what is left of those whose process is gone.

A process holds its directory with a lock of the kernel (flock) on a file in it, which ends with the process however that
ends. So whoever finds the lock free may clear the directory away, in whichever pid namespace its maker lived; a pid would
say nothing there, or name somebody else by now. A lock that cannot be asked proves nothing: the directory stays.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOCK: Final = "lock"


class HeldDir:
    """A new directory, of this process until `release` or its end. Raises OSError; FileExistsError if it is there."""

    def __init__(self, path: Path, mode: int = 0o700) -> None:
        path.mkdir(mode)
        try:
            self._fd = os.open(path / LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)  # who clears up was between the two lines above, and is removing it
            raise FileExistsError(f"{path} is being removed") from None
        except OSError:
            pass  # no locks here: then nobody can find this one free either
        if not _is(path / LOCK, self._fd):
            os.close(self._fd)
            raise FileExistsError(f"{path} was removed")
        self.path = path

    def release(self) -> None:
        """From now on the directory may be cleared away. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """The directory and what is in it, as far as possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def remove_abandoned(directories: Iterable[Path]) -> list[Path]:
    """Removes those that were held and are not any more; returns them. Others, and what cannot be known, stay."""
    removed = []
    for directory in directories:
        try:
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # never held, or not ours to open
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
        except OSError:
            pass  # held, or there are no locks here
        finally:
            os.close(fd)
    return removed


def _is(path: Path, fd: int) -> bool:
    """Whether this open file is the one that has this name."""
    try:
        named, opened = os.stat(path), os.fstat(fd)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
