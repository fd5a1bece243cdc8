"""Several routers on the same two ports: each takes some of the connections, and one that ends leaves the others theirs."""

from __future__ import annotations

import asyncio
import signal
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.cluster.cluster import Cluster, parse_metrics
from tests.models.tiny import make_tiny

CONNECTIONS = 48
ROUTERS = 2
ENDED = 'disagg_router_requests_total{outcome="ok"}'


async def completions(url: str, count: int) -> list[tuple[int, str]]:
    """Status and text of as many requests, each over a connection of its own. One that is reset is asked for once more."""

    async def one() -> tuple[int, str]:
        body = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for last in (False, True):
            try:
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120.0) as client:
                    answer = await client.post("/v1/completions", json=body)
                    return answer.status_code, answer.json()["choices"][0]["text"]
            except httpx.TransportError:
                if last:
                    raise
        raise AssertionError

    return list(await asyncio.gather(*(one() for _ in range(count))))


def said(port: int, path: str) -> httpx.Response:
    """By one router, at the port that it has for itself."""
    return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=60.0)


@pytest.mark.timeout(600)
def test_connections_are_spread_and_one_that_ends_leaves_the_others_theirs(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    with Cluster(tmp_path / "run", "--model", str(model), "--routers", str(ROUTERS)) as cluster:
        configs = [tomllib.loads((cluster.run_dir / f"router-{n}.toml").read_text())["router"] for n in range(ROUTERS)]
        own = [config["own_http_port"] for config in configs]

        def answered() -> list[float]:
            return [parse_metrics(said(port, "/metrics").text)[ENDED] for port in own]

        answers = asyncio.run(completions(cluster.http, CONNECTIONS))
        assert {status for status, _ in answers} == {200} and len(set(answers)) == 1
        counts = answered()
        assert sum(counts) == CONNECTIONS and min(counts) > 0, counts

        first = said(own[0], "/status").json()["routers"][0]
        assert first["name"] == configs[0]["name"] != configs[1]["name"]
        cluster.kill(first["pid"], signal.SIGTERM)
        again = asyncio.run(completions(cluster.http, CONNECTIONS))
        assert set(again) == set(answers)
        cluster.wait(lambda: said_pid(own[0]) not in (0, first["pid"]), 60, "the router that `up` starts again")
        assert set(asyncio.run(completions(cluster.http, CONNECTIONS))) == set(answers)
        cluster.check_adds_up()


def said_pid(port: int) -> int:
    """Of who answers there; 0: nobody."""
    try:
        return int(said(port, "/status").json()["routers"][0]["pid"])
    except httpx.TransportError:
        return 0
