"""Copies between a GPU's pool and the host's, and what decode feels of them: `python -m bench.offload_copies`.

KV of Llama-3.1-8B in bfloat16, pages of 16 tokens (2 MiB) all over both pools, by each way of worker/page_copies; shares of the
rate at which one contiguous copy of as many bytes goes between the device and page-locked memory of torch's, in turns with it.

    a stride      what one sequence offloads at a time: 256 tokens, 16 pages
    16 strides    one after the other, each begun before the one before it is waited for, as a worker does
    1 GiB         a conversation of 8k tokens

Then a model of that shape (bench.engine) decodes 64 sequences of 1k, while another thread of the process copies strides out, as
often as so many sequences fill one, or one after the other; rounds with copies and without take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from bench.engine import SHAPE, STEPS, Bench, random_model, work_of
from disagg.bench.engine.ceilings import measure_ceilings
from disagg.messages.control import Computation
from disagg.messages.layout import LayerGroup
from disagg.models.pool import Pool
from disagg.worker.host_memory import HostMemory, allocate_host
from disagg.worker.page_copies import (
    AT_ONCE,
    Copier,
    GroupMoves,
    KernelCopier,
    MemcpyCopier,
    copy_whole,
    open_copier,
    warm_up,
)

PAGE_TOKENS, STRIDE_PAGES, STRIDES = 16, 16, 16
PAGES = {"a stride": STRIDE_PAGES, "256 MiB": 128, "1 GiB": 512}
SEQUENCES, CONTEXT = 64, 1024
WAYS: dict[str, Callable[[Pool, HostMemory], Copier]] = {"kernel": KernelCopier, "memcpy": MemcpyCopier}


class Pages:
    """Pages to copy: others each time, all over both pools."""

    def __init__(self, pool: Pool, host: HostMemory) -> None:
        self._random = np.random.default_rng(0)
        self._there = pool.views[0].num_pages, host.num_pages(0)

    def draw(self, count: int) -> list[GroupMoves]:
        ours, theirs = (self._random.choice(num, count, replace=False).astype(np.int64) for num in self._there)
        return [GroupMoves(0, np.sort(ours), theirs)]


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def contiguous(nbytes: int, out: bool) -> Callable[[], None]:
    """A copy that waits for its end."""
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    source, target = (there, here) if out else (here, there)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return copy


def rates(pool: Pool, host: HostMemory, copiers: dict[str, Copier], rounds: int) -> Iterator[str]:
    pages = Pages(pool, host)
    for name, count in PAGES.items():
        nbytes = count * host.page_bytes[0]
        for out in (True, False):
            plain = contiguous(nbytes, out)
            took: dict[str, list[float]] = {"contiguous": [], **{way: [] for way in copiers}}
            for _ in range(rounds + 1):
                took["contiguous"].append(seconds(plain))
                for way, copier in copiers.items():
                    moves = pages.draw(count)
                    took[way].append(seconds(partial(copy_whole, copier, moves, out=out)))
            ceiling_s = statistics.median(took["contiguous"][1:])
            line = f"{name:>9s} {'out' if out else 'in':>3s}: contiguous {nbytes / ceiling_s / 1e9:5.1f} GB/s"
            for way in copiers:
                shares = [ceiling_s / taken_s for taken_s in took[way][1:]]
                middle = statistics.median(shares)
                line += f"; {way} {middle * nbytes / ceiling_s / 1e9:5.1f} ({middle:.2f}, {min(shares):.2f} to {max(shares):.2f})"
            yield line


def strides(copier: Copier, moves: Sequence[list[GroupMoves]], out: bool) -> None:
    """As worker/offload_driver copies what has been told."""
    begun: deque[Callable[[], None]] = deque()
    for each in moves:
        if len(begun) == AT_ONCE:
            begun.popleft()()
        begun.append(copier.begin(each, out=out))
    while begun:
        begun.popleft()()


def rates_of_strides(pool: Pool, host: HostMemory, copiers: dict[str, Copier], rounds: int) -> Iterator[str]:
    """Many in a row, against a contiguous copy of each of them in a row."""
    pages = Pages(pool, host)
    nbytes = STRIDE_PAGES * host.page_bytes[0]
    for out in (True, False):
        plain = contiguous(nbytes, out)
        for way, copier in copiers.items():
            shares = []
            for _ in range(rounds + 1):
                moves = [pages.draw(STRIDE_PAGES) for _ in range(STRIDES)]
                ceiling_s = sum(seconds(plain) for _ in range(STRIDES))
                shares.append(ceiling_s / seconds(partial(strides, copier, moves, out)))
            middle = statistics.median(shares[1:])
            yield (
                f"{STRIDES} strides {'out' if out else 'in':>3s}: {way} {middle:.2f} of as many contiguous ones, each waited for "
                f"({min(shares[1:]):.2f} to {max(shares[1:]):.2f})"
            )


@contextmanager
def copying(copier: Copier, pages: Pages, period_s: float) -> Iterator[list[int]]:
    """Strides go out meanwhile, one each period; of their bytes, how many pages."""
    stop, copied = threading.Event(), [0]

    def copy() -> None:
        next_s = time.perf_counter()
        while not stop.is_set():
            copy_whole(copier, pages.draw(STRIDE_PAGES), out=True)
            copied[0] += STRIDE_PAGES
            next_s = max(next_s + period_s, time.perf_counter())
            stop.wait(next_s - time.perf_counter())

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield copied
    finally:
        stop.set()
        thread.join()


def beside(bench: Bench, pool: Pool, host: HostMemory, copiers: dict[str, Copier], rounds: int) -> Iterator[str]:
    """Steps with copies and without."""
    pages = Pages(pool, host)
    bench.decode(SEQUENCES, CONTEXT)
    step_s, _ = bench.decode(SEQUENCES, CONTEXT)
    period_s = step_s * PAGE_TOKENS * STRIDE_PAGES / SEQUENCES
    for way, copier in copiers.items():
        for name, every_s in (("as they fill", period_s), ("one after the other", 0.0)):
            alone, together, gb_s = [], [], []
            for _ in range(rounds):
                alone.append(bench.decode(SEQUENCES, CONTEXT)[0])
                with copying(copier, pages, every_s) as copied:
                    started_s = time.perf_counter()
                    together.append(bench.decode(SEQUENCES, CONTEXT)[0])
                    gb_s.append(copied[0] * host.page_bytes[0] / (time.perf_counter() - started_s) / 1e9)
            ratios = [b / a for a, b in zip(alone, together, strict=True)]
            yield (
                f"{way}, strides {name} ({statistics.median(gb_s):.1f} GB/s): step {statistics.median(together) * 1e3:.3f} ms, "
                f"without {statistics.median(alone) * 1e3:.3f}: {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=8, help="of the host pool")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-model", action="store_true", help="rates alone")
    arguments = parser.parse_args()
    config = SHAPE
    group = LayerGroup(
        "full", tuple(range(config.num_hidden_layers)), config.num_key_value_heads, config.head_dim, "bfloat16"
    )
    page_bytes = group.page_bytes(PAGE_TOKENS)
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings.describe()}", flush=True)
    computation = Computation()
    if arguments.no_model:
        pool = Pool.create((group,), (16 << 30) // page_bytes, page_bytes, (page_bytes,), PAGE_TOKENS, "cuda")
    else:
        bench = Bench(random_model(config, computation), computation, PAGE_TOKENS, 32, SEQUENCES)
        pool = bench.pool
    started_s = time.perf_counter()
    storage = allocate_host(arguments.gib << 30, pinned=True)
    print(f"{arguments.gib} GiB of host memory had and locked in {time.perf_counter() - started_s:.1f} s", flush=True)
    host = HostMemory(pool.groups, storage, (page_bytes,), PAGE_TOKENS)
    copiers = {name: make(pool, host) for name, make in WAYS.items()}
    for copier in copiers.values():
        warm_up(copier, host)
    for lines in (rates, rates_of_strides):
        for line in lines(pool, host, copiers, arguments.rounds):
            print(line, flush=True)
    print(f"at start a worker takes: {open_copier('auto', pool, host)[1]}", flush=True)
    if not arguments.no_model:
        seen = SEQUENCES * (CONTEXT + 3 * STEPS // 2)
        floor_s = work_of(config, SEQUENCES, SEQUENCES, seen, seen).floor_s(ceilings, ceilings.burst)
        print(f"{SEQUENCES} sequences of {CONTEXT}: floor of a step {floor_s * 1e3:.3f} ms", flush=True)
        for line in beside(bench, pool, host, copiers, arguments.rounds):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
