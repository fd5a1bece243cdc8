"""Servers as pods, found by a router that watches an API of them: they come, stop being ready, and are deleted."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from tests.cluster.cluster import START_S
from tests.cluster.separate import SeparateProcesses
from tests.cluster.wire_faults.questions import Questions, ask, two_layers
from tests.discovery.fake_api import NAMESPACE, ApiThread, pod

OWN_PIDS = (
    "unshare",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)  # as a pod has: nobody outside can watch its processes


class Pods(SeparateProcesses):
    """A router that finds its servers by the API, and servers that are started as pods."""

    def __init__(self, run_dir: Path, api: ApiThread, questions: Questions) -> None:
        super().__init__(run_dir)
        self._api = api
        self._ports: dict[str, int] = {}
        self._base = load_config(
            None,
            {
                "model.name": str(questions.model_dir),
                "model.dtype": "float32",
                "engine.chunk_tokens": "128",
                "engine.kv_memory_bytes": "32MiB",
                "transfer.ucx_tls": "tcp",
            },
            {},
        )

    def __enter__(self) -> Pods:
        super().__enter__()
        http_port, grpc_port = pick_ports("127.0.0.1", 2)
        router = replace(
            self._base.router,
            http_port=http_port,
            grpc_port=grpc_port,
            discovery="kubernetes",
            selector="app=x",
            namespace=NAMESPACE,
            kubeconfig=self._api.fake.kubeconfig(self.run_dir),
        )
        self.http = f"http://127.0.0.1:{http_port}"
        self.start("router", "router", dump_config(replace(self._base, router=router)))
        return self

    def add(self, name: str) -> None:
        """A pod, and the server in it, which may take its time to be ready."""
        port, metrics_port = pick_ports("127.0.0.1", 2)
        identity = f"{NAMESPACE}/{name}/uid-{name}"
        own = replace(self._base.server, name=name, port=port, metrics_port=metrics_port, pod=identity)
        role = name.partition("-")[0]
        self.start(name, role, dump_config(replace(self._base, server=own)), OWN_PIDS, orphan=True)
        self._ports[name] = port
        self.say(name)

    def say(self, name: str, *, ready: bool = True) -> None:
        self._api.put(pod(name, name.partition("-")[0], "127.0.0.1", ready=ready, port=self._ports[name]))

    def end(self, name: str, number: int) -> None:
        """All processes of a pod end."""
        self.signal(name, number)
        self.processes.pop(name).wait(60)

    def computes(self, name: str) -> bool:
        """As it says itself, since what a router knows of that is up to a heartbeat old."""
        return self.metrics(name)["disagg_requests_running"] > 0

    def quarantined(self, name: str) -> float:
        return self.metrics(name)['disagg_arena_bytes{state="quarantined"}']


@pytest.fixture
def api() -> Iterator[ApiThread]:
    tried = subprocess.run([*OWN_PIDS, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if tried is None or tried.returncode:
        pytest.skip("no namespaces of processes can be made here")
    with ApiThread() as made:
        yield made


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return two_layers(tmp_path_factory.mktemp("model"), prompts=8, shortest=200, longest=400, outputs=40)


@pytest.mark.timeout(600)
def test_pods_come_and_go_under_load_and_answers_stay_right(
    tmp_path: Path, api: ApiThread, questions: Questions
) -> None:
    with Pods(tmp_path, api, questions) as cluster, ThreadPoolExecutor(1) as pool:
        for name in ("prefill-0", "decode-0"):
            cluster.add(name)
        cluster.wait(lambda: cluster.all_ready(2), START_S, "both servers")

        def wave(first: int, count: int = 1) -> None:
            serials = range(first, first + count * len(questions.prompts))
            ask(cluster, questions, serials, len(serials)).check()

        def names() -> set[str]:
            return {server["name"] for server in cluster.status()["servers"]}

        wave(0)
        asked = pool.submit(wave, 100, 8)
        for name in ("prefill-1", "decode-1"):
            cluster.add(name)
        cluster.wait(lambda: cluster.all_ready(4), START_S, "all four servers")
        asked.result()

        cluster.say("decode-0", ready=False)
        cluster.wait(lambda: cluster.server("decode-0")["state"] == "draining", 30, "a pod that is not ready")
        wave(200)
        cluster.say("decode-0")

        ended = threading.Event()

        def waves() -> None:
            """Until a pod has ended, so that it ends under load however soon prompts are computed."""
            for number in itertools.count():
                wave(1000 * (1 + number), 12)
                if ended.is_set():
                    return

        asked = pool.submit(waves)
        try:
            cluster.wait(lambda: cluster.computes("prefill-0"), 60, "prompts on the pod that ends")
            cluster.end("prefill-0", signal.SIGKILL)
        finally:
            ended.set()
        asked.result()
        cluster.wait(lambda: cluster.server("prefill-0")["state"] == "dead", 60, "its loss")
        wave(400)
        decodes = ("decode-0", "decode-1")
        cluster.wait(lambda: sum(map(cluster.quarantined, decodes)) > 0, 60, "memory that it may still write to")
        api.delete("prefill-0")
        cluster.wait(lambda: sum(map(cluster.quarantined, decodes)) == 0, 60, "that memory, once its pod has ended")
        # A router that was asked for the pod may say that it has gone before it hears of it unasked.
        cluster.wait(lambda: names() == {"prefill-1", *decodes}, 60, "three servers")

        cluster.end("decode-1", signal.SIGTERM)
        api.delete("decode-1")
        wave(500)
        cluster.wait(lambda: names() == {"prefill-1", "decode-0"}, 60, "two servers")
        assert not any('server="decode-1"' in name for name in cluster.router_metrics())
        cluster.check_adds_up()
