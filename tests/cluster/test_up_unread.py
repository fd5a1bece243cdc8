"""`disagg up` without a reader, a terminal, room on its disk, or its ports: what a user would want it to do.

The real command with a tiny model. Nothing here reads what `up` says but where that is what is tried; `up.log` has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from tests.models.tiny import make_tiny
from tests.small_disk import small_disk as small_disk

DEADLINE_S = 200.0
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def until(done: Callable[[], Any], what: str) -> Any:
    until_s = time.monotonic() + DEADLINE_S
    while not (found := done()):
        assert time.monotonic() < until_s, f"{what} did not come"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")


class Up:
    """A run whose output goes to `out`; `command` may put something before `disagg up`."""

    def __init__(
        self,
        model: Path,
        parent: Path,
        out: IO[bytes] | int,
        *flags: str,
        before: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.parent = parent
        self.tmp = parent / "t"  # the path of a socket in it is short, too
        self.tmp.mkdir(parents=True, exist_ok=True)
        ports = () if any("-port" in flag for flag in flags) else ("--http-port", "0", "--grpc-port", "0")
        argv = [*before, sys.executable, "-m", "disagg.cli", "up", "--model", str(model), "--kv-memory", "1MiB", *ports]
        env = {**os.environ, "TMPDIR": str(self.tmp), "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
        self.process = subprocess.Popen(
            [*argv, "--run-dir", str(parent / "run"), *flags],
            cwd=parent,  # where `nohup` leaves its file
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            **options,
        )
        self.http = ""

    def said(self) -> str:
        """What this run has said, though nobody reads it."""
        assert self.process.poll() is None, f"up exited with {self.process.returncode}"
        logs = (self.parent / "run").glob(f"{self.process.pid}-*/up.log")
        return "".join(log.read_text() for log in logs)

    @property
    def run_dir(self) -> Path:
        (found,) = (self.parent / "run").glob(f"{self.process.pid}-*")
        return found

    def wait_ready(self) -> Up:
        line = until(lambda: [line for line in self.said().splitlines() if line.startswith("ready ")], "ready")[0]
        self.http = dict(pair.split("=", 1) for pair in line.split()[1:])["http"]
        return self

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.http}/status", timeout=30, trust_env=False).json())

    def servers(self) -> dict[str, dict[str, Any]]:
        return {server["name"]: server for server in self.status()["servers"]}

    def pids(self) -> list[int]:
        servers = [pid for server in self.servers().values() for pid in (server["pid"], *server["worker_pids"])]
        return [self.process.pid, *servers, *(router["pid"] for router in self.status()["routers"])]

    def answers(self) -> bool:
        body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        reply = httpx.post(f"{self.http}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False)
        return reply.status_code == 200 and len(reply.json()["choices"][0]["token_ids"]) == 4

    def kill(self, name: str) -> None:
        """This server; returns when another is there, and requests succeed."""
        before = self.servers()[name]["pid"]
        os.kill(before, signal.SIGKILL)
        until(lambda: self.servers()[name]["pid"] not in (before, 0) and self.servers()[name]["state"] == "ready", name)
        assert self.answers()

    def ends(self, number: signal.Signals, pids: list[int], left: int = 0) -> None:
        """Asked so it drains, and leaves neither processes nor, in its own TMPDIR, more than so many directories."""
        self.process.send_signal(number)
        assert self.process.wait(DEADLINE_S) == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all processes")
        assert len(list(self.tmp.glob("disagg-*"))) == left


@pytest.fixture
def ups() -> Iterator[list[Up]]:
    """Append what you start; it is killed at the end."""
    started: list[Up] = []
    yield started
    for up in started:
        up.process.kill()
        up.process.wait()


def test_behind_head_the_cluster_goes_on_and_two_share_a_run_directory(
    tiny: Path, tmp_path: Path, ups: list[Up]
) -> None:
    """`disagg up 2>&1 | head -1`."""
    reading, writing = os.pipe()
    up = Up(tiny, tmp_path, writing)
    ups.append(up)
    os.close(writing)
    with os.fdopen(reading, "rb") as reader:
        assert reader.readline().startswith(b"run directory: ")
    up.wait_ready()
    assert up.answers()
    left = set(up.tmp.glob("disagg-*"))
    assert len(left) == 2
    worker = up.servers()["decode-0"]["worker_pids"][0]
    os.kill(worker, signal.SIGKILL)
    until(lambda: up.servers()["decode-0"]["worker_pids"] not in ([], [worker]), "another worker")
    assert up.answers()
    up.kill("prefill-0")
    assert len(set(up.tmp.glob("disagg-*"))) == 2  # what the killed server left was cleared away by the next
    assert "prefill-0 was killed by SIGKILL; starting it again" in up.said()
    until(lambda: "prefill-0: ready again" in up.said(), "that it serves again")

    port = up.http.rpartition(":")[2]
    refused = Up(tiny, tmp_path, subprocess.PIPE, "--http-port", port, "--grpc-port", "0")
    ups.append(refused)
    text, _ = refused.process.communicate(timeout=DEADLINE_S)
    assert refused.process.returncode == 1
    (line,) = text.decode().splitlines()
    assert line.startswith(f"error: router.http_port = {port}: cannot listen on 127.0.0.1:{port} (")
    assert line.endswith("--http-port 0 takes a free one")

    with (tmp_path / "second").open("wb") as out:
        second = Up(tiny, tmp_path, out)
    ups.append(second)
    second.wait_ready()
    assert second.run_dir != up.run_dir and second.run_dir.parent == up.run_dir.parent
    assert second.answers() and up.answers()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE_S) == 0
    assert up.answers()
    up.ends(signal.SIGTERM, up.pids())


def test_a_reader_that_stalls_and_a_full_disk_stop_neither_requests_nor_supervision(
    tiny: Path, small_disk: Path, ups: list[Up]
) -> None:
    """Run directory and temporary directory are on the disk that is full."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 100)
    os.set_blocking(writing, True)  # for `up`, which finds it full
    up = Up(tiny, small_disk, writing)
    ups.append(up)
    os.close(writing)
    up.wait_ready()
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    for _ in range(100):
        assert up.answers()
    up.kill("decode-0")
    up.kill("prefill-0")
    assert "No space left on device" not in "".join(log.read_text() for log in up.run_dir.glob("*.log"))
    ballast.unlink()
    router_log = up.run_dir / "router.log"
    until(lambda: "lines left out: No space left on device" in router_log.read_text(), "what was lost")
    assert up.answers()
    up.ends(signal.SIGTERM, up.pids(), left=2)  # of the killed servers; those after them found room in /tmp
    os.close(reading)


def test_a_closed_terminal_drains_but_not_after_nohup(tiny: Path, tmp_path: Path, ups: list[Up]) -> None:
    for before in ((), ("nohup",)):
        master, terminal = pty.openpty()
        parent = tmp_path / str(len(before))

        def own_terminal(fd: int = terminal) -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.setsid()
            fcntl.ioctl(fd, 0x540E, 0)  # TIOCSCTTY: this session's terminal, so that its end is a SIGHUP

        up = Up(tiny, parent, terminal, before=before, preexec_fn=own_terminal)
        ups.append(up)
        os.close(terminal)
        up.wait_ready()
        pids = up.pids()
        os.close(master)
        if not before:
            assert up.process.wait(DEADLINE_S) == 0
            until(lambda gone=pids: not any(Path(f"/proc/{pid}").exists() for pid in gone), "the end of all processes")
            assert "draining" in (next((parent / "run").glob("*")) / "up.log").read_text()
        else:
            up.kill("decode-0")
            up.ends(signal.SIGTERM, up.pids())


def test_a_run_directory_without_room_is_refused_in_one_line(tiny: Path, small_disk: Path, ups: list[Up]) -> None:
    (small_disk / "t").mkdir()
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    up = Up(tiny, small_disk, subprocess.PIPE)
    ups.append(up)
    text, _ = up.process.communicate(timeout=DEADLINE_S)
    (line,) = text.decode().splitlines()
    assert up.process.returncode == 1
    assert line.startswith("error: ") and "No space left on device" in line and "--run-dir" in line


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_a_port_that_is_taken_is_named_with_its_flag_before_anything_starts(
    tmp_path: Path, ups: list[Up], which: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        other = "grpc" if which == "http" else "http"
        up = Up(tmp_path, tmp_path, subprocess.PIPE, f"--{which}-port", port, f"--{other}-port", "0")
        ups.append(up)
        text, _ = up.process.communicate(timeout=DEADLINE_S)
    assert up.process.returncode == 1
    assert f"router.{which}_port = {port}" in text.decode() and f"--{which}-port" in text.decode()
    assert not (tmp_path / "run").exists()
