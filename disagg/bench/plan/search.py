"""Looks for the fewest GPUs with which a trace stays within an SLO. Pure: what it tries is simulated by whoever it is given.

For each pair of TP sizes: prefill servers until first tokens alone are in time, doubling and halving; then decode servers until
all is, likewise; then a few more prefill servers, if first tokens are late nevertheless. Mixed servers in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from disagg.bench.plan.simulate import Cluster, Simulated
from disagg.bench.serve.figures import Answered, Failed, times_of
from disagg.bench.serve.goodput import TIMES, Slo

MOST_PREFILL, MOST_DECODE = 64, 256
MORE_PREFILL = 3  # servers than first tokens need by themselves


class Verdict(Struct, frozen=True):
    """Of one cluster. over: (found, limit) by name of what is not within."""

    cluster: Cluster
    result: Simulated
    over: dict[str, tuple[float, float]]

    @property
    def within(self) -> bool:
        return not self.over


Simulate = Callable[[Cluster, Slo | None], Simulated]


def judge(cluster: Cluster, result: Simulated, slo: Slo) -> Verdict:
    answered = [each for each in result.outcomes if isinstance(each, Answered)]
    over = slo.excess(times_of(answered), len(result.outcomes) - len(answered))
    if result.given_up and not over:
        over = {"ttft": (float("inf"), slo.limits_s.get("ttft", 0.0))}
    return Verdict(cluster, result, over)


class Limits(Struct, frozen=True):
    """Most servers of each pool that are tried."""

    prefill: int = MOST_PREFILL
    decode: int = MOST_DECODE


class Search:
    """simulate: says what comes of a cluster; it may end early if the SLO that it is given cannot be met."""

    def __init__(self, simulate: Simulate, slo: Slo, limits: Limits) -> None:
        self._simulate = simulate
        self._slo = slo
        self._limits = limits
        self._known: dict[Cluster, Verdict] = {}

    @property
    def tried(self) -> list[Verdict]:
        """Of whole clusters, so far."""
        return [each for cluster, each in self._known.items() if cluster.decode or cluster.mixed]

    def pools(self, prefill_tp: Sequence[int], decode_tp: Sequence[int]) -> list[Verdict]:
        return [self._pair(p, d) for p in prefill_tp for d in decode_tp]

    def mixed(self, sizes: Sequence[int]) -> list[Verdict]:
        most = self._limits.prefill + self._limits.decode
        return [self._least(lambda n, tp=tp: Cluster(mixed=n, mixed_tp=tp), most) for tp in sizes]  # type: ignore[misc]

    def _pair(self, prefill_tp: int, decode_tp: int) -> Verdict:
        def alone(prefill: int) -> Cluster:
            return Cluster(prefill, 0, 0, prefill_tp, 1)

        first = self._least(alone, self._limits.prefill)
        fewest = first.cluster.prefill
        most = min(fewest + MORE_PREFILL, self._limits.prefill) if first.within else fewest
        best: Verdict | None = None
        for prefill in range(fewest, most + 1):
            found = self._least(
                lambda n, prefill=prefill: Cluster(prefill, n, 0, prefill_tp, decode_tp),  # type: ignore[misc]
                self._limits.decode,
            )
            best = found if best is None or found.within or _excess(found) < _excess(best) else best
            if found.within or "ttft" not in found.over:
                break
        assert best is not None
        return best

    def _least(self, of: Callable[[int], Cluster], most: int) -> Verdict:
        """With the fewest servers that are within; else the one that comes nearest."""
        bad, good = 0, 1
        best = self._try(of(good))
        while not best.within and good < most:
            bad, good = good, min(2 * good, most)
            now = self._try(of(good))
            best = now if now.within or _excess(now) <= _excess(best) else best
        if not best.within:
            return best
        while good - bad > 1:
            middle = (good + bad) // 2
            now = self._try(of(middle))
            if now.within:
                best, good = now, middle
            else:
                bad = middle
        return best

    def _try(self, cluster: Cluster) -> Verdict:
        verdict = self._known.get(cluster)
        if verdict is None:
            slo = self._slo if cluster.decode or cluster.mixed else _first_tokens(self._slo)
            verdict = judge(cluster, self._simulate(cluster, slo), slo)
            if verdict.over:  # nobody asks for its requests again, of which there may be very many
                verdict = Verdict(cluster, replace(verdict.result, outcomes=[]), verdict.over)
            self._known[cluster] = verdict
        return verdict


def _first_tokens(slo: Slo) -> Slo:
    """What of it can be judged without decode servers."""
    return Slo({name: limit_s for name, limit_s in slo.limits_s.items() if name == "ttft"}, slo.share)


def _excess(verdict: Verdict) -> float:
    """How far it is from the SLO: the worst of what is over, by its limit."""
    return max((found / limit if limit else float("inf") for found, limit in verdict.over.values()), default=0.0)


def missed(verdicts: Sequence[Verdict]) -> str:
    """What no cluster that was tried has met, and the best that was reached, in words."""
    best = min(verdicts, key=_excess)
    failed = sum(isinstance(each, Failed) for each in best.result.outcomes)
    said = [f"{failed} requests do not fit the KV of a server"] if failed else []
    said += [
        f"{name} comes to {1e3 * found:.4g} ms where {1e3 * limit:.4g} ms are allowed"
        for name, (found, limit) in best.over.items()
        if name in TIMES and math.isfinite(found)
    ]
    return f"the best was {best.cluster}: {', '.join(said) or 'given up, for too many first tokens were late'}"
