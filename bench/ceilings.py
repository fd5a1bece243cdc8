"""What one GPU can do at most: the rate of a copy, and of a large matrix product, as long as each is held.

Times come from CUDA graphs or from events around work that was queued beforehand, so they hold no time of the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from msgspec import Struct

COPY_BYTES = 2 << 30
PRODUCT = 8192  # rows, columns and depth: large enough that more brings nothing
BURST_S = 0.03  # before the chip reaches its power limit
SUSTAINED_S = 1.5  # when it has settled there


class Ceilings(Struct, frozen=True):
    """copy: bytes/s, read and written. burst, sustained: FLOP/s of bfloat16 products over BURST_S and after SUSTAINED_S."""

    copy: float
    burst: float
    sustained: float

    def describe(self) -> str:
        return (
            f"copy {self.copy / 1e9:.0f} GB/s; {PRODUCT}^3 bfloat16 {self.burst / 1e12:.0f} TFLOP/s as a burst, "
            f"{self.sustained / 1e12:.0f} sustained"
        )


def measure_ceilings() -> Ceilings:
    """Takes about 2 s, and leaves the chip warm."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy_s = seconds(copy, rounds=10)
    one, other = torch.randn(2, PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(one)

    def product() -> None:
        torch.mm(one, other, out=out)

    flops = 2 * PRODUCT**3
    product_s = seconds(product, rounds=3)
    burst_s = seconds(product, rounds=max(3, int(BURST_S / product_s)))
    seconds(product, rounds=int(SUSTAINED_S / product_s))
    sustained_s = seconds(product, rounds=max(3, int(0.2 / product_s)))
    return Ceilings(2 * COPY_BYTES / copy_s, flops / burst_s, flops / sustained_s)


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Of one of `rounds` calls, launched back to back."""
    work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds


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
