"""Up to how many rows the ranks' own sums are the faster ones on these GPUs: measured at the start, since links differ.

What is timed is what a step has of them: many sums in a row, by two slots in turns, each in the norm behind it (models/sums),
beside a collective's with that norm; on a GPU as a CUDA graph, as steps are.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from disagg.models.fused.modules import FusedRMSNorm, Sum
from disagg.models.ranks import Ranks
from disagg.models.sums.shared import SLOTS, SharedRows

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
SUMS = 64  # in a row: two for each layer of an 8B model
ROUNDS = 5
_MOST_BYTES = 1024  # of what a rank says of its times
logger = logging.getLogger(__name__)


class SumTimes(Struct, frozen=True, array_like=True):
    """Seconds of one sum of so many rows, with the norm behind it."""

    rows: int
    own_s: float
    collective_s: float


def rows_that_pay(found: Sequence[SumTimes]) -> int:
    """Up to how many of the rows that were timed, rising, no own sum is slower than a collective's. Pure."""
    pays = 0
    for each in found:
        if each.own_s > each.collective_s:
            break
        pays = each.rows
    return pays


def slowest(said: Sequence[Sequence[SumTimes]]) -> tuple[SumTimes, ...]:
    """What all ranks make of what each of them has measured of the same rows. Pure."""
    return tuple(
        SumTimes(each[0].rows, max(one.own_s for one in each), max(one.collective_s for one in each))
        for each in zip(*said, strict=True)
    )


class NormedSums:
    """The sum of what each rank has, [rows, size], and the norm of it; to nothing that was there before. shared: for `own`."""

    def __init__(self, norm: FusedRMSNorm, ranks: Ranks, shared: SharedRows | None, most_rows: int) -> None:
        self._norm, self._ranks, self._shared = norm, ranks, shared
        self._zeros = torch.zeros_like(norm.weight).expand(1, most_rows, -1).contiguous()
        self._number = 0

    def by_collective(self, part: Tensor) -> Tensor:
        return self._total(Sum(self._zeros[:, : part.shape[0]], self._ranks.sum(part.clone())[None]))

    def own(self, part: Tensor) -> Tensor:
        assert self._shared is not None
        self._number += 1
        return self._total(Sum(self._zeros[:, : part.shape[0]], part[None], self._shared.slot(self._number % SLOTS)))

    def _total(self, rows: Sum) -> Tensor:
        return self._norm.normed(rows)[0][0]


def seconds(ranks: Ranks, run: Callable[[], object], device: torch.device, graph: bool, rounds: int = ROUNDS) -> float:
    """Of a run, the median, which all ranks begin together. graph: captured; on a GPU only."""
    run()
    on_gpu = device.type == "cuda"
    replay = run
    if graph:
        torch.cuda.synchronize(device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            run()
        replay = captured.replay
        replay()
    took = []
    for _ in range(rounds):
        ranks.sum(torch.zeros(1, device=device))
        if on_gpu:
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        replay()
        if on_gpu:
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def measure(
    norm: FusedRMSNorm, ranks: Ranks, shared: SharedRows, rows: Sequence[int] = ROWS, sums: int = SUMS
) -> tuple[SumTimes, ...]:
    """Of so many rows each, as far as the ranks' own memory has room; the same on all ranks, all of which call this."""
    device = norm.weight.device
    ways = NormedSums(norm, ranks, shared, shared.most_rows)
    found = []
    for count in rows:
        if count > shared.most_rows:
            break
        part = torch.zeros(count, norm.weight.shape[0], dtype=norm.weight.dtype, device=device)

        def many(way: Callable[[Tensor], Tensor], part: Tensor = part) -> float:
            def run() -> None:
                for _ in range(sums):
                    way(part)

            return seconds(ranks, run, device, device.type == "cuda") / sums

        found.append(SumTimes(count, many(ways.own), many(ways.by_collective)))
    said = ranks.exchange(msgspec.msgpack.encode(found), _MOST_BYTES, device)
    return slowest([msgspec.msgpack.decode(each, type=list[SumTimes]) for each in said])


@torch.inference_mode()
def limit(norm: FusedRMSNorm, ranks: Ranks, shared: SharedRows, rows: Sequence[int] = ROWS, sums: int = SUMS) -> None:
    """From now on the ranks sum by themselves what they sum the faster so. All of them call it."""
    found = measure(norm, ranks, shared, rows, sums)
    shared.most_rows = rows_that_pay(found)
    more = next((each for each in found if each.rows > shared.most_rows), None)
    why = (
        ""
        if more is None
        else f": of {more.rows}, {1e6 * more.own_s:.1f} us beside {1e6 * more.collective_s:.1f} by a collective"
    )
    logger.info("sums of up to %d rows are made in the ranks' own memory%s", shared.most_rows, why)
