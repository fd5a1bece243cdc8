"""Directories of `disagg up`: one per run, with the children's configurations and logs. Old ones are pruned.

Also picks ports for the children: fixed for the run, so that a restarted child is found where it was.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from disagg.types.errors import ConfigError

KEEP_RUNS = 20
# Below Linux's ephemeral range (32768 on): while a child restarts, no outgoing connection can be given its port.
PORTS = range(20_000, 32_000)


def make_run_dir(parent: Path) -> Path:
    """`<parent>/<pid>-<time>`, new. Raises ConfigError."""
    directory = parent / f"{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        directory.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise ConfigError(f"run directory {directory} cannot be made: {error.strerror or error}") from error
    return directory


def prune_run_dirs(parent: Path, keep: int = KEEP_RUNS) -> None:
    """Removes the oldest runs, but none whose process lives."""
    runs = [each for each in parent.glob("*-*-*") if each.is_dir() and each.name.split("-")[0].isdecimal()]
    runs.sort(key=lambda each: each.name.split("-", 1)[1], reverse=True)
    for old in runs[keep:]:
        if not Path(f"/proc/{old.name.split('-')[0]}").exists():
            shutil.rmtree(old, ignore_errors=True)


def require_free(host: str, port: int, setting: str) -> None:
    """Raises ConfigError when something else listens there; better now than from a child's log."""
    reason = _why_not(host, port)
    if reason:
        raise ConfigError(f"{setting} = {port}: cannot listen on {host}:{port} ({reason}); 0 takes a free one")


def pick_ports(host: str, count: int, taken: Iterable[int] = ()) -> list[int]:
    """Free ports, all different, none of `taken`. Raises ConfigError."""
    picked: list[int] = []
    avoid = set(taken)
    candidates = random.sample(PORTS, len(PORTS))  # at random: two clusters that start at once rarely meet
    for port in candidates:
        if len(picked) == count:
            break
        if port not in avoid and _why_not(host, port) is None:
            picked.append(port)
    if len(picked) < count:
        raise ConfigError(f"no {count} free ports between {PORTS.start} and {PORTS.stop} on {host}")
    return picked


def _why_not(host: str, port: int) -> str | None:
    """Why this host and port cannot be listened on; None if they can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # two may bind a port with SO_REUSEADDR, but only one may listen
    except OSError as error:
        return error.strerror or str(error)
    return None
