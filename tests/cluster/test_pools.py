"""Two prefill and two decode servers: every pair works, and what one of each loses the others take over."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 100


@pytest.mark.timeout(900)
def test_requests_survive_the_loss_of_a_decode_server_and_of_a_prefill_worker(tmp_path: Path) -> None:
    model_dir = make_tiny("qwen3", tmp_path / "qwen3")
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 200))] for _ in range(40)]
    pools = ("--prefill", "2", "--decode", "2", "--page-tokens", "4", "--chunk-tokens", "32", "--kv-memory", "1MiB")
    with Cluster(tmp_path / "run", "--model", str(model_dir), *pools) as cluster:

        def ask(prompt: list[int]) -> list[int]:
            return cluster.complete(prompt, max_tokens=OUTPUTS, ignore_eos=True).token_ids[0]

        with ThreadPoolExecutor(16) as pool:
            undisturbed = list(pool.map(ask, prompts))
        for server in cluster.servers("prefill"):
            assert cluster.metrics(server)["disagg_prefill_tokens_total"] > 0, f"{server} was never used"
        for server in cluster.servers("decode"):
            assert cluster.metrics(server)["disagg_decode_tokens_total"] > 0, f"{server} was never used"

        def at_work() -> bool:
            return cluster.metrics("decode-1")["disagg_requests_running"] > 0

        cluster.wait(lambda: not at_work(), 120, "the end of that work")  # or it would be taken for what is asked next
        with ThreadPoolExecutor(len(prompts)) as pool:
            futures: list[Future[list[int]]] = []

            def work_to_lose() -> bool:
                """All is asked again if it was answered before that was seen."""
                if all(future.done() for future in futures):
                    futures.extend(pool.submit(ask, prompt) for prompt in prompts)
                return at_work()

            cluster.wait(work_to_lose, 120, "work on decode-1")
            cluster.kill(cluster.server("decode-1")["pid"])
            cluster.kill(cluster.server("prefill-0")["worker_pids"][0])
            answers = [future.result() for future in futures]
            assert answers == undisturbed * (len(answers) // len(undisturbed))
        cluster.wait_healthy()
        cluster.check_adds_up()
