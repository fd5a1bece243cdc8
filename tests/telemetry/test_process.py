"""Processes that die with their parent, show that they live, and say what they do."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from disagg.telemetry.process import heartbeat_to
from disagg.telemetry.stacks import format_stacks

ROOT = Path(__file__).resolve().parents[2]

# A parent that starts a child, which ties itself to it and prints its own pid.
PARENT = """
import os, subprocess, sys, time
child = "import os, sys, time; from disagg.telemetry.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
child += "print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child, str(os.getpid())])
time.sleep(60)
"""


def gone_within(pid: int, seconds: float) -> bool:
    """Whether the process ended (a zombie has) in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_killed_parent_takes_even_a_stopped_child_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    os.kill(child_pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(child_pid, 30.0)


def test_a_child_whose_parent_is_gone_already_kills_itself() -> None:
    code = "from disagg.telemetry.process import die_with_parent; die_with_parent(999999999); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_heartbeats_never_block_and_never_raise() -> None:
    reader, writer = os.pipe()
    beat = heartbeat_to(writer)
    beat()
    assert os.read(reader, 10) == b"."
    for _ in range(70_000):  # more than a pipe holds
        beat()
    os.close(reader)
    beat()
    os.close(writer)


def test_heartbeat_pipe_is_not_handed_to_children() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    heartbeat_to(writer)
    assert not os.get_inheritable(writer)
    os.close(reader)
    os.close(writer)


def test_stacks_show_every_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="transfer-3")
    thread.start()
    text = format_stacks()
    stop.set()
    thread.join()
    assert "--- thread transfer-3" in text
    assert "test_stacks_show_every_thread" in text
    assert "--- task" not in text


async def test_stacks_show_every_task() -> None:
    async def waits_for_pages() -> None:
        await asyncio.Event().wait()

    async def runs_a_leg() -> None:
        await waits_for_pages()

    task = asyncio.create_task(runs_a_leg(), name="leg r1")
    await asyncio.sleep(0)
    text = format_stacks()
    task.cancel()
    assert "--- task leg r1" in text
    chain = text[text.index("--- task leg r1") :]
    assert chain.index("in runs_a_leg") < chain.index("in waits_for_pages") < chain.index("in wait\n")
    assert "waits for <" in chain


async def test_stacks_show_tasks_whose_frames_have_no_lines() -> None:
    server = grpc.aio.server()  # its loop runs in a task of Cython's
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.sleep(0)
    text = format_stacks()
    await server.stop(None)
    assert "cython" in text.lower()


def test_sigusr1_writes_the_stacks_and_the_process_goes_on() -> None:
    code = (
        "import os, signal; from disagg.telemetry.stacks import dump_stacks_on_signal; dump_stacks_on_signal(); "
        "os.kill(os.getpid(), signal.SIGUSR1); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "goes on\n"
    assert "most recent call first" in done.stderr


def test_the_soft_limit_on_open_files_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource; from disagg.telemetry.process import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000)); print(raise_descriptor_limit()); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE)); print(raise_descriptor_limit())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1000", "1000", "1000", "1000"], done.stderr


def test_native_code_does_not_wait_for_who_reads_stderr_and_others_who_share_the_pipe_still_do() -> None:
    code = (
        "import ctypes, sys; from disagg.telemetry.process import never_wait_for_readers; never_wait_for_readers(); "
        "libc = ctypes.CDLL(None, use_errno=True); data = b'x' * 65536\n"
        "while libc.write(2, data, len(data)) > 0: pass\n"
        "print(ctypes.get_errno(), flush=True); sys.exit(0)"
    )
    reading, writing = os.pipe()
    try:
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=writing, timeout=60, check=False)
        assert (done.returncode, int(done.stdout)) == (0, errno.EAGAIN)
        assert os.get_blocking(writing)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_process_without_stderr_gives_its_number_to_nothing_else(closed: str) -> None:
    code = (
        "import os, sys; from disagg.telemetry.process import open_standard_descriptors; open_standard_descriptors(); "
        "sys.exit(0 if os.open('/', os.O_RDONLY) > 2 else 1)"
    )
    argv = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(argv, cwd=ROOT, timeout=60, check=False).returncode == 0


def test_python_has_streams_that_it_found_closed() -> None:
    code = (
        "import faulthandler, sys; from disagg.telemetry.process import open_standard_descriptors; "
        "open_standard_descriptors(); faulthandler.enable(sys.stderr); print('\\ud800', file=sys.stderr, flush=True); print(1); "
        "sys.exit(0 if sys.stdin.read() == '' and sys.__stderr__ is sys.stderr else 1)"
    )
    argv = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 1>&- 2>&-', sys.executable, code]
    assert subprocess.run(argv, cwd=ROOT, timeout=60, check=False).returncode == 0
