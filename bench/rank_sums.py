"""What the sums of several ranks' rows take: `python -m bench.rank_sums --ranks 2`; two minutes on GPUs.

Each rank adds up with the others what one layer's product leaves it, [rows, width] in bfloat16, twice a layer. Microseconds of
one sum, of many in a row, launched one by one and as a CUDA graph, by NCCL (`models/ranks`), by kernels that read other ranks'
memory (torch's symmetric memory), and as part of the norm behind it (`models/sums`), beside NCCL's with that norm. The floor is
what a rank must receive, over the rate at which it copies from another one. `--device cpu` tries the command out over gloo.

A second table is of products of one row that have the sum in them (`models/products`), beside the same ones without, by tile: of
what a rank has of Llama-3.1-8B's output and down projections. Weights are read from memory, so many in turn that no cache holds
them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from msgspec import Struct
from torch import Tensor

from disagg.models.fused.sum_times import ROWS, SUMS, NormedSums, seconds
from disagg.models.products.choice import OneRow, one_row
from disagg.models.products.launch import Norm, launch_one
from disagg.models.ranks import Ranks, dist
from disagg.models.sums.shared import SharedRows, share_rows
from tests.models.norms import fused_norm

ROUNDS = 15
WAIT_S = 60.0
DEPTHS = {"output": 4096, "down": 14336}  # of all ranks together
TILES = (
    OneRow(4, 1024, 4, 2),
    OneRow(4, 2048, 8, 2),
    OneRow(4, 512, 4, 4),
    OneRow(4, 1024, 4, 1),
    OneRow(4, 512, 4, 2),
    OneRow(4, 512, 2, 4),
    OneRow(8, 512, 4, 4),
    OneRow(8, 512, 4, 2),
    OneRow(8, 512, 4, 1),
    OneRow(8, 256, 2, 4),
)
CACHE_BYTES = 700_000_000  # more than a cache holds
Add = Callable[[Tensor], Tensor]


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


class Product(Struct, frozen=True):
    """Seconds of a product alone, and with the sum of ranks in it."""

    name: str
    tile: str
    alone_s: float
    summed_s: float


def products(ranks: Ranks, shared: SharedRows, width: int, device: torch.device) -> Iterator[Product]:
    """Of one row, by tile, with the sum and without."""
    norm = Norm(torch.ones(width, dtype=torch.bfloat16, device=device), 1e-5, False)
    residual = torch.randn(1, width, dtype=torch.bfloat16, device=device)
    for name, whole in DEPTHS.items():
        depth = whole // ranks.size
        shape = (CACHE_BYTES // (2 * width * depth) // 2 * 2, width, depth)
        weights = torch.randn(shape, dtype=torch.bfloat16, device=device) / 64
        row = torch.randn(1, depth, dtype=torch.bfloat16, device=device)
        for how in dict.fromkeys(
            (one_row(width, depth, gated=False), one_row(width, depth, gated=False, summed=True), *TILES)
        ):
            took = []
            for summed in (False, True):

                def run(how: OneRow = how, summed: bool = summed, row: Tensor = row, weights: Tensor = weights) -> None:
                    for number, weight in enumerate(weights):
                        slot = shared.slot(number % 2) if summed else None
                        launch_one(how, row, weight, residual=residual, norm=norm, slot=slot)

                took.append(seconds(ranks, run, device, True, ROUNDS) / len(weights))
            yield Product(name, str(how), *took)


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
    ways: dict[str, Add] = {"as models/ranks": lambda part: ranks.sum(part.clone())}
    shared = None
    if on_gpu:
        shared = share_rows(ranks, wanted.width, 2, device)
        weight = torch.ones(wanted.width, dtype=torch.bfloat16, device=device)
        normed = NormedSums(fused_norm(weight), ranks, shared, max(wanted.rows))
        ways |= {"and a norm behind": normed.by_collective} | ({"in the norm": normed.own} if shared else {})
        symmetric = Symmetric(ranks, folder / "symmetric", max(wanted.rows) * wanted.width, device)
        ways |= {"one shot": symmetric.one_shot, "two shots": symmetric.two_shot}
    told.send(copy_rate(device, torch.device("cuda", (rank + 1) % wanted.ranks)) if on_gpu else 0.0)
    for rows in wanted.rows:
        exact = torch.stack([part_of(other, rows, wanted.width).double() for other in range(wanted.ranks)]).sum(0)
        part = part_of(rank, rows, wanted.width).to(device)
        for way, add in ways.items():
            if shared is not None and way == "in the norm" and rows > shared.most_rows:
                continue
            error = float((add(part).double().cpu() - exact).abs().max())

            def run(add: Add = add, part: Tensor = part) -> None:
                for _ in range(SUMS):
                    add(part)

            graph_s = seconds(ranks, run, device, True, ROUNDS) / SUMS if on_gpu else None
            told.send(Measured(way, rows, seconds(ranks, run, device, False, ROUNDS) / SUMS, graph_s, error))
    told.send(None)
    for product in () if shared is None else products(ranks, shared, wanted.width, device):
        told.send(product)
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
    print("\n| product of one row | tile | us alone | us with the sum |\n|---|---|---:|---:|")
    while (found := hear(first)) is not None:
        print(f"| {found.name} | {found.tile} | {1e6 * found.alone_s:.1f} | {1e6 * found.summed_s:.1f} |", flush=True)
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
