"""A prefill and a decode server in network namespaces of their own, and the link between them taken down for 15 s.

                    ┌──────────── this namespace ────────────┐
                    │ router                       prefill-1 │
                    └───┬────────────────────────────────┬───┘
        10.213.1.0/30   │                                │   10.213.2.0/30
                  ┌─────┴─────┐    10.213.3.0/30   ┌─────┴─────┐
                  │ prefill-0 ├────────── ✂ ───────┤ decode-0  │
                  └───────────┘                    └───────────┘

KV crosses it by NIXL over TCP. The router goes on seeing every server: only the pair is parted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from disagg.config.tree import AuthConfig, ServerRef
from tests.cluster.cluster import START_S
from tests.cluster.namespaces import OURS_B, PAIR_A, PAIR_B, SIDE_A, SIDE_B, Namespaces, namespaces_or_skip
from tests.cluster.separate import SeparateProcesses
from tests.cluster.wire_faults.questions import Questions, ask, two_layers

CUT_S = 15.0
RATE = "8mbit"  # of the link that is cut: a piece takes a quarter of a second, so that a cut finds some under way
LINK_BYTES = 2 * (4 << 20)  # transfer.link_segments of transfer.segment_bytes


class PartedCluster(SeparateProcesses):
    """The four processes of the picture."""

    def __init__(self, run_dir: Path, net: Namespaces, questions: Questions, *sets: str) -> None:
        super().__init__(run_dir)
        self._net = net
        self._base = load_config(
            None,
            {
                "model.name": str(questions.model_dir),
                "model.dtype": "float32",
                "engine.chunk_tokens": "512",
                "engine.kv_memory_bytes": "32MiB",
                "transfer.ucx_tls": "tcp",
                **dict(each.split("=") for each in sets),
            },
            {},
        )
        self.hosts = {"prefill-0": SIDE_A, "decode-0": SIDE_B, "prefill-1": OURS_B}

    def __enter__(self) -> PartedCluster:
        super().__enter__()
        http_port, grpc_port, *ports = pick_ports("127.0.0.1", 8)
        base, net, refs = replace(self._base, auth=AuthConfig(insecure=True)), self._net, []
        for name, namespace, advertised, devices in (
            ("prefill-0", net.a, PAIR_A, "pair"),
            ("decode-0", net.b, PAIR_B, "pair,ours"),
            ("prefill-1", None, OURS_B, net.ours_b),
        ):
            port = ports.pop()
            own = replace(
                base.server,
                name=name,
                host="0.0.0.0",
                advertise_host=advertised,
                port=port,
                metrics_port=ports.pop(),
            )
            transfer = replace(base.transfer, ucx_net_devices=devices)
            role = name.partition("-")[0]
            refs.append(ServerRef(name=name, role=role, address=f"{self.hosts[name]}:{port}"))
            enter = (
                ("ip", "netns", "exec", namespace) if namespace else ()
            )  # with its /sys, where UCX looks for devices
            self.start(name, role, dump_config(replace(base, server=own, transfer=transfer)), enter)
        router = replace(base.router, http_port=http_port, grpc_port=grpc_port, servers=tuple(refs))
        self.http = f"http://127.0.0.1:{http_port}"
        self.start("router", "router", dump_config(replace(base, router=router)))
        try:
            self.wait(lambda: self.all_ready(len(refs)), START_S, "every server ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def pieces_sent(self, server: str) -> float:
        return self.metrics(server).get('disagg_transfer_pieces_total{direction="sent"}', 0.0)


@pytest.fixture(scope="module")
def net() -> Iterator[Namespaces]:
    with namespaces_or_skip(RATE) as made:
        yield made


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    """Prompts of one chunk or two, in pieces of some 250 KiB."""
    return two_layers(tmp_path_factory.mktemp("model"), prompts=12, shortest=400, longest=700, outputs=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lease_s", "lost"), [(10, True), (40, False)])
def test_a_pair_that_is_parted_for_a_while_spoils_no_answer_and_disturbs_no_other(
    tmp_path: Path, net: Namespaces, questions: Questions, lease_s: int, lost: bool
) -> None:
    sets = (f"transfer.link_lease_s={lease_s}", "transfer.progress_s=60")
    with PartedCluster(tmp_path, net, questions, *sets) as cluster, ThreadPoolExecutor(2) as pool:

        def wave(first: int) -> None:
            serials = range(first, first + 3 * len(questions.prompts))
            ask(cluster, questions, serials, len(serials)).check()

        def failures() -> float:
            samples = cluster.metrics("decode-0")
            return sum(value for name, value in samples.items() if name.startswith("disagg_transfer_failures_total"))

        def quarantined() -> float:
            return cluster.metrics("decode-0")['disagg_arena_bytes{state="quarantined"}']

        asked = pool.submit(wave, 0)
        cluster.wait(lambda: cluster.pieces_sent("prefill-0") >= 4, 60, "pieces on the link")
        cluster.wait(lambda: cluster.server("decode-0")["running"] >= 2, 60, "requests that decode")
        net.between("down")
        cut_s = time.monotonic()
        try:
            assert not asked.done()
            before = cluster.pieces_sent("prefill-1")
            later = pool.submit(wave, 100)
            cluster.wait(lambda: cluster.pieces_sent("prefill-1") >= before + 6, CUT_S, "pieces of another pair")
            time.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
            if lost:
                assert quarantined() == LINK_BYTES
        finally:
            net.between("up")
        asked.result()
        later.result()
        print(
            f"lease {lease_s} s: all answered {time.monotonic() - cut_s:.0f} s after the cut; {failures():g} failures"
        )
        assert (failures() > 0) is lost, "a transfer was given up" if not lost else "nothing was under way"

        before = cluster.pieces_sent("prefill-0")
        wave(200)
        assert cluster.pieces_sent("prefill-0") > before, "the pair did not come together again"
        if quarantined():  # a write had failed, and nobody can tell whether some of its bytes are on their way
            assert lost
            cluster.kill(cluster.server("prefill-0")["worker_pids"][0])
            cluster.wait_healthy()
        cluster.check_adds_up()
