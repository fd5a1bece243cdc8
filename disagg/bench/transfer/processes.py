"""The processes of a measured transfer, one per rank, and the sockets to them. Knows nothing of transfers."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from disagg.bench.transfer import trial
from disagg.config.load import ucx_log_is_theirs
from disagg.types.errors import ConfigError, DisaggError

START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 120.0

Answer = TypeVar("Answer")


def checked(answer: trial.Answer, name: str, kind: type[Answer]) -> Answer:
    """The answer, of whom it is. Raises ConfigError if it is refused, DisaggError if it is a failure."""
    if isinstance(answer, trial.Failed):
        raise (ConfigError if answer.refused else DisaggError)(f"{name}: {answer.reason}")
    assert isinstance(answer, kind), f"{name} answered {type(answer).__name__}"
    return answer


class RankPort(Protocol):
    """A rank that is told what to do, wherever it is."""

    def tell(self, command: trial.Command) -> None: ...

    def hear(self, kind: type[Answer], timeout_s: float = STEP_TIMEOUT_S) -> Answer:
        """The next answer. Raises DisaggError if it is a failure, or does not come."""
        ...


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
        self.connection = Connection(ours.detach())

    def tell(self, command: trial.Command) -> None:
        with self._explained():
            self.connection.send_bytes(trial.encode(command))

    def hear(self, kind: type[Answer], timeout_s: float = STEP_TIMEOUT_S) -> Answer:
        """The next answer. Raises DisaggError if it is a failure, or does not come."""
        return checked(self.hear_any(timeout_s), self._name, kind)

    def hear_any(self, timeout_s: float = STEP_TIMEOUT_S) -> trial.Answer:
        """The next answer, whatever it is. Raises DisaggError if none comes."""
        with self._explained():
            if not self.connection.poll(timeout_s):
                raise DisaggError(f"{self._name} did not answer within {timeout_s:g} s{self._last_words()}")
            answer: trial.Answer = trial.decode_answer(self.connection.recv_bytes())
            return answer

    def quit(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(trial.encode(trial.Quit()))

    def end(self) -> None:
        """Wait for it, not for long, and kill it."""
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()
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
    """The processes of one pair of TP sizes, and the memory in which the decode ranks say how far their rings are free.

    Either side may be empty: then it is on another machine (`listen`, `dial`).
    """

    def __init__(self, pair: trial.Pair, watermarks: int = 0) -> None:
        """watermarks: of how many decode ranks; 0: of those that are here."""
        self._num_watermarks = watermarks or pair.dst_tp
        self._directory = tempfile.TemporaryDirectory(prefix="disagg-bench-")
        self._shared_fd = os.memfd_create("watermarks")
        os.ftruncate(self._shared_fd, max(mmap.PAGESIZE, 8 * self._num_watermarks))
        self._shared = mmap.mmap(self._shared_fd, 0)
        names = [f"prefill rank {rank}" for rank in range(pair.src_tp)]
        names += [f"decode rank {rank}" for rank in range(pair.dst_tp)]
        self.all = [RankProcess(name, self._shared_fd) for name in names]
        self.src, self.dst = self.all[: pair.src_tp], self.all[pair.src_tp :]

    def __enter__(self) -> RankProcesses:
        try:
            hellos = [process.hear(trial.Hello, START_TIMEOUT_S) for process in self.all]
            self.gpus = hellos[0].gpus
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def watermarks(self) -> tuple[int, ...]:
        """By decode rank."""
        return struct.unpack_from(f"={self._num_watermarks}q", self._shared)

    def set_watermarks(self, values: tuple[int, ...]) -> None:
        """Of decode ranks that are elsewhere."""
        with memoryview(self._shared).cast("q") as shared:
            for rank, value in enumerate(values[: self._num_watermarks]):
                shared[rank] = value  # each at once, as who reads it expects

    def ucx_log(self, side: trial.Side) -> str:
        """A directory for the logs of a side's ranks; empty if whoever started us says where UCX's log goes."""
        if ucx_log_is_theirs():
            return ""
        path = os.path.join(self._directory.name, side)
        os.makedirs(path, exist_ok=True)
        return path

    def close(self) -> None:
        """Ends all of them. Closing twice is nothing."""
        for process in self.all:
            process.quit()
        for process in self.all:
            process.end()
        self.all.clear()
        if not self._shared.closed:
            self._shared.close()
            os.close(self._shared_fd)
        self._directory.cleanup()
