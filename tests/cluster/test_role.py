"""A server becomes one of another role under load, and its old one again: no client notices, and nothing is computed again."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import CLI, Cluster
from tests.cluster.test_drain import POOLS, asked, moved, recomputed
from tests.models.tiny import make_tiny

OUTPUTS = 400  # of a model that answers within seconds: they still go on when the command has begun


def role(cluster: Cluster, name: str, wanted: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "role", name, wanted, "--http", cluster.http, *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(600)
def test_a_decode_server_becomes_a_prefill_server_and_back_under_load(tmp_path: Path) -> None:
    requests = asked(random.Random(4), 8)
    model = make_tiny("llama", tmp_path / "llama")
    broken = tmp_path / "broken"
    worker = f"worker.command={sys.executable} -m tests.cluster.unstarted_worker {broken}"
    with (
        Cluster(tmp_path / "run", "--model", str(model), *POOLS, sets=(worker,)) as cluster,
        ThreadPoolExecutor(len(requests)) as pool,
    ):

        def ask(request: dict[str, Any]) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS, ignore_eos=True, **request).token_ids

        def all_at_work(*names: str) -> list[Future[list[list[int]]]]:
            answers = [pool.submit(ask, request) for request in requests]
            cluster.wait(lambda: all(cluster.server(name)["running"] for name in names), 120, f"work on {names}")
            return answers

        def becomes(wanted: str) -> None:
            done = role(cluster, "decode-1", wanted, "--wait")
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == f"decode-1: {wanted}, ready"

        undisturbed = list(pool.map(ask, requests))
        before = cluster.server("decode-1")["incarnation"]
        answers = all_at_work("decode-1")
        becomes("prefill")
        assert [answer.result() for answer in answers] == undisturbed
        assert moved(cluster) > 0 and recomputed(cluster) == 0
        assert cluster.servers("prefill") == ["prefill-0", "decode-1"] and cluster.servers("decode") == ["decode-0"]
        assert cluster.server("decode-1")["incarnation"] != before

        answers = all_at_work("decode-0")
        others = iter(asked(random.Random(5), 100))  # which no server has cached, so that they go to both in turns

        def computes() -> bool:
            cluster.complete(max_tokens=1, ignore_eos=True, **next(others))
            return cluster.metrics("decode-1")["disagg_prefill_tokens_total"] > 0

        cluster.wait(computes, 60, "prompts on it")
        last = role(cluster, "decode-0", "prefill")
        assert last.returncode == 1 and "the last decode server that is ready" in last.stderr
        assert "already" in role(cluster, "decode-1", "prefill").stdout
        becomes("decode")
        assert [answer.result() for answer in answers] == undisturbed and recomputed(cluster) == 0

        broken.touch()  # no workers can start
        answers = all_at_work("decode-1")
        assert role(cluster, "decode-1", "prefill").returncode == 0
        cluster.wait(lambda: cluster.server("decode-1")["role_failed"], 120, "a role that cannot be")
        broken.unlink()
        cluster.wait_healthy()
        back = cluster.server("decode-1")
        assert back["role"] == "decode" and "could not become prefill, and is decode again" in back["reason"]
        assert [answer.result() for answer in answers] == undisturbed
        assert list(pool.map(ask, requests)) == undisturbed
        cluster.check_adds_up()
