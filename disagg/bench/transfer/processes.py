"""The processes of a measured transfer, one per rank, and the sockets to them. Knows nothing of transfers."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

from disagg.bench.transfer import trial
from disagg.types.errors import DisaggError

START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 120.0

Answer = TypeVar("Answer")


class RankProcess:
    """One rank's process, and the socket to it."""

    def __init__(self, name: str, shared_fd: int) -> None:
        self._name = name
        self._output = open(os.memfd_create(name), "r+b")  # noqa: SIM115  # closed by `end`
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "disagg.bench.transfer.rank", "--socket-fd", str(theirs.fileno())]
        command += ["--shared-fd", str(shared_fd), "--parent", str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), shared_fd),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def tell(self, command: trial.Command) -> None:
        with self._explained():
            self._connection.send_bytes(trial.encode(command))

    def hear(self, kind: type[Answer], timeout_s: float = STEP_TIMEOUT_S) -> Answer:
        """The next answer. Raises DisaggError if it is a failure, or does not come."""
        with self._explained():
            if not self._connection.poll(timeout_s):
                raise DisaggError(f"{self._name} did not answer within {timeout_s:g} s{self._last_words()}")
            answer = trial.decode_answer(self._connection.recv_bytes())
        if isinstance(answer, trial.Failed):
            raise DisaggError(f"{self._name}: {answer.reason}")
        assert isinstance(answer, kind), f"{self._name} answered {type(answer).__name__}"
        return answer

    def quit(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(trial.encode(trial.Quit()))

    def end(self) -> None:
        """Wait for it, not for long, and kill it."""
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._connection.close()
        self._output.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise DisaggError(f"{self._name} has ended{self._last_words()}") from error

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return ": " + " | ".join(lines[-3:]) if lines else ""


class RankProcesses:
    """The processes of one pair of TP sizes, and the memory in which the decode ranks say how far their rings are free."""

    def __init__(self, pair: trial.Pair) -> None:
        self._shared_fd = os.memfd_create("watermarks")
        os.ftruncate(self._shared_fd, max(mmap.PAGESIZE, 8 * pair.dst_tp))
        names = [f"prefill rank {rank}" for rank in range(pair.src_tp)]
        names += [f"decode rank {rank}" for rank in range(pair.dst_tp)]
        self.all = [RankProcess(name, self._shared_fd) for name in names]
        self.src, self.dst = self.all[: pair.src_tp], self.all[pair.src_tp :]

    def __enter__(self) -> RankProcesses:
        try:
            hellos = [process.hear(trial.Hello, START_TIMEOUT_S) for process in self.all]
            self.gpus = hellos[0].gpus
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self.all:
            process.quit()
        for process in self.all:
            process.end()
        os.close(self._shared_fd)
