"""What an upgrade or a scaler does to pools under load: no request fails or is answered wrongly, none is computed again."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from disagg.cli.rundir import pick_ports
from disagg.config.load import dump_config, load_config
from disagg.config.tree import ServerRef
from tests.cluster.cluster import START_S, parse_metrics
from tests.cluster.separate import SeparateProcesses
from tests.cluster.wire_faults.questions import HANG_S, Outcome, Questions, two_layers

CLIENTS = 8
PRE_STOP_S = 1.0  # between the decision to end a router and its SIGTERM, as the chart has it
DRAIN_S = 60.0  # of each process; here they share two cores
PLANNED = {"first", "moved", "given_back"}  # why attempts begin where nothing is lost


class Pools(SeparateProcesses):
    """Routers that look for every server which could be there, and what is started of them."""

    def __init__(self, run_dir: Path, questions: Questions, *, routers: int, prefill: int, decode: int) -> None:
        super().__init__(run_dir)
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        ports = pick_ports("127.0.0.1", 2 * routers + 2 * len(names))
        base = load_config(
            None,
            {
                "model.name": str(questions.model_dir),
                "model.dtype": "float32",
                "engine.chunk_tokens": "128",
                "engine.kv_memory_bytes": "32MiB",
                "server.drain_s": str(DRAIN_S),
                "router.drain_s": str(DRAIN_S),
            },
            {},
        )
        self.configs: dict[str, str] = {}
        self.urls: dict[str, str] = {}  # of routers
        refs = []
        for name in names:
            own = replace(base.server, name=name, port=ports.pop(), metrics_port=ports.pop())
            self.configs[name] = dump_config(replace(base, server=own))
            refs.append(ServerRef(name=name, role=role_of(name), address=f"127.0.0.1:{own.port}"))
        for i in range(routers):
            name, http_port = f"router-{i}", ports.pop()
            own = replace(base.router, name=name, http_port=http_port, grpc_port=ports.pop(), servers=tuple(refs))
            self.configs[name] = dump_config(replace(base, router=own))
            self.urls[name] = f"http://127.0.0.1:{http_port}"
        self.http = self.urls["router-0"]
        self._turns = itertools.count()
        self.serving: list[str] = []  # routers that a load balancer sends to

    def run(self, *names: str) -> None:
        """Starts them, and waits until every router may send to them."""
        for name in names:
            self.start(name, role_of(name), self.configs[name])
        self.wait(lambda: all(map(self.up, names)), START_S, f"{', '.join(names)} ready")
        self.serving += [name for name in names if name in self.urls]

    def up(self, name: str) -> bool:
        if self.processes[name].poll() is not None:
            raise AssertionError(f"{name} exited with {self.processes[name].returncode}:\n{self.logs()}")
        try:
            if name in self.urls:
                return httpx.get(f"{self.urls[name]}/health", timeout=10).status_code == 200
            routers = [router for router in self.urls if router in self.processes]
            return all(self.state(router, name) == "ready" for router in routers)
        except httpx.TransportError:
            return False

    def state(self, router: str, name: str) -> str:
        servers = httpx.get(f"{self.urls[router]}/status", timeout=30).json()["servers"]
        return next(server["state"] for server in servers if server["name"] == name)

    def end(self, name: str) -> None:
        """As Kubernetes does."""
        if name in self.urls:
            self.serving.remove(name)
            time.sleep(PRE_STOP_S)
        self.signal(name, signal.SIGTERM)
        status = self.processes.pop(name).wait(DRAIN_S + 30)
        assert status == 0, f"{name} ended with {status}:\n{self.logs()}"

    # ---- what clients do

    def answer(self, prompt: list[int], **fields: Any) -> list[int]:
        """Retries what fails before, or while, it is answered, once."""
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, "temperature": 0, **fields}
        for left in (1, 0):
            serving = list(self.serving)
            url = self.urls[serving[next(self._turns) % len(serving)]]
            try:
                reply = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
            except httpx.TransportError:
                if not left:
                    raise
                continue
            assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
            return list(reply.json()["choices"][0]["token_ids"])
        raise AssertionError("unreachable")

    @contextmanager
    def load(self, questions: Questions) -> Iterator[Outcome]:
        """Clients that ask one question after the other, until the end of the `with`, which checks what they got."""
        outcome, over, serials = Outcome(), threading.Event(), itertools.count()

        def client() -> None:
            while not over.is_set():
                serial = next(serials)
                number = serial % len(questions.prompts)
                salt = f"request {serial}" if serial % 3 else "shared"
                fields = {"max_tokens": questions.outputs, "ignore_eos": True, "cache_salt": salt}
                try:
                    said = self.answer(list(questions.prompts[number]), **fields)
                except Exception as error:  # noqa: BLE001 - whatever it is, this request has failed
                    outcome.failed.append(f"request {serial}: {error!r}")
                    continue
                outcome.answered += 1
                if wrong := questions.wrong(number, said):
                    outcome.wrong.append(f"request {serial}, {wrong}")

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients: list[Future[None]] = [pool.submit(client) for _ in range(CLIENTS)]
            try:
                yield outcome
            finally:
                over.set()
            for each in clients:
                each.result()
        outcome.check()

    def wait_answers(self, outcome: Outcome, more: int = 2 * CLIENTS) -> None:
        wanted = outcome.answered + more
        self.wait(lambda: outcome.failed or outcome.answered >= wanted, HANG_S, f"{more} more answers")
        outcome.check()

    # ---- what must not be

    def attempts(self) -> dict[str, float]:
        """Why attempts began, by all routers that run."""
        causes: dict[str, float] = {}
        for router in self.serving:
            samples = parse_metrics(httpx.get(f"{self.urls[router]}/metrics", timeout=30).text)
            for name, value in samples.items():
                if name.startswith("disagg_router_attempts_total{"):
                    cause = name.split('"')[1]
                    causes[cause] = causes.get(cause, 0.0) + value
        return causes

    def recomputed(self) -> float:
        """Tokens that decode servers which run have computed again."""
        decodes = [name for name in self.processes if role_of(name) == "decode"]
        return sum(self.metrics(name)["disagg_recomputed_tokens_total"] for name in decodes)

    def status(self) -> dict[str, Any]:
        """Of servers that run."""
        status = super().status()
        return {**status, "servers": [each for each in status["servers"] if each["name"] in self.processes]}


def role_of(name: str) -> str:
    return name.partition("-")[0]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return two_layers(tmp_path_factory.mktemp("model"), prompts=16, shortest=20, longest=300, outputs=150)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_server_and_both_routers_restart_under_load(tmp_path: Path, questions: Questions) -> None:
    with Pools(tmp_path, questions, routers=2, prefill=2, decode=2) as pools:
        pools.run(*pools.configs)
        with pools.load(questions) as outcome:
            pools.wait_answers(outcome)
            for name in list(pools.configs):
                pools.end(name)
                pools.wait_answers(outcome, CLIENTS)
                pools.run(name)
                pools.wait_answers(outcome)
                assert pools.recomputed() == 0, f"after {name}"
                if name not in pools.urls:  # routers count from their start
                    causes = pools.attempts()
                    assert set(causes) <= PLANNED, f"{causes} after {name}"
        pools.check_adds_up()
        print(f"{outcome.answered} answers")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_pool_grows_from_one_to_three_and_shrinks_again_under_load(tmp_path: Path, questions: Questions) -> None:
    with Pools(tmp_path, questions, routers=2, prefill=3, decode=3) as pools:
        pools.run("router-0", "router-1", "prefill-0", "decode-0")
        with pools.load(questions) as outcome:
            for role in ("prefill", "decode"):
                more = [f"{role}-1", f"{role}-2"]
                pools.wait_answers(outcome)
                pools.run(*more)
                pools.wait_answers(outcome)
                worked = f"disagg_{role}_tokens_total"
                for name in more:
                    pools.wait(lambda each=name, worked=worked: pools.metrics(each)[worked] > 0, 60, f"work on {name}")
                for name in reversed(more):
                    pools.end(name)
                    pools.wait_answers(outcome)
                    assert pools.recomputed() == 0, f"after {name}"
            causes = pools.attempts()
        assert set(causes) <= PLANNED and causes.get("moved", 0) > 0, causes
        pools.check_adds_up()
        print(f"{outcome.answered} answers, attempts {causes}")
