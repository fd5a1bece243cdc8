"""Processes that may have few files open: they take what they may have, spin on nothing, live, and go on when there is room."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config
from disagg.config.tree import Config, ModelConfig, RouterConfig, ServerConfig, ServerRef, WorkerConfig
from tests.cli.test_router_process import make_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SOFT, HARD = 110, 180
FLOOD = 3 * HARD
WATCHED_S = 2.0
SLOW_WORKER = ROOT / "tests" / "server" / "slow_worker.py"


@contextmanager
def running(role: str, config: Config, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this role with a low limit on open files."""
    file = directory / f"{role}.toml"
    file.write_text(dump_config(config))
    with (directory / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("sh", "-c", f'ulimit -Sn {SOFT} && ulimit -Hn {HARD} && exec "$0" "$@"'),
                *(sys.executable, "-m", "disagg.cli", role, "--config", str(file)),
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        left = children.read_text().split() if children.exists() else []
        process.kill()
        process.wait()
        for child in left:  # unlike a real worker, the slow one does not end with its server
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False, timeout=2.0).status_code in (200, 503)
    return False


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def flooded(ports: Sequence[int]) -> Iterator[None]:
    """Far more connections than the process may have files, on each of these ports, and nothing said on them."""
    clients = []
    for port in ports:
        for _ in range(FLOOD):
            with suppress(OSError):  # refused, or dropped at once: that is for the process to decide
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=5.0))
    try:
        yield
    finally:
        for client in clients:
            client.close()


def assert_it_does_not_spin(process: subprocess.Popen[bytes]) -> None:
    """Once it has taken, or dropped, those that came: on a slow machine that alone may be seconds of work."""

    def rests() -> bool:
        before = cpu_s(process.pid)
        time.sleep(WATCHED_S)
        assert process.poll() is None
        return cpu_s(process.pid) - before < WATCHED_S / 2

    until(rests, "it spins")


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_a_router_at_its_limit_waits_and_goes_on(tmp_path: Path, face: str) -> None:
    http_port, grpc_port, *others = pick_ports("127.0.0.1", 4)
    servers = tuple(
        ServerRef(name=f"{role}-0", role=role, address=f"127.0.0.1:{port}")
        for role, port in zip(("prefill", "decode"), others, strict=True)
    )
    router = RouterConfig(http_port=http_port, grpc_port=grpc_port, servers=servers)
    config = Config(model=ModelConfig(name=str(make_model(tmp_path / "tiny"))), router=router)
    url = f"http://127.0.0.1:{http_port}/health"
    with running("router", config, tmp_path) as process:
        until(lambda: answers(url), "the router answers")
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (HARD, HARD)
        assert f"this process may have {HARD} files open" in (tmp_path / "router.log").read_text()
        with flooded([http_port if face == "http" else grpc_port]):
            assert_it_does_not_spin(process)
            until(lambda: face == "http" or answers(url), "its other port has room")
        until(lambda: answers(url), "the router answers again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    said = (tmp_path / "router.log").read_text()
    assert "is lost" not in said
    assert "Traceback" not in said


def test_a_server_whose_ports_are_flooded_starts_its_workers_again(tmp_path: Path) -> None:
    port, metrics_port = pick_ports("127.0.0.1", 2)
    config = Config(
        model=ModelConfig(name=str(make_model(tmp_path / "tiny")), device="cpu"),
        server=ServerConfig(port=port, metrics_port=metrics_port),
        worker=WorkerConfig(command=(sys.executable, str(SLOW_WORKER), "600"), silent_s=600.0),
    )
    url = f"http://127.0.0.1:{metrics_port}/health"

    def worker() -> int:
        """Its pid; 0 while there is none."""
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(found[0]) if found else 0

    with running("prefill", config, tmp_path) as process:
        until(lambda: answers(url) and worker() > 0, "the server and its worker are there")
        first = worker()
        with flooded([port, metrics_port]):
            assert worker() == first > 0
            os.kill(first, signal.SIGKILL)
            until(lambda: process.poll() is None and worker() not in (0, first), "another worker is there")
            assert_it_does_not_spin(process)
        with flooded([port]):
            until(lambda: answers(url), "its other port has room")
        until(lambda: answers(url), "the server answers again")


def test_a_process_that_cannot_work_with_so_few_files_says_so(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(name=str(make_model(tmp_path / "tiny")), device="cpu"), server=ServerConfig(tp=16)
    )
    with running("decode", config, tmp_path) as process:
        assert process.wait(DEADLINE_S) == 2
    said = (tmp_path / "decode.log").read_text()
    assert (
        f"may have {HARD} files open (the hard limit, `ulimit -Hn`); a decode process with this configuration" in said
    )
