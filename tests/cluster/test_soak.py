"""Half an hour of everything at once: every answer is right, and no process grows.

`--soak-minutes` makes it shorter or longer. The first pair of servers, the router and `up` live through all of it and are
what is measured; processes of the second pair are killed again and again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.cluster import reference
from tests.cluster.cluster import Cluster
from tests.cluster.soak.census import ALLOWED, Ledger, count_files, take_census, too_steep
from tests.cluster.soak.clients import Abuser, Asker, Soak

SAMPLE_S = 5.0
KILL_EVERY_S = 60.0
WARM_SHARE = 0.2  # of the time: what grows while caches fill is not counted
LONGEST_PROMPT = 200
ASKERS = 4


def of_second_pair(name: str) -> bool:
    """name: of a process, as `processes` has it. A router's is of its host and pid, and may have any digits in it."""
    return name.partition("/")[0] in ("prefill-1", "decode-1")


def processes(status: dict) -> dict[str, int]:
    """Name and pid of the router, the servers and their workers."""
    pids = {router["name"]: router["pid"] for router in status["routers"]}
    for server in status["servers"]:
        pids[server["name"]] = server["pid"]
        pids |= {f"{server['name']}/rank{rank}": pid for rank, pid in enumerate(server["worker_pids"])}
    return pids


async def observe(cluster: Cluster, soak: Soak, ledger: Ledger, started_s: float) -> None:
    """Samples every process until the soak stops; the second pair's are named by pid, since they are killed."""
    async with httpx.AsyncClient(timeout=60) as client:
        while not soak.stop.is_set():
            try:
                status = (await client.get(f"{soak.http}/status")).json()
            except httpx.TransportError as error:
                raise AssertionError(f"the router does not answer: {error!r}\n{cluster.output()}") from error
            stacks = (await client.get(f"{soak.http}/debug/dump")).text
            at_s = time.monotonic() - started_s
            for name, pid in {"up": cluster.process.pid, **processes(status)}.items():
                who = f"{name} ({pid})" if of_second_pair(name) else name
                census = take_census(pid, stacks.count("--- task ") if name.startswith("router") else None)
                if census is not None:
                    ledger.add(at_s, who, vars(census))
            ledger.add(at_s, "run directory", {"files": float(count_files(cluster.run_dir))})
            await soak.rest(SAMPLE_S)


async def kill(cluster: Cluster, soak: Soak, rng: random.Random) -> None:
    """Strikes one process of the second pair at a time, in turn with SIGKILL and with a pause."""
    while not soak.stop.is_set():
        await soak.rest(KILL_EVERY_S)
        async with httpx.AsyncClient(timeout=60) as client:
            status = (await client.get(f"{soak.http}/status")).json()
        pids = [pid for name, pid in processes(status).items() if of_second_pair(name)]
        if pids and not soak.stop.is_set():
            number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            try:
                cluster.kill(rng.choice(pids), number)
            except ProcessLookupError:
                continue
            soak.seen[f"struck with {number.name}"] += 1


async def run(cluster: Cluster, answers: list[reference.Answer], seconds: float, ledger: Ledger) -> Soak:
    soak = Soak(cluster.http, cluster.model)
    askers = [Asker(soak, answers, seed) for seed in range(ASKERS)]
    abusers = [Abuser(soak, seed) for seed in range(5)]
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(observe(cluster, soak, ledger, started_s))
        group.create_task(kill(cluster, soak, random.Random(3)))
        for asker in askers:
            group.create_task(soak.keep(asker.ask, 0.05))
        for abuse, pause_s in zip(
            ("leaves", "oversize", "reads_slowly", "writes_slowly", "floods"), (1.0, 4.0, 1.0, 1.0, 8.0), strict=True
        ):
            group.create_task(soak.keep(getattr(abusers[len(abuse) % 5], abuse), pause_s))
        await asyncio.sleep(seconds)
        soak.stop.set()
    for asker in askers:
        await asker.client.aclose()
    return soak


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_soak_leaves_every_process_as_it_was(tmp_path: Path, smollm2: Path, pytestconfig: pytest.Config) -> None:
    seconds = 60.0 * pytestconfig.getoption("--soak-minutes")
    kept = [*reference.load("boundary", smollm2), *reference.load("long", smollm2)]
    answers = [answer for answer in kept if len(answer.prompt) <= LONGEST_PROMPT]
    ledger = Ledger()
    flags = ("--prefill", "2", "--decode", "2", "--chunk-tokens", "64", "--dtype", "float32")
    with Cluster(tmp_path, *flags) as cluster:
        cluster.wait_healthy()
        soak = asyncio.run(run(cluster, answers, seconds, ledger))
        print(dict(sorted(soak.seen.items())))
        rises = ledger.rises(WARM_SHARE * seconds, 0.6 * seconds)
        ledger.show(rises)
        assert not soak.wrong, soak.wrong[:10]
        assert soak.seen["answers compared"] > seconds / 10
        assert {what for _, what in rises} == set(ALLOWED)
        cluster.wait_healthy()
        cluster.check_adds_up()
        assert not too_steep(rises), too_steep(rises)
