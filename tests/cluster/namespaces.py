"""Two network namespaces, as two machines see each other.

            ┌──────────── this namespace ────────────┐
            └───┬────────────────────────────────┬───┘
10.213.1.0/30   │                                │   10.213.2.0/30
          ┌─────┴─────┐    10.213.3.0/30   ┌─────┴─────┐
          │     A     ├─── pair ── pair ───┤     B     │
          └───────────┘                    └───────────┘
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

OURS_A, SIDE_A = "10.213.1.1", "10.213.1.2"
OURS_B, SIDE_B = "10.213.2.1", "10.213.2.2"
PAIR_A, PAIR_B = "10.213.3.1", "10.213.3.2"
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")  # as pods have


def ip(*words: str) -> None:
    run("ip", *words)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Namespaces:
    """A and B, each joined to ours and to each other. `with Namespaces() as net:`; raises CalledProcessError."""

    def __init__(self, rate: str = "") -> None:
        """rate: of the link between A and B, such as "8mbit"."""
        serial = os.getpid() % 100_000
        self._rate = rate
        self.a, self.b = f"disagg-a{serial}", f"disagg-b{serial}"
        self.ours_a, self.ours_b = f"dga{serial}", f"dgb{serial}"

    def __enter__(self) -> Namespaces:
        with contextlib.ExitStack() as undo:
            for name in (self.a, self.b):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            for ours, namespace, here, there in (
                (self.ours_a, self.a, OURS_A, SIDE_A),
                (self.ours_b, self.b, OURS_B, SIDE_B),
            ):
                ip("link", "add", ours, "type", "veth", "peer", "name", "ours", "netns", namespace)
                undo.callback(ip, "link", "del", ours)
                ip("addr", "add", f"{here}/30", "dev", ours)
                ip("link", "set", ours, "up")
                ip("-n", namespace, "addr", "add", f"{there}/30", "dev", "ours")
                ip("-n", namespace, "link", "set", "ours", "up")
            ip("-n", self.a, "link", "add", "pair", "type", "veth", "peer", "name", "pair", "netns", self.b)
            for namespace, address in ((self.a, PAIR_A), (self.b, PAIR_B)):
                ip("-n", namespace, "addr", "add", f"{address}/30", "dev", "pair")
                ip("-n", namespace, "link", "set", "pair", "up")
            if self._rate:
                shape = ("root", "tbf", "rate", self._rate, "burst", "64k", "latency", "1s")
                run("tc", "-n", self.a, "qdisc", "add", "dev", "pair", *shape)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def between(self, state: str) -> None:
        """The link between A and B: up or down."""
        ip("-n", self.a, "link", "set", "pair", state)

    def to_us(self, state: str) -> None:
        """The links of both to this namespace, by their far ends, so that our routes stay and lead nowhere: up or down."""
        ip("-n", self.a, "link", "set", "ours", state)
        ip("-n", self.b, "link", "set", "ours", state)


@contextlib.contextmanager
def namespaces_or_skip(rate: str = "") -> Iterator[Namespaces]:
    needed = ("ip", "unshare", "tc") if rate else ("ip", "unshare")
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        pytest.skip(f"no network namespaces can be made here: there is no {' and no '.join(missing)}")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Namespaces(rate))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces can be made here: {' '.join(error.cmd)}: {error.stderr}")
        yield made
