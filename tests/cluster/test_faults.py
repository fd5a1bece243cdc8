"""Sixteen requests in flight and something dies or freezes: every one finishes, token-identical, and nothing leaks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cluster import Answer, Cluster

PROMPTS = [list(range(500 + 37 * i, 500 + 37 * i + 40 + 11 * i)) for i in range(16)]
OUTPUTS = 24
ATTEMPTS = 3  # at striking while there is something to disturb: who strikes may stand still meanwhile

FAULTS: dict[str, Callable[[Cluster], tuple[int, signal.Signals]]] = {
    "decode server killed": lambda c: (c.server("decode-0")["pid"], signal.SIGKILL),
    "prefill server killed": lambda c: (c.server("prefill-0")["pid"], signal.SIGKILL),
    "decode worker killed": lambda c: (c.server("decode-0")["worker_pids"][0], signal.SIGKILL),
    "prefill worker killed": lambda c: (c.server("prefill-0")["worker_pids"][0], signal.SIGKILL),
    "decode worker frozen": lambda c: (c.server("decode-0")["worker_pids"][0], signal.SIGSTOP),
    "prefill worker frozen": lambda c: (c.server("prefill-0")["worker_pids"][0], signal.SIGSTOP),
    "decode server frozen": lambda c: (c.server("decode-0")["pid"], signal.SIGSTOP),
    "prefill server frozen": lambda c: (c.server("prefill-0")["pid"], signal.SIGSTOP),
}


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fragile"), "--chunk-tokens", "64") as cluster:
        yield cluster


def ask_all(
    cluster: Cluster, salt: str, during: Callable[[Sequence[Future[Answer]]], None] | None = None
) -> list[Answer]:
    """salt: new each time, so that no prompt is cached and there is prefill to disturb. during: may see which are answered."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        fields = {"max_tokens": OUTPUTS, "ignore_eos": True, "cache_salt": salt}
        futures = [pool.submit(cluster.complete, p, **fields) for p in PROMPTS]
        if during is not None:
            during(futures)
        return [future.result() for future in futures]


@pytest.fixture(scope="module")
def expected(fragile: Cluster) -> list[list[int]]:
    """What the same cluster answers undisturbed; test_exactness shows that such answers are right."""
    return [answer.token_ids[0] for answer in ask_all(fragile, "undisturbed")]


def pids(cluster: Cluster) -> set[int]:
    return {pid for server in cluster.status()["servers"] for pid in (server["pid"], *server["worker_pids"])}


def strike(cluster: Cluster, fault: str, asked: Sequence[Future[Answer]], struck: list[int]) -> None:
    """When some requests decode, some are in transfer, some are in prefill. struck: gets who was struck; nobody, if all was
    answered before it came to that."""
    tokens = "disagg_decode_tokens_total"
    before = cluster.metrics("decode-0")[tokens]

    def is_over() -> bool:
        return all(each.done() for each in asked)

    def is_on_the_way() -> bool:
        now = cluster.metrics("decode-0")
        return now[tokens] > before + len(PROMPTS) * OUTPUTS / 5 and now["disagg_requests_running"] > 0

    cluster.wait(lambda: is_on_the_way() or is_over(), 120, "a fifth of the tokens, and a running request")
    pid, number = FAULTS[fault](cluster)
    if not is_over():
        cluster.kill(pid, number)
        struck.append(pid)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_sixteen_requests_survive(fragile: Cluster, expected: list[list[int]], fault: str) -> None:
    fragile.wait_healthy()
    fragile.check_adds_up()  # what was asked before is counted by now
    struck: list[int] = []
    for attempt in range(ATTEMPTS):
        started = time.monotonic()
        answers = ask_all(fragile, f"{fault} {attempt}", lambda asked: strike(fragile, fault, asked, struck))
        print(f"{fault}: all {len(answers)} finished {time.monotonic() - started:.1f} s after they were asked")
        assert [answer.token_ids[0] for answer in answers] == expected
        if struck:
            break
    assert struck, "nothing was left to disturb"
    # The answers may be there before anybody misses it: a frozen process is silent for 10 s first.
    fragile.wait(lambda: not pids(fragile) & set(struck), 240, "somebody in the place of what was struck")
    fragile.wait_healthy()
    fragile.check_adds_up()


@pytest.mark.timeout(900)
def test_a_seeded_sampled_request_says_the_same_alone_in_a_batch_and_replayed(fragile: Cluster) -> None:
    fragile.wait_healthy()
    fields = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "max_tokens": 48, "ignore_eos": True}
    prompt = "Once upon a time, in a town by the sea,"
    alone = fragile.complete(prompt, **fields)
    others = [{"temperature": 1.0, "seed": i, "max_tokens": 48, "ignore_eos": True} for i in range(15)]

    def in_a_batch(during: Callable[[], None] | None = None) -> Answer:
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(fragile.complete, PROMPTS[i], **other) for i, other in enumerate(others)]
            ours = pool.submit(fragile.complete, prompt, **fields)
            if during is not None:
                during()
            for future in futures:
                future.result()
            return ours.result()

    assert in_a_batch().token_ids == alone.token_ids

    fragile.check_adds_up()
    before = fragile.metrics("decode-0")["disagg_decode_tokens_total"]  # while nothing is decoded

    def kill_decode_half_way() -> None:
        fragile.wait(
            lambda: fragile.metrics("decode-0")["disagg_decode_tokens_total"] - before > 16 * 20, 240, "half the tokens"
        )
        fragile.kill(fragile.server("decode-0")["pid"])

    assert in_a_batch(kill_decode_half_way).token_ids == alone.token_ids
    fragile.wait_healthy()
    fragile.check_adds_up()


@pytest.mark.timeout(600)
def test_kill_9_of_up_leaves_no_process_behind(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--chunk-tokens", "64") as cluster:
        status = cluster.status()
        pids = [s["pid"] for s in status["servers"]] + [p for s in status["servers"] for p in s["worker_pids"]]
        pids += [router["pid"] for router in status["routers"]]
        cluster.process.kill()
        cluster.process.wait()
        cluster.wait(lambda: not any(alive(pid) for pid in pids), 60, "the end of every process")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
