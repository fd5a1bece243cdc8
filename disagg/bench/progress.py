"""How far long work is: on a terminal a bar, elsewhere a line every 10 s."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

DRAW_EVERY_S = 0.25
SAY_EVERY_S = 10.0


class PacedProgress:
    """`is_due`, and then `show`, within a `with` block."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_s = time.monotonic()
        self._bar: RichProgress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            # Drawn by hand: its own thread would take the interpreter from a loop that is timed.
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def is_due(self, *, at_once: bool = False) -> bool:
        """Enough time has gone since it was last true, or at_once."""
        now_s = time.monotonic()
        if not at_once and now_s - self._said_s < (DRAW_EVERY_S if self._bar is not None else SAY_EVERY_S):
            return False
        self._said_s = now_s
        return True

    def show(self, completed: int, words: str, line: str) -> None:
        """words: beside the bar. line: what stands for both where there is none; empty: nothing."""
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, description=words, refresh=True)
        elif line:
            self._say(line)
