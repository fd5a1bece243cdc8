"""How many log lines a process may write: a token bucket from which errors may take more than the rest. Pure.

    tokens   0        burst/4        burst/2            burst
             |─ errors ──|─ + warnings ──|─ + everything ──|

A flood of one level so leaves something for the levels above it, and all together stay within the rate.
"""

from __future__ import annotations

import logging
from collections import Counter


class LineBudget:
    """per_s: lines per second in the long run, and as many at once after a quiet second."""

    def __init__(self, per_s: float, now_s: float) -> None:
        assert per_s > 0, "a log without lines is no log"
        self._per_s = per_s
        self._burst = max(4.0, per_s)  # so that each level finds a whole token in its part
        self._tokens = self._burst
        self._seen_s = now_s
        self._left_out: Counter[str] = Counter()

    def allows(self, level: int, now_s: float) -> bool:
        """Whether a line of this level may be written now; if not, it is counted."""
        self._refill(now_s)
        if self._tokens < self._reserve(level) + 1.0:
            self._left_out[logging.getLevelName(level).lower()] += 1
            return False
        self._tokens -= 1.0
        return True

    def take_left_out(self, now_s: float) -> dict[str, int]:
        """How many lines were left out since the last call, by level; none while lines are still being left out.

        What is said of them is a line as well, and takes its token.
        """
        self._refill(now_s)
        if not self._left_out or self._tokens < self._reserve(logging.INFO) + 1.0:
            return {}
        self._tokens -= 1.0
        counted, self._left_out = dict(self._left_out), Counter()
        return counted

    def _refill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._seen_s) * self._per_s)
        self._seen_s = max(self._seen_s, now_s)

    def _reserve(self, level: int) -> float:
        if level >= logging.ERROR:
            return 0.0
        return self._burst / (4 if level >= logging.WARNING else 2)
