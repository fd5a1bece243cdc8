"""`disagg bench serve`: load on an endpoint, and what its clients see of it.

    options ──> what is asked (workload), when (arrivals) ──> warm-up ──> one run, or one for each rate of a search ──> report

Decides what is run; the pure parts are beside it. Ctrl-C ends a run and reports what there is.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from disagg.bench.serve.arrivals import random_arrivals, trace_arrivals
from disagg.bench.serve.figures import Answered, Failed, Outcome, duration_of, figures, times_of
from disagg.bench.serve.goodput import RateSearch, Slo
from disagg.bench.serve.http import Client, Origin
from disagg.bench.serve.keep import keep, try_to_write
from disagg.bench.serve.load import Load, LoadResult, OfferedLoad, Prompts, warm_up_load
from disagg.bench.serve.show import Progress, say_run, show_goodput, show_run
from disagg.bench.serve.target import Form, Target
from disagg.bench.serve.trace import MOST_INPUT, MOST_OUTPUT, Traced, read_trace
from disagg.bench.serve.workload import Conversation, Lengths, Synthetic, from_trace
from disagg.telemetry.process import raise_descriptor_limit
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.status import DONE, FAILED, INTERRUPTED

LOWEST_RATE = 1e-3
ALL_WITHIN_S = 0.1  # a rate at which all requests come in so little time is as good as all at once


class ServeOptions(Struct, frozen=True, kw_only=True):
    """As given. None: not said."""

    url: str
    model: str
    api_key: str
    ca: Path | None  # whose certificates are trusted; None: those that this machine trusts
    rate: float | None
    concurrency: int | None
    burstiness: float
    requests: int | None
    input_tokens: str
    output_tokens: str
    trace: Path | None
    trace_block: int
    speed: float
    prefix_tokens: int
    prefix_groups: int
    turns: int
    think_s: float
    slo: str | None
    share: float
    goodput: bool
    tolerance: float
    warmup: int
    prompts: str
    token_ids: str | None
    ignore_eos: bool
    temperature: float | None
    extra_body: str | None
    timeout_s: float
    seed: int | None
    details: bool
    json_file: Path | None
    plot_file: Path | None


DEFAULT_REQUESTS = 100


class Workload(Struct, frozen=True):
    """What is asked, the same in every run but for its tokens. moments_s: of a trace."""

    conversations: tuple[Conversation, ...]
    moments_s: tuple[float, ...] | None
    words: str

    @property
    def requests(self) -> int:
        return sum(len(each.turns) for each in self.conversations)


def run_serve_bench(options: ServeOptions, say: Callable[[str], None]) -> int:
    """The exit status. Raises ConfigError for options that cannot be, DisaggError for an endpoint that does not answer."""
    slo = _slo(options)
    seed = options.seed if options.seed is not None else secrets.randbits(32)
    workload = _workload(options, np.random.default_rng((seed, 1)))
    for file in (options.json_file, options.plot_file):
        if file is not None:
            try_to_write(file)
    raise_descriptor_limit()
    status, kept = uvloop.run(_Bench(options, workload, slo, seed, say).run())
    if options.json_file is not None and kept:
        keep(options.json_file, msgspec.json.format(msgspec.json.encode(_without_infinity(kept))) + b"\n")
        say(f"figures kept in {options.json_file}")
    return status


# ---- from options to what is asked


def _slo(options: ServeOptions) -> Slo | None:
    if options.slo is None:
        if options.goodput:
            raise ConfigError("--goodput needs --slo, such as --slo ttft=2s,itl=100ms")
        return None
    try:
        return Slo.parse(options.slo, options.share)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from error


def _workload(options: ServeOptions, rng: np.random.Generator) -> Workload:
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError("--rate and --concurrency are two kinds of load; give one of them")
    if options.goodput and options.concurrency is not None:
        raise ConfigError("--goodput looks for a rate; it goes with --rate (where to begin), not with --concurrency")
    if options.trace is not None:
        if options.turns > 1 or options.prefix_tokens:
            raise ConfigError("--trace says what prompts have in common; --turns and --prefix-tokens do not go with it")
        traced = read_trace(options.trace, options.requests, options.trace_block)
        traced = tuple(sorted(traced, key=lambda each: each.at_s or 0.0))
        return Workload(
            from_trace(traced, options.trace_block),
            _trace_moments(options, traced),
            f"{len(traced)} requests of {options.trace}",
        )
    try:
        lengths = (
            Lengths.parse(options.input_tokens, MOST_INPUT),
            Lengths.parse(options.output_tokens, MOST_OUTPUT),
        )
    except ValueError as error:
        raise ConfigError(f"--input-tokens, --output-tokens: {error}") from error
    requests = options.requests or DEFAULT_REQUESTS
    synthetic = Synthetic(requests, *lengths, options.turns, options.prefix_tokens, options.prefix_groups)
    words = f"{requests} requests of {lengths[0]} tokens in and {lengths[1]} out"
    if options.prefix_tokens:
        words += f", behind {options.prefix_groups} shared prefixes of {options.prefix_tokens}"
    if options.turns > 1:
        words += f", in conversations of {options.turns} turns"
    return Workload(synthetic.draw(rng), None, words)


def _trace_moments(options: ServeOptions, traced: tuple[Traced, ...]) -> tuple[float, ...] | None:
    if options.rate is not None or options.concurrency is not None or options.goodput:
        return None
    moments_s = [each.at_s for each in traced if each.at_s is not None]
    if not moments_s:
        raise ConfigError(
            f"{options.trace} has no timestamps: it gives lengths only, so --rate or --concurrency is needed"
        )
    return tuple(trace_arrivals(moments_s, options.speed))


def _token_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and max(len(low), len(high)) < 10 and int(low) < int(high)):
        raise ConfigError(f"--token-ids {text}: it must be a range such as 1000-30000")
    return int(low), int(high)


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--extra-body: it must be a JSON object: {error}") from error


def _without_infinity(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- running it


class _Bench:
    def __init__(
        self, options: ServeOptions, workload: Workload, slo: Slo | None, seed: int, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._workload = workload
        self._slo = slo
        self._seed = seed
        self._say = say
        self._ids = _token_range(options.token_ids)
        if self._ids is not None and options.prompts == "text":
            raise ConfigError("--token-ids says which ids prompts have; it does not go with --prompts text")
        self._wished = Form("", None, options.ignore_eos, options.temperature, _extra(options.extra_body))
        self._client = Client(Origin(options.url, options.ca), options.api_key)
        self._target = Target(self._client, options.timeout_s)
        self._ratio = 1.0
        self._form = self._wished
        self._load: Load | None = None
        self._interrupted = False
        self._runs = 0

    async def run(self) -> tuple[int, dict[str, Any]]:
        """The exit status, and what is kept."""
        loop = asyncio.get_running_loop()
        preparing = asyncio.create_task(self._prepare(), name="prepare")
        loop.add_signal_handler(signal.SIGINT, preparing.cancel)
        try:
            warm_up = await preparing
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
            found = await (self._goodput() if self._options.goodput else self._once())
        except asyncio.CancelledError:
            return INTERRUPTED, {}
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            self._client.close()
        kept = {"target": self._describe(), "warm_up": warm_up, **found}
        status = DONE if found["completed"] else FAILED
        return INTERRUPTED if self._interrupted else status, kept

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._load is not None:
            self._load.stop()

    def _describe(self) -> dict[str, Any]:
        form = self._form
        return {
            "url": self._client.origin.url,
            "model": form.model,
            "prompts": "text" if form.ids is None else f"token ids {form.ids[0]} to {form.ids[1] - 1}",
            "ignore_eos": form.ignore_eos,
            "workload": self._workload.words,
            "seed": self._seed,
        }

    async def _prepare(self) -> dict[str, Any]:
        """Which model, what it takes, and a few requests that are not counted."""
        options = self._options
        model = options.model or await self._target.model()
        wished = msgspec.structs.replace(self._wished, model=model)
        self._form, self._ratio = await self._target.form(wished, options.prompts, self._ids)
        if options.ignore_eos and not self._form.ignore_eos:
            self._say("the endpoint does not take ignore_eos: answers may be shorter than was asked for")
        prompts = "text" if self._form.ids is None else "token ids"
        self._say(f"{self._client.origin.url}, model {model}, prompts as {prompts}: {self._workload.words}")
        if not options.warmup:
            return {"requests": 0}
        offered = warm_up_load(self._workload.conversations, options.warmup)
        run = await Load(self._target, self._new_prompts(), offered).run()
        failed = [each for each in run.outcomes if isinstance(each, Failed)]
        if failed:
            first = failed[0]
            self._say(f"{len(failed)} of {offered.requests} warm-up requests failed: {first.cause}: {first.detail}")
        return {"requests": offered.requests, "failed": len(failed), "duration_s": duration_of(run.outcomes)}

    def _new_prompts(self) -> Prompts:
        """Of tokens that no run before had: what a server has cached of those is of no use."""
        self._runs += 1
        return Prompts(self._form, self._ratio, self._seed * 1000 + self._runs)

    def _offered(self, rate: float | None) -> OfferedLoad:
        options, workload = self._options, self._workload
        if options.concurrency is not None:
            return OfferedLoad(workload.conversations, None, options.concurrency, options.think_s)
        moments = workload.moments_s
        if moments is None:
            each_turns = workload.requests / len(workload.conversations)
            per_s = (rate if rate is not None else math.inf) / each_turns
            rng = np.random.default_rng((self._seed, 2))
            moments = tuple(random_arrivals(len(workload.conversations), per_s, options.burstiness, rng))
        return OfferedLoad(workload.conversations, moments, 0, options.think_s)

    async def _run(self, rate: float | None, gives_up: bool) -> LoadResult:
        """gives_up: as soon as the SLO cannot be met any more."""
        offered, slo = self._offered(rate), self._slo
        progress = Progress(offered.requests, self._say)
        late = 0

        def heard(outcome: Outcome) -> bool:
            nonlocal late
            progress.heard(outcome)
            if not gives_up or slo is None or "ttft" not in slo.limits_s:
                return False
            late += isinstance(outcome, Failed) or outcome.ttft_s > slo.limits_s["ttft"]
            return slo.hopeless(late, offered.requests)

        self._load = Load(self._target, self._new_prompts(), offered, heard, progress.sent)
        with progress:
            run = await self._load.run()
        self._load = None
        return run

    async def _once(self) -> dict[str, Any]:
        options = self._options
        run = await self._run(options.rate, gives_up=False)
        kept = self._kept(run)
        show_run(kept, self._slo)
        for line in say_run(run, kept):
            self._say(line)
        if options.plot_file is not None:
            from disagg.bench.serve.plot import plot_run

            keep(options.plot_file, plot_run(run.outcomes, self._workload.words).encode())
            self._say(f"plots in {options.plot_file}")
        return kept

    def _kept(self, run: LoadResult) -> dict[str, Any]:
        """What is reported of a run."""
        options = self._options
        answered = [each for each in run.outcomes if isinstance(each, Answered)]
        duration_s = duration_of(run.outcomes)
        client = run.client
        found = figures(run.outcomes, duration_s)
        warnings = client.warnings(found["ttft_s"]["p50"], found["itl_s"]["p50"])
        kept: dict[str, Any] = {
            "load": {
                "rate": options.rate,
                "concurrency": options.concurrency,
                "burstiness": options.burstiness,
                "trace": str(options.trace) if options.trace else None,
            },
            **found,
            "unfinished": run.unfinished,
            "client": {**msgspec.structs.asdict(client), "warnings": warnings},
        }
        if self._slo is not None:
            over = self._slo.excess(times_of(answered), found["failed"])
            good = sum(map(self._slo.good, answered))
            kept["slo"] = {
                "limits_s": self._slo.limits_s,
                "share": self._slo.share,
                "within": not over and not run.unfinished,
                "over": {name: found_s for name, (found_s, _) in over.items()},
                "good_requests": good,
                "good_requests_per_s": good / duration_s if duration_s else 0.0,
            }
        if options.details:
            kept["details"] = [_detail(each, run.began_s) for each in run.outcomes]
        return kept

    async def _goodput(self) -> dict[str, Any]:
        """A run at each rate that the search wants; the figures of the best one."""
        options, slo = self._options, self._slo
        assert slo is not None
        highest = max(1.0, self._workload.requests / ALL_WITHIN_S)
        first = options.rate if options.rate is not None and math.isfinite(options.rate) else 1.0
        search = RateSearch(min(first, highest), options.tolerance, min(first, LOWEST_RATE), highest)
        trials: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        while (rate := search.rate) is not None and not self._interrupted:
            run = await self._run(rate, gives_up=True)
            if self._interrupted:
                break
            kept = self._kept(run)
            kept["load"]["rate"] = rate
            within = bool(kept["slo"]["within"])
            trials.append(kept)
            show_goodput(kept, self._say)
            if within:
                best = kept if best is None or rate >= best["load"]["rate"] else best
            search.judged(within)
            if not within and run.peak <= 1:
                self._say("requests came one after the other: no lower rate would be within")
                break
        if not trials:
            raise DisaggError("interrupted before the first rate was measured")
        chosen = best or trials[-1]
        show_run(chosen, slo)
        goodput = {
            "requests_per_s": search.good,
            "not_within_at": search.bad,
            "trials": [{"rate": t["load"]["rate"], **{k: v for k, v in t.items() if k != "details"}} for t in trials],
        }
        upper = f"; not at {search.bad:.3g}" if search.bad else ", and no rate was too high"
        self._say(f"goodput: {search.good:.4g} requests/s{upper} ({slo})" if search.good else f"no rate meets {slo}")
        if options.plot_file is not None:
            from disagg.bench.serve.plot import plot_goodput

            keep(options.plot_file, plot_goodput(trials, slo, self._workload.words).encode())
            self._say(f"plots in {options.plot_file}")
        return {**chosen, "goodput": goodput}


def _detail(outcome: Outcome, began_s: float) -> dict[str, Any]:
    if isinstance(outcome, Failed):
        return {"sent_s": outcome.sent_s - began_s, "cause": outcome.cause, "detail": outcome.detail}
    return {
        "sent_s": outcome.sent_s - began_s,
        "late_s": outcome.late_s,
        "ttft_s": outcome.ttft_s,
        "e2e_s": outcome.e2e_s,
        "tpot_s": outcome.tpot_s,
        "itl_s": list(outcome.gaps_s),
        "input_tokens": outcome.input_tokens,
        "output_tokens": outcome.output_tokens,
    }
