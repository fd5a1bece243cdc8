"""What delayed prompts gain on data-parallel ranks in lockstep, on this CPU: `python -m bench.prefill_delay_cpu`.

A real cluster of one mixed server with a tiny random model, whose data-parallel ranks share experts and so step together, without
delays and with them, in turns; many requests at once, over HTTP streams.

On few cores a step of several ranks is not as long as the longest of theirs, and tokens cost little, so what a GPU gains by
prompts in the same steps is not seen in seconds. The steps themselves are those that a GPU would take: they are recorded, and
told also by what they cost in the simulation (`bench.prefill_delay`), if prompts were SCALE times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as parquet

from bench.prefill_delay import BASE_MS, TOKEN_MS
from bench.streams import Stream, ask, client, completion
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

MAX_RUNNING = 16
SCALE = 8
DELAYED = 'disagg_prefill_delay_outcomes_total{allow="false"'


def body(cluster: Cluster, rng: random.Random, prompt: int, outputs: int) -> dict[str, object]:
    return completion(cluster.model, [rng.randrange(10, VOCAB_SIZE) for _ in range(prompt)], outputs)


async def offline(cluster: Cluster, requests: int) -> list[Stream]:
    rng = random.Random(1)
    bodies = [body(cluster, rng, rng.randint(32, 256), rng.randint(16, 96)) for _ in range(requests)]
    async with client() as http:
        return list(await asyncio.gather(*(ask(http, cluster.http, each) for each in bodies)))


def steps_of(records: Path) -> tuple[int, float, float]:
    """Steps of all ranks together, the share of them with prompts on any rank, and the seconds that they would take where each
    is as long as that of its slowest rank, by the simulation's costs.
    """
    rows = [row for path in records.glob("steps-*.parquet") for row in parquet.read_table(path).to_pylist()]
    steps: dict[int, list[dict[str, int]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    with_prompts = sum(any(row["prefill_tokens"] for row in ranks) for ranks in steps.values())
    longest = [max(SCALE * row["prefill_tokens"] + row["decode_tokens"] for row in ranks) for ranks in steps.values()]
    seconds = sum(BASE_MS + TOKEN_MS * tokens for tokens in longest) / 1000
    return len(steps), with_prompts / len(steps), seconds


def show(name: str, streams: list[Stream], counted: list[float], records: Path) -> None:
    delayed, ended, waited = counted
    seconds = max(each.ended_s for each in streams) - min(each.arrived_s for each in streams)
    ttft = sorted(each.first_s - each.arrived_s for each in streams)
    tokens = sum(each.tokens for each in streams)
    steps, with_prompts, modelled_s = steps_of(records)
    print(
        f"| {name} | {tokens / seconds:.0f} | {statistics.median(ttft):.3f} / {ttft[int(0.99 * (len(ttft) - 1))]:.3f} "
        f"| {steps} | {100 * with_prompts:.0f}% | {tokens / modelled_s:.0f} | {delayed:.0f} | {waited / max(1, ended):.1f} |",
        flush=True,
    )


def counts(cluster: Cluster) -> list[float]:
    """Passes of ranks in which prompts waited, delays that ended, and the passes of these."""
    metrics = cluster.metrics("mixed-0")
    names = (DELAYED, "disagg_prefill_delay_passes_count", "disagg_prefill_delay_passes_sum")
    return [sum(value for name, value in metrics.items() if name.startswith(each)) for each in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--dp", type=int, default=2)
    options = parser.parse_args()
    print(
        "| passes | tokens/s | TTFT s, P50 / P99 | steps | with prompts | tokens/s by the simulation's costs "
        "| passes in which prompts waited | of one delay |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("mixtral", Path(folder, "tiny"))
        for round_no in range(options.rounds):
            for passes in (0, 30):
                run, records = Path(folder, f"{round_no}-{passes}"), Path(folder, f"records-{round_no}-{passes}")
                flags = (
                    "--model",
                    str(model),
                    "--prefill",
                    "0",
                    "--decode",
                    "0",
                    "--mixed",
                    "1",
                    "--mixed-dp",
                    str(options.dp),
                )
                more = ("--policy", options.policy, "--max-model-len", "1024", "--record", str(records))
                sets = [f"engine.max_running={MAX_RUNNING}", f"engine.prefill_delay_passes={passes}"]
                with Cluster(run, *flags, *more, sets=sets) as cluster:
                    streams = asyncio.run(offline(cluster, options.requests))
                    time.sleep(0.5)  # metrics follow
                    counted = counts(cluster)
                show(str(passes), streams, counted, records)


if __name__ == "__main__":
    main()
