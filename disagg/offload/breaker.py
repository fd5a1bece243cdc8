"""When a store that fails is left alone, and when it is tried again. Pure: time is an argument.

    OK ── `failures` calls fail with none between them that succeeds ──> DEGRADED ── after a pause ──> TRIED
     ^                                                       ^                               │
     └──────────────────────── the one call succeeds ────────│───────────────────────────────┤
                                                             └── it fails: a longer pause ───┘

While it is degraded nobody waits for the store: calls are refused at once. Each pause is twice the one before, so a store
that is gone for a day is asked some thousand times, and one that comes back is noticed within `most_pause_s`.
"""

from __future__ import annotations

import enum
from collections import Counter

from disagg.offload.causes import Cause


class StoreState(enum.StrEnum):
    """Whether storage is used."""

    OK = "ok"
    DEGRADED = "degraded"


class Breaker:
    """failures: so many calls in a row; math.inf: it is never left alone. failed_calls: since the start, by cause. opened: how
    often it became degraded.
    """

    def __init__(self, failures: float = 3, pause_s: float = 1.0, most_pause_s: float = 30.0) -> None:
        assert failures > 0 and 0 < pause_s <= most_pause_s, f"{failures} failures, {pause_s} to {most_pause_s} s"
        self.failed_calls: Counter[Cause] = Counter()
        self.opened = 0
        self._failures = failures
        self._least_s, self._most_s = pause_s, most_pause_s
        self._in_a_row = 0
        self._pause_s = pause_s
        self._tried_again_s: float | None = None  # when a call is let through; None while all are
        self._trial = 0  # the call that was let through; 0: none is under way
        self._calls = 0
        self._given_up_at = 0  # the last call that was begun before it became degraded

    @property
    def state(self) -> StoreState:
        return StoreState.OK if self._tried_again_s is None else StoreState.DEGRADED

    def begin(self, now_s: float) -> int | None:
        """A number for this call, to be handed to `end`; None: it must not be made."""
        if self._tried_again_s is not None:
            if self._trial or now_s < self._tried_again_s:
                return None
            self._trial = self._calls + 1
        self._calls += 1
        return self._calls

    def end(self, call: int, now_s: float, failed: Cause | None) -> None:
        """The call has ended. failed: why the store did not answer; that something is not there is an answer."""
        if failed is not None:
            self.failed_calls[failed] += 1
        if call != self._trial and (self._tried_again_s is not None or (failed and call <= self._given_up_at)):
            return  # begun before the store was given up: says nothing of how it is now
        if failed is None:
            self._in_a_row, self._pause_s, self._tried_again_s, self._trial = 0, self._least_s, None, 0
            return
        self._in_a_row += 1
        if self._trial:
            self._pause_s = min(2 * self._pause_s, self._most_s)
        elif self._in_a_row < self._failures:
            return
        else:
            self.opened += 1
            self._given_up_at = self._calls
        self._trial = 0
        self._tried_again_s = now_s + self._pause_s

    def succeed_small(self, call: int) -> None:
        """The call has succeeded, and was less than what failed. If it was the trial, others are let through again. The first of
        them that succeeds proves that all is well; the first that fails is one too many, and the pause is longer then.
        """
        if call == self._trial:
            self._in_a_row, self._pause_s = int(self._failures) - 1, min(2 * self._pause_s, self._most_s)
            self._tried_again_s, self._trial = None, 0

    def give_up(self, call: int, now_s: float) -> None:
        """Whoever made the call does not wait for its end any more, for a reason of its own: nothing is known."""
        if call == self._trial:
            self._trial, self._tried_again_s = 0, now_s
