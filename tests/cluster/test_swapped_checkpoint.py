"""A checkpoint replaced under a running cluster, in five ways, with requests in flight and workers dying.

Whatever is answered is the old model's answer or the new one's, whole; nothing is of both, nor of neither. And the operator is
told, by the server's log, its metric, and the router's status. Models are tiny and every token depends on all before it.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.cluster import Cluster
from tests.models import reference
from tests.models.tiny import VOCAB_SIZE, make_tiny

FLAGS = ("--dtype", "float32", "--page-tokens", "4", "--chunk-tokens", "16", "--kv-memory", "1MiB")
OUTPUTS = 40
CLIENTS = 6
WEIGHTS = "model.safetensors"
RNG = random.Random(11)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 17, 40, 64, 90, 120)]

Outputs = tuple[int, ...]


class Models:
    """The directory that is served, a link, and what each version of it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.current = folder / "current"
        first = make_tiny("llama", folder / "0", seed=0)
        self.current.symlink_to(first)
        self.answers: list[dict[int, Outputs]] = [self.answers_of(first)]
        self._made = 0

    def answers_of(self, model_dir: Path) -> dict[int, Outputs]:
        found = reference.generate(model_dir, PROMPTS, OUTPUTS)
        return {number: tuple(answer.outputs) for number, answer in enumerate(found)}

    def make(self) -> Path:
        """Another model of the same shape, with the same config.json and tokenizer."""
        self._made += 1
        made = make_tiny("llama", self.folder / f"{self._made}", seed=self._made)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(self.current / name, made / name)
        return made

    def rename(self) -> None:
        (self.make() / WEIGHTS).rename(self.current / WEIGHTS)

    def symlink(self) -> None:
        beside = self.folder / "next"
        beside.symlink_to(self.make())
        beside.rename(self.current)

    def in_place(self) -> None:
        content = (self.make() / WEIGHTS).read_bytes()
        with (self.current / WEIGHTS).open("r+b") as file:
            file.write(content)

    def one_tensor(self) -> None:
        """A few bytes in the middle of one tensor of many."""
        path = self.current / WEIGHTS
        with path.open("r+b") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            first, end = header["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
            file.seek(start + (first + end) // 2 // 4 * 4)
            file.write(b"\0\0\x80\x43" * 64)  # 256.0


TWO_CRASHES = "was present twice when workers died"  # a request is not tried again when it may be what kills workers

WAYS: dict[str, Callable[[Models], None]] = {
    "rename": Models.rename,
    "symlink": Models.symlink,
    "in place": Models.in_place,
    "one tensor": Models.one_tensor,
}


class Load:
    """Clients that ask all the time. `answers` and `refusals` are what came since they were last taken."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._answers: list[tuple[int, Outputs]] = []
        self._refusals: list[tuple[int, str]] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            number = rng.randrange(len(PROMPTS))
            body = {
                "model": self.cluster.model,
                "prompt": PROMPTS[number],
                "max_tokens": OUTPUTS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "n": 1 + rng.randrange(2),
            }
            try:
                reply = httpx.post(f"{self.cluster.http}/v1/completions", json=body, timeout=300)
            except httpx.TransportError as error:
                reply = httpx.Response(599, text=f"the connection broke: {error!r}")
            with self._lock:
                if reply.status_code == 200:
                    self._answers += [(number, tuple(choice["token_ids"])) for choice in reply.json()["choices"]]
                else:
                    self._refusals.append((reply.status_code, reply.text))
            if reply.status_code != 200:
                self._stop.wait(0.2)

    def take(self) -> tuple[list[tuple[int, Outputs]], list[tuple[int, str]]]:
        with self._lock:
            taken = self._answers, self._refusals
            self._answers, self._refusals = [], []
        return taken

    @property
    def refused(self) -> bool:
        return bool(self._refusals)

    def wait_answers(self, count: int) -> None:
        before = len(self._answers)
        self.cluster.wait(lambda: len(self._answers) >= before + count, 120, f"{count} more answers")

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


def kill_workers(cluster: Cluster, *names: str) -> None:
    """And wait for their successors."""
    before = {name: cluster.server(name)["incarnation"] for name in names}
    for name in names:
        cluster.kill(cluster.server(name)["worker_pids"][0])

    def back() -> bool:
        servers = [cluster.server(name) for name in names]
        return all(s["incarnation"] not in ("", before[s["name"]]) and s["state"] != "loading" for s in servers)

    cluster.wait(back, 120, f"new workers of {names}")


def refused_for(refusals: list[tuple[int, str]], *reasons: str) -> bool:
    return all(any(reason in said for reason in reasons) for _, said in refusals)


def count(answers: list[tuple[int, Outputs]], *models: dict[int, Outputs]) -> Counter[int]:
    """How many are of which model; -1: of none."""
    found: Counter[int] = Counter()
    for number, outputs in answers:
        found[next((at for at, model in enumerate(models) if model[number] == outputs), -1)] += 1
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_checkpoint_overwritten_under_a_pair_gives_no_wrong_text_and_is_said(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    old = models.answers[0]
    with Cluster(tmp_path / "run", *FLAGS, "--model", str(models.current)) as cluster, Load(cluster).running() as load:
        load.wait_answers(CLIENTS)
        load.take()
        models.in_place()
        new = models.answers_of(models.current)
        load.wait_answers(2 * CLIENTS)
        answers, refusals = load.take()
        assert count(answers, old) == {0: len(answers)}  # nobody has loaded it yet
        assert refusals == []

        kill_workers(cluster, "prefill-0")
        check_told(cluster, "prefill-0", "in place")
        cluster.wait(lambda: {s["state"] for s in cluster.status()["servers"]} == {"no-peer"}, 60, "no pair")
        cluster.wait(lambda: load.refused, 60, "a refusal")
        answers, refusals = load.take()
        assert count(answers, old) == {0: len(answers)}
        # While prefill-0 has no workers yet, which may be longer than requests wait, it is one role that lacks a server. Whoever
        # had the old model's first token when prefill-0 died, before its KV was at decode-0, cannot be served by the new one.
        assert refused_for(refusals, "models or protocols differ", "other weights", "no server of one role"), refusals

        kill_workers(cluster, "decode-0")
        cluster.wait_healthy()
        load.wait_answers(CLIENTS)
        answers, refusals = load.take()
        assert count(answers, old, new)[-1] == 0
        assert refused_for(refusals, "models or protocols differ", "other weights", "no server of one role"), refusals


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_swapped_in_every_way_under_load_gives_no_wrong_text_and_is_said(tmp_path: Path) -> None:
    check(tmp_path, *WAYS)


def check(tmp_path: Path, *ways: str) -> None:
    """Each way in turn, and at last the tokenizer alone."""
    models = Models(tmp_path / "models")
    flags = ("--model", str(models.current), "--prefill", "2", "--decode", "2")
    with Cluster(tmp_path / "run", *FLAGS, *flags) as cluster:
        load = Load(cluster)
        with load.running():
            load.wait_answers(CLIENTS)
            old = models.answers[0]
            for way in ways:
                load.take()
                WAYS[way](models)
                load.wait_answers(2 * CLIENTS)
                answers, refusals = load.take()
                assert count(answers, old) == {0: len(answers)}, way  # nobody has loaded it yet
                assert refusals == [], way
                new = models.answers_of(models.current)
                assert all(old[number] != new[number] for number in old), "the models must answer differently"

                kill_workers(cluster, "prefill-1", "decode-1")
                load.wait_answers(4 * CLIENTS)
                answers, refusals = load.take()
                found = count(answers, old, new)
                assert found[-1] == 0, (way, found)
                assert refused_for(refusals, TWO_CRASHES), (way, refusals)
                for name in ("prefill-1", "decode-1"):
                    check_told(cluster, name, way)

                kill_workers(cluster, "prefill-0", "decode-0")
                cluster.wait_healthy()
                load.wait_answers(CLIENTS)
                answers, refusals = load.take()
                found = count(answers, old, new)
                assert found[-1] == 0, (way, found)
                # What the old model had begun and nobody can go on with ends with the reason.
                assert refused_for(refusals, TWO_CRASHES, "other weights", "no server of one role"), (way, refusals)
                load.wait_answers(2 * CLIENTS)
                answers, refusals = load.take()
                assert count(answers, new)[-1] == 0 and refusals == [], way
                old = new
                print(f"{way}: {found}")
            check_tokenizer_only(cluster, models, load, old)
        cluster.check_adds_up()


def check_told(cluster: Cluster, name: str, way: str) -> None:
    assert "is not the one that was there before" in cluster.server(name)["reason"], (way, cluster.server(name))
    assert cluster.metrics(name)["disagg_model_changes_total"] >= 1
    assert "is not the one that was there before" in (cluster.run_dir / f"{name}.log").read_text()


def check_tokenizer_only(cluster: Cluster, models: Models, load: Load, expected: dict[int, Outputs]) -> None:
    """The weights are the same. What comes back with other files gets nothing from a router that has the old ones."""
    text = cluster.complete("tokens of the old tokenizer", max_tokens=8, ignore_eos=True).text
    path = models.current / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(tokenizer))
    beside.rename(path)

    load.take()
    kill_workers(cluster, "prefill-1", "decode-1")
    load.wait_answers(2 * CLIENTS)
    answers, refusals = load.take()
    assert count(answers, expected) == {0: len(answers)}
    assert refused_for(refusals, TWO_CRASHES), refusals
    for name in ("prefill-1", "decode-1"):
        status = cluster.server(name)
        assert status["state"] == "mismatch" and "tokenizer.json" in status["reason"], status
    assert cluster.router_metrics()["disagg_router_servers_mismatched"] == 2
    assert "its tokenizer.json is not what this router has loaded" in (cluster.run_dir / "router.log").read_text()
    assert cluster.complete("tokens of the old tokenizer", max_tokens=8, ignore_eos=True).text == text

    kill_workers(cluster, "prefill-0", "decode-0")
    body = {"model": cluster.model, "prompt": "a b", "max_tokens": 4}
    refused = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60)
    assert refused.status_code == 503 and "tokenizer" in refused.text, refused.text
    cluster.kill(cluster.status()["routers"][0]["pid"])  # restarted, it has what the servers have
    cluster.wait(cluster.healthy, 120, "a router with the new tokenizer")
    cluster.wait_healthy()
    assert cluster.complete(PROMPTS[0], max_tokens=OUTPUTS, ignore_eos=True).token_ids == [list(expected[0])]
