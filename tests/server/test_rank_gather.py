"""Data-parallel ranks that decide their passes together, as processes: all alike, and none outlives one that is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from disagg.scheduler.prefill_delayer import Row
from disagg.server.rank_gather import HELLO, RankGather, _dialled
from disagg.types.errors import RankLost

pytestmark = pytest.mark.timeout(120)
END_S = 60.0
LOST = 3  # exit status of a rank that lost another


class Group:
    """`with Group(...) as group:`; a process for each rank.

    stays: one stays behind at pass 40, when it has said `after_bytes` of its row.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *,
        seed: int = 1,
        passes: int = 100,
        stays: int = -1,
        after_bytes: int = 0,
        deadline_s: float = 60.0,
        low_usage: float = 0.0,
    ) -> None:
        self.processes = []
        for rank in range(ranks):
            numbers = (rank, ranks, seed, passes, 40 if rank == stays else -1, after_bytes, deadline_s, low_usage)
            command = (sys.executable, "-m", "tests.server.gather_rank", str(folder), *map(str, numbers))
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.kill()
            each.communicate()

    def await_stay(self, rank: int) -> None:
        """The others wait for it, or will."""
        out = self.processes[rank].stdout
        assert out is not None and any(line == "stays\n" for line in out)

    def said(self, rank: int) -> tuple[int, list[str]]:
        """Its exit status and its lines, once it has ended."""
        out = self.processes[rank].communicate(timeout=END_S)[0]
        return self.processes[rank].returncode, out.splitlines()


@pytest.mark.parametrize(("ranks", "low_usage"), [(2, 0.0), (4, 0.0), (3, 0.3)])
def test_no_rank_ever_disagrees_whatever_comes_to_which(ranks: int, low_usage: float, tmp_path: Path) -> None:
    with Group(tmp_path, ranks, seed=ranks, passes=1500, low_usage=low_usage) as group:
        all_said = [group.said(rank) for rank in range(ranks)]
    first = all_said[0]
    assert first[0] == 0 and len(first[1]) == 1500
    assert all(said == first for said in all_said)
    seen = Counter(" ".join(line.split()[:3]) for line in first[1])
    forced = "mixed True token_watermark"
    assert {"mixed False delay", "mixed True wait_timeout", "all True wait_success", "none True none"} <= set(seen)
    assert (forced in seen) == bool(low_usage), seen


@pytest.mark.parametrize("after_bytes", [0, 7])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_that_is_killed_in_mid_gather_ends_the_others(lost: int, after_bytes: int, tmp_path: Path) -> None:
    with Group(tmp_path, 4, stays=lost, after_bytes=after_bytes if lost else 0) as group:
        group.await_stay(lost)
        group.processes[lost].kill()
        for rank in set(range(4)) - {lost}:
            status, lines = group.said(rank)
            assert status == LOST and len(lines) == 41, "40 passes, and why there are no more"
            assert f"data-parallel rank {lost} is lost" in lines[-1] and "its group of 4 ends" in lines[-1]


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_says_nothing_ends_the_others_at_the_deadline(silent: int, tmp_path: Path) -> None:
    with Group(tmp_path, 3, stays=silent, deadline_s=1.0) as group:
        group.await_stay(silent)
        group.processes[silent].send_signal(signal.SIGSTOP)
        for rank in set(range(3)) - {silent}:
            status, lines = group.said(rank)
            assert status == LOST and f"data-parallel rank {silent} is lost" in lines[-1]


def pair(folder: Path) -> tuple[RankGather, RankGather]:
    """Rank 0, which does not wait for long, and the other one."""
    one, other = RankGather(0, 2, 0.5), RankGather(1, 2, 0.5)
    meeting = threading.Thread(target=other.connect, args=(folder / "group", 30.0))
    meeting.start()
    one.connect(folder / "group", 30.0)
    meeting.join()
    return one, other


ROW = Row(True, False, 3, 2)


def test_ranks_at_different_passes_end(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    other._pass_no = 5
    said: list[str] = []

    def asks() -> None:
        with pytest.raises(RankLost) as raised:
            other.gather(ROW)
        said.append(str(raised.value))

    asking = threading.Thread(target=asks)
    asking.start()
    with pytest.raises(RankLost, match=r"rank 1 is lost \(it is at pass 5, rank 0 at 0\)"):
        one.gather(ROW)
    asking.join()
    assert said == ["data-parallel rank 1 is lost: its group of 2 ends"]


def test_a_group_that_has_ended_stays_so(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    other.close()
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 is lost"):
            one.gather(ROW)


def test_a_rank_that_comes_late_hears_who_was_lost_and_not_rank_0(tmp_path: Path) -> None:
    one, other = pair(tmp_path)
    with pytest.raises(RankLost, match=r"rank 1 is lost \(nothing came of it for 0.5 s\)"):
        one.gather(ROW)
    with pytest.raises(RankLost, match="rank 1 is lost: its group of 2 ends"):
        other.gather(ROW)


def test_ranks_that_do_not_all_come_are_no_group(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="the 2 data-parallel ranks did not find each other"):
        RankGather(0, 2, 1.0).connect(tmp_path / "alone", meet_s=0.2)
    with pytest.raises(RankLost, match=r"did not find each other in .*: nothing came in time"):
        RankGather(1, 2, 1.0).connect(tmp_path / "nobody", meet_s=0.2)


def test_a_stranger_is_no_rank(tmp_path: Path) -> None:
    one = RankGather(0, 2, 1.0)

    def stranger() -> None:
        _dialled(tmp_path / "group", time.monotonic() + 30.0).sendall(HELLO.pack(7))

    coming = threading.Thread(target=stranger)
    coming.start()
    with pytest.raises(RankLost, match="a process says that it is rank 7"):
        one.connect(tmp_path / "group", meet_s=30.0)
    coming.join()
