"""One data-parallel rank of a group that decides its passes together: `python -m tests.server.gather_rank DIR RANK ...`.

Requests come to it at random, run for a while, and end. What was decided in each pass, and what ended the group, is said on
stdout. At pass `stays_at` it stays behind for ever, when it has said so many bytes of its row.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from disagg.scheduler.prefill_delayer import LargestBatch, Limits, PrefillDelayer, Row, SinglePass
from disagg.server.rank_gather import RankGather
from disagg.types.errors import RankLost

MAX_RUNNING = 6


class Rank:
    def __init__(self, gather: RankGather, seed: int, low_usage: float) -> None:
        self._rng = random.Random(f"{seed} {gather.rank}")
        self._limits = Limits(4, MAX_RUNNING, low_usage)
        self._delayer = PrefillDelayer(self._limits, gather)
        self._largest = LargestBatch(10)
        self._waiting = 0
        self._running: list[int] = []  # passes that are left of each
        self._pass_no = 0

    def one_pass(self) -> str:
        """What was decided in it."""
        rng = self._rng
        self._waiting += rng.choice((0, 0, 0, 1, 1, 5))
        one = SinglePass(self._delayer, self._row, now_s=rng.random() * 1e9)  # this clock is nobody else's
        begun = 0
        if self._waiting and len(self._running) < MAX_RUNNING and one.may_prefill():
            begun = min(self._waiting, MAX_RUNNING - len(self._running))
            self._waiting -= begun
            self._running += [rng.randint(1, 12) for _ in range(begun)]
        verdict = one.finalize(executed=bool(begun)).verdict
        self._largest.add(self._pass_no, begun)
        self._running = [left - 1 for left in self._running if left > 1]
        self._pass_no += 1
        if rng.random() < 0.02:
            time.sleep(rng.random() * 0.02)
        waits = self._delayer.delay.passes if self._delayer.delay is not None else 0
        return f"{verdict.estimate.value} {verdict.allow} {verdict.reason.value} {waits}"

    def _row(self, prefillable: bool) -> Row:
        running = len(self._running)
        return self._limits.row(
            prefillable=prefillable,
            usage=running / MAX_RUNNING,
            running=running,
            largest_batch=self._largest.at(self._pass_no),
        )


def main() -> int:
    folder = Path(sys.argv[1])
    rank, ranks, seed, passes, stays_at, after_bytes = map(int, sys.argv[2:8])
    deadline_s, low_usage = map(float, sys.argv[8:])
    gather = RankGather(rank, ranks, deadline_s)
    gather.connect(folder / "group", meet_s=60.0)
    one = Rank(gather, seed, low_usage)
    try:
        for pass_no in range(passes):
            if pass_no == stays_at:
                if after_bytes:
                    gather._sockets[0].sendall(bytes(after_bytes))
                print("stays", flush=True)
                time.sleep(600.0)
            print(one.one_pass())
    except RankLost as error:
        print(error, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
