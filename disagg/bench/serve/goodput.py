"""What counts as good, and the highest rate at which it is. Pure.

An SLO bounds times; `share` of them must be within (0.99: the 99th percentile), as Sarathi and DistServe judge. Goodput is the
highest rate at which that holds, found by doubling until it does not and halving the ratio between the two ends:

    rate   1 ok   2 ok   4 ok   8 not   5.7 not   4.8 ok   5.2 ok   5.5 ...   until the ends are within `tolerance`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from disagg.bench.serve.figures import Answered, percentile

TIMES = ("ttft", "itl", "tpot", "e2e")
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(us|ms|s|m)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}
MOST_TRIALS = 40


def parse_seconds(text: str) -> float:
    """ "2s", "100ms", "1.5". Raises ValueError."""
    found = _TIME.fullmatch(text.strip())
    if found is None or not (seconds := float(found[1]) * _UNITS[found[2]]) > 0 or not math.isfinite(seconds):
        raise ValueError(f'"{text}" is no time above 0, such as 2s or 100ms')
    return seconds


class Slo(Struct, frozen=True):
    """Most seconds, by name of the time; `share` of each must be within."""

    limits_s: dict[str, float]
    share: float = 0.99

    @staticmethod
    def parse(text: str, share: float) -> Slo:
        """ "ttft=2s,itl=100ms". Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name in limits:
                raise ValueError(f'"{name}" is given twice; each of {", ".join(TIMES)} has one limit')
            if name not in TIMES or not equals:
                raise ValueError(f'"{part.strip()}" is not one of {", ".join(TIMES)} with a time, such as ttft=2s')
            limits[name] = parse_seconds(value)
        return Slo(limits, share)

    def __str__(self) -> str:
        limits = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in self.limits_s.items())
        return f"{limits} for {100 * self.share:g}%"

    def excess(self, times: Mapping[str, Sequence[float]], failed: int = 0) -> dict[str, tuple[float, float]]:
        """Limits that were exceeded: name -> (found, limit). A request that failed was late: its TTFT is infinite."""
        over = {}
        for name, limit_s in self.limits_s.items():
            values = list(times[name]) + ([math.inf] * failed if name in ("ttft", "e2e") else [])
            if failed and name in ("itl", "tpot") and not values:
                values = [math.inf]
            found = percentile(values, self.share) if values else 0.0
            if not found <= limit_s:
                over[name] = (found, limit_s)
        if failed and not over and failed > (1.0 - self.share) * (failed + len(times["ttft"])):
            over["failed"] = (float(failed), 0.0)
        return over

    @property
    def least_requests(self) -> int:
        """With fewer the percentile is the one or two latest of them, and says little."""
        beyond = 1.0 - self.share
        return max(30, min(1000, math.ceil(1.0 / beyond - 1e-6))) if beyond > 0 else 100

    def good(self, answered: Answered) -> bool:
        """One request is within: its own times, and `share` of its gaps between tokens."""
        of = {
            "ttft": answered.ttft_s,
            "tpot": answered.tpot_s or 0.0,
            "e2e": answered.e2e_s,
            "itl": percentile(answered.gaps_s, self.share) if len(answered.gaps_s) else 0.0,
        }
        return all(of[name] <= limit_s for name, limit_s in self.limits_s.items())

    def hopeless(self, late: int, requests: int) -> bool:
        """So many first tokens are late already that a run of so many requests cannot be within any more."""
        return late >= requests - int(self.share * (requests - 1))


class RateSearch:
    """Which rate to try next (`rate`, None when it is found); `judged` says how it went."""

    def __init__(self, first: float, tolerance: float, lowest: float, highest: float) -> None:
        """tolerance: the ends may differ by so much, as a share of the lower one. lowest, highest: of what is tried."""
        assert 0 < lowest <= first <= highest and tolerance > 0
        self._tolerance = tolerance
        self._lowest, self._highest = lowest, highest
        self.good: float | None = None  # the highest rate that was within
        self.bad: float | None = None  # the lowest that was not, above `good`
        self.rate: float | None = first
        self.trials = 0

    def judged(self, within: bool) -> None:
        """The rate that was to be tried has been."""
        assert self.rate is not None
        self.trials += 1
        if within:
            self.good = self.rate
        else:
            self.bad = self.rate
        self.rate = self._next()

    def _next(self) -> float | None:
        if self.trials >= MOST_TRIALS:
            return None
        if self.bad is None:
            assert self.good is not None
            return min(2 * self.good, self._highest) if self.good < self._highest else None
        if self.good is None:
            return max(self.bad / 2, self._lowest) if self.bad > self._lowest else None
        if self.bad <= self.good * (1 + self._tolerance):
            return None
        return math.sqrt(self.good * self.bad)
