"""A decode server that drains hands its answers over, KV and all: no client notices, and nothing is computed again."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.cluster import CLI, Cluster
from tests.cluster.test_tp import MixedCluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 600  # seconds of decoding, so that a server is told to go while there is something to move
BEGUN = 8  # tokens of a server, after which answers have begun: those that have not are given back, and do not move
ATTEMPTS = 3  # at disturbing answers while there are some
POOLS = ("--decode", "2", "--page-tokens", "4", "--chunk-tokens", "32", "--kv-memory", "16MiB", "--dtype", "float32")
HYBRID = "jamba"  # full attention and recurrent states
MODELS = [HYBRID, *(pytest.param(model, marks=pytest.mark.slow) for model in ("llama", "gemma3_text", "falcon_h1"))]


def asked(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Greedy and sampled, of one choice and of several."""
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 90))] for _ in range(count)]
    return [
        {"prompt": prompt, "n": 1 + 2 * (i % 4 == 3), "temperature": 0.9 * (i % 2), "seed": i}
        for i, prompt in enumerate(prompts)
    ]


def drain(cluster: Cluster, name: str, *flags: str) -> str:
    command = [*CLI, "drain", name, "--http", cluster.http, *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def tell(cluster: Cluster, name: str, what: str) -> None:
    """Sooner than a process of the command line has started, in which time answers may end."""
    httpx.post(f"{cluster.http}/servers/{name}/{what}", timeout=60).raise_for_status()


def recomputed(cluster: Cluster) -> float:
    """Tokens that were computed more than once, as all servers say."""
    decodes = [cluster.metrics(name)["disagg_recomputed_tokens_total"] for name in cluster.servers("decode")]
    return cluster.router_metrics()["disagg_router_replayed_tokens_total"] + sum(decodes)


def moved(cluster: Cluster) -> float:
    return cluster.router_metrics().get('disagg_router_attempts_total{cause="moved"}', 0.0)


def first_attempts(cluster: Cluster) -> float:
    return cluster.router_metrics()['disagg_router_attempts_total{cause="first"}']


def decoded_before(cluster: Cluster, name: str) -> float:
    """All that it has decoded, once it has nothing to do, as the router knows too: else it would send others what comes.

    Servers tell the router by their beats, and export by others, so what an answer that has ended had last comes later than
    its end, and would count for one that has not begun. What is exported together is of one moment.
    """
    cluster.wait(
        lambda: not (at := cluster.server(name))["running"] and not at["waiting"], 120, f"the end of work on {name}"
    )

    def idle() -> dict[str, float]:
        told = cluster.metrics(name)
        return {} if told["disagg_requests_running"] or told["disagg_requests_waiting"] else told

    return cluster.wait(idle, 120, f"the last tokens of {name}")["disagg_decode_tokens_total"]


def wait_begun(cluster: Cluster, name: str, decoded: float, answers: Sequence[Future[list[list[int]]]]) -> None:
    """Until at least two choices are at work there, and answers have begun; or all is over. decoded: its tokens before."""

    def begun() -> bool:
        told = cluster.metrics(name)
        return told["disagg_requests_running"] >= 2 and told["disagg_decode_tokens_total"] >= decoded + BEGUN

    cluster.wait(lambda: begun() or all(answer.done() for answer in answers), 120, f"answers of {name}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_answers_move_from_a_server_that_drains_with_nothing_computed_again(model: str, tmp_path: Path) -> None:
    requests = asked(random.Random(1), 8)
    with (
        Cluster(tmp_path / "run", "--model", str(make_tiny(model, tmp_path / model)), *POOLS) as cluster,
        ThreadPoolExecutor(len(requests)) as pool,
    ):

        def ask(request: dict[str, Any]) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS, ignore_eos=True, **request).token_ids

        def all_at_work(name: str) -> list[Future[list[list[int]]]]:
            decoded, placed = decoded_before(cluster, name), first_attempts(cluster)
            answers = [pool.submit(ask, request) for request in requests]
            # Of what comes to a server that is leaving the prompt is computed again.
            cluster.wait(lambda: first_attempts(cluster) >= placed + len(requests), 120, "a place for each")
            wait_begun(cluster, name, decoded, answers)
            return answers

        undisturbed = list(pool.map(ask, requests))

        def disturb(name: str, leave: Callable[[str], None]) -> bool:
            """Whether answers moved. They do not where all have ended before `name` leaves: whoever tells it to may stand still
            for longer than they take, once."""
            before = moved(cluster)
            answers = all_at_work(name)
            leave(name)
            assert [answer.result() for answer in answers] == undisturbed
            return moved(cluster) > before

        def drain_and_undo(name: str) -> bool:
            def leave(name: str) -> None:
                tell(cluster, name, "drain")
                assert drain(cluster, name, "--wait").splitlines()[-1] == f"{name}: drained"
                assert cluster.server(name)["state"] == "drained"

            has_moved = disturb(name, leave)
            assert recomputed(cluster) == 0
            drain(cluster, name, "--undo")
            cluster.wait_healthy()
            return has_moved

        assert any(drain_and_undo("decode-0") for _ in range(ATTEMPTS))
        # The other way round, over the same two servers.
        assert any(drain_and_undo("decode-1") for _ in range(ATTEMPTS))
        for pause_s in (0.0, 0.02, 0.1):  # undone while answers stand still to be sent
            answers = all_at_work("decode-1")
            for step in ("drain", "undrain"):
                tell(cluster, "decode-1", step)
                time.sleep(pause_s)
            assert [answer.result() for answer in answers] == undisturbed
            assert recomputed(cluster) == 0

        def end_and_return(name: str) -> bool:
            replayed = cluster.router_metrics()["disagg_router_replayed_tokens_total"]
            pid = cluster.server(name)["pid"]
            has_moved = disturb(name, lambda name: cluster.kill(pid, 15))
            assert cluster.router_metrics()["disagg_router_replayed_tokens_total"] == replayed
            cluster.wait(lambda: cluster.server(name)["pid"] != pid, 120, f"another {name}")
            cluster.wait_healthy()
            return has_moved

        assert any(end_and_return("decode-1") for _ in range(ATTEMPTS))
        cluster.check_adds_up()


SIX = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (3, 1)], ids=str)
def test_answers_move_between_servers_of_two_tp_sizes(tps: tuple[int, int], tmp_path: Path) -> None:
    """From the first to the second."""
    requests = asked(random.Random(2), 6)
    model_dir = make_tiny("llama", tmp_path / "llama", **SIX)
    with MixedCluster(tmp_path / "run", model_dir, (1,), tps) as cluster, ThreadPoolExecutor(len(requests)) as pool:

        def ask(request: dict[str, Any]) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS, ignore_eos=True, **request).token_ids

        drain(cluster, "decode-0", "--wait")
        undisturbed = list(pool.map(ask, requests))  # on decode-1 alone
        drain(cluster, "decode-0", "--undo")
        cluster.wait_healthy()
        decoded = decoded_before(cluster, "decode-0")
        answers = [pool.submit(ask, request) for request in requests]
        wait_begun(cluster, "decode-0", decoded, answers)
        drain(cluster, "decode-0", "--wait")
        assert [answer.result() for answer in answers] == undisturbed
        assert moved(cluster) > 0 and recomputed(cluster) == 0
        cluster.check_adds_up()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
def test_the_loss_of_either_end_of_a_move_costs_no_answer(victim: str, tmp_path: Path) -> None:
    """Answers move from decode-0 to decode-1, of which one is killed."""
    requests = asked(random.Random(3), 16)
    with (
        Cluster(tmp_path / "run", "--model", str(make_tiny("llama", tmp_path / "llama")), *POOLS) as cluster,
        ThreadPoolExecutor(len(requests)) as pool,
    ):

        def ask(request: dict[str, Any]) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS, ignore_eos=True, **request).token_ids

        undisturbed = list(pool.map(ask, requests))
        for pause_s in (0.0, 0.1, 0.4):
            answers = [pool.submit(ask, request) for request in requests]
            cluster.wait(lambda: cluster.server("decode-0")["running"] >= 1, 120, "work on decode-0")
            pid = cluster.server(victim)["pid"]
            drain(cluster, "decode-0", "--force")
            time.sleep(pause_s)  # somewhere in the moves
            cluster.kill(pid)
            assert [answer.result() for answer in answers] == undisturbed
            if victim != "decode-0":
                drain(cluster, "decode-0", "--undo")
            cluster.wait_healthy()
        cluster.check_adds_up()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tps", "victim"), [((1, 2), "decode-0"), ((2, 3), "decode-1"), ((3, 1), "decode-0")], ids=str)
def test_the_loss_of_either_end_of_a_move_between_tp_sizes_costs_no_answer(
    tps: tuple[int, int], victim: str, tmp_path: Path
) -> None:
    """Answers move from decode-0 to decode-1, of which one loses a rank."""
    requests = asked(random.Random(5), 6)
    model_dir = make_tiny("llama", tmp_path / "llama", **SIX)
    with MixedCluster(tmp_path / "run", model_dir, (1,), tps) as cluster, ThreadPoolExecutor(len(requests)) as pool:

        def ask(request: dict[str, Any]) -> list[list[int]]:
            return cluster.complete(max_tokens=OUTPUTS, ignore_eos=True, **request).token_ids

        drain(cluster, "decode-0", "--wait")
        undisturbed = list(pool.map(ask, requests))  # on decode-1 alone
        for pause_s in (0.0, 0.2):
            drain(cluster, "decode-0", "--undo")
            cluster.wait_healthy()
            answers = [pool.submit(ask, request) for request in requests]
            cluster.wait(lambda: cluster.server("decode-0")["running"] >= 2, 120, "work on decode-0")
            ranks = cluster.server(victim)["worker_pids"]
            drain(cluster, "decode-0", "--force")
            time.sleep(pause_s)  # somewhere in the moves
            cluster.kill(ranks[-1])
            assert [answer.result() for answer in answers] == undisturbed
        drain(cluster, "decode-0", "--undo")
        cluster.wait_healthy()
        cluster.check_adds_up()
