"""What one device can do at most: the rate of a copy, and of a large matrix product, as long as each is held.

On a GPU times come from CUDA graphs or from events around work that was queued beforehand, so they hold no time of the host.

python -m disagg.bench.engine.ceilings DEVICE DTYPE THREADS: prints them as JSON. In a process of its own, whose memory goes back
before an engine takes what is left.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import torch

from disagg.bench.engine.work import Ceilings

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
PRODUCT = {"cuda": 8192, "cpu": 1536}  # rows, columns and depth: large enough that more brings nothing
BURST_S = 0.03  # before the chip reaches its power limit
SUSTAINED_S = 1.5  # when it has settled there


def measure_ceilings(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Takes about 2 s, and leaves the chip warm. dtype: of the products."""
    kind = torch.device(device).type
    nbytes, size = COPY_BYTES[kind], PRODUCT[kind]
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy_s = seconds(copy, rounds=10, device=kind)
    one, other = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(one)

    def product() -> None:
        torch.mm(one, other, out=out)

    flops = 2 * size**3
    product_s = seconds(product, rounds=3, device=kind)
    burst_s = seconds(product, rounds=max(3, int(BURST_S / product_s)), device=kind)
    seconds(product, rounds=max(1, int(SUSTAINED_S / product_s)), device=kind)
    sustained_s = seconds(product, rounds=max(3, int(0.2 / product_s)), device=kind)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if kind == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    what = f"{size}^3 {str(dtype).removeprefix('torch.')}"
    return Ceilings(2 * nbytes / copy_s, flops / burst_s, flops / sustained_s, name, what)


def seconds(work: Callable[[], object], rounds: int, device: str = "cuda") -> float:
    """Of one of `rounds` calls, launched back to back."""
    work()
    if device == "cpu":
        started_s = time.perf_counter()
        for _ in range(rounds):
            work()
        return (time.perf_counter() - started_s) / rounds
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / rounds


def graph_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Of one replay of `work`, captured: the median of several. Raises what the capture raises."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(2):
        graph.replay()
    return statistics.median(seconds(graph.replay, 1) for _ in range(rounds))


def main() -> int:
    device, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    found = measure_ceilings("cuda:0" if device == "cuda" else device, getattr(torch, dtype))
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
