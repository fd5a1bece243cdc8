"""Whether a process on this host has exited, or is stopped. Linux: pidfds, and start times to tell a reused pid apart.

    UNKNOWN ──its descriptor, and its start time is the one that was said──> ALIVE ──it exits──> GONE
       └── ESRCH, or a start time that was read and is another's ────────────────────────────────────┘

Only these prove an exit. No descriptors left, no right to look, a /proc that hides it: nothing is known, and it is tried again.
"""

from __future__ import annotations

import enum
import os
import select
from pathlib import Path

STATE_FIELD, START_TIME_FIELD = 3, 22  # of /proc/PID/stat, counted from 1
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux; what a peer says may be any number


class Fate(enum.Enum):
    """What is known of a process."""

    ALIVE = "alive"
    GONE = "gone"  # for good: nothing that it was writing can arrive any more
    UNKNOWN = "unknown"


_host_id = ""


def host_id() -> str:
    """Equal for processes that see each other's pids: this boot of this host, and this pid namespace. Empty: unknown."""
    global _host_id
    if not _host_id:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            _host_id = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
        except OSError:  # asked again the next time
            return ""
    return _host_id


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it could not be read, for whatever reason."""
    try:
        return int(_stat(pid)[START_TIME_FIELD - STATE_FIELD])
    except (OSError, ValueError, IndexError):
        return 0


def is_stopped(pid: int) -> bool:
    """A signal, or a debugger, holds the process. False if that could not be read, for whatever reason."""
    try:
        return _stat(pid)[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: what is before it is the command, which may be any text."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class ProcessWatch:
    """Watches one process, perhaps of another server. Knows it by pid and start time (0: the peer does not know it)."""

    def __init__(self, pid: int, pid_started: int) -> None:
        self._pid = pid
        self._pid_started = pid_started
        self._fd = -1
        self._is_it = False  # the descriptor is of the process that is meant
        self._gone = False
        self._closed = False
        self.look()

    @property
    def gone(self) -> bool:
        """It has exited, and that is proven."""
        return self.look() is Fate.GONE

    def look(self) -> Fate:
        """Looks again, unless its end is known. Costs a system call or two."""
        if not self._gone and not self._closed:
            self._gone = self._has_exited()
            if self._gone:
                self._release()
        if self._gone:
            return Fate.GONE
        return Fate.ALIVE if self._is_it else Fate.UNKNOWN

    def close(self) -> None:
        """Looks no more. What was not known stays unknown."""
        self._closed = True
        self._release()

    def _has_exited(self) -> bool:
        if not 0 < self._pid <= MAX_PID:  # of no process: what the peer says is wrong, which proves nothing
            return False
        if self._fd < 0:
            try:
                self._fd = os.pidfd_open(self._pid)
            except ProcessLookupError:
                return True
            except OSError:  # no descriptors are left, most likely; to ask for a signal takes none
                return _no_such_process(self._pid)
        if not self._is_it:
            now = started(self._pid)
            if now and self._pid_started and now != self._pid_started:
                return True  # the one that is meant has exited, and its pid is another's
            self._is_it = now != 0
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(self._fd, select.POLLIN)
        try:
            return any(event & select.POLLIN for _, event in poll.poll(0))
        except OSError:
            return False

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        self._is_it = False
        if fd >= 0:
            os.close(fd)


def _no_such_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and not ours to signal
        return False
    return False
