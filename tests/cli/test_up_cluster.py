"""`disagg up` with the real processes and the default model: what operators' scripts see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Up:
    """A running `disagg up`, ready."""

    def __init__(self, directory: Path) -> None:
        argv = [sys.executable, "-m", "disagg.cli", "up", "--http-port", "0", "--grpc-port", "0"]
        self.errors = directory / "up.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*argv, "--run-dir", str(directory / "run")], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.errors.read_text()
        self.addresses = dict(pair.split("=", 1) for pair in line.split()[1:])

    def command(self, *args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "disagg.cli", *args], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("status", "--json", "--http", self.addresses["http"])))

    def generate(self) -> dict[str, Any]:
        flags = ["--raw", "--json", "--max-tokens", "4", "--temperature", "0", "--grpc", self.addresses["grpc"]]
        return dict(json.loads(self.command("generate", "The capital of France is", *flags)))

    def pids(self) -> list[int]:
        """Of every process below `disagg up`."""
        status = self.status()
        servers = [pid for server in status["servers"] for pid in (server["pid"], *server["worker_pids"])]
        return [*servers, *(router["pid"] for router in status["routers"])]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path)
    yield running
    running.process.kill()
    running.process.communicate()


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def wait_until_gone(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.1)


@pytest.mark.timeout(400)
def test_a_killed_server_comes_back_where_it_was_and_sigterm_leaves_nothing(up: Up) -> None:
    assert "Paris" in up.generate()["text"]
    (before,) = [server for server in up.status()["servers"] if server["role"] == "decode"]
    os.kill(before["pid"], signal.SIGKILL)
    answer = up.generate()  # waits for the new one
    assert "Paris" in answer["text"]
    assert answer["timeline"]
    (after,) = [server for server in up.status()["servers"] if server["role"] == "decode"]
    assert (after["address"], after["state"]) == (before["address"], "ready")
    assert after["pid"] != before["pid"]
    assert "decode-0 was killed by SIGKILL; starting it again" in up.errors.read_text()
    wait_until(lambda: "decode-0: ready again" in up.errors.read_text(), 30)
    assert "decode-0: ready again" not in up.errors.read_text().partition("was killed by SIGKILL")[0]
    pids = up.pids()
    assert len(pids) == 5
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0
    wait_until_gone(pids, 60)


@pytest.mark.timeout(400)
def test_a_killed_up_leaves_nothing(up: Up) -> None:
    pids = up.pids()
    assert len(pids) == 5
    up.process.kill()
    wait_until_gone(pids, 60)
