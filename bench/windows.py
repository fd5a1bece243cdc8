"""What letting go of KV that has left its window is worth: `python -m bench.windows`.

Gemma 3 270M (15 layers with a window of 512 tokens, 3 with full attention) on this CPU, real weights, through one prefill
and one decode server. The same requests, twice, in the same fixed pool: as served, and with `engine.keep_windows` on, so
that every layer keeps every token, as a paged allocator that knows one kind of page does. The order alternates over
rounds; ratios are per round, and their median is what counts.

    at once     most requests that decoded together, and what the pool would hold by its own arithmetic
    tokens/s    output tokens, from the first request to the last token
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.compare import prompts_for
from tests.cluster.cluster import Cluster

POLL_S = 0.1


class Measured(Struct, frozen=True):
    """One run of all requests."""

    at_once: int
    tokens_per_s: float
    preemptions: float


async def _ask(client: httpx.AsyncClient, cluster: Cluster, prompt: list[int], outputs: int) -> None:
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = await client.post(f"{cluster.http}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["token_ids"]) == outputs


async def _watch(client: httpx.AsyncClient, cluster: Cluster, seen: list[int]) -> None:
    while True:
        status = (await client.get(f"{cluster.http}/status")).json()
        seen.append(next(server["running"] for server in status["servers"] if server["role"] == "decode"))
        await asyncio.sleep(POLL_S)


async def _run(cluster: Cluster, prompts: list[list[int]], outputs: int) -> tuple[int, float]:
    async with httpx.AsyncClient(timeout=1800) as client:
        seen: list[int] = []
        watcher = asyncio.create_task(_watch(client, cluster, seen))
        started = time.perf_counter()
        await asyncio.gather(*(_ask(client, cluster, prompt, outputs) for prompt in prompts))
        elapsed_s = time.perf_counter() - started
        watcher.cancel()
        return max(seen), len(prompts) * outputs / elapsed_s


def measure(keep_windows: bool, arguments: argparse.Namespace, round_no: int) -> Measured:
    prompts = prompts_for(round_no, arguments.requests, arguments.tokens, 200_000)
    sets = (f"engine.keep_windows={'on' if keep_windows else 'off'}", "engine.prefix_cache=off")
    flags = ("--model", "gemma3-270m", "--dtype", "float32", "--kv-memory", arguments.kv_memory)
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), *flags, sets=sets) as cluster:
        at_once, tokens_per_s = asyncio.run(_run(cluster, prompts, arguments.outputs))
        metrics = cluster.metrics("decode-0")
    preemptions = sum(value for name, value in metrics.items() if name.startswith("disagg_preemptions_total"))
    return Measured(at_once, tokens_per_s, preemptions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=12, help="sent at once")
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt")
    parser.add_argument("--outputs", type=int, default=600, help="tokens of each answer")
    parser.add_argument("--kv-memory", default="192MiB", help="pool of each server")
    arguments = parser.parse_args()
    console = Console()
    rounds: list[dict[bool, Measured]] = []
    for round_no in range(arguments.rounds):
        measured = {}
        for keep_windows in (True, False) if round_no % 2 == 0 else (False, True):
            what = "keeps all" if keep_windows else "lets go"
            console.print(f"round {round_no + 1} of {arguments.rounds}: {what} ...")
            measured[keep_windows] = measure(keep_windows, arguments, round_no)
            console.print(f"  {measured[keep_windows]}")
        rounds.append(measured)
    table = Table(
        title=f"{arguments.requests} requests of {arguments.tokens} + {arguments.outputs} tokens, {arguments.kv_memory}"
    )
    for heading in ("", "at once", "tokens/s", "preemptions"):
        table.add_column(heading, justify="right")
    for keep_windows, name in ((True, "window-blind"), (False, "window-aware")):
        of = [measured[keep_windows] for measured in rounds]
        table.add_row(
            name,
            str(max(m.at_once for m in of)),
            f"{statistics.median(m.tokens_per_s for m in of):.2f}",
            f"{statistics.median(m.preemptions for m in of):g}",
        )
    ratios = sorted(measured[False].tokens_per_s / measured[True].tokens_per_s for measured in rounds)
    fits = sorted(measured[False].at_once / measured[True].at_once for measured in rounds)
    table.add_row("ratio", f"{statistics.median(fits):.2f}x", f"{statistics.median(ratios):.2f}x", "")
    console.print(table)
    console.print("tokens/s ratio by round: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
