"""When a workers of workers counts as lost."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from disagg.config.tree import LogConfig, WorkerConfig
from disagg.messages.control import Dump, Dumped, Profile, Profiled
from disagg.messages.plan import WorkerPlan
from disagg.server.workers import Workers, WorkersLost, make_sockets_dir
from disagg.streams.awake import READ_S
from disagg.types.errors import ConfigError
from tests.small_disk import small_disk as small_disk

SILENT_S = 1.0
LONG_S = 60.0  # for those that are not to be taken for silent, however late a busy machine lets them answer
WORKER = Path(__file__).with_name("slow_worker.py")


@asynccontextmanager
async def workers_of(reply_after_s: float, silent_s: float = SILENT_S, beat_s: float = 0.0) -> AsyncIterator[Workers]:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    command = (sys.executable, str(WORKER), str(reply_after_s), str(beat_s))
    workers = Workers("test", WorkerConfig(command=command, silent_s=silent_s), LogConfig(), 1, ignore, ignore)
    workers.start()
    try:
        yield workers
    finally:
        await workers.kill()


def no_such_program(directory: Path) -> tuple[str, ...]:
    return (str(directory / "nothing"), "-m")


def a_directory(directory: Path) -> tuple[str, ...]:
    return (str(directory),)


def no_executable(directory: Path) -> tuple[str, ...]:
    (directory / "text").write_text("print()")
    return (str(directory / "text"),)


def no_program(directory: Path) -> tuple[str, ...]:
    (directory / "text").write_bytes(b"\x00\x01\x02")
    (directory / "text").chmod(0o755)
    return (str(directory / "text"),)


def with_a_nul(directory: Path) -> tuple[str, ...]:
    return ("a\0b",)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
async def test_a_rank_is_lost_at_once_whichever_signal_ended_it(number: int, name: str) -> None:
    async with workers_of(60.0) as workers:
        workers._processes[0].send_signal(number)
        assert await asyncio.wait_for(workers.wait_lost(), 30.0) == f"rank 0 was killed by {name}"


@pytest.mark.parametrize("made", [no_such_program, a_directory, no_executable, no_program, with_a_nul])
async def test_a_command_that_cannot_be_run_is_a_configuration_error(
    tmp_path: Path, made: Callable[[Path], tuple[str, ...]]
) -> None:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    workers = Workers("test", WorkerConfig(command=made(tmp_path)), LogConfig(), 1, ignore, ignore)
    with pytest.raises(ConfigError, match=r"worker.command = \[.*\]: it cannot be run: .*; it must be a program"):
        workers.start()
    await workers.kill()


async def test_a_rank_that_exits_without_a_word_is_told_from_one_that_is_killed_or_has_spoken() -> None:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    workers = Workers("test", WorkerConfig(command=(sys.executable, "-c", "exit(7)")), LogConfig(), 1, ignore, ignore)
    workers.start()
    assert await asyncio.wait_for(workers.wait_lost(), 30.0) == workers.silent_exit == "rank 0 exited with status 7"
    await workers.kill()
    async with workers_of(60.0) as workers:
        workers._processes[0].kill()
        await asyncio.wait_for(workers.wait_lost(), 30.0)
        assert workers.silent_exit == ""
    async with workers_of(0.0, LONG_S) as workers:
        await workers.call(Dump(), 30.0)
        workers._exited_with(0, 1)
        assert workers.silent_exit == ""


async def test_a_rank_may_be_silent_while_it_does_what_it_was_called_for() -> None:
    async with workers_of(3 * SILENT_S) as workers:
        assert await workers.call(Profile(1, 1), 30.0) == [Profiled(0, 5, 3)]


async def test_a_rank_may_not_be_stopped_while_it_does_what_it_was_called_for() -> None:
    async with workers_of(600.0) as workers:
        workers._processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(WorkersLost, match="rank 0 has been stopped for"):
            await asyncio.wait_for(workers.call(Profile(1, 1), 300.0), 60.0)


async def test_a_dump_and_another_call_get_their_own_answers() -> None:
    async with workers_of(0.1, LONG_S) as workers:
        for _ in range(3):
            profiled, dumped = await asyncio.gather(workers.call(Profile(1, 1), 30.0), workers.call(Dump(), 30.0))
            assert profiled == [Profiled(0, 5, 3)]
            assert dumped == [Dumped(0, "here")]


async def test_an_answer_that_comes_after_its_time_is_not_taken_for_the_next_ones() -> None:
    async with workers_of(0.5, LONG_S) as workers:
        await workers.call(Profile(1, 1), 30.0)  # it has started
        with pytest.raises(WorkersLost, match="no answer to Dump in time"):
            await workers.call(Dump(), 0.1)
        assert await workers.call(Profile(1, 1), 30.0) == [Profiled(0, 5, 3)]
        assert await workers.call(Dump(), 30.0) == [Dumped(0, "here")]


async def test_a_rank_may_not_be_silent_because_somebody_asks_for_a_dump() -> None:
    async with workers_of(60.0) as workers:
        with pytest.raises(WorkersLost, match="rank 0 has been silent"):
            await workers.call(Dump(), 30.0)


async def test_a_rank_that_nobody_has_called_may_not_be_silent() -> None:
    async with workers_of(0.0) as workers:
        await workers.call(Dump(), 30.0)
        assert "rank 0 has been silent" in await asyncio.wait_for(workers.wait_lost(), 30.0)


def test_a_server_that_was_stopped_itself_calls_no_rank_silent_that_was_not() -> None:
    server = subprocess.Popen([sys.executable, "-m", "tests.server.stopped_server"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        for _ in range(3):
            server.send_signal(signal.SIGSTOP)
            time.sleep(3 * SILENT_S)
            server.send_signal(signal.SIGCONT)
            assert not select.select([server.stdout], [], [], READ_S + 1.0)[0], server.stdout.readline()
        (worker,) = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(worker), signal.SIGSTOP)
        assert server.stdout.readline().startswith("rank 0 has been "), "silence ends it still"
        assert server.wait(60.0) == 0
    finally:
        server.kill()
        server.wait()


async def test_a_call_is_lost_when_its_time_is_over_though_the_rank_lives() -> None:
    async with workers_of(60.0) as workers:
        with pytest.raises(WorkersLost, match="no answer to Profile in time"):
            await workers.call(Profile(1, 1), 3 * SILENT_S)


@pytest.mark.parametrize(
    ("what", "error"),
    [("plan", "IndexError"), ("plan", "Unheard"), ("job", "ZeroDivisionError"), ("transfer", "IndexError")],
)
async def test_whatever_a_worker_raises_its_server_learns_the_cause(what: str, error: str) -> None:
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    command = (sys.executable, "-m", "tests.server.failing_worker", what, error)
    workers = Workers("test", WorkerConfig(command=command), LogConfig(), 1, ignore, ignore)
    workers.start()
    try:
        if what == "plan":
            await workers.barrier(30.0)
            workers.publish(WorkerPlan(0))
        if what == "job":
            with pytest.raises(WorkersLost) as caught:
                await workers.call(Profile(1, 1), 30.0)
            reason = str(caught.value)
        else:
            reason = await asyncio.wait_for(workers.wait_lost(), 30.0)
    finally:
        await workers.kill()
    assert f"{error}: row 262144 is out of bounds" in reason


def test_what_killed_servers_left_is_cleared_away_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, tempfile, sys; tempfile.tempdir = sys.argv[1]; "
        "from disagg.server.workers import make_sockets_dir; held = make_sockets_dir(); "
        "open(held.path / 'plans', 'w').close(); print(held.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    killed = subprocess.run(argv, cwd=WORKER.parents[2], capture_output=True, text=True, timeout=60, check=False)
    left = Path(killed.stdout.strip())
    assert left.parent == tmp_path and (left / "plans").exists()
    (tmp_path / "disagg-of-a-user").mkdir()
    first = make_sockets_dir()
    assert not left.exists()
    second = make_sockets_dir()
    assert {each.name for each in tmp_path.iterdir()} == {first.path.name, second.path.name, "disagg-of-a-user"}
    first.remove()
    second.remove()
    assert [each.name for each in tmp_path.iterdir()] == ["disagg-of-a-user"]


async def make_group() -> None:
    Workers("test", WorkerConfig(), LogConfig(), 1, lambda _: None, lambda *_: None)


@pytest.mark.parametrize("files", [0, 1, 2])  # so there is no room for a socket, for the lock, for the directory
def test_no_room_for_sockets_loses_the_group_with_the_reason(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """It is tried again later: a full disk is no fault of the configuration, and a traceback no reason."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", str(small_disk)], check=True)
    for number in range(files):
        (small_disk / str(number)).touch()
    with pytest.raises(WorkersLost, match=rf"the workers' sockets .* in {small_disk}.*: No space left on device"):
        asyncio.run(make_group())
    assert len(list(small_disk.iterdir())) == files


def test_a_temporary_directory_with_a_long_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR = .* more than 107 bytes; set it to a shorter one"):
        make_sockets_dir()
    assert list(long.iterdir()) == []
