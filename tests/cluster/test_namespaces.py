"""A prefill and a decode server on two machines, as far as networks and processes go: what UCX chooses between them, and
how fast it is.

The router is in this namespace, prefill-0 in A, decode-0 in B (`namespaces`); nobody says which network device is whose.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from disagg.config.tree import AuthConfig, ServerRef
from tests.cluster.cluster import CLI, START_S
from tests.cluster.namespaces import OWN_PIDS, PAIR_A, PAIR_B, SIDE_A, SIDE_B, Namespaces, namespaces_or_skip
from tests.cluster.separate import SeparateProcesses
from tests.cluster.wire_faults.questions import Questions, ask, two_layers

BENCH_S = 240.0
CUT_S = 15.0


class TwoMachines(SeparateProcesses):
    """A router, and the servers of the two namespaces, each with processes that the others cannot see."""

    def __init__(self, run_dir: Path, net: Namespaces, questions: Questions) -> None:
        super().__init__(run_dir)
        self._net = net
        self._base = load_config(
            None,
            {
                "model.name": str(questions.model_dir),
                "model.dtype": "float32",
                "engine.chunk_tokens": "128",
                "engine.kv_memory_bytes": "32MiB",
            },
            {},
        )
        self.hosts = {"prefill-0": SIDE_A, "decode-0": SIDE_B}

    def __enter__(self) -> TwoMachines:
        super().__enter__()
        http_port, grpc_port, *ports = pick_ports("127.0.0.1", 6)
        base, refs = replace(self._base, auth=AuthConfig(insecure=True)), []
        for name, namespace, reached_at in (
            ("prefill-0", self._net.a, PAIR_A),
            ("decode-0", self._net.b, PAIR_B),
        ):
            port, role = ports.pop(), name.partition("-")[0]
            own = replace(
                base.server, name=name, host="0.0.0.0", advertise_host=reached_at, port=port, metrics_port=ports.pop()
            )
            refs.append(ServerRef(name=name, role=role, address=f"{self.hosts[name]}:{port}"))
            enter = ("ip", "netns", "exec", namespace, *OWN_PIDS)
            self.start(name, role, dump_config(replace(base, server=own)), enter, orphan=True)
        router = replace(base.router, http_port=http_port, grpc_port=grpc_port, servers=tuple(refs))
        self.http = f"http://127.0.0.1:{http_port}"
        self.start("router", "router", dump_config(replace(base, router=router)))
        try:
            self.wait(lambda: self.all_ready(len(refs)), START_S, "both servers ready")
        except BaseException:
            self.__exit__()
            raise
        return self


@pytest.fixture(scope="module")
def net() -> Iterator[Namespaces]:
    with namespaces_or_skip() as made:
        yield made


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return two_layers(tmp_path_factory.mktemp("model"), prompts=6, shortest=100, longest=300, outputs=60)


@pytest.mark.timeout(600)
def test_servers_on_two_machines_answer_exactly_over_the_device_that_reaches_them(
    tmp_path: Path, net: Namespaces, questions: Questions
) -> None:
    with TwoMachines(tmp_path, net, questions) as cluster:
        ask(cluster, questions, range(2 * len(questions.prompts)), 6).check()
        cluster.wait(lambda: cluster.server("prefill-0")["carried"], 30, "the server's next report")
        [carried] = cluster.server("prefill-0")["carried"]
        assert carried["peer"] == "decode-0"
        assert [way.rpartition(" ")[2] for way in carried["ways"]] == ["tcp/pair"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_router_that_is_parted_from_all_servers_for_a_while_fails_no_request(tmp_path: Path, net: Namespaces) -> None:
    """What runs goes on, and what comes meanwhile waits."""
    questions = two_layers(tmp_path, prompts=6, shortest=100, longest=300, outputs=1000)

    def wave(first: int) -> None:
        serials = range(first, first + 4 * len(questions.prompts))
        ask(cluster, questions, serials, len(serials)).check()

    with TwoMachines(tmp_path, net, questions) as cluster, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(wave, 0)
        cluster.wait(lambda: cluster.server("decode-0")["running"] >= 2, 60, "requests that decode")
        net.to_us("down")
        try:
            assert not asked.done()
            later = pool.submit(wave, 100)
            time.sleep(CUT_S)
            assert not later.done()
        finally:
            net.to_us("up")
        asked.result()
        later.result()
        ask(cluster, questions, range(200, 206), 6).check()
        cluster.check_adds_up()


@pytest.mark.timeout(600)
def test_a_transfer_between_two_machines_is_measured_with_what_carried_it(tmp_path: Path, net: Namespaces) -> None:
    def within(namespace: str, *arguments: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", namespace, *OWN_PIDS, *CLI, "bench", "transfer", *arguments)

    listener = subprocess.Popen(within(net.b, "--listen", f"{PAIR_B}:7600"), stderr=subprocess.PIPE, text=True)
    try:
        assert listener.stderr is not None and "listening" in listener.stderr.readline()
        kept = tmp_path / "figures.json"
        asked = "--device cpu --tp 1:2 --tokens 70 --shape 3x4x16xfloat32 --page-tokens 8 --piece 20KiB --arena 56KiB"
        done = subprocess.run(
            within(net.a, "--to", PAIR_B, *asked.split(), "--repeat", "2", "--no-curve", "--json", str(kept)),
            capture_output=True,
            text=True,
            timeout=BENCH_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    finally:
        listener.kill()  # unshare would wait for it, and takes it along
        listener.wait(30)
    _, staged = msgspec.json.decode(kept.read_bytes())["measurements"]
    assert [way.rpartition(" ")[2] for way in staged["ways"]] == ["tcp/pair"]
    print(done.stdout, file=sys.stderr)
