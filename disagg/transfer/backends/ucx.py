"""What UCX says of itself: which ways it takes to peers, and what goes wrong.

UCX's own interfaces that tell it need handles that NIXL keeps to itself, so it is read from UCX's log, which goes into a file for
that. UCX writes a table there when it first chooses how to write from one kind of memory into another over connections of one
kind; connections that are like earlier ones get no table of their own:

    [1795443.34] [host:18895:0]   | prefill/0 inter-node cfg#1                               |
    [1795443.34] [host:18895:0]   | remote memory write by ucp_put* from host memory to host |
    [1795443.34] [host:18895:0]   | Range  | Description |              Config               |
    [1795443.34] [host:18895:0]   | 0..inf | zero-copy   | tcp/eth0                          |

Loads neither UCX nor torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

SETTINGS = {"UCX_PROTO_INFO": "*memory write*"}  # which tables are written
MAX_READ_BYTES = 1 << 20  # at once; UCX warns seldom
MAX_KEPT_BYTES = 8 << 20  # of the file
MAX_WAYS = 64  # that are remembered; UCX has as many as there are kinds of connections
MAX_WAY_CHARS = 200
MAX_SAID = 8  # of one peer

_LINE = re.compile(r"\[[\d.]+\] \[[^\]]*\]\s+(?P<text>.*)")
_CONNECTIONS = re.compile(r"\b(?P<where>self|intra-node|inter-node) cfg#\d+$")
_LEVEL = re.compile(r"\bUCX\s+(?P<level>FATAL|ERROR|WARN)\b")


class WayTables:
    """Finds in lines of the log by what each kind of connection carries large writes. Pure."""

    def __init__(self) -> None:
        self._to_others = False  # the table is of connections to other processes
        self._row = ""

    def line(self, text: str) -> str | None:
        """text: of a line, without time and process. A way if the line ends a table of one, such as "zero-copy tcp/eth0"."""
        if text.startswith("+-"):
            way, self._row = self._row, ""
            return way[:MAX_WAY_CHARS] if way and self._to_others else None
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if found := _CONNECTIONS.search(cells[0]):
            self._to_others = found["where"] != "self"
        elif len(cells) == 3 and cells[0] != "Range":
            self._row = f"{cells[1]} {cells[2]}"  # the last row is of the largest writes
        return None


class UcxLog:
    """UCX's log of this process, in a file that is its alone. What is no table goes on into our own log."""

    def __init__(self, file: Path, expected: str = "") -> None:
        """Makes the file. expected: what UCX warns of though nobody has done anything wrong; of it nothing is said.

        Raises OSError.
        """
        self._expected = expected
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._read = self._cut = 0
        self._rest = b""
        self._tables = WayTables()
        self._libc = ctypes.CDLL(None)

    def ways(self) -> tuple[str, ...]:
        """Those that UCX has taken since the last call."""
        self._libc.fflush(None)  # UCX writes through a buffer of the C library
        content = os.pread(self._fd, MAX_READ_BYTES, self._read)
        self._read += len(content)
        if self._read - self._cut > MAX_KEPT_BYTES:
            os.ftruncate(self._fd, 0)  # UCX goes on at its own place, behind a hole
            self._cut = self._read
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[-MAX_READ_BYTES:]
        ways = []
        for line in lines:
            text = line.decode(errors="replace")
            found = _LINE.fullmatch(text)
            if found is not None and found["text"].startswith(("|", "+-")):
                way = self._tables.line(found["text"])
                if way is not None:
                    ways.append(way)
            elif text.strip() and not (self._expected and self._expected in text):
                pass_on(text)
        return tuple(ways)


def pass_on(line: str) -> None:
    """A line of UCX's log that is no table, into our own."""
    found = _LEVEL.search(line)
    level = logging.WARNING if found is None or found["level"] == "WARN" else logging.ERROR
    logger.log(level, "UCX says: %s", line)


class Ways:
    """By which ways writes to each peer may go, of what the log tells. Pure."""

    def __init__(self) -> None:
        self._all: list[str] = []
        self._before: dict[object, int] = {}  # how many there were when a peer's wiring began

    def wiring(self, peer: object) -> None:
        self._before.setdefault(peer, len(self._all))

    def forget(self, peer: object) -> None:
        self._before.pop(peer, None)

    def taken(self, ways: tuple[str, ...]) -> None:
        self._all = [*self._all, *ways][:MAX_WAYS]

    def wired(self, peer: object) -> tuple[str, ...]:
        """Of a peer to which a write has been completed: the way it took, or several of which it took one.

        UCX names one when it takes it for the first time. Empty if it has named none, since its log goes elsewhere.
        """
        since = self._all[self._before.pop(peer, 0) :]
        return tuple(dict.fromkeys(since or self._all))[-MAX_SAID:]
