"""What routing by caches spares, on this CPU: `python -m bench.routing`. Four minutes on two cores.

A real cluster of four prefill and two decode servers with a small random Llama, and routers of their own for each policy over
these same servers, in turns. Conversations of several turns, each about a document of its own behind one of four system prompts:

    prompt of turn n    system prompt, document, all that was said, a new question

All conversations are held at once, under a cache salt of their round, so that no round finds what another left. Counted are the
tokens of prompts that servers computed, decode servers those that they compute themselves, and the client's time to the first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from msgspec import Struct

from bench.gpu_cluster import FIRST_ID, make_model
from bench.streams import client, completion, lines
from tests.cluster.cluster import Cluster

PREFILL, DECODE = 4, 2
SYSTEMS, SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS, OUTPUTS = 4, 192, 512, 24, 16
BEGIN_S = 5.0  # within which conversations begin
PAUSE_S = 1.0  # between an answer and the next question
START_S = 60.0
SHAPE = {"vocab": 1024, "hidden": 256, "mlp": 512, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64}


class Turn(Struct, frozen=True):
    """One question and its answer. number: which turn it is, from 0."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    token_ids: tuple[int, ...]


async def ask(http: httpx.AsyncClient, url: str, number: int, body: dict[str, object]) -> Turn:
    """Raises AssertionError unless it is answered in full."""
    asked_s, first_s, cached = time.perf_counter(), 0.0, 0
    token_ids: list[int] = []
    async with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200, f"{reply.status_code}: {(await reply.aread()).decode()}"
        async for line in lines(reply):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
            first_s = first_s or (time.perf_counter() - asked_s if new else 0.0)
            token_ids += new
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert len(token_ids) == OUTPUTS, f"{len(token_ids)} of {OUTPUTS} tokens came: {event}"
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    return Turn(number, len(prompt), cached, first_s, tuple(token_ids))


async def converse(
    http: httpx.AsyncClient, urls: Sequence[str], model: str, number: int, turns: int, salt: str
) -> list[Turn]:
    """One conversation. Its turns go to the routers in turn."""
    rng = random.Random(f"{salt} {number}")
    system = random.Random(f"system {number % SYSTEMS}")
    said = [system.randrange(FIRST_ID, SHAPE["vocab"]) for _ in range(SYSTEM_TOKENS)]
    said += [rng.randrange(FIRST_ID, SHAPE["vocab"]) for _ in range(DOCUMENT_TOKENS)]
    held = []
    await asyncio.sleep(rng.uniform(0, BEGIN_S))
    for turn in range(turns):
        said += [rng.randrange(FIRST_ID, SHAPE["vocab"]) for _ in range(QUESTION_TOKENS)]
        body = {
            **completion(model, said, OUTPUTS),
            "cache_salt": salt,
            "stream_options": {"include_usage": True},
        }
        held.append(await ask(http, urls[(number + turn) % len(urls)], turn, body))
        said += held[-1].token_ids
        await asyncio.sleep(PAUSE_S)
    return held


async def round_of(urls: Sequence[str], model: str, conversations: int, turns: int, salt: str) -> list[Turn]:
    async with client() as http:
        talks = [converse(http, urls, model, number, turns, salt) for number in range(conversations)]
        return [turn for held in await asyncio.gather(*talks) for turn in held]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.contextmanager
def router(cluster: Cluster, name: str, policy: str) -> Iterator[str]:
    """The URL of one more router over the cluster's servers."""
    port = free_port()
    file = next(cluster.run_dir.glob("router*.toml"))
    changes = {"NAME": name, "POLICY": policy, "HTTP_PORT": str(port), "GRPC_PORT": "0"}
    env = {**os.environ, **{f"DISAGG__ROUTER__{key}": value for key, value in changes.items()}}
    command = (sys.executable, "-m", "disagg.cli", "router", "--config", str(file))
    with (cluster.run_dir / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        cluster.wait(lambda: _all_ready(url), START_S, f"router {name}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _all_ready(url: str) -> bool:
    try:
        servers = httpx.get(f"{url}/status", timeout=5).json()["servers"]
    except httpx.TransportError:
        return False
    return len(servers) == PREFILL + DECODE and all(server["state"] == "ready" for server in servers)


def computed(cluster: Cluster) -> list[float]:
    """Prompt tokens that each server has computed, prefill servers first."""
    names = [f"{role}-{n}" for role, count in (("prefill", PREFILL), ("decode", DECODE)) for n in range(count)]
    return [cluster.metrics(name)["disagg_prefill_tokens_total"] for name in names]


def settled(cluster: Cluster) -> list[float]:
    """`computed`, once it stays as it is for a while: metrics follow."""
    seen = computed(cluster)
    while True:
        time.sleep(1.2)
        now = computed(cluster)
        if now == seen:
            return now
        seen = now


def show(name: str, turns: Sequence[Turn], shares: Sequence[float]) -> None:
    def ttft(some: Sequence[Turn]) -> str:
        times = sorted(turn.first_s for turn in some)
        return f"{statistics.median(times):.3f} / {times[int(0.95 * (len(times) - 1))]:.3f}"

    asked = sum(turn.prompt_tokens for turn in turns)
    by_prefill, by_decode = shares[:PREFILL], shares[PREFILL:]
    print(
        f"| {name} | {asked} | {sum(shares):.0f} ({sum(shares) / asked:.0%}) | {sum(by_decode):.0f} "
        f"| {max(by_prefill) / (sum(by_prefill) / PREFILL):.2f} "
        f"| {ttft([t for t in turns if not t.number])} | {ttft([t for t in turns if t.number])} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--heartbeat-s", type=float, default=1.0, help="how old what routers know of load may be")
    options = parser.parse_args()
    shape = argparse.Namespace(**SHAPE, tokens=1024, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "small"), shape, "cpu")
        flags = ("--model", str(model), "--prefill", str(PREFILL), "--decode", str(DECODE), "--kv-memory", "256MiB")
        with contextlib.ExitStack() as stack:
            sets = (f"router.heartbeat_s={options.heartbeat_s}", f"router.lease_s={10 * options.heartbeat_s}")
            cluster = stack.enter_context(Cluster(Path(folder, "run"), *flags, "--max-model-len", "2048", sets=sets))
            urls = {
                name: stack.enter_context(router(cluster, name, policy))
                for name, policy in (("turns", "round_robin"), ("load", "least_loaded"))
            }
            urls |= {name: stack.enter_context(router(cluster, name, "kv_aware")) for name in ("kv", "other-kv")}
            cases = {
                "`round_robin`": (urls["turns"],),
                "`least_loaded`": (urls["load"],),
                "`kv_aware`": (urls["kv"],),
                "`kv_aware`, two routers": (urls["kv"], urls["other-kv"]),
            }
            asyncio.run(round_of(cases["`round_robin`"], cluster.model, 4, 2, "warm-up"))
            print(
                "| policy | tokens of prompts | computed | of these by decode servers | most of one prefill server / mean "
                "| TTFT s of first turns, P50 / P95 | later |"
            )
            print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
            before = settled(cluster)
            for number in range(options.rounds):
                for name, routers in cases.items():
                    turns = asyncio.run(
                        round_of(routers, cluster.model, options.conversations, options.turns, f"{number} {name}")
                    )
                    now = settled(cluster)
                    show(name, turns, [b - a for a, b in zip(before, now, strict=True)])
                    before = now


if __name__ == "__main__":
    main()
