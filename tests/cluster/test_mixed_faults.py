"""Mixed servers beside a pair: requests take both roads, and whatever is lost on one of them goes on on the other.

Every answer is what transformers says. The model is tiny and its answers are long, so that a fault meets prompts, transfers
and answers alike.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.campaign import check
from tests.cluster.cluster import Cluster
from tests.models import reference
from tests.models.tiny import VOCAB_SIZE, make_tiny

LENGTHS = (1, 5, 33, 100)
OUTPUTS = 80
CLIENTS = 8
FROZEN_S = 15.0
FLAGS = ("--page-tokens", "4", "--chunk-tokens", "16", "--kv-memory", "2MiB", "--dtype", "float32")
BOTH = ("--prefill", "1", "--decode", "1", "--mixed", "1")

Fault = Callable[[Cluster], tuple[int, signal.Signals]]
FAULTS: dict[str, Fault] = {
    "mixed server killed": lambda c: (c.server("mixed-0")["pid"], signal.SIGKILL),
    "mixed worker killed": lambda c: (c.server("mixed-0")["worker_pids"][0], signal.SIGKILL),
    "decode server killed": lambda c: (c.server("decode-0")["pid"], signal.SIGKILL),
    "prefill worker killed": lambda c: (c.server("prefill-0")["worker_pids"][0], signal.SIGKILL),
    "mixed server frozen": lambda c: (c.server("mixed-0")["pid"], signal.SIGSTOP),
    "mixed worker frozen": lambda c: (c.server("mixed-0")["worker_pids"][0], signal.SIGSTOP),
    "decode worker frozen": lambda c: (c.server("decode-0")["worker_pids"][0], signal.SIGSTOP),
}


class Asked:
    """Prompts, and what transformers says."""

    def __init__(self, model_dir: Path) -> None:
        rng = random.Random(14)
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        self._answers = reference.generate(model_dir, self.prompts, OUTPUTS)

    def meanwhile(self, cluster: Cluster, what: str, act: Callable[[], None]) -> int:
        """Clients ask, one request after another, for as long as `act` takes. How many answers were compared."""
        over = threading.Event()

        def client(number: int) -> list[tuple[int, list[int]]]:
            said: list[tuple[int, list[int]]] = []
            for turn in itertools.count(number):
                if over.is_set():
                    return said
                which = turn % len(LENGTHS)
                fields = {
                    "max_tokens": OUTPUTS,
                    "ignore_eos": True,
                    "n": 1 + turn % 3,
                    "cache_salt": f"{number} {turn}",
                }
                said += [(which, each) for each in cluster.complete(self.prompts[which], **fields).token_ids]
            raise AssertionError

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(CLIENTS)]
            try:
                act()
            finally:
                over.set()
            said = [each for future in clients for each in future.result()]
        check([self._answers[which] for which, _ in said], [each for _, each in said], what)
        return len(said)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Asked]:
    model_dir = make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")
    return model_dir, Asked(model_dir)


@pytest.fixture(scope="module")
def both(asked: tuple[Path, Asked], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("both"), "--model", str(asked[0]), *FLAGS, *BOTH) as cluster:
        yield cluster


def run(cluster: Cluster, asked: Asked, fault: str) -> None:
    cluster.wait_healthy()

    def strike() -> None:
        roads = ("decode-0", "mixed-0")
        cluster.wait(lambda: all(cluster.server(name)["running"] for name in roads), 120, "work on both roads")
        pid, number = FAULTS[fault](cluster)
        cluster.kill(pid, number)
        if number is signal.SIGSTOP:
            time.sleep(FROZEN_S)
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile, since it was silent
                cluster.kill(pid, signal.SIGCONT)
        cluster.wait(lambda: pid not in pids(cluster), 120, "somebody in the place of what was struck")
        cluster.wait_healthy()

    started_s = time.monotonic()
    compared = asked.meanwhile(cluster, fault, strike)
    print(f"{fault}: {compared} answers in {time.monotonic() - started_s:.1f} s")
    cluster.check_adds_up()


def pids(cluster: Cluster) -> set[int]:
    return {pid for server in cluster.status()["servers"] for pid in (server["pid"], *server["worker_pids"])}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_take_both_roads_and_survive_a_fault_on_one_of_them(
    both: Cluster, asked: tuple[Path, Asked], fault: str
) -> None:
    run(both, asked[1], fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["decode-0", "prefill-0"])
def test_while_a_pool_is_empty_everything_goes_to_the_mixed_server(
    both: Cluster, asked: tuple[Path, Asked], lost: str
) -> None:
    both.wait_healthy()
    both.kill(both.server(lost)["pid"])
    both.wait(lambda: both.server(lost)["state"] != "ready", 60, f"the loss of {lost}")
    said = []
    while both.server(lost)["state"] != "ready":  # it is started again, which takes seconds
        said.append(both.complete(asked[1].prompts[len(said) % len(LENGTHS)], max_tokens=4, ignore_eos=True))
    *said, _ = said  # it may have been back when the last one was asked
    assert said
    for answer in said:
        (attempt,) = [event for event in both.timeline(answer.id) if event["name"].startswith("attempt")]
        assert attempt["detail"] == "mixed-0: done"
    both.wait_healthy()
    both.check_adds_up()
