"""Runs child processes as `supervise` decides. Knows processes, pipes and signals; nothing of what the children do.

Each child is the leader of its own session and process group, writes into a pipe of its own, and gets two more arguments:
`--heartbeat-fd N` (a pipe into which it writes a byte every second) and `--parent-pid P` (for `die_with_parent`).
Children are started from the thread that runs the event loop, which must be the main thread: they die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from disagg.cli.supervise import (
    Beat,
    Begin,
    Died,
    DiedDraining,
    Ended,
    Event,
    Exited,
    GiveUp,
    Kill,
    Limits,
    Proven,
    Start,
    Stop,
    Supervisor,
    Terminate,
    Tick,
)
from disagg.types.status import CANNOT_START

TICK_S = 0.1
SECOND_INTERRUPT_S = 0.5  # one Ctrl-C can arrive twice, from the terminal and from a wrapper that passes it on


class ChildSpec(Struct, frozen=True):
    """What to run under a name. argv: without the two arguments that every child gets."""

    name: str
    argv: tuple[str, ...]
    log: Path  # where the operator finds what it wrote


class Reports(Protocol):
    """Who tells the operator."""

    def cannot_start(self, spec: ChildSpec, why: str) -> None: ...

    def died(self, spec: ChildSpec, status: int, restart_in_s: float) -> None: ...

    def died_draining(self, spec: ChildSpec, status: int) -> None: ...

    def killed(self, spec: ChildSpec, why: str) -> None: ...

    def gave_up(self, spec: ChildSpec) -> None: ...

    def draining(self) -> None: ...


class _Process:
    """One running child."""

    def __init__(self, spec: ChildSpec, environ: Mapping[str, str], open_output: Callable[[str], int]) -> None:
        self._beats, child_end = os.pipe()
        os.set_blocking(self._beats, False)
        try:
            with os.fdopen(open_output(spec.name), "wb") as output:
                self._popen = subprocess.Popen(
                    [*spec.argv, "--heartbeat-fd", str(child_end), "--parent-pid", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(child_end,),
                    start_new_session=True,
                    env=dict(environ),
                )
        except OSError:
            os.close(self._beats)
            raise
        finally:
            os.close(child_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def has_beaten(self) -> bool:
        """Whether heartbeats came since the last call."""
        try:
            return len(os.read(self._beats, 65536)) > 0
        except BlockingIOError:
            return False

    def poll(self) -> int | None:
        """Its exit status once it has ended; whatever it left in its process group ends then too."""
        if os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Not reaped yet, so nobody else can have its process group's number.
        self.kill_group()
        os.close(self._beats)
        return self._popen.wait()

    def terminate(self) -> None:
        os.kill(
            self._popen.pid, signal.SIGTERM
        )  # Popen's own would reap a child that has just ended, which `poll` does

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)


class Children:
    """All children of one `disagg up`, from start to end."""

    def __init__(
        self,
        waves: tuple[tuple[ChildSpec, ...], ...],
        limits: Limits,
        reports: Reports,
        environ: Mapping[str, str],
        open_output: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """open_output: a descriptor for what the child of this name writes; closed here once the child has it."""
        self._specs = {spec.name: spec for wave in waves for spec in wave}
        self._supervisor = Supervisor(tuple(tuple(spec.name for spec in wave) for wave in waves), limits)
        self._reports = reports
        self._environ = environ
        self._open_output = open_output
        self._clock = clock
        self._running: dict[str, _Process] = {}
        self._exit_code: int | None = None
        self._stops_asked = 0
        self._asked_at_s: float | None = None

    @property
    def draining(self) -> bool:
        return self._supervisor.draining

    @property
    def pids(self) -> dict[str, int]:
        """Of those that run now, by name."""
        return {name: process.pid for name, process in self._running.items()}

    def proven(self, name: str) -> None:
        """This child serves: from now on nothing that it finds when it starts again ends the others."""
        if self._exit_code is None:
            self._do(Proven(name))

    def drain(self) -> None:
        """Asks for an end (SIGTERM). Asking again changes nothing: `timeout` and the like send it twice."""
        if self._asked_at_s is None:
            self._asked_at_s = self._clock()
            self._stops_asked += 1

    def interrupt(self) -> None:
        """Asks for an end (Ctrl-C); when one was asked for before, for an immediate one."""
        if self._asked_at_s is None:
            self.drain()
        elif self._clock() - self._asked_at_s >= SECOND_INTERRUPT_S:
            self._stops_asked += 1

    async def run(self) -> int:
        """Starts all, keeps them running, and returns the exit code when all have ended after `drain`.

        Whatever ends this coroutine, no child is left.
        """
        try:
            self._do(Begin())
            while self._exit_code is None:
                await asyncio.sleep(TICK_S)
                self._look()
            return self._exit_code
        finally:
            for process in self._running.values():
                process.kill_group()

    def _look(self) -> None:
        for name, process in list(self._running.items()):
            if process.has_beaten():
                self._do(Beat(name))
            status = process.poll()
            if status is not None:
                del self._running[name]
                self._do(Exited(name, status))
                if self._exit_code is not None:
                    return
        while self._stops_asked:
            self._stops_asked -= 1
            if not self._supervisor.draining:
                self._reports.draining()
            self._do(Stop())
            if self._exit_code is not None:
                return
        self._do(Tick())

    def _do(self, event: Event) -> None:
        for instruction in self._supervisor.handle(event, self._clock()):
            match instruction:
                case Start(name):
                    self._start(name)
                case Terminate(name):
                    self._running[name].terminate()
                case Kill(name, why):
                    self._reports.killed(self._specs[name], why)
                    self._running[name].kill_group()
                case Died(name, status, restart_in_s):
                    self._reports.died(self._specs[name], status, restart_in_s)
                case DiedDraining(name, status):
                    self._reports.died_draining(self._specs[name], status)
                case GiveUp(name):
                    self._reports.gave_up(self._specs[name])
                case Ended(exit_code):
                    self._exit_code = exit_code

    def _start(self, name: str) -> None:
        """A machine out of processes, memory or descriptors may have some later: that is no reason to end the others."""
        try:
            self._running[name] = _Process(self._specs[name], self._environ, self._open_output)
        except OSError as error:
            self._reports.cannot_start(self._specs[name], error.strerror or str(error))
            self._do(Exited(name, CANNOT_START))
