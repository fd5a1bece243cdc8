"""How long the event loop of a process did nothing else: the longest gap of late, and a warning when one was too long.

    due          due              due          a timer every 50 ms; how late it runs is a gap
     |            |<--- held --->|X|            ...because a call kept the loop or the interpreter, or because the machine
     time ->                                       had no processor to spare: the process's own CPU time tells which

Everybody's requests wait while one request's work holds the loop, so above ALARM_S it is said. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

logger = logging.getLogger(__name__)

PERIOD_S = 0.05  # at 20 ms the watches took more than half of what an idle cluster takes
ALARM_S = 0.25
WINDOW_S = 60.0
SAY_EVERY_S = 10.0


class Gaps:
    """The gaps of one loop. Time is an argument."""

    def __init__(self, now_s: float) -> None:
        self._alarms = 0
        self._began_s = now_s
        self._before = self._current = (
            0.0,
            0.0,
        )  # of the last whole window, and of this one: longest gap, longest hold
        self._said_s = -SAY_EVERY_S
        self._unsaid = 0

    def note(self, gap_s: float, cpu_s: float, now_s: float) -> str:
        """cpu_s: what the process computed meanwhile. What to say about it, if anything."""
        self._turn(now_s)
        held_s = min(gap_s, cpu_s)
        self._current = (max(self._current[0], gap_s), max(self._current[1], held_s))
        if gap_s < ALARM_S:
            return ""
        self._alarms += 1
        if now_s - self._said_s < SAY_EVERY_S:
            self._unsaid += 1
            return ""
        more = f"; {self._unsaid} more since the last warning" if self._unsaid else ""
        self._said_s, self._unsaid = now_s, 0
        return f"the event loop stood still for {gap_s:.3f} s, in {held_s:.3f} s of which this process computed{more}"

    def take_alarms(self) -> int:
        """How many gaps were too long since this was last asked."""
        alarms, self._alarms = self._alarms, 0
        return alarms

    def longest(self, now_s: float) -> tuple[float, float]:
        """Of the last one to two minutes: the longest gap, and the most of one in which the process computed."""
        self._turn(now_s)
        return max(self._before[0], self._current[0]), max(self._before[1], self._current[1])

    def _turn(self, now_s: float) -> None:
        windows = int((now_s - self._began_s) // WINDOW_S)
        if windows > 0:
            self._before = self._current if windows == 1 else (0.0, 0.0)
            self._current = (0.0, 0.0)
            self._began_s += windows * WINDOW_S


class LoopWatch:
    """Measures the running loop from `start` to `stop`. registry None: only warnings. warn: None for the log."""

    def __init__(
        self,
        registry: CollectorRegistry | None,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._warn = warn if warn is not None else partial(logger.warning, "%s")
        self._gaps = Gaps(clock())
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = self._cpu_s = 0.0
        self._alarms: Counter | None = None
        if registry is None:
            return
        gap = Gauge(
            "disagg_loop_longest_gap_seconds",
            "Longest time for which the event loop stood still, in the last one to two minutes",
            registry=registry,
        )
        gap.set_function(lambda: self.longest_gap_s)
        held = Gauge(
            "disagg_loop_longest_hold_seconds",
            "The same, but only the part of a gap in which this process computed",
            registry=registry,
        )
        held.set_function(lambda: self._gaps.longest(self._clock())[1])
        self._alarms = Counter(
            "disagg_loop_alarms", f"Times that the event loop stood still for {ALARM_S:g} s or more", registry=registry
        )

    @property
    def longest_gap_s(self) -> float:
        """In the last one to two minutes."""
        return self._gaps.longest(self._clock())[0]

    def start(self) -> None:
        self._arm()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self) -> None:
        self._due_s, self._cpu_s = self._clock() + PERIOD_S, time.process_time()
        self._handle = asyncio.get_running_loop().call_later(PERIOD_S, self._ran)

    def _ran(self) -> None:
        now_s = self._clock()
        words = self._gaps.note(max(0.0, now_s - self._due_s), time.process_time() - self._cpu_s, now_s)
        if words:
            self._warn(words)
        if self._alarms is not None:
            self._alarms.inc(self._gaps.take_alarms())
        self._arm()
