"""How many requests may be run again: a budget of the router, beside each request's own attempts. Pure; time is an argument.

Where servers are lost faster than requests end, running everything again is more work for fewer servers. So replays of the last
WINDOW_S are at most `share` of the requests that were under way meanwhile, and `floor` a second; beyond that a request fails.
With a share of 1 everything that runs can be run again once in that time.
"""

from __future__ import annotations

from collections import Counter

WINDOW_S = 10


class RetryBudget:
    """Of one router. Moves, and what is given back unstarted, cost nothing of it."""

    def __init__(self, share: float, floor_per_s: float) -> None:
        self._share = share
        self._floor = floor_per_s * WINDOW_S
        self._ended: Counter[int] = Counter()  # by second
        self._replays: Counter[int] = Counter()

    def request_ended(self, now_s: float) -> None:
        self._ended[int(now_s)] += 1
        _forget(self._ended, now_s)

    def allows(self, running: int, now_s: float) -> bool:
        """Whether one more request may be run again now, which then counts. running: requests under way."""
        _forget(self._ended, now_s)
        _forget(self._replays, now_s)
        if self._replays.total() + 1 > self._share * (running + self._ended.total()) + self._floor:
            return False
        self._replays[int(now_s)] += 1
        return True


def _forget(seconds: Counter[int], now_s: float) -> None:
    for second in [each for each in seconds if each <= now_s - WINDOW_S]:
        del seconds[second]
