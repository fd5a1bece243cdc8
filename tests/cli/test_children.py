"""The supervisor with real processes: small dummies in the place of router and servers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cli.children import Children, ChildSpec
from disagg.cli.supervise import Limits
from disagg.telemetry.process import describe_status

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SILENT_S = 3.0  # for what is to be missed: thirty beats


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Supervised:
    """A supervisor process with dummy children, and what they wrote down."""

    def __init__(self, directory: Path, silent_s: float, *names: str) -> None:
        self.directory = directory
        self.names = names
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("supervise_dummies.py")),
                str(directory),
                str(silent_s),
                *names,
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> dict[str, list[tuple[int, int]]]:
        """(pid, pid of its worker or 0) of every life so far, by name."""
        lives: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        file = self.directory / "pids"
        for line in file.read_text().splitlines() if file.exists() else ():
            name, pid, worker = line.split()
            lives[name].append((int(pid), int(worker)))
        return lives

    def wait_for_lives(self, **counts: int) -> dict[str, list[tuple[int, int]]]:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            lives = self.pids()
            if all(len(lives[name]) >= count for name, count in counts.items()):
                return lives
            time.sleep(0.02)
        raise AssertionError(f"never came to {counts}: {self.pids()}")

    def wait_until_gone(self, pids: list[int]) -> None:
        until = time.monotonic() + DEADLINE_S
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < until, f"still alive: {[pid for pid in pids if alive(pid)]}"
            time.sleep(0.02)

    def finish(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[list[Supervised]]:
    """Append what you start; it is killed at the end."""
    started: list[Supervised] = []
    yield started
    for each in started:
        each.close()


def test_a_killed_child_comes_back_in_its_slot_and_sigterm_ends_all_with_0(
    tmp_path: Path, supervised: list[Supervised]
) -> None:
    up = Supervised(tmp_path, 20.0, "router", "server")
    supervised.append(up)
    lives = up.wait_for_lives(router=1, server=1)
    os.kill(lives["server"][0][0], signal.SIGKILL)
    lives = up.wait_for_lives(router=1, server=2)
    assert len(lives["router"]) == 1
    assert lives["server"][0] != lives["server"][1]
    up.process.send_signal(signal.SIGTERM)
    code, out = up.finish()
    assert (code, out) == (0, "server was killed by SIGKILL\ndraining\n")
    assert not any(alive(pid) for pid in (lives["router"][0][0], lives["server"][1][0]))


def test_a_stopped_child_is_killed_with_its_group_and_comes_back(tmp_path: Path, supervised: list[Supervised]) -> None:
    names = ("router", "with-worker")
    up = Supervised(tmp_path, SILENT_S, *names)
    supervised.append(up)
    ((pid, worker),) = up.wait_for_lives(**dict.fromkeys(names, 1))["with-worker"]
    os.kill(worker, signal.SIGSTOP)
    os.kill(pid, signal.SIGSTOP)
    up.wait_for_lives(**{"with-worker": 2})
    up.wait_until_gone([pid, worker])
    up.process.send_signal(signal.SIGTERM)
    code, out = up.finish()
    assert code == 0
    assert out.splitlines()[:2] == ["with-worker killed: no heartbeat", "with-worker was killed by SIGKILL"]


def test_a_killed_supervisor_leaves_nobody_behind(tmp_path: Path, supervised: list[Supervised]) -> None:
    names = ("router", "with-worker")
    up = Supervised(tmp_path, 20.0, *names)
    supervised.append(up)
    lives = up.wait_for_lives(**dict.fromkeys(names, 1))
    pids = [pid for life in lives.values() for pids in life for pid in pids if pid]
    assert len(pids) == 3
    up.process.kill()
    up.wait_until_gone(pids)


def test_a_child_with_a_configuration_error_ends_all_with_its_status(
    tmp_path: Path, supervised: list[Supervised]
) -> None:
    up = Supervised(tmp_path, 20.0, "router", "misconfigured")
    supervised.append(up)
    code, out = up.finish()
    assert code == 2
    assert out == "misconfigured gave up: error: engine.page_tokens = 0\n"


def test_a_second_ctrl_c_kills_what_does_not_drain_but_a_second_sigterm_does_not(
    tmp_path: Path, supervised: list[Supervised]
) -> None:
    up = Supervised(tmp_path, 20.0, "stubborn", "server")
    supervised.append(up)
    lives = up.wait_for_lives(stubborn=1, server=1)
    pids = [life[0][0] for life in lives.values()]
    assert up.process.stdout is not None
    up.process.send_signal(signal.SIGTERM)
    assert up.process.stdout.readline() == "draining\n"
    up.process.send_signal(signal.SIGTERM)
    time.sleep(0.6)
    assert all(alive(pid) for pid in pids)
    up.process.send_signal(signal.SIGINT)
    code, out = up.finish()
    assert (code, out) == (130, "stubborn killed: asked to end now\nserver killed: asked to end now\n")
    assert not any(alive(pid) for pid in pids)


class Told:
    """Reports of a supervisor in this process."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def cannot_start(self, spec: ChildSpec, why: str) -> None:
        self.said.append(f"{spec.name}: {why}")

    def died(self, spec: ChildSpec, status: int, restart_in_s: float) -> None:
        self.said.append(f"{spec.name} {describe_status(status)}")

    def died_draining(self, spec: ChildSpec, status: int) -> None: ...

    def killed(self, spec: ChildSpec, why: str) -> None: ...

    def gave_up(self, spec: ChildSpec) -> None: ...

    def draining(self) -> None: ...


async def test_a_child_that_ends_while_it_is_asked_to_is_not_lost(tmp_path: Path) -> None:
    """Two whose configuration is wrong end at one moment, and the first of them drains the second."""
    argv = (sys.executable, "-c", "import sys; sys.exit(2)")
    specs = [ChildSpec(name, argv, tmp_path / name) for name in ("first", "second")]
    children = Children((tuple(specs),), Limits(drain_s=(60.0,)), Told(), os.environ, lambda name: os.dup(1))
    look = children._look

    def look_when_both_have_ended() -> None:
        for process in children._running.values():
            os.waitid(os.P_PID, process._popen.pid, os.WEXITED | os.WNOWAIT)
        look()

    children._look = look_when_both_have_ended  # type: ignore[method-assign]
    assert await asyncio.wait_for(children.run(), DEADLINE_S) == 2


async def test_a_machine_out_of_descriptors_delays_a_start_and_ends_nobody(tmp_path: Path) -> None:
    left = {"router": 0, "server": 2}

    def output(name: str) -> int:
        left[name] -= 1
        if left[name] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return os.open(tmp_path / f"{name}.log", os.O_CREAT | os.O_WRONLY)

    script = str(Path(__file__).with_name("dummy_child.py"))
    specs = [
        ChildSpec(name, (sys.executable, script, name, str(tmp_path / "pids")), tmp_path / f"{name}.log")
        for name in left
    ]
    told = Told()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    limits = Limits(drain_s=(60.0, 60.0), silent_s=20.0)
    children = Children((tuple(specs[:1]), tuple(specs[1:])), limits, told, environ, output)
    running = asyncio.create_task(children.run())
    async with asyncio.timeout(DEADLINE_S):
        while len(await asyncio.to_thread(read_lines, tmp_path / "pids")) < 2:
            await asyncio.sleep(0.05)
        children.drain()
        assert await running == 0
    assert told.said == ["server: Too many open files", "server exited with status 126"] * 2


def read_lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("status", "says"),
    [(0, "exited with status 0"), (3, "exited with status 3"), (-11, "was killed by SIGSEGV"), (-77, "by signal 77")],
)
def test_a_status_is_said_in_words(status: int, says: str) -> None:
    assert says in describe_status(status)
