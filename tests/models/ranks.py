"""Processes that compute one model together over gloo, for tests. They live as long as the tests do.

Each is forked from a process that has imported torch, transformers and the models once: that takes seconds, and the rest
next to nothing.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from disagg.models.ranks import Ranks
from disagg.types.errors import DisaggError

ANSWER_S = 120.0
COLLECTIVE_S = 60.0


class RankPool:
    """`run(tp, work, ...)` calls `work(ranks, ...)` on the first `tp` of its processes at once."""

    def __init__(self, most: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "disagg.models.model", "disagg.worker.executor"])
        self._directory = directory
        self._runs = 0
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, tp: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What it returned, by rank. Raises AssertionError with the traceback of a rank that failed."""
        meeting = self.meeting()
        for rank, pipe in enumerate(self._pipes[:tp]):
            pipe.send((rank, tp, meeting, work, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:tp]):
            assert pipe.poll(ANSWER_S), f"rank {rank} of {tp} does not answer"
            failure, value = pipe.recv()
            answers.append((failure, value))
        failures = [failure for failure, _ in answers if failure]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def meeting(self) -> Path:
        """A file by which ranks can find each other, once."""
        self._runs += 1
        return self._directory / f"ranks-{self._runs}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    while True:
        rank, tp, meeting, work, arguments = pipe.recv()
        ranks = Ranks(rank, tp)
        try:
            ranks.connect(meeting, torch.device("cpu"), COLLECTIVE_S, COLLECTIVE_S)
            pipe.send(("", work(ranks, *arguments)))
        except (DisaggError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError):
            pipe.send((traceback.format_exc(), None))
