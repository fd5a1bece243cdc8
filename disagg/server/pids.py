"""Whether a process on this host has exited. Linux: pidfds, and start times to tell a reused pid apart."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from pathlib import Path

START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1


@functools.cache
def host_id() -> str:
    """Equal for processes that see each other's pids: this boot of this host, and this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is no such process."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[START_TIME_FIELD - 3])
    return 0


class ProcessWatch:
    """Watches one process, perhaps of another server. Knows it by pid and start time."""

    def __init__(self, pid: int, pid_started: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(pid)
            if started(pid) != pid_started:
                self.close()  # the one we mean has exited, and its pid is another's

    @property
    def gone(self) -> bool:
        """It has exited: nothing that it was writing can arrive any more."""
        return self._fd < 0 or bool(select.select([self._fd], [], [], 0)[0])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
