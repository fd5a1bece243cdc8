"""A process is gone when that is proven. Whatever keeps us from looking proves nothing."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from disagg.server import pids
from disagg.server.pids import Fate, ProcessWatch, started

NOBODY = 4_000_000  # below PID_MAX_LIMIT, above what this machine gives out


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Every descriptor that this process may have is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(taken[0])
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_process_that_ends_is_gone(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch(child.pid, started(child.pid))
    assert watch.look() is Fate.ALIVE
    child.kill()
    child.wait()
    assert watch.look() is Fate.GONE
    watch.close()
    assert watch.gone  # what is proven stays so


def test_a_pid_without_a_process_and_a_pid_of_another_process_are_gone() -> None:
    assert ProcessWatch(NOBODY, 1).look() is Fate.GONE
    assert ProcessWatch(os.getpid(), started(os.getpid()) + 1).look() is Fate.GONE


def test_a_living_process_is_not_gone_for_want_of_descriptors(child: subprocess.Popen[bytes]) -> None:
    begun = started(child.pid)
    with no_descriptors_left():
        watch = ProcessWatch(child.pid, begun)
        assert watch.look() is Fate.UNKNOWN
        assert ProcessWatch(NOBODY, 1).gone  # to ask for a signal takes none
    assert watch.look() is Fate.ALIVE  # now that there are some
    child.kill()
    child.wait()
    assert watch.gone
    watch.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOENT])
@pytest.mark.parametrize("call", ["pidfd_open", "read_text", "both"])
def test_what_cannot_be_looked_at_is_unknown(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    begun = started(child.pid)

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    if call in ("pidfd_open", "both"):
        monkeypatch.setattr(os, "pidfd_open", fails)
    if call in ("read_text", "both"):
        monkeypatch.setattr(Path, "read_text", fails)
    watch = ProcessWatch(child.pid, begun)
    assert watch.look() is not Fate.GONE
    monkeypatch.undo()
    assert watch.look() is Fate.ALIVE
    watch.close()


@pytest.mark.parametrize("pid", [0, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_pid_that_no_process_can_have_proves_nothing_and_breaks_nothing(pid: int) -> None:
    assert ProcessWatch(pid, 1).look() is Fate.UNKNOWN


def test_a_process_is_watched_with_more_than_a_thousand_descriptors_open(child: subprocess.Popen[bytes]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this machine allows no more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        watch = ProcessWatch(child.pid, started(child.pid))
        assert watch.look() is Fate.ALIVE
        watch.close()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_host_that_cannot_be_named_is_no_ones_host(monkeypatch: pytest.MonkeyPatch) -> None:
    known = pids.host_id()
    assert known
    monkeypatch.setattr(pids, "_host_id", "")
    fails: Callable[..., str] = lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, ""))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        assert pids.host_id() == ""
    assert pids.host_id() == known
