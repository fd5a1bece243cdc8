"""What links cost a decode server: its arena, however many prefill servers there are, and nothing while they idle."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.wire_faults.questions import Questions, ask, two_layers

ARENA_BYTES = 32 << 20
LINK_BYTES = 2 * (2 << 20)
SETS = (
    "transfer.arena_bytes=32MiB",
    "transfer.segment_bytes=2MiB",
    "transfer.link_segments=2",
    "transfer.gather_bytes=1MiB",
)
SHARE = 4  # no peer gets more than this part of an arena


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return two_layers(tmp_path_factory.mktemp("model"), prompts=16, shortest=100, longest=300, outputs=8)


def arena(cluster: Cluster, server: str) -> dict[str, float]:
    samples = cluster.metrics(server)
    return {state: samples[f'disagg_arena_bytes{{state="{state}"}}'] for state in ("free", "leased", "quarantined")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2)])
def test_an_arena_is_as_large_for_two_prefill_servers_as_for_one_and_idle_links_hold_none_of_it(
    tmp_path: Path, questions: Questions, prefill: int, decode: int
) -> None:
    flags = ("--prefill", str(prefill), "--decode", str(decode), "--chunk-tokens", "64", "--kv-memory", "8MiB")
    with Cluster(tmp_path, "--model", str(questions.model_dir), *flags, sets=SETS) as cluster:
        servers = cluster.servers("decode")
        assert len(servers) == decode
        most = dict.fromkeys(servers, 0.0)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, cluster, questions, range(4 * len(questions.prompts)), 16)
            while not asked.done():
                time.sleep(0.02)
                for server in servers:
                    now = arena(cluster, server)
                    assert sum(now.values()) == ARENA_BYTES
                    assert now["quarantined"] == 0
                    assert now["leased"] <= prefill * LINK_BYTES <= prefill * ARENA_BYTES // SHARE
                    most[server] = max(most[server], now["leased"])
            asked.result().check()
        assert any(most.values()), "no lease was seen"
        for server in cluster.servers("prefill"):
            assert cluster.metrics(server)['disagg_transfer_pieces_total{direction="sent"}'] > 0
            assert sum(arena(cluster, server).values()) == 0, "a prefill server has an arena"
        cluster.wait(
            lambda: all(arena(cluster, server)["free"] == ARENA_BYTES for server in servers),
            120,
            "idle links that hold nothing",
        )
        cluster.check_adds_up()
