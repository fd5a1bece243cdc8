"""Data-parallel ranks in one mixed server: token-identical to transformers, with shared experts, and when one is lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from disagg.bench.report.read import read_records
from tests.cluster.campaign import total
from tests.cluster.cluster import Cluster
from tests.cluster.test_mixed_faults import FLAGS, FROZEN_S, LENGTHS, Asked, pids
from tests.models.tiny import make_tiny

ALONE = ("--prefill", "0", "--decode", "0", "--mixed", "1")


@dataclass(frozen=True)
class Case:
    family: str
    dp: int
    tp: int = 1
    shares: bool = True  # experts, so that the ranks step together

    def __str__(self) -> str:
        return f"{self.family}-{self.dp}x{self.tp}"


QUICK = Case("mixtral", 2)
SLOW = (
    Case("llama", 2, shares=False),
    Case("llama", 3, 2, shares=False),
    Case("qwen2_moe", 3),  # four experts on three ranks
    Case("qwen3_moe", 2, 2),
    Case("olmoe", 5),  # one rank has no expert
    Case("gpt_oss", 2),
    Case("jamba", 2),  # layers with states, and only some with experts
)


class Server:
    """A cluster of one mixed server, and what is asked of it."""

    def __init__(self, case: Case, cluster: Cluster, asked: Asked) -> None:
        self.case, self.cluster, self.asked = case, cluster, asked
        server = cluster.server("mixed-0")
        assert (server["tp"], len(server["worker_pids"])) == (case.tp, case.tp * case.dp)

    def answers(self) -> None:
        """Several requests at a time, some with choices, on all ranks."""
        enough = 4 * len(LENGTHS)

        def until_enough() -> None:
            done = total(self.cluster, "disagg_legs")
            self.cluster.wait(lambda: total(self.cluster, "disagg_legs") >= done + enough, 240, "answers")

        print(f"{self.case}: {self.asked.meanwhile(self.cluster, str(self.case), until_enough)} answers")
        self.cluster.check_adds_up()
        passes = total(self.cluster, "disagg_prefill_delay_outcomes")
        assert bool(passes) == self.case.shares, f"{passes} passes in which ranks heard each other"

    def loses(self, rank: int, number: signal.Signals) -> None:
        """This worker, while requests are on every rank; they go on elsewhere, or when there are workers again."""
        cluster = self.cluster
        before = set(cluster.server("mixed-0")["worker_pids"])

        def strike() -> None:
            cluster.wait(lambda: cluster.server("mixed-0")["running"] > 2, 120, "work")
            pid = cluster.server("mixed-0")["worker_pids"][rank]
            cluster.kill(pid, number)
            if number is signal.SIGSTOP:
                time.sleep(FROZEN_S)
                with contextlib.suppress(ProcessLookupError):  # killed meanwhile, since it was silent
                    cluster.kill(pid, signal.SIGCONT)
            cluster.wait(lambda: not before & pids(cluster), 120, "other workers, in the place of all of them")
            cluster.wait_healthy()
            done = total(cluster, "disagg_legs")
            cluster.wait(lambda: total(cluster, "disagg_legs") > done + len(LENGTHS), 240, "answers of the new ones")

        what = f"{self.case}, rank {rank}, {number.name}"
        print(f"{what}: {self.asked.meanwhile(cluster, what, strike)} answers")
        cluster.check_adds_up()


@contextlib.contextmanager
def serving(case: Case, tmp_path: Path) -> Iterator[Server]:
    """And what it has recorded is looked at."""
    model_dir = make_tiny(case.family, tmp_path / case.family)
    asked = Asked(model_dir)
    flags = (*FLAGS, *ALONE, "--mixed-dp", str(case.dp), "--mixed-tp", str(case.tp))
    records = tmp_path / "records"
    with Cluster(tmp_path / "run", "--model", str(model_dir), "--record", str(records), *flags) as cluster:
        yield Server(case, cluster, asked)
    steps = read_records(records).steps.to_pylist()
    for life in {row["incarnation"] for row in steps}:
        of_ranks = [
            [row["step"] for row in steps if (row["incarnation"], row["rank"]) == (life, rank)]
            for rank in range(case.dp)
        ]
        assert all(len(numbers) > len(LENGTHS) and len(set(numbers)) == len(numbers) for numbers in of_ranks)


@pytest.mark.timeout(600)
def test_ranks_that_share_experts_say_what_transformers_says_also_when_one_is_killed(tmp_path: Path) -> None:
    with serving(QUICK, tmp_path) as server:
        server.answers()
        server.loses(1, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_ranks_of_every_kind_say_what_transformers_says_and_survive_what_befalls_one(
    case: Case, tmp_path: Path
) -> None:
    with serving(case, tmp_path) as server:
        server.answers()
        server.loses(0, signal.SIGKILL)
        server.loses(case.dp * case.tp - 1, signal.SIGSTOP)
