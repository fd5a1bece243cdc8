"""The objects of a store that is a directory, as the system says them: whatever else lies there does not end a listing.

Listed are regular files, also those that are not whole: what is being written, and what was when its writer was killed. Links
are followed, and a folder that is reached twice is listed once, so a loop of links ends; folders deeper than any object are not
looked into, so a link to elsewhere does not take a listing through the machine. A link that leads nowhere, a pipe, or what is
removed meanwhile is passed over. Knows files; nothing of KV.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

STAGED = "#"  # in the names of files that are being written (object_store's): of which object, and a number behind it
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # it is gone, or leads nowhere, or in a circle


class Entry(Struct, frozen=True):
    """An object. modified_s: by the store's clock."""

    path: str
    nbytes: int
    modified_s: float


def walk(root: Path, prefix: str, chunk: int, deepest: int) -> Iterator[list[Entry]]:
    """Every object below a folder of it, at most `chunk` at a time. deepest: names in the path of the deepest object.

    Raises OSError for what may not be looked at.
    """
    found: list[Entry] = []
    seen: set[tuple[int, int]] = set()
    folders = [prefix.strip("/")]
    while folders:
        folder = folders.pop()
        try:
            at = os.stat(root / folder)
            if (at.st_dev, at.st_ino) in seen:
                continue
            seen.add((at.st_dev, at.st_ino))
            names = os.listdir(root / folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            path = f"{folder}/{name}" if folder else name
            try:
                info = os.stat(root / path)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
                continue
            if stat.S_ISDIR(info.st_mode):
                if path.count("/") + 1 < deepest:
                    folders.append(path)
            elif stat.S_ISREG(info.st_mode):
                found.append(Entry(path, info.st_size, info.st_mtime))
                if len(found) == chunk:
                    yield found
                    found = []
    if found:
        yield found
