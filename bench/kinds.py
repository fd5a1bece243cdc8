"""Pages by kind of layer against pages of one size, in whole servers: `python -m bench.kinds`.

Random models whose layers differ, in the shapes of served ones, and for each two mixed servers, alike but for one setting:

    by kind     each kind of layer has pages of its own: what has left a window is let go
    one size    `engine.keep_windows`: every layer keeps every token, as a pool of one kind of page does; prefixes are cached too

Their pools are as large. For each model, by one client:

    throughput  long prompts at once, with long answers: answers and tokens per second, and how many ran beside each other
    rates       an open loop at several rates: TTFT and TPOT
    prefixes    questions about documents, more and more of them: questions per second, and how much of prompts was cached

Servers that fit on `--gpus` of this machine run at the same time. `--device cpu` has small shapes, one server after the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import httpx
from msgspec import Struct, to_builtins

from bench.goodput import Offer, gpu_names, offer
from bench.gpu_cluster import FIRST_ID
from bench.kinds_models import CPU, GPU, Shape
from bench.streams import Crowd, completion
from disagg.bench.serve.goodput import Slo
from disagg.bench.serve.workload import Lengths
from tests.cluster.cluster import Cluster

ALONE = ("--prefill", "0", "--decode", "0", "--mixed", "1")
SETTINGS = {"one size": ("engine.keep_windows=on",), "by kind": ()}
PARTS = ("throughput", "rates", "prefixes")
POLL_S = 0.2
SETTLE_S = 3.0
RATE_OUTPUTS = 128  # at most, where rates are offered


# ---- what is measured


class Throughput(Struct, frozen=True):
    """Of all prompts at once. beside: the most that were in the batch together."""

    requests_per_s: float
    tokens_per_s: float
    beside: int
    gave_way: float


class Rate(Struct, frozen=True):
    """Of one rate; ms, P50 and P99."""

    rate: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    failed: int


class Prefixes(Struct, frozen=True):
    """Of so many documents."""

    documents: int
    requests_per_s: float
    cached_share: float


class Measured(Struct):
    """Of one model under one setting."""

    throughput: Throughput | None = None
    rates: list[Rate] = []
    prefixes: list[Prefixes] = []
    trouble: str = ""


class Bench:
    """One server, and what it is asked. crowd: processes of clients."""

    def __init__(
        self, cluster: Cluster, shape: Shape, parts: Sequence[str], crowd: Crowd, clients: ProcessPoolExecutor
    ) -> None:
        self._cluster = cluster
        self._parts = parts
        self._shape = shape
        self._crowd = crowd
        self._clients = clients
        self._rng = random.Random(1)  # the same for both settings

    def measure(self, measured: Measured, say: Callable[[str], None]) -> None:
        self._at_once(2, 8)  # what compiles at first
        if "throughput" in self._parts:
            measured.throughput = self._throughput()
            say(f"throughput {measured.throughput}")
        for rate in self._shape.rates if "rates" in self._parts else ():
            measured.rates.append(self._rate(rate))
            say(f"rate {measured.rates[-1]}")
        for documents in self._shape.documents if "prefixes" in self._parts else ():
            measured.prefixes.append(self._prefixes(documents))
            say(f"prefixes {measured.prefixes[-1]}")

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(FIRST_ID, self._shape.config["vocab_size"]), k=count)

    def _at_once(self, count: int, outputs: int) -> float:
        """Seconds until all are answered."""
        bodies = [completion(self._cluster.model, self._tokens(self._shape.tokens), outputs) for _ in range(count)]
        began_s = time.perf_counter()
        self._crowd.ask(self._cluster.http, bodies)
        return time.perf_counter() - began_s

    def _throughput(self) -> Throughput:
        shape, running, over = self._shape, [0], threading.Event()

        def watch() -> None:
            while not over.wait(POLL_S):
                running.append(int(self._metrics("disagg_requests_running")))

        before = self._metrics("disagg_preemptions_total")
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            took_s = self._at_once(shape.at_once, shape.outputs)
        finally:
            over.set()
            watching.join()
        gave_way = self._metrics("disagg_preemptions_total") - before
        return Throughput(shape.at_once / took_s, shape.at_once * shape.outputs / took_s, max(running), gave_way)

    def _metrics(self, name: str) -> float:
        """Of the one server, over all labels."""
        metrics = self._cluster.metrics("mixed-0")
        return sum(value for series, value in metrics.items() if series.partition("{")[0] == name)

    def _rate(self, rate: float) -> Rate:
        shape, short = self._shape, min(self._shape.outputs, RATE_OUTPUTS)
        asked = Offer(
            url=self._cluster.http,
            model=self._cluster.model,
            vocab=shape.config["vocab_size"],
            inputs=Lengths(shape.tokens // 2, shape.tokens),
            outputs=Lengths(short // 2, short),
            seed=7,
            prompts=self._rng.randrange(1 << 30),
            rate=rate,
            window_s=max(12.0, 10 / rate),
            patience_s=120.0,
            slos=(Slo.parse("ttft=600s,itl=600s", 0.99),),
        )
        rung = self._clients.submit(offer, asked).result().rung

        def ms(name: str) -> tuple[float, float]:
            return 1e3 * rung.p50_s[name], 1e3 * rung.p99_s[name]

        return Rate(rate, ms("ttft"), ms("tpot"), sum(rung.failed.values()) + rung.unfinished)

    def _prefixes(self, count: int) -> Prefixes:
        """Each document is asked about once before, so that what is measured is what stayed."""
        shape = self._shape
        documents = [self._tokens(shape.document_tokens) for _ in range(count)]
        questions = [document + self._tokens(32) for document in documents for _ in range(shape.questions)]
        self._rng.shuffle(questions)
        self._ask_in_turn([document + self._tokens(32) for document in documents])
        hits_before, queries_before = self._prefix_tokens()
        took_s = self._ask_in_turn(questions)
        hits, queries = self._prefix_tokens()
        return Prefixes(count, len(questions) / took_s, (hits - hits_before) / (queries - queries_before))

    def _prefix_tokens(self) -> tuple[float, float]:
        """Of prompts so far: that were cached, and all. What a server says of itself is a moment old."""
        time.sleep(SETTLE_S)
        return self._metrics("disagg_prefix_hit_tokens_total"), self._metrics("disagg_prefix_query_tokens_total")

    def _ask_in_turn(self, prompts: Sequence[list[int]]) -> float:
        """Four at a time."""
        bodies = [completion(self._cluster.model, prompt, 8) for prompt in prompts]
        began_s = time.perf_counter()
        for at in range(0, len(bodies), 4):
            self._crowd.ask(self._cluster.http, bodies[at : at + 4])
        return time.perf_counter() - began_s


# ---- servers


def make(directory: Path, shape: Shape, dtype: str, device: str) -> Path:
    """In a process of its own, whose memory on the device ends with it."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.models.tiny import write_tokenizer

    torch.manual_seed(0)
    config = shape.transformers_config()
    config.eos_token_id = shape.config["vocab_size"] // 2
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="100GB")
    write_tokenizer(directory, shape.config["vocab_size"])
    return directory


class Run(Struct, frozen=True):
    """One model under one setting. parts: of what is measured."""

    name: str
    shape: Shape
    setting: str
    parts: tuple[str, ...]


def run_one(
    run: Run, measured: Measured, model: Path, run_dir: Path, gpu: str | None, say: Callable[[str], None]
) -> None:
    """What has been measured is in `measured` when it is said."""
    shape = run.shape
    device = "cuda" if gpu is not None else "cpu"
    flags = ("--model", str(model), "--dtype", "bfloat16" if gpu is not None else "float32", *ALONE)
    sets = (f"model.device={device}", *SETTINGS[run.setting])
    env = {"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {}
    spawn = multiprocessing.get_context("spawn")

    def note(text: str) -> None:
        say(f"{run.name}, {run.setting}: {text}")

    try:
        with (
            Cluster(run_dir, *flags, "--kv-memory", f"{shape.pool_mib}MiB", sets=sets, env=env) as cluster,
            Crowd(4) as crowd,
            ProcessPoolExecutor(1, spawn) as clients,
        ):
            note("ready")
            Bench(cluster, shape, run.parts, crowd, clients).measure(measured, note)
    except (AssertionError, OSError, httpx.HTTPError) as error:  # the other models are measured anyway
        measured.trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
        note(measured.trouble)


def report(name: str, shape: Shape, found: dict[str, Measured]) -> str:
    out = [
        f"\n{name}: pools of {shape.pool_mib} MiB, prompts of {shape.tokens}, documents of {shape.document_tokens}\n"
    ]
    one, kind = found["one size"], found["by kind"]
    out += [f"- {setting}: {each.trouble}" for setting, each in found.items() if each.trouble]
    out += ["| | one size | by kind | ratio |", "|---|---:|---:|---:|"]
    a, b = one.throughput, kind.throughput
    if a is not None and b is not None:
        ratio = b.tokens_per_s / a.tokens_per_s
        out += [
            f"| {shape.at_once} at once: output tokens/s | {a.tokens_per_s:.1f} | {b.tokens_per_s:.1f} | {ratio:.2f} |",
            f"| running beside each other, most | {a.beside} | {b.beside} | {b.beside / max(1, a.beside):.2f} |",
            f"| gave way | {a.gave_way:g} | {b.gave_way:g} | |",
        ]
    for x, y in zip(one.rates, kind.rates, strict=False):
        for what, left, right in (("TTFT", x.ttft_ms, y.ttft_ms), ("TPOT", x.tpot_ms, y.tpot_ms)):
            said = [f"{p50:.1f} / {p99:.1f}" for p50, p99 in (left, right)]
            out.append(
                f"| {x.rate:g}/s: {what} ms, P50 / P99 | {said[0]} | {said[1]} | {right[0] / max(left[0], 1e-9):.2f} |"
            )
        if x.failed or y.failed:
            out.append(f"| {x.rate:g}/s: not answered | {x.failed} | {y.failed} | |")
    for p, q in zip(one.prefixes, kind.prefixes, strict=False):
        shares = [f"{each.requests_per_s:.2f} ({each.cached_share:.0%})" for each in (p, q)]
        out.append(
            f"| {p.documents} documents: questions/s (cached) | {shares[0]} | {shares[1]} "
            f"| {q.requests_per_s / p.requests_per_s:.2f} |"
        )
    return "\n".join(out)


def measure_model(
    name: str,
    shape: Shape,
    parts: tuple[str, ...],
    folder: Path,
    gpus: Sequence[str | None],
    say: Callable[[str], None],
    found: dict[str, Measured],
) -> None:
    """Of each setting of `found`. gpus: names of those that are used; None for the CPU. Settings share what there is in turns."""
    on_gpu = gpus[0] is not None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        made = (folder / "model", shape, "bfloat16" if on_gpu else "float32", "cuda" if on_gpu else "cpu")
        model = process.submit(make, *made).result()
    say(f"{name}: the model is there")
    with ThreadPoolExecutor(len(gpus)) as threads:
        running = [
            threads.submit(
                run_one,
                Run(name, shape, setting, parts),
                measured,
                model,
                folder / f"run{at}",
                gpus[at % len(gpus)],
                say,
            )
            for at, (setting, measured) in enumerate(found.items())
        ]
        for each in running:
            each.result()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kinds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="of this machine that are used")
    parser.add_argument(
        "--only", nargs="+", choices=(*GPU, *CPU), default=(), metavar="MODEL", help=", ".join((*GPU, *CPU))
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of what is measured")
    parser.add_argument("--json", type=Path, help="keep the figures, as soon as there are any")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    arguments = parse(argv)
    began_s, one_at_a_time = time.monotonic(), threading.Lock()
    kept: dict[str, dict[str, Measured]] = {}

    def say(text: str) -> None:
        with one_at_a_time:
            print(f"[{time.monotonic() - began_s:5.1f} s] {text}", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(to_builtins(kept)))

    on_gpu = arguments.device == "cuda"
    known = GPU if on_gpu else CPU
    gpus = gpu_names(arguments.gpus) if on_gpu else [None]
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or known:
            own = Path(folder, str(len(kept)))
            kept[name] = {setting: Measured() for setting in SETTINGS}
            measure_model(name, known[name], tuple(arguments.parts), own, gpus, say, kept[name])
            say(report(name, known[name], kept[name]))
    return 1 if any(each.trouble for found in kept.values() for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
