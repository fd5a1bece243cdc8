"""`disagg bench transfer --to`: prefill ranks here, decode ranks on the machine that is dialled, as if they were all here."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TypeVar

import msgspec

from disagg.bench.transfer import trial
from disagg.bench.transfer.far import (
    PINGS,
    Bye,
    Clock,
    ForRank,
    Free,
    FromRank,
    Offer,
    Ping,
    Pong,
    Refused,
    Welcome,
    Wire,
)
from disagg.bench.transfer.processes import START_TIMEOUT_S, STEP_TIMEOUT_S, RankProcesses, checked
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.version import own_version

DIAL_S = 10.0
_POLL_S = 0.5

Answer = TypeVar("Answer")


class FarRank:
    """One decode rank of the other machine, spoken to like a `RankProcess`."""

    def __init__(self, name: str, rank: int, ends: _Ends) -> None:
        self._name, self._rank, self._ends = name, rank, ends
        self.answers: queue.SimpleQueue[trial.Answer] = queue.SimpleQueue()

    def tell(self, command: trial.Command) -> None:
        self._ends.wire.send(ForRank(self._rank, trial.encode(self._ends.clock.there(command))))

    def hear(self, kind: type[Answer], timeout_s: float = STEP_TIMEOUT_S) -> Answer:
        try:
            answer = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DisaggError(f"{self._name} did not answer within {timeout_s:g} s") from None
        return checked(answer, self._name, kind)


class _Ends:
    """Our end of the connection, and how the other end's clock compares."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.clock = Clock(0.0, 0.0)


class FarRanks:
    """Like `RankProcesses`, with decode ranks elsewhere. `with FarRanks(...) as ranks:`; raises ConfigError, DisaggError."""

    def __init__(self, pair: trial.Pair, host: str, port: int) -> None:
        self._to = f"{host}:{port}"
        self._local = RankProcesses(trial.Pair(pair.src_tp, 0), watermarks=pair.dst_tp)
        self._stack = contextlib.ExitStack()
        self._closing = threading.Event()
        try:
            connected = socket.create_connection((host, port), DIAL_S)
        except OSError as error:
            self._local.close()
            raise DisaggError(f"--to: nobody listens at {self._to}: {error}; start it there with --listen") from error
        self._ends = _Ends(Wire(connected))
        self.own_host = self._ends.wire.own_host
        self.src = self._local.src
        self.dst = [FarRank(f"decode rank {rank} at {self._to}", rank, self._ends) for rank in range(pair.dst_tp)]
        self.all = [*self.src, *self.dst]

    def __enter__(self) -> FarRanks:
        wire = self._ends.wire
        try:
            wire.send(Offer(str(own_version()), len(self.dst)))
            self._stack.enter_context(self._local)
            answer = wire.receive(START_TIMEOUT_S)
            if isinstance(answer, Refused):
                raise ConfigError(f"--to: {self._to} refuses: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise DisaggError(f"{self._to} did not welcome us within {START_TIMEOUT_S:g} s")
            self.gpus, self.far_gpus = self._local.gpus, answer.gpus
            self._ends.clock = Clock.of(self._ping() for _ in range(PINGS))
        except BaseException:
            self._end()
            raise
        self._reader = threading.Thread(target=self._read, name="far ranks", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(DisaggError):
            self._ends.wire.send(Bye())
        self._reader.join()
        self._end()

    @property
    def clock_error_s(self) -> float:
        return self._ends.clock.error_s

    def ucx_log(self, side: trial.Side) -> str:
        return self._local.ucx_log(side)

    def _end(self) -> None:
        self._ends.wire.close()
        self._stack.close()
        self._local.close()

    def _ping(self) -> tuple[float, float, float]:
        before = time.monotonic()
        self._ends.wire.send(Ping())
        pong = self._ends.wire.receive(DIAL_S)
        if not isinstance(pong, Pong):
            raise DisaggError(f"{self._to} did not say its time within {DIAL_S:g} s")
        return before, pong.here_s, time.monotonic()

    def _read(self) -> None:
        """Runs in a thread of its own, since watermarks come while others wait for answers."""
        try:
            while not self._closing.is_set():
                message = self._ends.wire.receive(_POLL_S)
                if isinstance(message, Free):
                    self._local.set_watermarks(message.watermarks)
                elif isinstance(message, FromRank) and 0 <= message.rank < len(self.dst):
                    answer = trial.decode_answer(message.answer)
                    self.dst[message.rank].answers.put(self._ends.clock.here(answer))
        except (DisaggError, msgspec.DecodeError) as error:
            for rank in self.dst:
                rank.answers.put(trial.Failed(str(error)))
