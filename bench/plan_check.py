"""Whether `disagg plan` says what a real cluster then does: `python -m bench.plan_check`. Some twelve minutes on two cores.

A real cluster of one prefill and one decode server with a small random Llama on this CPU, which records what it does. In each
round

    learn     a trace of its own, from whose records step times are learned; and by how much later than the servers' own a client
              sees first tokens
    predict   `disagg plan --prefill 1 --decode 1` for another trace, before it is run
    measure   that trace, by `disagg bench serve`
    own       predict it again, by step times from the records of that very run: what is left is the simulation's own error,
              without what the machine did differently meanwhile
    goodput   with --goodput: the highest rate within the SLO, looked for by both

Errors are predicted / measured - 1, their median, and those of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_cluster import make_model
from disagg.bench.report.merge import Answer, merge
from disagg.bench.report.read import read_records
from tests.cluster.cluster import CLI, Cluster

SHAPE = {"vocab": 1024, "hidden": 256, "mlp": 512, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64}
RUN_S = 600.0
WRITTEN_S = 60.0
QUIET_S = 12.0  # more than twice what servers wait for between two files
TIMES = ("ttft_s", "itl_s")
SEEDS = 5  # of the noise that is drawn; the median counts
SHARES = ("mean", "p50", "p90", "p99")


def write_trace(path: Path, requests: int, rate: float, seed: int) -> None:
    rng, at_s = random.Random(seed), 0.0
    lines = []
    for _ in range(requests):
        at_s += rng.expovariate(rate)
        lines.append(
            {"timestamp": 1e3 * at_s, "input_length": rng.randint(64, 768), "output_length": rng.randint(16, 64)}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(*arguments: str, check: bool = True) -> str:
    done = subprocess.run((*CLI, *arguments), capture_output=True, text=True, timeout=RUN_S)
    if check and done.returncode:
        sys.exit(f"disagg {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def serve(cluster: Cluster, kept: Path, *flags: str) -> dict[str, Any]:
    command("bench", "serve", "--url", cluster.http, "--json", str(kept), "--warmup", "2", *flags)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def completed(records: Path) -> list[Answer]:
    """In order of arrival; none where a file is just being written, or there is none yet."""
    with contextlib.suppress(Exception):
        return [answer for answer in merge(read_records(records).requests.to_pylist()) if answer.completed]
    return []


def settled(records: Path) -> set[str]:
    """Names of the files of what was before, once nothing is added to them any more."""
    names = {path.name for path in records.glob("*.parquet")}
    deadline = time.monotonic() + WRITTEN_S
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        before, names = names, {path.name for path in records.glob("*.parquet")}
        if before == names:
            break
    return names


def recorded(records: Path, into: Path, old: set[str], requests: int, cluster: Cluster) -> float:
    """Copies what was recorded beside the old files once all requests are in it; the servers' own median TTFT of them."""

    def written() -> bool:
        shutil.rmtree(into, ignore_errors=True)
        with contextlib.suppress(OSError):  # of a file that is being written, and gets its name at last
            shutil.copytree(records, into, ignore=lambda _, names: old.intersection(names))
        return len(completed(into)) >= requests

    cluster.wait(written, WRITTEN_S, "the records of all requests")
    return statistics.median(a.ttft_s for a in completed(into) if a.ttft_s is not None)


def predict(trace: Path, records: Path, router_ms: float, slo: str) -> dict[str, Any]:
    """Medians over draws of the noise."""
    flags = ("--record", str(records), "--router-latency", f"{router_ms:.3f}ms", "--slo", slo, "--share", "0.9")
    plan = ("plan", "--trace", str(trace), "--prefill", "1", "--decode", "1", "--no-prefix-cache", "--json", *flags)
    drawn = [json.loads(command(*plan, "--seed", str(seed))) for seed in range(SEEDS)]
    middle = statistics.median
    out: dict[str, Any] = {t: {s: middle(each[t][s] for each in drawn) for s in SHARES} for t in TIMES}
    for name in ("good_requests_per_s", "goodput_requests_per_s"):
        out[name] = middle(each[name] or 0.0 for each in drawn)
    return out


def run_recorded(cluster: Cluster, folder: Path, name: str, trace: Path, *flags: str) -> tuple[dict[str, Any], float]:
    """(what clients saw of a trace, by how many ms later than servers say); its records are in folder/name."""
    records, requests = folder.parent / "records", len(trace.read_text().splitlines())
    old = settled(records)
    seen = serve(cluster, folder / f"{name}.json", "--trace", str(trace), *flags)
    own_s = recorded(records, folder / name, old, requests, cluster)
    return seen, max(0.0, 1e3 * (seen["ttft_s"]["p50"] - own_s))


def one_round(cluster: Cluster, folder: Path, number: int, options: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """(predicted, predicted by the run's own step times, measured) by name."""
    here = folder / str(number)
    here.mkdir()
    learned, asked = here / "learned.jsonl", here / "asked.jsonl"
    write_trace(learned, options.requests, options.rate, 2 * number)
    write_trace(asked, options.requests, options.rate, 2 * number + 1)
    seen, router_ms = run_recorded(cluster, here, "learned", learned)
    slo = options.slo or f"ttft={3e3 * seen['ttft_s']['p50']:.0f}ms,itl={3e3 * seen['itl_s']['p90']:.0f}ms"
    said = predict(asked, here / "learned", router_ms, slo)
    was, own_router_ms = run_recorded(cluster, here, "asked", asked, "--slo", slo, "--share", "0.9")
    own = predict(asked, here / "asked", own_router_ms, slo)
    out: dict[str, tuple[float, ...]] = {f"{t} {s}": (said[t][s], own[t][s], was[t][s]) for t in TIMES for s in SHARES}
    name = "good_requests_per_s"
    out["within, 1/s"] = (said[name], own[name], was["slo"][name])
    if options.goodput:
        search = ("--trace", str(asked), "--slo", slo, "--share", "0.9", "--goodput", "--rate", str(options.rate))
        best = serve(cluster, here / "goodput.json", *search)["goodput"]["requests_per_s"]
        name = "goodput_requests_per_s"
        out["goodput, 1/s"] = (said[name], own[name], best or 0.0)
    load = ", ".join(f"{each:.0f}" for each in os.getloadavg())
    print(f"round {number} ({slo}, router {router_ms:.1f} ms, load {load})", flush=True)
    for what, values in out.items():
        print(
            f"    {what}: {values[0]:.5g} predicted, {values[1]:.5g} by its own steps, {values[2]:.5g} measured",
            flush=True,
        )
    return out


def show(rounds: Sequence[dict[str, tuple[float, ...]]]) -> None:
    print("| | predicted, median | measured, median | error, median (rounds) | by the run's own step times |")
    print("|---|---:|---:|---:|---:|")
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        said, _, was = (statistics.median(each) for each in zip(*values, strict=True))
        scale, unit = (1.0, "") if name.endswith("1/s") else (1e3, " ms")
        shown = [errors_of([(each[at], each[2]) for each in values]) for at in (0, 1)]
        print(f"| {name} | {scale * said:.4g}{unit} | {scale * was:.4g}{unit} | {shown[0]} | {shown[1]} |")


def errors_of(pairs: Sequence[tuple[float, float]]) -> str:
    errors = [said / was - 1 for said, was in pairs if was]
    return f"{statistics.median(errors):+.0%} ({', '.join(f'{each:+.0%}' for each in errors)})" if errors else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--slo", help="[default: three times the medians that were seen while learning]")
    parser.add_argument("--goodput", action="store_true", help="look for the highest rate within the SLO, too")
    options = parser.parse_args()
    shape = argparse.Namespace(**SHAPE, tokens=1024, dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "small", shape, "cpu")
        flags = ("--model", str(model), "--kv-memory", "256MiB", "--max-model-len", "2048", "--prefix-cache", "off")
        with Cluster(folder / "run", *flags, "--record", str(folder / "records")) as cluster:
            serve(cluster, folder / "first.json", "--requests", "8", "--rate", "2", "--input-tokens", "64-768")
            rounds = [one_round(cluster, folder, number, options) for number in range(options.rounds)]
    show(rounds)


if __name__ == "__main__":
    main()
