"""A ladder of request rates: which one to try next, and the goodput of any SLO afterwards. Pure.

A rung is one run at one rate. A goodput lies between the highest rate below which all hold and the first one that does not:

    rate           1 ok    3 ok    6 ok    8.5 not    12 not        between 6 and 8.5; where the line between these two
    P99 / limit    .2      .4      .8      1.3                      reaches the limit: 7

Rungs serve all SLOs: the next rate is the one that halves (as a ratio) most of what is not known yet, of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from disagg.bench.serve.figures import Answered, ClientLoad, Failed, duration_of, figures, percentile, times_of
from disagg.bench.serve.goodput import TIMES, Slo
from disagg.bench.serve.load import LoadResult

SHARE = 0.99


class Rung(Struct, frozen=True):
    """What clients saw at one rate. p50_s, p99_s: by name of the time; who got no answer had an infinite TTFT in P99.

    unfinished: under way, or not yet sent, when the run was given up.
    """

    rate: float
    requests: int
    failed: dict[str, int]
    unfinished: int
    p50_s: dict[str, float]
    p99_s: dict[str, float]
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_chunk: float
    client: ClientLoad
    warnings: list[str]

    def of_limits(self, slo: Slo) -> dict[str, float]:
        """How many times its limit each P99 is."""
        return {name: self.p99_s[name] / limit_s for name, limit_s in slo.limits_s.items()}

    def within(self, slo: Slo) -> bool:
        return all(share <= 1 for share in self.of_limits(slo).values())


def rung_of(rate: float, run: LoadResult) -> Rung:
    answered = [each for each in run.outcomes if isinstance(each, Answered)]
    lost = sum(isinstance(each, Failed) for each in run.outcomes) + run.unfinished
    found = figures(run.outcomes, duration_of(run.outcomes))
    times = {name: list(values) for name, values in times_of(answered).items()}
    for name in TIMES:
        if name in ("ttft", "e2e") or not times[name]:
            times[name] += [math.inf] * lost
    return Rung(
        rate,
        len(run.outcomes) + run.unfinished,
        found["failures"],
        run.unfinished,
        {name: found[f"{name}_s"]["p50"] or 0.0 for name in TIMES},
        {name: percentile(times[name], SHARE) if times[name] else 0.0 for name in TIMES},
        found["requests_per_s"],
        found["output_tokens_per_s"],
        found["tokens_per_chunk"] or 0.0,
        run.client,
        run.client.warnings(found["ttft_s"]["p50"], found["itl_s"]["p50"]),
    )


# ---- goodput


class Goodput(Struct, frozen=True):
    """Requests/s. good: the last rate that holds; bad: the first one that does not; None: no such rate was tried.

    rate: where the first P99 reaches its limit on the line between them. It is `good` where clients at `bad` had no answer or the
    run was given up, since the P99 there is not known, and where there is no `bad`.
    """

    good: float | None
    bad: float | None
    rate: float | None

    def per(self, gpus: int) -> Goodput:
        return Goodput(*(rate and rate / gpus for rate in (self.good, self.bad, self.rate)))


def goodput(rungs: Iterable[Rung], slo: Slo) -> Goodput:
    held = over = None
    for rung in sorted(rungs, key=lambda each: each.rate):
        if not rung.within(slo):
            over = rung
            break
        held = rung
    if held is None:
        return Goodput(None, over and over.rate, None)
    if over is None:
        return Goodput(held.rate, None, held.rate)
    low, high = held.of_limits(slo), over.of_limits(slo)
    share = min((1 - low[name]) / (high[name] - low[name]) for name in high if high[name] > 1)  # 0 of an infinite one
    return Goodput(held.rate, over.rate, held.rate + share * (over.rate - held.rate))


class Ratio(Struct, frozen=True):
    """Of one goodput to another. rate: None if one of them is not known; low, high: what the brackets leave open."""

    rate: float | None
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            bounds = f"at least {self.low:.2f}" if self.low else "unknown"
            return f"{self.rate:.2f} ({bounds})" if self.rate is not None and self.low else bounds
        if self.rate is None:
            return f"at most {self.high:.2f}"
        return f"{self.rate:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(one: Goodput, other: Goodput) -> Ratio:
    rate = one.rate / other.rate if one.rate is not None and other.rate is not None else None
    low = (one.good or 0.0) / other.bad if other.bad else 0.0
    high = one.bad / other.good if one.bad and other.good else math.inf
    return Ratio(rate, low, high)


# ---- which rate is next


class Search(Struct, frozen=True):
    """Rates from lowest to highest, for these SLOs, until each one's goodput is known but for `tolerance` of it."""

    slos: tuple[Slo, ...]
    lowest: float
    highest: float
    tolerance: float

    def next_rate(self, rungs: Sequence[Rung]) -> float | None:
        """None: all is known."""
        found = [goodput(rungs, slo) for slo in self.slos]
        brackets = [(each.good or self.lowest, each.bad or self.highest) for each in found]
        wide = [(low, high) for low, high in brackets if high > low * (1 + self.tolerance)]

        def worth(rate: float) -> float:
            return sum(max(0.0, min(math.log(rate / low), math.log(high / rate))) for low, high in wide)

        middles = sorted({math.sqrt(low * high) for low, high in wide})
        return float(f"{max(middles, key=worth):.3g}") if middles else None


class Ladder(Struct, frozen=True):
    """These rates from below, until no SLO holds any more."""

    slos: tuple[Slo, ...]
    rates: tuple[float, ...]

    def next_rate(self, rungs: Sequence[Rung]) -> float | None:
        """None: all rates have been tried, or more are not needed."""
        left = sorted(set(self.rates) - {rung.rate for rung in rungs})
        if not left or (rungs and not any(rungs[-1].within(slo) for slo in self.slos)):
            return None
        return left[0]


# ---- time


class Clock(Struct, frozen=True):
    """How the time until end_s is shared. start_s, stop_s: what starting and stopping the clusters of a stage takes."""

    end_s: float
    start_s: float
    stop_s: float

    def until_s(self, now_s: float, stages: int) -> float:
        """When a stage has to stop measuring that has just started its clusters. stages: that are left, with this one."""
        others_s = (stages - 1) * self.start_s + stages * self.stop_s
        return now_s + max(0.0, self.end_s - others_s - now_s) / stages
