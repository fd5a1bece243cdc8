"""What a client of a cluster on GPUs sees, with nothing set: `python -m bench.client`.

`disagg up --model DIR` with a random model of Llama-3.1-8B's shape that is made here, one prefill and one decode server (on
GPUs of their own, if there are two), and requests over HTTP:

    first tokens    of one prompt at a time
    a burst         prompts at once: until the last one's first token, against their operations at the rate of a large product
                    held as long
    decode          so many sequences at a time, of 1024 tokens in the middle of what is measured: time between tokens, beside
                    the decode server's own step (disagg_step_seconds), and the floor of bench.engine
    a newcomer      a long prompt that comes to sequences that decode: their longest silence, with it and without

Ceilings and floors are of the same run. `--device cpu` with a small shape runs the same on a CPU, to try it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from transformers import LlamaConfig

from bench.engine import SHAPE, Work, work_of
from bench.gpu_cluster import add_shape, ask, make_model, parts_of, prompt_of
from bench.streams import STREAMS_PER_PROCESS, Crowd, Stream, completion
from disagg.bench.engine.ceilings import Ceilings, measure_ceilings
from tests.cluster.cluster import Cluster

CONTEXT = 1024
LEAST_WINDOW_S = 1.0  # of steps with all sequences that are measured
STEPS = 96
# A process writes and connects all its requests before the first one leaves: 32 of 1000 tokens take it some 0.1 s.
BURST_PROCESSES = 8
SETTLED_S = 0.3  # after the last sequence has begun
LOOK_S = 0.1
PREFILL_ROWS_PER_S = 35_000  # about: how far ahead the first of many sequences is when the last one begins
NO_CEILINGS = Ceilings(float("nan"), float("nan"), float("nan"))


class Steps(Struct, frozen=True):
    """A look at the decode server. at_s: the client's clock; steps, seconds: since its start."""

    at_s: float
    steps: float
    seconds: float


class Watch:
    """Looks at the decode server's steps several times a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looks: list[Steps] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            metrics = self._cluster.metrics("decode-0")
            steps = (metrics[f"disagg_step_seconds_{what}"] for what in ("count", "sum"))
            self._looks.append(Steps(time.perf_counter(), *steps))

    def step_s(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """(seconds of a step as the worker counts them, seconds from one step to the next) between two moments."""
        within = [look for look in self._looks if begin_s <= look.at_s <= end_s]
        if len(within) < 2:
            return float("nan"), float("nan")
        first, last = within[0], within[-1]
        steps = last.steps - first.steps
        return (last.seconds - first.seconds) / steps, (last.at_s - first.at_s) / steps


class Bench:
    """One cluster, and the requests that it is given. No two prompts share a prefix."""

    def __init__(self, cluster: Cluster, crowd: Crowd, config: LlamaConfig, ceilings: Ceilings) -> None:
        self._cluster = cluster
        self._crowd = crowd
        self._config = config
        self._ceilings = ceilings
        self._number = 0

    def prompt(self, tokens: int) -> list[int]:
        self._number += 1
        return prompt_of(self._number, tokens, self._config.vocab_size)

    def _at_once(self, count: int, tokens: int, outputs: int, per_process: int = STREAMS_PER_PROCESS) -> list[Stream]:
        bodies = [completion(self._cluster.model, self.prompt(tokens), outputs) for _ in range(count)]
        return self._crowd.ask(self._cluster.http, bodies, per_process)

    def first_tokens(self, tokens: int, repeats: int) -> str:
        asked = [ask(self._cluster, self.prompt(tokens), 4) for _ in range(repeats + 1)][1:]
        floor_s = self._prefill(1, tokens).floor_s(self._ceilings, self._ceilings.sustained)
        first_s = statistics.median(each.first_token_s for each in asked)
        prefill_s = statistics.median(parts_of(each.events).prefill for each in asked)
        second_s = statistics.median(each.second_token_s - each.first_token_s for each in asked)
        landed_s, transferred_s = (
            statistics.median(getattr(parts_of(each.events), what) for each in asked)
            for what in ("landed", "transferred")
        )
        return (
            f"{tokens:7d} tokens: first token {first_s * 1e3:8.1f} ms (prefill {prefill_s * 1e3:.1f}, floor "
            f"{floor_s * 1e3:.1f} = {floor_s / first_s:.2f}), second {second_s * 1e3:.1f} ms later; after the first, the last "
            f"piece had landed by {landed_s * 1e3:.1f} ms, the transfer was over by {transferred_s * 1e3:.1f}"
        )

    def new_lengths(self, count: int) -> str:
        """What the first prompt of a length waits for beside others of that length."""
        rng = random.Random(3)
        first_s, again_s = [], []
        for tokens in [rng.randrange(1100, 8000) for _ in range(count)]:
            first_s.append(ask(self._cluster, self.prompt(tokens), 2).first_token_s)
            again_s.append(ask(self._cluster, self.prompt(tokens), 2).first_token_s)
        longer = [(a - b) * 1e3 for a, b in zip(first_s, again_s, strict=True)]
        return (
            f"prompts of {count} lengths that had not come before: first tokens {statistics.median(longer):.1f} ms later than "
            f"the second time, most {max(longer):.1f}"
        )

    def burst(self, count: int, tokens: int) -> str:
        before = self._cluster.metrics("prefill-0")
        streams = self._at_once(count, tokens, 2, per_process=-(-count // BURST_PROCESSES))
        after = self._cluster.metrics("prefill-0")
        steps, step_s = (
            after[name] - before[name] for name in ("disagg_step_seconds_count", "disagg_step_seconds_sum")
        )
        taken_s = max(stream.first_s for stream in streams) - min(stream.arrived_s for stream in streams)
        work = self._prefill(count, tokens)
        floor_s, burst_s = (
            work.floor_s(self._ceilings, rate) for rate in (self._ceilings.sustained, self._ceilings.burst)
        )
        return (
            f"{count} of {tokens} tokens at once: last first token after {taken_s * 1e3:.0f} ms; floor {floor_s * 1e3:.0f} "
            f"= {floor_s / taken_s:.2f} of a sustained product, {burst_s / taken_s:.2f} of a burst; "
            f"{steps:.0f} steps of prefill took {step_s * 1e3:.0f} ms"
        )

    def decode(self, count: int) -> str:
        """Prompts are the shorter the earlier the first of them begins to grow."""
        floor_s = self._step(count, count * CONTEXT).floor_s(self._ceilings, self._ceilings.burst)
        guessed_s = 1.3 * floor_s if floor_s > 0 else 0.01
        measured = max(STEPS, int(LEAST_WINDOW_S / guessed_s))
        tokens = CONTEXT
        for _ in range(4):
            ahead = int(count * tokens / PREFILL_ROWS_PER_S / guessed_s)
            tokens = max(16, CONTEXT - (ahead + measured) // 2)
        with Watch(self._cluster) as watch:
            streams = self._at_once(count, tokens, int(1.3 * ahead) + 2 * measured)
        begin_s = max(stream.first_s for stream in streams) + SETTLED_S
        end_s = min(stream.heard_s[0][-1] for stream in streams)
        if end_s - begin_s < LEAST_WINDOW_S / 4:
            return f"{count:5d} sequences: only {end_s - begin_s:.2f} s together; nothing is measured"
        middle_s = (begin_s + end_s) / 2
        within = sum(sum(begin_s < heard_s <= end_s for heard_s in stream.heard_s[0]) for stream in streams)
        itl_s = (end_s - begin_s) * count / within
        keys = count * tokens + sum(sum(heard_s <= middle_s for heard_s in stream.heard_s[0]) for stream in streams)
        floor_s = self._step(count, keys).floor_s(self._ceilings, self._ceilings.burst)
        step_s, period_s = watch.step_s(begin_s, end_s)
        return (
            f"{count:5d} sequences of {keys / count:.0f}: {itl_s * 1e3:.2f} ms between tokens over {end_s - begin_s:.1f} s; step "
            f"{step_s * 1e3:.2f} (ratio {itl_s / step_s:.3f}), one after the other {period_s * 1e3:.2f}; floor "
            f"{floor_s * 1e3:.2f} ({itl_s / floor_s:.2f})"
        )

    def profiled(self, count: int, directory: Path) -> str:
        """Where Python's time goes in every process while so many decode: files for flame graphs, by py-spy."""
        pids = {"up": self._cluster.process.pid}
        for server in self._cluster.status()["servers"]:
            pids[server["name"]] = server["pid"]
            pids |= {f"{server['name']}-worker{rank}": pid for rank, pid in enumerate(server["worker_pids"])}
        for line in subprocess.run(["pgrep", "-P", str(pids["up"])], capture_output=True, text=True).stdout.split():
            if int(line) not in pids.values():
                pids[f"router-{line}"] = int(line)

        def record() -> None:
            time.sleep(2.0 + count * CONTEXT / PREFILL_ROWS_PER_S)
            flags = ("--duration", "3", "--rate", "150", "--nonblocking", "--format", "raw")
            running = [
                subprocess.Popen(
                    ["py-spy", "record", *flags, "--pid", str(pid), "--output", str(directory / f"{name}.raw")]
                )
                for name, pid in pids.items()
            ]
            for process in running:
                process.wait(60)

        with ThreadPoolExecutor(1) as thread:
            recording = thread.submit(record)
            self._at_once(count, CONTEXT // 2, 500)
            recording.result()
        return f"{len(pids)} processes profiled"

    def newcomer(self, count: int, tokens: int) -> str:
        """The longest silence of those that decode, in the time of a long prompt's request and before it."""
        arrived: list[tuple[float, float]] = []

        def come() -> None:
            time.sleep(2.5)
            begin_s = time.perf_counter()
            ask(self._cluster, self.prompt(tokens), 8)
            arrived.append((begin_s, time.perf_counter()))

        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(come)
            streams = self._at_once(count, 900, 900)
            coming.result()
        ((begin_s, end_s),) = arrived
        settled_s = max(stream.first_s for stream in streams) + SETTLED_S
        if not settled_s < begin_s < end_s < min(stream.ended_s for stream in streams):
            return f"{tokens} tokens came to {count} sequences too early or too late; nothing is measured"
        calm, disturbed = _gaps(streams, settled_s, begin_s), _gaps(streams, begin_s, end_s)
        return (
            f"{tokens} tokens come to {count} sequences: longest silence of any {max(disturbed) * 1e3:.1f} ms, before it "
            f"{max(calm) * 1e3:.1f}; median of the sequences' longest {statistics.median(disturbed) * 1e3:.1f} and "
            f"{statistics.median(calm) * 1e3:.1f}"
        )

    def _step(self, count: int, keys: int) -> Work:
        return work_of(self._config, count, count, keys, keys)

    def _prefill(self, count: int, tokens: int) -> Work:
        return work_of(self._config, count * tokens, count, count * tokens, count * tokens * (tokens + 1) // 2)


def _gaps(streams: Sequence[Stream], begin_s: float, end_s: float) -> list[float]:
    """Each stream's longest silence between two moments."""
    found = []
    for stream in streams:
        times = [at_s for at_s in stream.heard_s[0] if begin_s <= at_s <= end_s]
        found.append(max((b - a for a, b in itertools.pairwise(times)), default=0.0))
    return found


def prepare(model_dir: Path, arguments: argparse.Namespace) -> Ceilings:
    """In a process of its own, whose memory on the GPU ends with it."""
    make_model(model_dir, arguments, arguments.device)
    return measure_ceilings() if arguments.device == "cuda" else NO_CEILINGS


def measure(bench: Bench, arguments: argparse.Namespace, note: Callable[[str], None]) -> None:
    for tokens in arguments.prompts:
        note(bench.first_tokens(tokens, arguments.repeats))
    if arguments.lengths:
        note(bench.new_lengths(arguments.lengths))
    for _ in range(arguments.bursts):
        note(bench.burst(arguments.burst, 1000))
    for count in arguments.sequences:
        note(bench.decode(count))
    if arguments.newcomer:
        note(bench.newcomer(32, arguments.newcomer))
    if arguments.profile is not None:
        note(bench.profiled(max(arguments.sequences), arguments.profile))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.client", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_shape(parser, SHAPE.vocab_size)
    parser.add_argument("--tokens", type=int, default=16384, help="half of what a sequence may have")
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length")
    parser.add_argument("--lengths", type=int, default=6, help="prompts of lengths that have not come before; 0: none")
    parser.add_argument("--burst", type=int, default=32, help="prompts of 1000 tokens at once")
    parser.add_argument("--bursts", type=int, default=2, help="one after the other")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 32, 128, 256])
    parser.add_argument(
        "--newcomer", type=int, default=8192, help="tokens of a prompt that comes to 32 sequences; 0: none"
    )
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument(
        "--profile", type=Path, help="at last, py-spy of all processes with most sequences, in that folder"
    )
    parser.add_argument("--keep-logs", type=Path, help="copy the run's logs there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    arguments = parse(argv)
    started_s = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - started_s:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        run_dir, model_dir = Path(directory) / "run", arguments.model_dir or Path(directory) / "model"
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            ceilings = process.submit(prepare, model_dir, arguments).result()
        note(f"model made; {ceilings.describe()}")
        config = LlamaConfig.from_pretrained(model_dir)
        sets = (f"model.device={arguments.device}", *arguments.sets)
        with Cluster(run_dir, "--model", str(model_dir), "--dtype", arguments.dtype, sets=sets) as cluster:
            note("the cluster is ready")
            for line in said_at_start(cluster):
                note(line)
            processes = max(BURST_PROCESSES, -(-max([1, *arguments.sequences]) // STREAMS_PER_PROCESS))
            try:
                with Crowd(processes) as crowd:
                    measure(Bench(cluster, crowd, config, ceilings), arguments, note)
            finally:
                if arguments.keep_logs is not None:
                    for log in cluster.run_dir.glob("*.log"):
                        (arguments.keep_logs / log.name).write_bytes(log.read_bytes()[-(4 << 20) :])
        note("the cluster has ended")


def said_at_start(cluster: Cluster) -> list[str]:
    """Of the servers: where they are, what they chose, and how much memory they have."""
    lines = [line for line in cluster.output().splitlines() if " on GPU" in line]
    for name in ("prefill-0", "decode-0"):
        text = (cluster.run_dir / f"{name}.log").read_text().splitlines()
        lines += [
            f"{name}: {line}" for line in text if "KV memory: " in line or "chosen: " in line or "captured" in line
        ]
    return lines


if __name__ == "__main__":
    main()
