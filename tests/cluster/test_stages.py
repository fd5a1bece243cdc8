"""Mixed servers whose layers are cut by pipeline stages: token-identical to transformers, also when a stage's worker is lost."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.cluster import CLI, Cluster
from tests.cluster.test_mixed import ALONE, SIX, Case, run
from tests.cluster.test_mixed_faults import FLAGS, FROZEN_S, Asked, pids
from tests.models.tiny import make_tiny
from tests.scheduler.mixed_policies import MIXED_POLICIES

FIVE = {"num_hidden_layers": 5}
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
SLOW = (
    Case("llama", 1, fields=FIVE, pp=2),
    Case("llama", 1, fields=FIVE, pp=3),
    Case("llama", 3, fields={**SIX, **FIVE}, pp=2),
    Case("gemma3_text", 1, pp=3),
    Case("gemma3_text", 1, fields=SIX_LAYERS, pp=2),  # the first stage has no layer of the other group
    Case("gemma3_text", 2, fields=SIX_LAYERS, pp=2),
    Case("jamba", 1, pp=2),
    Case("falcon_h1", 1, pp=3),
    Case("qwen3_next", 1, pp=2),
    Case("gpt_oss", 1, pp=2),
)
KNOWN = (
    Case("smollm2-135m", 1, 16, 64, 512, 16, {}, 2),
    Case("smollm2-135m", 1, 16, 64, 512, 16, {}, 3),
    Case("gemma3-270m", 1, 4, 64, 512, 64, {}, 2),
)


def strike(cluster: Cluster, asked: Asked, stage: int, number: signal.Signals = signal.SIGKILL) -> int:
    """The worker of a stage is struck while requests are under way; answers that were compared."""
    cluster.wait_healthy()

    def act() -> None:
        cluster.wait(lambda: cluster.server("mixed-0")["running"] > 1, 120, "requests under way")
        before = cluster.server("mixed-0")
        cluster.kill(before["worker_pids"][stage], number)
        if number is signal.SIGSTOP:
            time.sleep(FROZEN_S)
        gone = set(before["worker_pids"])
        cluster.wait(lambda: not gone & pids(cluster), 120, "other workers in all stages")
        cluster.wait_healthy()

    compared = asked.meanwhile(cluster, f"stage {stage} gets {number.name}", act)
    cluster.check_adds_up()
    return compared


@pytest.mark.timeout(300)
def test_two_stages_say_what_transformers_says_also_after_a_worker_of_one_is_killed(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "llama")
    asked = Asked(model_dir)
    with Cluster(tmp_path / "run", "--model", str(model_dir), *FLAGS, *ALONE, "--mixed-pp", "2") as cluster:
        first = cluster.server("mixed-0")
        assert len(first["worker_pids"]) == 2 and (first["tp"], first["dp"], first["pp"]) == (1, 1, 2)
        assert strike(cluster, asked, stage=1)
        metrics = cluster.metrics("mixed-0")
        for stage in ("0", "1"):
            for kind in ("busy", "bubble"):
                assert metrics[f'disagg_pipeline_{kind}_seconds_total{{stage="{stage}"}}'] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_three_stages_survive_the_loss_of_any_worker(tmp_path: Path, stage: int, number: signal.Signals) -> None:
    model_dir = make_tiny("llama", tmp_path / "llama")
    with Cluster(tmp_path / "run", "--model", str(model_dir), *FLAGS, *ALONE, "--mixed-pp", "3") as cluster:
        print(f"stage {stage}, {number.name}: {strike(cluster, Asked(model_dir), stage, number)} answers")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_stages_under_every_policy_say_what_transformers_says(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path, MIXED_POLICIES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_stages_of_trained_models_say_what_transformers_says(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path, ("sarathi", "vllm"))


@pytest.mark.timeout(300)
def test_a_model_that_cannot_be_cut_is_refused_at_start(tmp_path: Path) -> None:
    model_dir = make_tiny("gemma3n_text", tmp_path / "gemma3n")
    command = [*CLI, "mixed", "--set", f"model.name={model_dir}", "--set", "server.pp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "server.pp must be 1" in said, said
