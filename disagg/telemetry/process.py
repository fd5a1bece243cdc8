"""Ties the life of a process to its parent's, shows the parent that it is alive, and takes the descriptors that it may have.
Linux; knows no roles.

Who dies with whom: `disagg up` > servers and router > workers. Each calls `die_with_parent` first thing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CRASHES = frozenset(
    (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGXCPU)
)  # by which a process ends for what it does itself
MOST_DESCRIPTORS = 1 << 20  # more are of no use to us, and some systems' hard limit is no number that can be set


def die_with_parent(expected_ppid: int) -> None:
    """From now on the kernel kills this process with SIGKILL when its parent ends, also when it is stopped or hung.

    expected_ppid: the parent's pid as the parent itself wrote it down. If that is not our parent any more, it ended
    before we asked, and this process kills itself. The kernel watches the parent's *thread* that started us, so parents
    start children from a thread that lives as long as they do (the main thread), never from a pool.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != expected_ppid:
        os.kill(os.getpid(), signal.SIGKILL)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to drain: what a supervisor, Ctrl-C and the end of a terminal send. Whoever was started to outlive
    its terminal, as by nohup, ignores the last."""
    hangs_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangs_up)


def leave_signals_to_parent() -> None:
    """Ctrl-C and the end of a terminal reach all of its processes, and are for the one that drains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ended_from_outside(status: int) -> bool:
    """Whether a process that ended with this status (negative: by that signal) was ended by others: an operator, a
    supervisor, the kernel for want of memory. What it was doing is not to blame then. Ask only for what was not killed here.
    """
    return status < 0 and -status not in CRASHES


def describe_status(status: int) -> str:
    """ "exited with status 1", or "was killed by SIGSEGV". Of most real-time signals Python knows no name."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def limit_resources(spare_bytes: int, descriptors: int | None = None) -> None:
    """From now on this process can have `spare_bytes` more memory than it has, so many open files, and leaves no core."""
    with open("/proc/self/statm") as statm:
        has = int(statm.read().split()[0]) * resource.getpagesize()
    wanted = {resource.RLIMIT_AS: has + spare_bytes, resource.RLIMIT_CORE: 0}
    if descriptors is not None:
        wanted[resource.RLIMIT_NOFILE] = descriptors
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def leave(status: object) -> NoReturn:
    """As sys.exit, at the very end of a process.

    Where obstore is loaded the interpreter is not taken apart: a thread of its runtime that comes back with an answer into
    one that is, ends the process with SIGABRT, after all that it was asked for was done.
    """
    if "obstore" not in sys.modules:
        sys.exit(status)  # type: ignore[arg-type]
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


def open_standard_descriptors() -> None:
    """Puts /dev/null where this process was started without stdin, stdout or stderr (`2>&-`), for Python too.

    The first socket or file opened would get that number otherwise, and with it whatever is written to stderr. Python, which
    found it closed, has None for such a stream, which not all that write there expect (faulthandler, for one).
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            assert opened == fd, "somebody opened a file before this"
            os.set_inheritable(fd, True)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode, errors = ("w", "backslashreplace") if fd else ("r", "strict")
            stream = os.fdopen(fd, mode, encoding="utf-8", errors=errors, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def never_wait_for_readers() -> None:
    """From now on writing to stdout and stderr fails where it would wait, for native code in this process too.

    gRPC and UCX write to stderr from threads that must not stand still. Only for pipes and terminals, and on an open file
    of our own: the mode belongs to the open file, which others may share. Where that cannot be had, all stays as it is.
    """
    for fd in (1, 2):
        try:
            kind = os.fstat(fd).st_mode
            if not (stat.S_ISFIFO(kind) or os.isatty(fd)):
                continue
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            continue
        os.dup2(own, fd, inheritable=True)
        os.close(own)


def heartbeat_to(fd: int) -> Callable[[], None]:
    """A function that writes one byte to the pipe `fd`, to be called every second from the loop that must not hang.

    It never blocks (a full pipe is as good as a beat) and never raises once the reader is gone. The descriptor is kept
    from children: a worker that held it would look like a server that beats.
    """
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)

    def beat() -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full, or nobody reads: neither is our affair
            os.write(fd, b".")

    return beat


def raise_descriptor_limit() -> int:
    """Raises the soft limit on open files to the hard one, and returns it. Every connection is one; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # above what this system allows anybody: what there is must do
        return soft
    return most


def no_heartbeat() -> None:
    """For a process that nobody supervises."""
