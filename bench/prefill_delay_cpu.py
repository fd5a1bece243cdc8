"""What delayed prompts gain and cost on one mixed server, on this CPU: `python -m bench.prefill_delay_cpu`.

A real cluster of one mixed server with a tiny random model, without delays and with them, in turns. With real HTTP streams:

    offline     many requests at once
    newcomers   a burst that began in one step is under way, and one request after another comes beside it, to free slots
    online      requests come one by one, at a share of the rate at which the cluster without delays answered offline

One rank waits for no other; so prompts wait only for as many free slots as prompts have begun at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.streams import Stream, ask, client, completion
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

MAX_RUNNING = 16
BURST = 12
DELAYED = 'disagg_prefill_delay_outcomes_total{allow="false"'


def body(cluster: Cluster, rng: random.Random, prompt: int, outputs: int) -> dict[str, object]:
    return completion(cluster.model, [rng.randrange(10, VOCAB_SIZE) for _ in range(prompt)], outputs)


async def offline(cluster: Cluster, requests: int) -> list[Stream]:
    rng = random.Random(1)
    bodies = [body(cluster, rng, rng.randint(32, 256), rng.randint(16, 96)) for _ in range(requests)]
    async with client() as http:
        return list(await asyncio.gather(*(ask(http, cluster.http, each) for each in bodies)))


async def newcomers(cluster: Cluster, number: int) -> list[Stream]:
    rng = random.Random(2)
    async with client() as http:
        bodies = [body(cluster, rng, 4, 900) for _ in range(BURST)]
        burst = [asyncio.create_task(ask(http, cluster.http, each)) for each in bodies]
        await asyncio.sleep(0.3)
        came = []
        while len(came) < number and not any(each.done() for each in burst):
            came.append(await ask(http, cluster.http, body(cluster, rng, 32, 4)))
        await asyncio.gather(*burst)
    return came


async def online(cluster: Cluster, rate: float, seconds: float) -> list[Stream]:
    rng = random.Random(3)
    tasks = []
    async with client() as http:
        started_s, at_s = time.perf_counter(), 0.0
        while at_s < seconds:
            await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            one = body(cluster, rng, rng.randint(32, 256), rng.randint(16, 96))
            tasks.append(asyncio.create_task(ask(http, cluster.http, one)))
            at_s += rng.expovariate(rate)
        return list(await asyncio.gather(*tasks))


def show(name: str, streams: list[Stream], counted: list[float]) -> None:
    steps, delayed, ended, waited = counted
    seconds = max(each.ended_s for each in streams) - min(each.arrived_s for each in streams)
    ttft = sorted(each.first_s - each.arrived_s for each in streams)
    rate = sum(each.tokens for each in streams) / seconds
    print(
        f"| {name} | {rate:.0f} | {sum(each.tokens for each in streams) / steps:.2f} "
        f"| {statistics.median(ttft):.3f} / {ttft[int(0.99 * (len(ttft) - 1))]:.3f} "
        f"| {delayed:.0f} of {steps:.0f} | {waited / max(1, ended):.1f} |",
        flush=True,
    )


def counts(cluster: Cluster) -> list[float]:
    """Steps, passes in which prompts waited, delays that ended, and the passes of these."""
    metrics = cluster.metrics("mixed-0")
    names = (
        "disagg_engine_steps_total",
        DELAYED,
        "disagg_prefill_delay_passes_count",
        "disagg_prefill_delay_passes_sum",
    )
    return [sum(value for name, value in metrics.items() if name.startswith(each)) for each in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--policy", default="sarathi")
    options = parser.parse_args()
    rate = 0.0
    print(
        "| load, passes | tokens/s | tokens a step | TTFT s, P50 / P99 | passes in which prompts waited | of one delay |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder, "tiny"))
        for round_no in range(options.rounds):
            for passes in (0, 30):
                flags = ("--model", str(model), "--prefill", "0", "--decode", "0", "--mixed", "1", "--http-port", "0")
                more = ("--grpc-port", "0", "--policy", options.policy, "--max-model-len", "1024")
                sets = [f"engine.max_running={MAX_RUNNING}", f"engine.prefill_delay_passes={passes}"]
                with Cluster(Path(folder, f"{round_no}-{passes}"), *flags, *more, sets=sets) as cluster:
                    asyncio.run(offline(cluster, 20))  # to warm up
                    time.sleep(0.5)
                    before = counts(cluster)
                    for load in ("offline", "newcomers", "online"):
                        if load == "offline":
                            streams = asyncio.run(offline(cluster, options.requests))
                            took = max(s.ended_s for s in streams) - min(s.arrived_s for s in streams)
                            rate = rate or 0.7 * options.requests / took
                        elif load == "newcomers":
                            streams = asyncio.run(newcomers(cluster, 8))
                        else:
                            streams = asyncio.run(online(cluster, rate, options.seconds))
                        time.sleep(0.5)  # metrics follow
                        now = counts(cluster)
                        show(f"{load}, {passes}", streams, [b - a for a, b in zip(before, now, strict=True)])
                        before = now


if __name__ == "__main__":
    main()
