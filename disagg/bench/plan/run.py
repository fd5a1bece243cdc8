"""`disagg plan`: from a trace, an SLO and measured step times to how many servers there should be. `search` decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from disagg.bench.plan.cluster import Asked
from disagg.bench.plan.costs import (
    DOCUMENTED,
    Handoff,
    Measured,
    given,
    mixed_facts,
    parse_step,
    parse_time,
    with_limits,
)
from disagg.bench.plan.live import running
from disagg.bench.plan.report import RouterRates, alternative, best_of, costs_of, figures_of, overheads, servers_of
from disagg.bench.plan.search import Limits, Search, Verdict, judge, missed
from disagg.bench.plan.show import Progress, show_plan
from disagg.bench.plan.simulate import Cluster, Simulated, Simulation
from disagg.bench.serve.arrivals import random_arrivals, trace_arrivals
from disagg.bench.serve.goodput import RateSearch, Slo
from disagg.bench.serve.keep import keep, try_to_write
from disagg.bench.serve.trace import read_trace
from disagg.types.errors import ConfigError, DisaggError

MOST_OUTPUT_TOKENS = 20_000_000  # of all requests: a number is kept for each
MOST_SPEED = 1e4  # of the trace; what is within the SLO there is so at any speed
GOODPUT_TOLERANCE = 0.02
GOODPUT_TRIALS = 24
FAR_BEYOND = 1.5  # times the sequences of the largest measured step: beyond it times are the line's, and nobody's
Say = Callable[[str], None]


class NoPlan(DisaggError):
    """None that can be recommended. kept: what is known nevertheless, as `--json` prints it."""

    def __init__(self, message: str, kept: dict[str, Any]) -> None:
        super().__init__(message)
        self.kept = kept


class TimeUp(DisaggError):
    """--limit ran out."""


class PlanOptions(Struct, frozen=True):
    """As the command line gives them."""

    trace: Path
    slo: str
    share: float = 0.99
    records: Path | None = None
    prefill_steps: tuple[str, ...] = ()
    decode_steps: tuple[str, ...] = ()
    chunk_tokens: int | None = None
    kv_tokens: int | None = None
    max_running: int | None = None
    handoff: str | None = None
    router: str | None = None
    router_requests: float = 400.0
    router_tokens: float = 15_000.0
    requests: int | None = None
    trace_block: int = 512
    speed: float = 1.0
    rate: float | None = None
    caches: bool = True
    prefill: int | None = None
    decode: int | None = None
    mixed: int | None = None
    most_prefill: int = 64
    most_decode: int = 256
    seed: int = 1
    limit_s: float = 600.0
    as_json: bool = False
    plot_file: Path | None = None
    status: tuple[str, Any] | None = None  # a router's URL, and what its /status says


def run_plan(options: PlanOptions, say: Say, result: Say) -> int:
    """The exit status. Raises ConfigError; NoPlan if no cluster that was tried is within the SLO, which is printed before as
    JSON where that is wanted; DisaggError."""
    if options.plot_file is not None:
        try_to_write(options.plot_file)
    try:
        slo = Slo.parse(options.slo, options.share)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from error
    measured = _measured(options)
    asked = _asked(options)
    if measured.assumed:
        say(
            f"WARNING: no step times of yours were given (--record DIR, --http URL, or --prefill-step and --decode-step): "
            f"these are {measured.source}, which says nothing of another model or machine"
        )
    if len(asked) < slo.least_requests:
        say(
            f"WARNING: the trace has {len(asked)} requests; with fewer than {slo.least_requests} neither what "
            f"{100 * slo.share:g}% of them get nor goodput says much"
        )
    planner = _Planner(options, slo, measured, asked, say)
    try:
        with planner.progress:
            kept = planner.fixed() if _is_fixed(options) else planner.searched()
    except NoPlan as none:
        if options.as_json:
            result(msgspec.json.format(msgspec.json.encode(none.kept)).decode())
        raise
    planner.warn_of_larger_steps()
    if not kept["complete"]:
        say(f"WARNING: {planner.time_up}. This is the best so far: fewer servers may do, and goodput may be higher")
    if options.plot_file is not None:
        from disagg.bench.plan.plot import plot_plan

        keep(options.plot_file, plot_plan(kept, planner.chosen.outcomes, slo).encode())
        say(f"plots in {options.plot_file}")
    if options.as_json:
        result(msgspec.json.format(msgspec.json.encode(kept)).decode())
    else:
        show_plan(kept, slo)
    return 0


def _is_fixed(options: PlanOptions) -> bool:
    return any(each is not None for each in (options.prefill, options.decode, options.mixed))


# ---- what is given


def _measured(options: PlanOptions) -> Measured:
    by_hand = bool(options.prefill_steps or options.decode_steps)
    if options.records is not None and by_hand:
        raise ConfigError("--record and --prefill-step, --decode-step are two sources of step times; give one of them")
    if options.status is not None and (by_hand or options.records is not None):
        raise ConfigError(
            "--http is a source of step times like --record, --prefill-step and --decode-step; give one of them"
        )
    if options.status is not None:
        measured = running(options.status[1], options.status[0])
    elif options.records is not None:
        from disagg.bench.plan.learn import learn

        measured = learn(options.records)
    elif by_hand:
        measured = given(_steps("--prefill-step", options.prefill_steps), _steps("--decode-step", options.decode_steps))
    else:
        measured = DOCUMENTED
    limits = {
        name: value
        for name in ("chunk_tokens", "kv_tokens", "max_running")
        if (value := getattr(options, name)) is not None
    }
    router_s = None if options.router is None else _time("--router-latency", options.router)
    handoff = None if options.handoff is None else Handoff(_time("--handoff", options.handoff))
    return with_limits(measured, limits, router_s, handoff)


def _steps(flag: str, texts: tuple[str, ...]) -> list[Any]:
    if not texts:
        raise ConfigError(
            f"{flag} is missing: step times of both phases are needed, such as {flag} fixed=4ms,token=15us"
        )
    found: dict[int, Any] = {}
    for text in texts:
        try:
            tp, cost = parse_step(text)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from error
        if tp in found:
            raise ConfigError(f"{flag}: tp={tp} is given twice")
        found[tp] = cost
    return sorted(found.items())


def _time(flag: str, text: str) -> float:
    try:
        return parse_time(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _asked(options: PlanOptions) -> tuple[Asked, ...]:
    traced = read_trace(options.trace, options.requests, options.trace_block)
    tokens = sum(each.output_tokens for each in traced)
    if tokens > MOST_OUTPUT_TOKENS:
        raise ConfigError(
            f"{options.trace}: its answers have {tokens} tokens, and {MOST_OUTPUT_TOKENS} are simulated at most: "
            "--requests takes its first ones"
        )
    traced = tuple(sorted(traced, key=lambda each: each.at_s or 0.0))
    if options.rate is not None:
        moments_s = random_arrivals(len(traced), options.rate, 1.0, np.random.default_rng((options.seed, 2)))
    elif traced[0].at_s is None:
        raise ConfigError(f"{options.trace} has no timestamps: it gives lengths only, so --rate is needed")
    else:
        moments_s = trace_arrivals([each.at_s or 0.0 for each in traced], options.speed)
    return tuple(
        Asked(number, at_s, each.input_tokens, each.output_tokens, each.hash_ids)
        for number, (at_s, each) in enumerate(zip(moments_s, traced, strict=True))
    )


# ---- what is done with it


class _Planner:
    def __init__(self, options: PlanOptions, slo: Slo, measured: Measured, asked: tuple[Asked, ...], say: Say) -> None:
        self._options, self._slo, self._measured, self._asked = options, slo, measured, asked
        self._say, self.progress = say, Progress(len(asked), say)
        self._until_s = time.monotonic() + options.limit_s
        self.chosen = Simulated([], 0.0, {})
        self.time_up: TimeUp | None = None
        self._most_decoding = 0  # in one step of what is reported
        self._largest_measured = 0
        span_s = asked[-1].at_s - asked[0].at_s
        self._rate = (len(asked) - 1) / span_s if span_s > 0 else math.inf

    def _simulate(self, cluster: Cluster, slo: Slo | None, speed: float = 1.0) -> Simulated:
        """speed: the trace's requests come so many times as fast."""
        options = self._options
        self.progress.begins(str(cluster))
        self._check_time()
        asked = self._asked
        if speed != 1.0:
            asked = tuple(msgspec.structs.replace(each, at_s=each.at_s / speed) for each in asked)
        simulation = Simulation(cluster, self._measured, options.trace_block, options.caches, options.seed)
        return simulation.run(asked, slo, self._watch)

    def _watch(self, ended: int) -> None:
        self.progress.ended(ended)
        self._check_time()

    def _check_time(self) -> None:
        """Raises TimeUp."""
        if time.monotonic() > self._until_s:
            self.time_up = TimeUp(
                f"the simulation was not done after {self._options.limit_s:g} s: --requests takes fewer of the trace, "
                "and --limit gives it longer"
            )
            raise self.time_up

    def fixed(self) -> dict[str, Any]:
        """What the cluster that was named would do."""
        options, measured = self._options, self._measured
        if options.mixed is not None and (options.prefill is not None or options.decode is not None):
            raise ConfigError("--mixed is simulated alone: it does not go with --prefill and --decode")
        if options.mixed is not None:
            sizes = mixed_facts(measured)
            if not sizes:
                raise ConfigError(f"{measured.source} has no step times from which those of a mixed server follow")
            cluster = Cluster(mixed=options.mixed, mixed_tp=min(sizes))
        else:
            if options.prefill is None or options.decode is None:
                raise ConfigError("--prefill and --decode go together")
            self._need_pools()
            cluster = Cluster(options.prefill, options.decode, 0, min(measured.prefill), min(measured.decode))
        try:
            verdict = judge(cluster, self._simulate(cluster, None), self._slo)
        except TimeUp as error:
            raise NoPlan(str(error), {**self._given(), **servers_of(cluster), "within": None}) from error
        kept = self._kept(verdict)
        kept["within"] = verdict.within
        return {**kept, "over": {name: found for name, (found, _) in verdict.over.items()}}

    def _need_pools(self) -> None:
        if not (self._measured.prefill and self._measured.decode):
            raise ConfigError(f"{self._measured.source} has step times of mixed servers only: give --mixed N")

    def searched(self) -> dict[str, Any]:
        options, measured, slo = self._options, self._measured, self._slo
        search = Search(self._simulate, slo, Limits(options.most_prefill, options.most_decode))
        try:
            pools = search.pools(sorted(measured.prefill), sorted(measured.decode))
            mixed = search.mixed(list(mixed_facts(measured)))
        except TimeUp:
            found = [
                best_of([each for each in search.tried if bool(each.cluster.mixed) is kind]) for kind in (False, True)
            ]
            pools, mixed = ([] if each is None else [each] for each in found)
        best_pools, best_mixed = best_of(pools), best_of(mixed)
        best = best_of([*pools, *mixed])
        if best is None:
            raise self._none([*pools, *mixed] or search.tried)
        kept = self._kept(best_pools or best)
        kept["recommended"] = "mixed" if best.cluster.mixed else "pools"
        kept["mixed"] = None if best_mixed is None else alternative(best_mixed, slo)
        kept["alternatives"] = [alternative(each, slo) for each in (*pools, *mixed) if each is not best_pools]
        return {**kept, "within": (best_pools or best).within, "over": {}}

    def _none(self, verdicts: list[Verdict]) -> NoPlan:
        """What is said when nothing is within. What was given up early is simulated to its end, if there is time."""
        why, whole = "", [each for each in verdicts if each.cluster.decode or each.cluster.mixed]
        try:
            if self.time_up is None:
                whole = [judge(each.cluster, self._simulate(each.cluster, None), self._slo) for each in whole]
        except TimeUp:
            pass  # what is known of them stays
        if self.time_up is not None:
            why = f"{self.time_up}. "
        nearest = [alternative(each, self._slo) for each in whole]
        best = missed(whole) if whole else "not one was simulated to its end"
        words = f"{why}No cluster that was tried is within {self._slo}: {best}"
        return NoPlan(
            words[0].lower() + words[1:], {**self._given(), "within": False if whole else None, "tried": nearest}
        )

    def _given(self) -> dict[str, Any]:
        """What every report says."""
        return {
            "slo": {"limits_s": self._slo.limits_s, "share": self._slo.share},
            "complete": self.time_up is None,
            "trace": {
                "requests": len(self._asked),
                "enough_requests": len(self._asked) >= self._slo.least_requests,
                "requests_per_s": self._rate if math.isfinite(self._rate) else None,
                "input_tokens": sum(each.input_tokens for each in self._asked),
                "output_tokens": sum(each.output_tokens for each in self._asked),
            },
            "times": costs_of(self._measured),
        }

    def _kept(self, verdict: Verdict) -> dict[str, Any]:
        """What is reported of the one that was chosen."""
        options, cluster = self._options, verdict.cluster
        self.chosen = verdict.result
        measured = self._measured
        pool = mixed_facts(measured)[cluster.mixed_tp].decode if cluster.mixed else measured.decode[cluster.decode_tp]
        self._largest_measured = pool.cost.most_decoding
        self._note_most(verdict)
        found = figures_of(cluster, verdict.result, self._slo)
        rates = RouterRates(options.router_requests, options.router_tokens)
        largest = Cluster(64, 256, 0)
        scale = max(1.0, largest.prefill / max(1, cluster.prefill))
        rate, tokens = found["requests_per_s"], found["output_tokens_per_s"]
        return {
            "prefill": 0,
            "decode": 0,
            "prefill_tp": cluster.prefill_tp,
            "decode_tp": cluster.decode_tp,
            **found,
            "goodput_requests_per_s": self._goodput(cluster),
            "overheads": {
                "chosen": overheads(cluster, rate, tokens, rates),
                "64x256": {"scale": scale, **overheads(largest, scale * rate, scale * tokens, rates)},
                "router_requests_per_s": rates.requests_per_s,
                "router_tokens_per_s": rates.tokens_per_s,
            },
            "servers": servers_of(cluster),
            **self._given(),  # goodput first: --limit may run out meanwhile
        }

    def _note_most(self, verdict: Verdict) -> None:
        self._most_decoding = max(self._most_decoding, *(use.most_decoding for use in verdict.result.pools.values()))

    def warn_of_larger_steps(self) -> None:
        """Where much larger steps were simulated than were measured."""
        most, known = self._most_decoding, self._largest_measured
        if known and most > FAR_BEYOND * known:
            self._say(
                f"WARNING: the largest step that was measured had {known} sequence{'s' * (known > 1)}, and up to {most} are "
                "simulated in one (of the goodput, too): what such steps take is a guess. Record under a load like the one that "
                "is planned for"
            )

    def _goodput(self, cluster: Cluster) -> float | None:
        """The highest rate at which the trace's requests are within the SLO, coming in the same pattern; None of a trace whose
        requests all come at once, or would all be within the SLO if they did, or where no rate is."""
        if not math.isfinite(self._rate):
            return None
        search = RateSearch(1.0, GOODPUT_TOLERANCE, 1e-3, MOST_SPEED)
        while (speed := search.rate) is not None and search.trials < GOODPUT_TRIALS:
            try:
                verdict = judge(cluster, self._simulate(cluster, self._slo, speed), self._slo)
            except TimeUp:
                break
            search.judged(verdict.within)
            if verdict.within:
                self._note_most(verdict)
        if search.good == MOST_SPEED:
            self._say(
                "WARNING: all requests of the trace at once are within the SLO, so it is too short to tell the goodput"
            )
            return None
        return None if search.good is None else search.good * self._rate
