"""Clusters that keep what talks say in storage, and what an operator sees of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.cluster.cluster import CLI, Cluster
from tests.cluster.talks import Heard, Talk, hold

PAGE = 16
POOL_PAGES = 64  # 768 KiB, of which one takes 12 KiB
SERVERS = ("prefill-0", "decode-0")
CLEAR_S = 120.0  # trials are 30 s apart at most
PUBLISHED = "disagg_store_published_pages_total"
READ = 'disagg_tier_bytes_total{direction="in",tier="storage"}'
FAILURES = "disagg_store_failures_total"
MISSES = "disagg_store_misses_total"


def flags(model: Path, url: str, **options: Any) -> tuple[str, ...]:
    """Pools that hold little more than the talks, so that what was said before comes from storage, always."""
    sizes = ("--kv-memory", "768KiB", "--host-memory", "768KiB", "--page-tokens", str(PAGE))
    always = ("--set", "offload.load=always", "--set", "engine.local_prefill_tokens=0")
    stored = ("--offload", "on", "--storage", url, "--set", "offload.stride_tokens=32", *always, *sets_of(options))
    return ("--model", str(model), "--dtype", "float32", *sizes, *stored)


def sets_of(options: dict[str, Any]) -> list[str]:
    """Flags for options of the store."""
    said = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return [word for name, value in said.items() for word in ("--set", f"storage.options.{name}={value}")]


def pages_of(talks: list[Talk]) -> int:
    """That are stored of them, of one group: what is whole, but for the last token of an answer, which has no KV."""
    return sum((len(talk[-1].prompt) + len(talk[-1].outputs) - 1) // PAGE for talk in talks)


def remember(cluster: Cluster, talks: list[Talk], salts: list[str]) -> list[Heard]:
    """Stores what is said in the last turns, under each salt, to the last page."""
    cluster.wait_offloaded()  # what others said before is stored now, or will not be
    before = cluster.metrics("decode-0").get(PUBLISHED, 0)
    heard = [heard for salt in salts for heard in hold(cluster, [talk[-1:] for talk in talks], salt)]
    wanted = before + len(salts) * pages_of(talks)
    cluster.wait(lambda: cluster.metrics("decode-0").get(PUBLISHED, 0) >= wanted, 180, "what is stored")
    cluster.wait_offloaded()
    return heard


def fill_pools(cluster: Cluster, talks: list[Talk], salt: str) -> None:
    """Says so much that is new that nothing of what was said before is left on a GPU or a host: it is in storage alone."""
    prompts = sum(len(talk[-1].prompt) // PAGE for talk in talks)
    remember(cluster, talks, [f"{salt} {number}" for number in range(1 + 2 * POOL_PAGES // prompts)])


# ---- what an operator sees


def degraded(cluster: Cluster) -> list[str]:
    """Servers that say so, in both places."""
    status = {each["name"]: each["offload"]["store"] for each in cluster.status()["servers"]}
    up = {name: cluster.metrics(name)["disagg_store_up"] for name in SERVERS}
    return [name for name in SERVERS if status[name] == "degraded" and not up[name]]


def works(cluster: Cluster) -> bool:
    status = [each["offload"]["store"] for each in cluster.status()["servers"]]
    return set(status) == {"ok"} and all(cluster.metrics(name)["disagg_store_up"] == 1 for name in SERVERS)


def misses(cluster: Cluster) -> dict[str, float]:
    """By cause, over all servers."""
    count: dict[str, float] = {}
    for name in SERVERS:
        for sample, value in cluster.metrics(name).items():
            if sample.startswith(MISSES + "{"):
                cause = sample.split('"')[1]
                count[cause] = count.get(cause, 0) + value
    return count


def legs(cluster: Cluster) -> dict[str, float]:
    """How many have ended, by server. What a server missed for one is in the same export as its end, or in one before."""
    samples = {name: cluster.metrics(name) for name in SERVERS}
    return {
        name: sum(value for sample, value in told.items() if sample.startswith("disagg_legs_total{"))
        for name, told in samples.items()
    }


def disagg(*arguments: str) -> tuple[int, dict[str, Any]]:
    """What a command says as JSON, and its exit status."""
    done = subprocess.run([*CLI, *arguments, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def check_all_answered(cluster: Cluster) -> None:
    """Nothing has failed, and nothing was tried twice."""
    counters = cluster.router_metrics()
    names = ("disagg_router_requests_total{", "disagg_router_attempts_total{")
    told = {name for name, value in counters.items() if name.startswith(names) and value}
    assert told == {'disagg_router_requests_total{outcome="ok"}', 'disagg_router_attempts_total{cause="first"}'}
