"""A server becomes one of another role under load, and its old one again: no client notices, and nothing is computed again."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.cluster import CLI, Cluster
from tests.cluster.test_drain import POOLS, asked, decoded_before, moved, recomputed, wait_begun
from tests.models.tiny import make_tiny

OUTPUTS = 300  # at least; each request asks for another number, so that answers do not all begin at once


def role(cluster: Cluster, name: str, wanted: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "role", name, wanted, "--http", cluster.http, *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(600)
def test_a_decode_server_becomes_a_prefill_server_and_back_under_load(tmp_path: Path) -> None:
    requests = asked(random.Random(4), 8)
    model = make_tiny("llama", tmp_path / "llama")
    broken = tmp_path / "broken"
    enough = threading.Event()
    worker = f"worker.command={sys.executable} -m tests.cluster.unstarted_worker {broken}"
    with (
        Cluster(tmp_path / "run", "--model", str(model), *POOLS, sets=(worker,)) as cluster,
        ThreadPoolExecutor(len(requests)) as pool,
        ExitStack() as stack,  # clients end first, whatever else fails
    ):

        def ask(number: int) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS + 20 * number, ignore_eos=True, **requests[number]).token_ids

        def keep_asking(number: int) -> int:
            """How many answers there were, all of them what was said undisturbed."""
            for count in itertools.count():
                if enough.is_set():
                    return count
                assert ask(number) == undisturbed[number], f"answer {count} of request {number}"
            raise AssertionError

        def at_work(name: str) -> None:
            cluster.wait(lambda: cluster.server(name)["running"], 120, f"work on {name}")

        def becomes(wanted: str) -> None:
            done = role(cluster, "decode-1", wanted, "--wait")
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == f"decode-1: {wanted}, ready"

        undisturbed = list(pool.map(ask, range(len(requests))))
        before = cluster.server("decode-1")["incarnation"]
        decoded = decoded_before(cluster, "decode-1")  # else what it had to do before could be taken for work of now
        asking = [pool.submit(keep_asking, number) for number in range(len(requests))]
        stack.callback(enough.set)
        wait_begun(cluster, "decode-1", decoded, asking)
        becomes("prefill")
        assert moved(cluster) > 0 and recomputed(cluster) == 0
        assert cluster.servers("prefill") == ["prefill-0", "decode-1"] and cluster.servers("decode") == ["decode-0"]
        assert cluster.server("decode-1")["incarnation"] != before

        at_work("decode-0")
        others = iter(asked(random.Random(5), 100))  # which no server has cached, so that they go to both in turns

        def computes() -> bool:
            cluster.complete(max_tokens=1, ignore_eos=True, **next(others))
            return cluster.metrics("decode-1")["disagg_prefill_tokens_total"] > 0

        cluster.wait(computes, 60, "prompts on it")
        last = role(cluster, "decode-0", "prefill")
        assert last.returncode == 1 and "the last decode server that is ready" in last.stderr
        assert "already" in role(cluster, "decode-1", "prefill").stdout
        becomes("decode")
        assert recomputed(cluster) == 0

        broken.touch()  # no workers can start
        at_work("decode-1")
        assert role(cluster, "decode-1", "prefill").returncode == 0
        cluster.wait(lambda: cluster.server("decode-1")["role_failed"], 120, "a role that cannot be")
        broken.unlink()
        cluster.wait_healthy()
        back = cluster.server("decode-1")
        assert back["role"] == "decode" and "could not become prefill, and is decode again" in back["reason"]
        at_work("decode-1")
        enough.set()
        assert min(client.result() for client in asking) > 0
        cluster.check_adds_up()
