"""Directories of `disagg up`: one per run, held while it lasts, with configurations and logs. Old ones are pruned.

Also picks ports for the children: fixed for the run, so that a restarted child is found where it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

from disagg.telemetry.held_dirs import HeldDir, remove_abandoned
from disagg.telemetry.listening import why_not_listen
from disagg.types.errors import ConfigError, DisaggError

KEEP_RUNS = 20
MAX_SAME_NAME = 100
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Below Linux's ephemeral range (32768 on): while a child restarts, no outgoing connection can be given its port.
PORTS = range(20_000, 32_000)


def make_run_dir(parent: Path) -> HeldDir:
    """`<parent>/<pid>-<time>`, new, and of this process until it ends. Raises ConfigError, or DisaggError for a full disk.

    Where that name is taken (two containers that share a volume may have one pid), a number follows.
    """
    name = f"{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = parent / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(MAX_SAME_NAME):
            directory = parent / (f"{name}-{attempt}" if attempt else name)
            with contextlib.suppress(FileExistsError):
                return HeldDir(directory, 0o777)  # less what the umask takes: others may read logs
        raise FileExistsError(errno.EEXIST, "so are all others of this second")
    except OSError as error:
        raise cannot_write(f"run directory {directory} cannot be made", error, "--run-dir takes another") from error


def prune_run_dirs(parent: Path, keep: int = KEEP_RUNS) -> None:
    """Removes the oldest runs, but none that is held, in whichever container its `up` runs, or of which that is unknown."""
    runs = [each for each in parent.glob("*-*-*") if each.is_dir() and each.name.split("-")[0].isdecimal()]
    runs.sort(key=lambda each: each.name.split("-", 1)[1], reverse=True)
    remove_abandoned(runs[keep:])


def cannot_write(what: str, error: OSError, hint: str) -> DisaggError:
    """ConfigError for a place where nothing can ever be written; DisaggError for what may pass, such as a full disk."""
    kind = DisaggError if error.errno in _MAY_PASS else ConfigError
    return kind(f"{what}: {error.strerror or error}; {hint}")


def require_free(host: str, port: int, setting: str, flag: str) -> None:
    """Raises ConfigError, or DisaggError when something else listens there; better now than from a child's log."""
    refusal = why_not_listen(host, port, setting, f"{flag} 0 takes a free one")
    if refusal is not None:
        raise refusal


def pick_ports(host: str, count: int, taken: Iterable[int] = ()) -> list[int]:
    """Free ports, all different, none of `taken`. Raises ConfigError."""
    picked: list[int] = []
    avoid = set(taken)
    candidates = random.sample(PORTS, len(PORTS))  # at random: two clusters that start at once rarely meet
    for port in candidates:
        if len(picked) == count:
            break
        if port not in avoid and _is_free(host, port):
            picked.append(port)
    if len(picked) < count:
        raise ConfigError(f"no {count} free ports between {PORTS.start} and {PORTS.stop} on {host}")
    return picked


def _is_free(host: str, port: int) -> bool:
    return why_not_listen(host, port, "server.port", "") is None
