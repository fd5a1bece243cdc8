"""Goodput of policies on one GPU, and of a pair against mixed servers on two: `python -m bench.goodput`.

A random model of Llama-3.1-8B's shape, clusters with nothing set but what is compared, and one client program, an open loop of
Poisson arrivals with the same moments and lengths for all, at several rates each:

    on one GPU      one mixed server under `sarathi`, `vllm`, `orca`, and `sarathi` with chunks of 8192 (512 by default)
    on two GPUs     one prefill and one decode server; two mixed servers under `sarathi`

Goodput, the highest rate at which P99 TTFT and P99 ITL are within an SLO, is read off the same rungs for each `--slo`. Rates are
of each GPU. Clusters that fit beside each other on `--gpus` run at the same time, each with a client process of its own; the time
is shared by these stages, and what there is is printed when it is over. `--device cpu` with a small shape tries it on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from bench.engine import SHAPE
from bench.goodput_table import Configuration, Found, packed, report
from bench.gpu_cluster import FIRST_ID, add_shape, make_model_apart
from bench.ladder import Clock, Ladder, Rung, Search, rung_of
from disagg.bench.serve.arrivals import random_arrivals
from disagg.bench.serve.figures import Answered, Failed, Outcome
from disagg.bench.serve.goodput import Slo
from disagg.bench.serve.http import Client, Origin
from disagg.bench.serve.keep import keep, try_to_write
from disagg.bench.serve.load import Load, LoadResult, OfferedLoad, Prompts, warm_up_load
from disagg.bench.serve.target import Form, Target
from disagg.bench.serve.workload import Conversation, Lengths, Synthetic
from disagg.telemetry.process import raise_descriptor_limit
from disagg.types.errors import DisaggError
from tests.cluster.cluster import Cluster

ALONE = ("--prefill", "0", "--decode", "0", "--mixed")


def mixed(count: int, policy: str, *flags: str) -> tuple[str, ...]:
    return (*ALONE, str(count), "--policy", policy, *flags)


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration("sarathi", 1, mixed(1, "sarathi"), "a mixed server"),
        Configuration("vllm", 1, mixed(1, "vllm"), "a mixed server"),
        Configuration("orca", 1, mixed(1, "orca"), "a mixed server"),
        Configuration("sarathi-8192", 1, mixed(1, "sarathi", "--chunk-tokens", "8192"), "the same in chunks of 8192"),
        Configuration("1p1d", 2, ("--prefill", "1", "--decode", "1"), "a prefill and a decode server"),
        Configuration("2mixed", 2, mixed(2, "sarathi"), "two mixed servers"),
        # Only when they are asked for:
        Configuration("sarathi-256", 1, mixed(1, "sarathi", "--chunk-tokens", "256"), "the same in chunks of 256"),
        Configuration("2mixed-8192", 2, mixed(2, "sarathi", "--chunk-tokens", "8192"), "two, in chunks of 8192"),
        Configuration("simple_chunking", 1, mixed(1, "simple_chunking"), "a mixed server"),
        Configuration("faster_transformer", 1, mixed(1, "faster_transformer"), "a mixed server"),
    )
}
DEFAULT = ("sarathi", "vllm", "orca", "sarathi-8192", "1p1d", "2mixed")
SLOS = (
    "ttft=1s,itl=15ms",
    "ttft=1s,itl=25ms",
    "ttft=1s,itl=50ms",
    "ttft=1s,itl=100ms",
    "ttft=2s,itl=200ms",
)
MOST_REQUESTS = 8192  # of a rung
LEAST_REQUESTS = 8
WARM_UPS = 2
WARM_UP_REQUESTS = 32  # of each GPU, at once
REQUEST_S = 120.0
IDLE_S = 20.0  # for what was given up to end
START_S, STOP_S = 33.0, 10.0  # of a stage's clusters, as far as is known before; the first may compile


# ---- the client, in a process of its own


class Offer(Struct, frozen=True, kw_only=True):
    """What a client sends. inputs, outputs: lengths, drawn with `seed`, as moments are; prompts: of which tokens.

    patience_s: after the last one was sent, those that are under way still are given up.
    """

    url: str
    model: str
    vocab: int
    inputs: Lengths
    outputs: Lengths
    seed: int
    prompts: int
    rate: float
    window_s: float
    patience_s: float
    slos: tuple[Slo, ...]

    @property
    def requests(self) -> int:
        return min(MOST_REQUESTS, max(LEAST_REQUESTS, round(self.rate * self.window_s)))

    def conversations(self) -> tuple[Conversation, ...]:
        """The first ones are the same, however many there are."""
        drawn = Synthetic(MOST_REQUESTS, self.inputs, self.outputs).draw(np.random.default_rng((self.seed, 1)))
        return drawn[: self.requests]

    def load(self) -> OfferedLoad:
        rng = np.random.default_rng((self.seed, 2))
        return OfferedLoad(self.conversations(), tuple(random_arrivals(self.requests, self.rate, 1.0, rng)))


class Heard(Struct, frozen=True):
    """A rung, and of each request what there is to know."""

    rung: Rung
    outcomes: tuple[Outcome, ...]
    began_s: float


def offer(offered: Offer) -> Heard:
    """One run. It is given up when no SLO's TTFT can hold any more."""
    load, late = offered.load(), [0] * len(offered.slos)

    def heard(outcome: Outcome) -> bool:
        for number, slo in enumerate(offered.slos):
            limit_s = slo.limits_s.get("ttft", float("inf"))
            late[number] += isinstance(outcome, Failed) or outcome.ttft_s > limit_s
        return all(slo.hopeless(count, load.requests) for slo, count in zip(offered.slos, late, strict=True))

    assert load.moments_s is not None
    run = uvloop.run(_run(offered, load, heard, load.moments_s[-1] + offered.patience_s))
    return Heard(rung_of(offered.rate, run), tuple(run.outcomes), run.began_s)


def warm_up(offered: Offer, requests: int) -> str:
    """Requests at once that are not counted; what went wrong."""
    load = warm_up_load(offered.conversations(), requests)
    run = uvloop.run(_run(offered, load, lambda outcome: False, REQUEST_S))
    failed = [each for each in run.outcomes if isinstance(each, Failed)]
    return f"{len(failed)} failed: {failed[0].cause}: {failed[0].detail}" if failed else ""


async def _run(offered: Offer, load: OfferedLoad, heard: Callable[[Outcome], bool], limit_s: float) -> LoadResult:
    raise_descriptor_limit()
    client = Client(Origin(offered.url))
    try:
        form = Form(offered.model, (FIRST_ID, offered.vocab), ignore_eos=True)
        running = Load(Target(client, REQUEST_S), Prompts(form, 1.0, offered.prompts), load, heard)
        asyncio.get_running_loop().call_later(limit_s, running.stop)
        return await running.run()
    finally:
        client.close()


# ---- a cluster and its rungs


class Lane:
    """One configuration: its cluster, on GPUs of its own, and what is asked of it."""

    def __init__(self, found: Found, gpus: Sequence[str], plan: Plan, model_dir: Path, run_dir: Path) -> None:
        self.found = found
        self._plan = plan
        arguments = plan.arguments
        flags = ("--model", str(model_dir), "--dtype", arguments.dtype, *found.configuration.flags)
        sets = (f"model.device={arguments.device}", *arguments.sets)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if arguments.device == "cuda" else {}
        self.cluster = Cluster(run_dir, *flags, sets=sets, env=env)
        self._where = f"GPU {' and '.join(gpus)}" if env else "CPU"
        self._runs = 0

    @property
    def name(self) -> str:
        return self.found.configuration.name

    def start(self) -> None:
        began_s = time.perf_counter()
        try:
            self.cluster.__enter__()
        except (AssertionError, OSError, httpx.HTTPError) as error:
            self._trouble(f"it did not start: {error}")
            return
        logs = "".join(log.read_text(errors="replace") for log in self.cluster.run_dir.glob("*.log"))
        self.found.chosen = ", ".join(sorted(set(re.findall(r"engine\.[\w., =and]+(?=, chosen for)", logs))))
        self._plan.note(
            f"{self.name}: ready on {self._where} after {time.perf_counter() - began_s:.1f} s; {self.found.chosen}"
        )

    def stop(self) -> None:
        self.cluster.__exit__()

    def measure(self, client: Executor, until_s: float) -> None:
        """Rungs until that moment, or all is known."""
        if self.found.trouble:
            return
        try:
            self._measure(client, until_s)
        except (AssertionError, OSError, httpx.HTTPError, DisaggError) as error:
            self._trouble(f"{type(error).__name__}: {error}")

    def _measure(self, client: Executor, until_s: float) -> None:
        gpus = self.found.configuration.gpus
        for _ in range(WARM_UPS):
            requests = WARM_UP_REQUESTS * gpus
            wrong = client.submit(
                warm_up, self._offer(requests / self._plan.arguments.window_seconds), requests
            ).result()
            if wrong:
                self._plan.note(f"{self.name}: of {requests} requests to warm up {wrong}")
        ladder, took_s = self._plan.ladder(gpus), 0.0
        while (rate := ladder.next_rate(self.found.rungs)) is not None:
            began_s = time.monotonic()
            # One rung there is in any case that the whole time allows: the stages after this one share what is left.
            over_s = until_s if self.found.rungs else self._plan.clock.end_s - self._plan.clock.stop_s
            if began_s + max(took_s, self._plan.rung_s) > over_s:
                self._plan.note(f"{self.name}: no time for {rate:.3g}/s")
                return
            self._settle()
            heard = client.submit(offer, self._offer(rate)).result()
            took_s = time.monotonic() - began_s
            self.found.rungs.append(heard.rung)
            self._plan.heard(self.found, heard)
        self._plan.note(f"{self.name}: all is known")

    def _offer(self, rate: float) -> Offer:
        self._runs += 1
        arguments = self._plan.arguments
        return Offer(
            url=self.cluster.http,
            model=self.cluster.model,
            vocab=arguments.vocab,
            inputs=arguments.input_tokens,
            outputs=arguments.output_tokens,
            seed=arguments.seed,
            prompts=1000 * arguments.seed + self._runs,
            rate=rate,
            window_s=arguments.window_seconds,
            patience_s=arguments.patience_seconds,
            slos=self._plan.slos,
        )

    def _settle(self) -> None:
        """Nobody is asked while an answer that was given up is under way."""
        names = [server["name"] for server in self.cluster.status()["servers"]]

        def idle() -> bool:
            metrics = [self.cluster.metrics(name) for name in names]
            return not any(each[f"disagg_requests_{what}"] for each in metrics for what in ("running", "waiting"))

        self.cluster.wait(idle, IDLE_S, "an idle cluster")

    def _trouble(self, text: str) -> None:
        self.found.trouble = text.partition("\n")[0]
        self._plan.note(f"{self.name}: {text}")


class Plan:
    """What all lanes share: the arguments, what is said, and what is kept."""

    def __init__(self, arguments: argparse.Namespace, clock: Clock, note: Callable[[str], None]) -> None:
        self.arguments = arguments
        self.clock = clock
        self.note = note
        self.slos: tuple[Slo, ...] = arguments.slo
        self.found: list[Found] = []
        self.rung_s = arguments.window_seconds + arguments.drain_seconds
        self._details: dict[str, list[dict[str, object]]] = {}

    def ladder(self, gpus: int) -> Search | Ladder:
        arguments = self.arguments
        if arguments.rates:
            return Ladder(self.slos, tuple(gpus * rate for rate in arguments.rates))
        lowest, highest = arguments.between
        return Search(self.slos, gpus * lowest, gpus * highest, arguments.tolerance)

    def heard(self, found: Found, heard: Heard) -> None:
        rung, name = heard.rung, found.configuration.name
        times = ", ".join(
            f"{what.upper()} P50 {1e3 * rung.p50_s[what]:.1f} P99 {1e3 * rung.p99_s[what]:.1f} ms"
            for what in ("ttft", "itl")
        )
        over = [slo for slo in self.slos if not rung.within(slo)]
        lost = f", {rung.unfinished} given up" if rung.unfinished else ""
        lost += f", failed: {rung.failed}" if rung.failed else ""
        verdict = f"not within {len(over)} of {len(self.slos)} SLOs" if over else "within all SLOs"
        self.note(
            f"{name}: {rung.rate:.3g}/s, {rung.requests} requests{lost}: {times}; {rung.output_tokens_per_s:.0f} tokens/s; "
            f"client's loop late {1e3 * (rung.client.loop_late_s['p99'] or 0.0):.1f} ms, "
            f"{100 * rung.client.cpu_share:.0f}% of a core; {verdict}"
        )
        requests = [detail(each, heard.began_s) for each in heard.outcomes]
        self._details.setdefault(name, []).append({"rate": rung.rate, "requests": requests})
        self.keep()

    def keep(self) -> None:
        """All there is so far."""
        if self.arguments.json is None:
            return
        found = [
            {**msgspec.to_builtins(each), "details": self._details.get(each.configuration.name)} for each in self.found
        ]
        kept = {"slos": self.slos, "found": found, "report": report(self.found, self.slos)}
        keep(self.arguments.json, msgspec.json.encode(kept) + b"\n")


def detail(outcome: Outcome, began_s: float) -> dict[str, object]:
    """Of one request, in ms."""
    sent_ms = round(1e3 * (outcome.sent_s - began_s), 2)
    if not isinstance(outcome, Answered):
        return {"sent": sent_ms, "failed": f"{outcome.cause}: {outcome.detail}"}
    gaps = [round(1e3 * gap_s, 2) for gap_s in outcome.gaps_s]
    tokens = [outcome.input_tokens, outcome.output_tokens]
    return {"sent": sent_ms, "ttft": round(1e3 * outcome.ttft_s, 2), "gaps": gaps, "tokens": tokens}


# ---- all of them


def gpu_names(count: int) -> list[str]:
    """As CUDA_VISIBLE_DEVICES has them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return shown.split(",")[:count] if shown else [str(number) for number in range(count)]


@contextlib.contextmanager
def running(lanes: Sequence[Lane], threads: Executor) -> Iterator[None]:
    """All clusters start at once, and are stopped, whether they came up or not."""
    try:
        list(threads.map(Lane.start, lanes))
        yield
    finally:
        list(threads.map(Lane.stop, lanes))


@contextlib.contextmanager
def client_processes(count: int) -> Iterator[Executor]:
    """They import what they need while others get ready."""
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as clients:
        for _ in range(count):
            clients.submit(awake, 1.0)
        yield clients


def awake(seconds: float) -> None:
    time.sleep(seconds)


def measure(plan: Plan, stages: Sequence[Sequence[Configuration]], model_dir: Path, clients: Executor) -> None:
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(max(map(len, stages))) as threads:
        for number, stage in enumerate(stages):
            free = gpu_names(plan.arguments.gpus)
            lanes = []
            for each in stage:
                gpus, free = free[: each.gpus], free[each.gpus :]
                beside = tuple(other.name for other in stage if other is not each)
                found = Found(each, beside, [])
                plan.found.append(found)
                lanes.append(Lane(found, gpus, plan, model_dir, Path(directory) / each.name))
            with running(lanes, threads):
                until_s = plan.clock.until_s(time.monotonic(), len(stages) - number)
                plan.note(f"{until_s - time.monotonic():.0f} s for {', '.join(each.name for each in stage)}")
                list(threads.map(lambda lane, until_s=until_s: lane.measure(clients, until_s), lanes))
            plan.keep()


def pair_of(text: str) -> tuple[float, float]:
    low, high = map(float, text.split("-"))
    if not 0 < low < high:
        raise ValueError(text)
    return low, high


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_shape(parser, SHAPE.vocab_size)
    parser.add_argument("--gpus", type=int, default=2, help="of this machine that are used")
    parser.add_argument("--only", nargs="+", choices=tuple(CONFIGURATIONS), default=DEFAULT, metavar="CONFIGURATION")
    parser.add_argument("--minutes", type=float, default=8.5, help="of everything, with the making of the model")
    parser.add_argument(
        "--slo", nargs="+", type=lambda text: Slo.parse(text, 0.99), default=SLOS, metavar="ttft=S,itl=S"
    )
    parser.add_argument("--input-tokens", type=lambda text: Lengths.parse(text, 1 << 16), default="256-2048")
    parser.add_argument("--output-tokens", type=lambda text: Lengths.parse(text, 1 << 16), default="64-256")
    parser.add_argument(
        "--between", type=pair_of, default="1.5-24", help="requests/s of each GPU: where rates are sought"
    )
    parser.add_argument("--rates", nargs="+", type=float, help="of each GPU: these, from below, and no search")
    parser.add_argument("--tolerance", type=float, default=0.08, help="goodputs need not be known any better")
    parser.add_argument("--window-seconds", type=float, default=12.0, help="in which a rung's requests are sent")
    parser.add_argument("--drain-seconds", type=float, default=4.0, help="about how long the last answers take")
    parser.add_argument(
        "--patience-seconds", type=float, default=8.0, help="after the last one was sent, all is given up"
    )
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", type=Path, help="keep every request's times, after each rung")
    arguments = parser.parse_args(argv)
    if arguments.slo is SLOS:
        arguments.slo = [Slo.parse(text, 0.99) for text in SLOS]
    arguments.slo = tuple(arguments.slo)
    arguments.tokens = arguments.input_tokens.high + arguments.output_tokens.high  # of the model's context, at least
    return arguments


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    began_s = time.monotonic()
    arguments = parse(argv)
    if arguments.json is not None:
        try_to_write(arguments.json)

    def note(text: str) -> None:
        print(f"[{time.monotonic() - began_s:5.1f} s] {text}", flush=True)

    stages = packed((CONFIGURATIONS[name] for name in arguments.only), arguments.gpus)
    if not stages:
        note(f"nothing of that fits on {arguments.gpus} GPUs")
        return 2
    plan = Plan(arguments, Clock(began_s + 60.0 * arguments.minutes, START_S, STOP_S), note)
    note("stages: " + "; then ".join(" beside ".join(each.name for each in stage) for stage in stages))
    with tempfile.TemporaryDirectory() as directory, client_processes(max(map(len, stages))) as clients:
        model_dir = make_model_apart(arguments.model_dir or Path(directory) / "model", arguments)
        note("the model is there")
        measure(plan, stages, model_dir, clients)
    note("done")
    print(f"\n{report(plan.found, plan.slos)}", flush=True)
    return 1 if any(found.trouble or not found.rungs for found in plan.found) else 0


if __name__ == "__main__":
    sys.exit(main())
