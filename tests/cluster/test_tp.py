"""Prefill and decode servers of any two TP sizes, over NIXL: token-identical to transformers, and one wrong head shows.

Every case asks its cluster twice: as it is, and with one rank that spoils one of its heads (spoiling_worker), which must
change an answer. Prompts are short: on a CPU each layer of each step is a round between processes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from disagg.cli.up import UpOptions, cluster_processes
from disagg.config.load import dump_config, load_config
from disagg.convert.model_dir import resolve
from tests.cluster.campaign import check, total
from tests.cluster.cluster import CLI, Cluster
from tests.models import reference
from tests.models.tiny import make_tiny

CACHE = Path("~/.cache/disagg/models").expanduser()
LENGTHS = (1, 5, 18, 40)
OUTPUTS = 8
FLAGS = ("--dtype", "float32", "--page-tokens", "4", "--chunk-tokens", "16", "--kv-memory", "64MiB")
SETS = ("engine.checkpoint_tokens=16",)
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}


@dataclass(frozen=True)
class Case:
    """A model (a known name, or a family and what differs in its tiny configuration) and two TP sizes. spoil: how."""

    model: str
    prefill_tp: int
    decode_tp: int
    spoil: str = "zero"
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}-{self.fields.get('num_key_value_heads', '')}-{self.prefill_tp}to{self.decode_tp}"

    def make(self, directory: Path) -> Path:
        if self.model in ("smollm2-135m", "gemma3-270m"):
            return resolve(self.model, CACHE)
        return make_tiny(self.model, directory / self.model, **self.fields)


QUICK = (
    Case("smollm2-135m", 1, 3, "swap"),
    Case("llama", 4, 2, "zero", EIGHT),
    Case("llama", 2, 3, "zero", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}),
)
SLOW = (
    Case("smollm2-135m", 3, 1),
    Case("smollm2-135m", 3, 3),
    Case("llama", 2, 4, "swap", EIGHT),
    Case("llama", 1, 4, "swap", EIGHT),
    Case("llama", 4, 1, "zero", EIGHT),
    Case("llama", 1, 4),
    Case("llama", 4, 1),
    Case("llama", 2, 4),
    Case("gemma3-270m", 1, 2),
    Case("gemma3-270m", 2, 1),
    Case("falcon_h1", 2, 1),
    Case("falcon_h1", 1, 2, "swap"),
    Case("gpt_oss", 4, 2),
)


def prompts_of(vocab: int = 512) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in LENGTHS]


def ask(cluster: Cluster, prompts: Sequence[Sequence[int]], salt: str, outputs: int = OUTPUTS) -> list[list[int]]:
    """salt: new where nothing is to come from a prefix cache."""
    fields = {"max_tokens": outputs, "ignore_eos": True, "cache_salt": salt, "timeout_s": 300}
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(cluster.complete, list(prompt), **fields) for prompt in prompts]
        return [future.result().token_ids[0] for future in futures]


def run(case: Case, tmp_path: Path) -> None:
    model_dir = case.make(tmp_path)
    prompts = prompts_of()
    answers = reference.generate(model_dir, prompts, OUTPUTS)
    spoil = tmp_path / "spoil"
    spoil.mkdir()
    worker = f"worker.command={sys.executable} -m tests.cluster.spoiling_worker {spoil}"
    tps = ("--prefill-tp", str(case.prefill_tp), "--decode-tp", str(case.decode_tp))
    flags = ("--model", str(model_dir), *FLAGS, *tps)
    with Cluster(tmp_path / "run", *flags, sets=(*SETS, worker)) as cluster:
        for role, tp in (("prefill", case.prefill_tp), ("decode", case.decode_tp)):
            server = cluster.server(f"{role}-0")
            assert (server["tp"], len(server["worker_pids"])) == (tp, tp)
        compared = check(answers, ask(cluster, prompts, "right"), str(case))
        assert total(cluster, "disagg_prefill_tokens", "decode") == 0, "decode received all that it did not compute"
        (spoil / case.spoil).touch()
        spoilt = ask(cluster, prompts, "spoilt")
        changed = sum(answer.outputs != got for answer, got in zip(answers, spoilt, strict=True))
        assert total(cluster, "disagg_checksum_failures") == 0
        cluster.check_adds_up()
    print(f"{case}: (steps, ties) {compared}; one wrong head changed {changed} of {len(prompts)} answers")
    assert changed, "one wrong head changed nothing"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_servers_of_two_tp_sizes_say_what_transformers_says_and_a_wrong_head_shows(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more_pairs_of_tp_sizes_say_what_transformers_says_and_a_wrong_head_shows(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--decode-tp", "2"), "decode servers with tp = 2: TP size 2 cannot share 9 query heads and 3 KV heads"),
        (("--prefill-tp", "4"), "prefill servers with tp = 4: TP size 4 cannot share 9 query heads and 3 KV heads"),
    ],
)
def test_a_tp_size_that_the_model_does_not_allow_is_refused_before_anything_starts(
    flags: tuple[str, ...], sentence: str, smollm2: Path, tmp_path: Path
) -> None:
    up = (
        *CLI,
        "up",
        "--model",
        str(smollm2),
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--run-dir",
        str(tmp_path),
        *flags,
    )
    done = subprocess.run(up, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert sentence in line and line.endswith("1, 3, 9")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_rank_that_dies_takes_its_group_along_and_every_request_survives(victim: str, tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "llama", **EIGHT)
    prompts = prompts_of() * 2
    outputs = 240  # so many that a fast machine is still at them when it has been seen that they run
    answers = reference.generate(model_dir, prompts, outputs)
    with Cluster(
        tmp_path / "run", "--model", str(model_dir), *FLAGS, "--prefill-tp", "2", "--decode-tp", "2"
    ) as cluster:
        before = set(cluster.server(victim)["worker_pids"])
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, cluster, prompts, "right", outputs)
            cluster.wait(lambda: cluster.server("decode-0")["running"] >= 4, 60, "four running requests")
            cluster.kill(cluster.server(victim)["worker_pids"][1])
            got = asked.result()
        check(answers, got, f"rank 1 of {victim} killed")
        cluster.wait_healthy()
        cluster.wait(lambda: not before & set(cluster.server(victim)["worker_pids"]), 60, "a whole new group")
        cluster.check_adds_up()


class MixedCluster(Cluster):
    """Servers of a pool with TP sizes of their own, which `disagg up` does not offer: the same processes, started here."""

    def __init__(self, run_dir: Path, model_dir: Path, prefill_tps: Sequence[int], decode_tps: Sequence[int]) -> None:
        super().__init__(run_dir)
        run_dir.mkdir()
        model = {"model.name": str(model_dir), "model.dtype": "float32"}
        engine = {"engine.page_tokens": 4, "engine.chunk_tokens": 16, "engine.kv_memory_bytes": "64MiB"}
        base = load_config(None, {**model, **engine, "router.http_port": 0, "router.grpc_port": 0})
        specs = cluster_processes(base, UpOptions(num_prefill=len(prefill_tps), num_decode=len(decode_tps)))
        self._specs = [specs[0]]
        for spec, tp in zip(specs[1:], (*prefill_tps, *decode_tps), strict=True):
            self._specs.append(replace(spec, config=replace(spec.config, server=replace(spec.config.server, tp=tp))))
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> MixedCluster:
        for spec in self._specs:
            file = self.run_dir / f"{spec.name}.toml"
            file.write_text(dump_config(spec.config))
            with (self.run_dir / f"{spec.name}.log").open("wb") as log:
                command = (*CLI, spec.role, "--config", str(file))
                self._children.append(subprocess.Popen(command, stdout=log, stderr=log))
        self.http = f"http://127.0.0.1:{self._specs[0].config.router.http_port}"
        try:
            self.wait_healthy(180)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def output(self) -> str:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_prefill_servers_of_two_tp_sizes_feed_two_decode_servers_of_two_others(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "llama", **EIGHT)
    prompts = prompts_of() * 4
    answers = reference.generate(model_dir, prompts, OUTPUTS)
    with MixedCluster(tmp_path / "run", model_dir, (1, 2), (2, 4)) as cluster:
        assert [server["tp"] for server in cluster.status()["servers"]] == [1, 2, 2, 4]
        check(answers, ask(cluster, prompts, "right"), "mixed pools")
        for server in cluster.servers("prefill"):
            assert cluster.metrics(server)["disagg_prefill_tokens_total"] > 0, f"{server} was never used"
        for server in cluster.servers("decode"):
            assert cluster.metrics(server)["disagg_decode_tokens_total"] > 0, f"{server} was never used"
        cluster.check_adds_up()
