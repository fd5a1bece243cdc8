"""What the sums of several ranks' rows take: `python -m bench.rank_sums --ranks 2`; a minute on GPUs.

Each rank adds up with the others what one layer's product leaves it, [rows, width] in bfloat16, as `models/ranks` does after
every output and every down projection: twice a layer. Microseconds of one sum, of many in a row, launched one by one and as a
CUDA graph, by NCCL and by kernels that read the other ranks' memory (torch's symmetric memory). The floor is what a rank must
receive, over the rate at which it copies from another one. `--device cpu` tries the command out over gloo.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from msgspec import Struct
from torch import Tensor

from disagg.models.ranks import Ranks, dist

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
SUMS = 64  # in a row: two for each layer of an 8B model
ROUNDS = 15
WAIT_S = 60.0
Sum = Callable[[Tensor], Tensor]


class Symmetric:
    """Sums by kernels that read what the other ranks have put where all can read it."""

    def __init__(self, ranks: Ranks, meeting: Path, most: int, device: torch.device) -> None:
        # It finds its peers by a process group that torch knows by name; models/ranks registers none.
        store = dist.FileStore(str(meeting), ranks.size)
        dist.init_process_group("nccl", store=store, rank=ranks.rank, world_size=ranks.size, device_id=device)
        self._group = dist.group.WORLD.group_name
        self._shared = symmetric_memory.empty(most, dtype=torch.bfloat16, device=device)
        self.handle = symmetric_memory.rendezvous(self._shared, group=dist.group.WORLD)

    def one_shot(self, part: Tensor) -> Tensor:
        """Every rank reads all that the others have."""
        place = self._shared[: part.numel()]
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, part.view(-1), "sum", self._group)
        return total.view(part.shape)

    def two_shot(self, part: Tensor) -> Tensor:
        """Every rank adds up its share of it, and reads the others' shares."""
        place = self._shared[: part.numel()]
        place.copy_(part.view(-1))
        total: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", self._group)
        return total.view(part.shape)


def seconds(ranks: Ranks, add: Sum, part: Tensor, graph: bool) -> float:
    """Of one of SUMS in a row, the median of ROUNDS."""

    def run() -> Tensor:
        total = part
        for _ in range(SUMS):
            total = add(part)
        return total

    run()
    on_gpu = part.device.type == "cuda"
    replay: Callable[[], object] = run
    if graph:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            run()
        replay = captured.replay
        replay()
    took = []
    for _ in range(ROUNDS):
        ranks.sum(torch.zeros(1, device=part.device))  # all begin together
        if on_gpu:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        replay()
        if on_gpu:
            torch.cuda.synchronize()
        took.append((time.perf_counter() - began_s) / SUMS)
    return statistics.median(took)


def copy_rate(device: torch.device, other: torch.device) -> float:
    """Bytes a second from the other rank's GPU."""
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device=each) for each in (other, device))
    took = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began_s)
    return source.nbytes / min(took)


class Measured(Struct, frozen=True):
    """Seconds of one sum; error: the largest of an element, against float64."""

    way: str
    rows: int
    launched_s: float
    graph_s: float | None
    error: float


def part_of(rank: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).bfloat16()


def work(rank: int, wanted: argparse.Namespace, folder: Path, told: Connection) -> None:
    """One rank: says the rate of a copy, then each row, then None."""
    on_gpu = wanted.device == "cuda"
    device = torch.device(wanted.device, rank) if on_gpu else torch.device(wanted.device)
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = Ranks(rank, wanted.ranks)
    ranks.connect(folder / "ranks", device, WAIT_S, WAIT_S)
    ways: dict[str, Sum] = {"as models/ranks": lambda part: ranks.sum(part.clone())}
    if on_gpu:
        symmetric = Symmetric(ranks, folder / "symmetric", max(wanted.rows) * wanted.width, device)
        ways |= {"one shot": symmetric.one_shot, "two shots": symmetric.two_shot}
    told.send(copy_rate(device, torch.device("cuda", (rank + 1) % wanted.ranks)) if on_gpu else 0.0)
    for rows in wanted.rows:
        exact = torch.stack([part_of(other, rows, wanted.width).double() for other in range(wanted.ranks)]).sum(0)
        part = part_of(rank, rows, wanted.width).to(device)
        for way, add in ways.items():
            error = float((add(part).double().cpu() - exact).abs().max())
            graph_s = seconds(ranks, add, part, True) if on_gpu else None
            told.send(Measured(way, rows, seconds(ranks, add, part, False), graph_s, error))
    told.send(None)


def show(first: Connection, wanted: argparse.Namespace) -> None:
    """What the first rank says."""
    print("| rows | way | us launched | us in a graph | floor us | largest error |\n|---:|---|---:|---:|---:|---:|")
    rate = hear(first)
    while (row := hear(first)) is not None:
        nbytes = 2 * row.rows * wanted.width * (wanted.ranks - 1)
        graph = "" if row.graph_s is None else f"{1e6 * row.graph_s:.1f}"
        floor = f"{1e6 * nbytes / rate:.1f}" if rate else ""
        line = f"| {row.rows} | {row.way} | {1e6 * row.launched_s:.1f} | {graph} | {floor} | {row.error:.3g} |"
        print(line, flush=True)
    if rate:
        print(f"\na copy from the next rank's GPU: {rate / 1e9:.0f} GB/s; {torch.cuda.get_device_name(0)}")


def hear(first: Connection) -> Any:
    if not first.poll(WAIT_S):
        sys.exit(f"the first rank said nothing for {WAIT_S:g} s")
    return first.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--width", type=int, default=4096, help="of a row, in elements")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    wanted = parser.parse_args()
    if wanted.device == "cuda" and torch.cuda.device_count() < wanted.ranks:
        sys.exit(f"{wanted.ranks} ranks need as many GPUs; torch sees {torch.cuda.device_count()}")
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(wanted.ranks)]
    with tempfile.TemporaryDirectory() as name:
        processes = [
            spawn.Process(target=work, args=(rank, wanted, Path(name), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            show(pipes[0][0], wanted)
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    main()
