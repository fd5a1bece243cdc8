"""A router in a process of its own, for tests that attack it from outside, and what shows whether anybody noticed.

Its servers and a client that reads streams through it are another process (`tests.router.steady_cluster`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from disagg.cli.rundir import pick_ports
from disagg.config.tree import Config, ModelConfig, RouterConfig, ServerRef
from tests.cli.test_router_process import ROOT, Running
from tests.router.fake_server import MODEL, write_model

MAX_GROWTH = 64 << 20
MAX_LATE_S = 0.25
ROUNDS = 3
DEADLINE_S = 60.0


class Steady:
    """The process with the servers and the reader."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.steady_cluster"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: dict[str, int] = self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def tell(self, **what: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Target:
    """A running router, seen from outside."""

    def __init__(self, directory: Path) -> None:
        self.steady = Steady()
        http_port, grpc_port = pick_ports("127.0.0.1", 2)
        ports = self.steady.ports
        servers = (
            ServerRef(name="p0", role="prefill", address=f"127.0.0.1:{ports['p0']}"),
            ServerRef(name="d0", role="decode", address=f"127.0.0.1:{ports['d0']}"),
        )
        (directory / "model").mkdir()
        config = Config(
            model=ModelConfig(name=str(write_model(directory / "model")), served_name=MODEL),
            router=RouterConfig(http_port=http_port, grpc_port=grpc_port, servers=servers, request_deadline_s=20.0),
        )
        self.address = ("127.0.0.1", http_port)
        self.grpc_address = ("127.0.0.1", grpc_port)
        self.running = Running(config, directory)
        self.running.wait_until_it_answers()
        self.http = httpx.Client(base_url=self.running.url, trust_env=False, timeout=DEADLINE_S)
        self.until(lambda: self.http.get("/health").status_code == 200)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")

    def until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until_s, self.running.log.read_text()[-4000:]
            time.sleep(0.02)

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.running.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.running.process.pid}/fd"))

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def requests(self) -> int:
        return len(self.http.get("/debug/dump").json()["router"]["requests"])

    def tasks(self) -> int:
        return str(self.http.get("/debug/dump").json()["router_stacks"]).count("Task")

    def close(self) -> None:
        self.channel.close()
        self.http.close()
        self.running.close()
        self.steady.close()


@pytest.fixture(scope="module", name="target")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


@pytest.fixture(scope="module", name="watched")
def make_watched(target: Target) -> Target:
    target.steady.tell(watch=target.address)
    return target


def undisturbed(target: Target, warm_up: Callable[[], None], fuzz: Callable[[], None]) -> None:
    """Runs `fuzz`; fails if a stream, or the process itself, shows that it has.

    A machine that others use makes a router late, too, but not each time: `fuzz` runs again where only lateness speaks.
    """
    warm_up()
    for round_no in range(ROUNDS):
        if _in_time(target, fuzz):
            return
        print(f"the stream was late in round {round_no + 1} of {ROUNDS}")
    pytest.fail(f"in each of {ROUNDS} rounds a token was more than {MAX_LATE_S} s late")


def _in_time(target: Target, fuzz: Callable[[], None]) -> bool:
    """Whether a stream's tokens were in time while `fuzz` ran. Fails where it did anything else to streams or process."""
    target.steady.tell(report=True)
    time.sleep(3.0)
    before = target.steady.tell(report=True)
    assert before["tokens"] > 20
    rss, files, tasks = target.rss_bytes(), target.files(), target.tasks()
    fuzz()
    during = target.steady.tell(report=True)
    print(f"\nundisturbed {before}\ndisturbed   {during}")
    assert not during["failed"], during
    target.until(lambda: target.requests() <= 1)  # the steady one
    target.until(lambda: target.tasks() <= tasks + 4)  # that one comes and goes
    target.until(lambda: target.files() <= files + 2)
    growth = target.rss_bytes() - rss
    print(f"{growth / 2**20:.1f} MiB more than before")
    assert growth <= MAX_GROWTH
    assert target.running.process.poll() is None
    # On a machine that others use, too, that process is late itself; the router, which has more to do, by more.
    return bool(during["worst_late_s"] <= before["worst_late_s"] + MAX_LATE_S + 3 * during["worst_lag_s"])
