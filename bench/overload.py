"""Who waits, and for how long is who has begun silent, when more comes than can be answered: `python -m bench.overload`.

A real cluster (one prefill, one decode server) with a tiny random model on this CPU and so little KV memory that about eight
answers fit at once. First its capacity is measured, by as many requests as fit, again and again. Then, with real HTTP
streams:

    overload    requests come at twice that rate, whether or not others have been answered, and each is awaited
    many        one request with n = 64 beside eight plain streams
    flood       one client's thousand requests, and another's, one after the other

The scripts need nothing of this version of disagg, so an older one can be measured beside it:
`PYTHONPATH=OTHER_CHECKOUT:. python bench/overload.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.streams import Stream, client
from bench.streams import ask as ask_stream
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

PROMPT_TOKENS = 32
GAVE_WAY = "disagg_preemptions_total"
STEPS = "disagg_engine_steps_total"
SILENT_S = 1.0  # a stream that has begun and says nothing for so long is counted as silent


async def ask(http: httpx.AsyncClient, cluster: Cluster, outputs: int, n: int = 1, key: str = "one") -> Stream:
    body: dict[str, Any] = {
        "model": cluster.model,
        "prompt": [random.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
        "max_tokens": outputs,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "n": n,
    }
    return await ask_stream(http, cluster.http, body, key)


# ---- figures


def overtaken(streams: list[Stream]) -> list[int]:
    """Of each, how many that came later ended before."""
    seen: list[float] = []
    counts = []
    for stream in sorted(streams, key=lambda each: -each.arrived_s):
        counts.append(bisect.bisect_left(seen, stream.ended_s))
        bisect.insort(seen, stream.ended_s)
    return counts


def kendall_tau(streams: list[Stream]) -> float:
    """Of the orders of arrival and of end: 1 if they are the same, 0 if they have nothing to do with each other."""
    pairs = len(streams) * (len(streams) - 1) / 2
    return 1 - 2 * sum(overtaken(streams)) / pairs if pairs else 1.0


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def most_silent(streams: list[Stream]) -> int:
    """Most streams at one time that had begun, had not ended, and had said nothing for SILENT_S."""
    changes = []
    for stream in streams:
        times = sorted(itertools.chain(*stream.heard_s.values(), (stream.ended_s,)))
        for a, b in itertools.pairwise(times):
            if b - a > SILENT_S:
                changes += [(a + SILENT_S, 1), (b, -1)]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def figures(name: str, values: list[float]) -> str:
    return (
        f"{name}: median {statistics.median(values):.3f} s, p99 {quantile(values, 0.99):.3f} s, max {max(values):.3f} s"
    )


def counted(cluster: Cluster, counter: str) -> int:
    """Of the decode server."""
    return int(sum(value for name, value in cluster.metrics("decode-0").items() if name.startswith(counter)))


# ---- loads


async def capacity(cluster: Cluster, outputs: int, at_once: int, seconds: float) -> float:
    """Requests per second, of which the first ones at either end do not count."""
    ended: list[float] = []

    async def again(http: httpx.AsyncClient, stop_s: float) -> None:
        while time.perf_counter() < stop_s:
            ended.append((await ask(http, cluster, outputs)).ended_s)

    async with client() as http:
        await asyncio.gather(*(again(http, time.perf_counter() + seconds) for _ in range(at_once)))
    ended = sorted(ended)[at_once:]
    return (len(ended) - 1) / (ended[-1] - ended[0])


async def overload(cluster: Cluster, rate: float, outputs: int, seconds: float) -> list[Stream]:
    rng = random.Random(1)
    tasks = []
    async with client() as http:
        started_s, at_s = time.perf_counter(), 0.0
        while at_s < seconds:
            await asyncio.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(http, cluster, rng.randint(outputs // 2, outputs * 3 // 2))))
            at_s += rng.expovariate(rate)
        return await asyncio.gather(*tasks)


async def many(cluster: Cluster, outputs: int) -> tuple[list[Stream], Stream]:
    """Eight plain streams, and in the middle of them one of n = 64."""
    async with client() as http:
        plain = [asyncio.create_task(ask(http, cluster, outputs * 3, key=f"p{i}")) for i in range(8)]
        await asyncio.sleep(0.5)
        crowd = asyncio.create_task(ask(http, cluster, outputs, n=64, key="many"))
        return await asyncio.gather(*plain), await crowd


async def flood(cluster: Cluster, outputs: int, requests: int, singles: int) -> list[Stream]:
    """What another client gets, one request after the other, while one client's are waiting."""
    async with client() as http:
        crowd = [asyncio.create_task(ask(http, cluster, outputs, key="flood")) for _ in range(requests)]
        await asyncio.sleep(3.0)
        alone = []
        for _ in range(singles):
            try:
                alone.append(await asyncio.wait_for(ask(http, cluster, outputs, key="another"), 40.0))
            except TimeoutError:
                alone.append(Stream(0.0, {}, 40.0, 0))
                break
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-memory", default="640KiB", help="pool of each server")
    parser.add_argument("--outputs", type=int, default=160, help="tokens of an answer, on the average")
    parser.add_argument("--seconds", type=float, default=20.0, help="of overload; what came is then awaited")
    parser.add_argument("--requests", type=int, default=1000, help="of the flood")
    parser.add_argument("--only", choices=("overload", "many", "flood"))
    arguments = parser.parse_args()
    outputs = arguments.outputs
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny("llama", Path(directory) / "llama")
        flags = ("--model", str(model), "--dtype", "float32", "--kv-memory", arguments.kv_memory)
        with Cluster(Path(directory) / "run", *flags) as cluster:
            asyncio.run(capacity(cluster, 8, 4, 1.0))  # everything is warm
            if arguments.only in (None, "overload"):
                rate = asyncio.run(capacity(cluster, outputs, 8, 8.0))
                gave_way, steps = (counted(cluster, counter) for counter in (GAVE_WAY, STEPS))
                streams = asyncio.run(overload(cluster, 2 * rate, outputs, arguments.seconds))
                answered = [stream for stream in streams if stream.status == 200]
                print(f"capacity {rate:.2f} requests/s; {len(streams)} came at twice that rate")
                print(f"  answered {len(answered)}, gave way {counted(cluster, GAVE_WAY) - gave_way} times")
                print("  " + figures("longest silence within a stream", [each.silence_s for each in answered]))
                print(f"  silent for over {SILENT_S:g} s after they had begun, at one time: {most_silent(answered)}")
                print("  " + figures("first token", [each.first_s - each.arrived_s for each in answered]))
                print("  " + figures("whole answer", [each.ended_s - each.arrived_s for each in answered]))
                print(
                    f"  overtaken by at most {max(overtaken(answered))} places, Kendall tau {kendall_tau(answered):.3f}"
                )
                took_s = max(each.ended_s for each in answered) - min(each.arrived_s for each in answered)
                steps = counted(cluster, STEPS) - steps
                tokens = sum(each.tokens for each in answered)
                print(
                    f"  {len(answered) / took_s:.2f} answers/s until the last one, {tokens / steps:.2f} tokens a step"
                )
            if arguments.only in (None, "many"):
                plain, crowd = asyncio.run(many(cluster, outputs))
                print(f"n = 64 beside eight plain streams: status {crowd.status}, {len(crowd.heard_s)} choices")
                print("  " + figures("longest silence within a plain stream", [each.silence_s for each in plain]))
                print(
                    f"  within the one of n = 64: {crowd.silence_s:.3f} s, within a choice {crowd.choice_silence_s:.3f} s"
                )
            if arguments.only in (None, "flood"):
                alone = asyncio.run(flood(cluster, 32, arguments.requests, 10))
                first = [each.first_s - each.arrived_s for each in alone]
                print(
                    f"another's requests beside {arguments.requests} of one client: {[each.status for each in alone]}"
                )
                print("  " + figures("first token", first))
                print("  " + figures("whole answer", [each.ended_s - each.arrived_s for each in alone]))


if __name__ == "__main__":
    main()
