"""Gather and scatter on a GPU against a plain copy of the same bytes, in the same run: `python -m bench.staging`.

KV of Llama-3.1-8B (32 layers, 8 KV heads of 128 dims, bfloat16) in random pages; for each pair of TP sizes the slice that
one prefill rank sends to one decode rank, gathered from the one's pages and scattered into the other's. The copy moves as
many contiguous bytes from one buffer to another (`Tensor.copy_`, a device-to-device memcpy). Copies and moves are launched
back to back on one stream, with an event behind each, as the mover does it: so moves overlap where the device lets them.

Rates count bytes read and bytes written. Every launch of a round works on other bytes than the last, until at least
FOOTPRINT_BYTES were touched, so that neither side finds its input in the level-2 cache; the device is kept busy while a
round is being launched, so that it never waits for Python; rounds of copy, gather and scatter alternate, and medians are
compared. Before that, what scatters bring back is compared with what gathers took, and damage must be found out, both with
launches back to back.

Goals, on one H200: at least 95% of the copy's rate from 32 MiB up; the checksum costs at most 3%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from msgspec import Struct

from disagg.messages.pieces import HeadSlice, Piece
from disagg.staging.kernels import SUMS, VERDICT_OK, VERDICT_WRONG, Launch, Launcher, launch_of
from disagg.staging.mover import PREPARED_ALIGN
from disagg.staging.pieces import framed_bytes
from disagg.staging.rows import PagedRows, PageShape
from disagg.staging.slices import head_slices, heads_per_rank
from disagg.staging.triton_mover import CudaQueue, TritonMover

LAYERS, KV_HEADS, HEAD_DIM, DTYPE_BYTES = 32, 8, 128, 2
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PAGE_TOKENS = (16, 64)
TP_PAIRS = ((1, 2), (2, 1), (1, 4), (4, 1))
FOOTPRINT_BYTES = 1 << 29  # several times the level-2 cache
MOST_LAUNCHES = 64  # of one round
SEED = 0x5EED_CAFE_F00D_D00D
BUSY_CYCLES = 2_000_000  # of the device, and so many more per launch: longer than Python takes to launch a round
BUSY_CYCLES_PER_LAUNCH = 200_000
MIB = 1 << 20


class Case(Struct, frozen=True):
    """A piece of all layers of `tokens` tokens, between ranks of two TP sizes."""

    tokens: int
    page_tokens: int
    src_tp: int
    dst_tp: int

    @property
    def slice(self) -> HeadSlice:
        return head_slices(self.src_tp, self.dst_tp, KV_HEADS)[0]

    @property
    def piece(self) -> Piece:
        return Piece(0, 0, LAYERS, 0, self.tokens)

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page_tokens)

    @property
    def payload(self) -> int:
        return self.shape(self.src_tp).payload_bytes(self.piece, self.slice.heads)

    def shape(self, tp: int) -> PageShape:
        return PageShape(LAYERS, heads_per_rank(tp, KV_HEADS), self.page_tokens, HEAD_DIM, DTYPE_BYTES)


class Rates(Struct, frozen=True):
    """Seconds per launch, and of the host to plan and to begin one gather."""

    copy: float
    gather: float
    gather_plain: float  # without the checksum
    scatter: float
    scatter_plain: float
    plan: float
    begin: float


class Memory:
    """Everything that the launches of one case touch, `copies` times over."""

    def __init__(self, case: Case, launcher: Launcher) -> None:
        self.case = case
        self._launcher = launcher
        self.copies = max(2, min(MOST_LAUNCHES, -(-FOOTPRINT_BYTES // case.payload)))
        framed = framed_bytes(case.payload)
        self.entry_bytes = -(-framed // PREPARED_ALIGN) * PREPARED_ALIGN
        self.staging = torch.empty(self.copies, self.entry_bytes, dtype=torch.uint8, device="cuda")
        self.src, self.src_pages = self._pool(case.shape(case.src_tp))
        self.dst, self.dst_pages = self._pool(case.shape(case.dst_tp))
        self.plain = self.staging[:, : case.payload]
        self.target = torch.empty(self.copies, case.payload, dtype=torch.uint8, device="cuda")
        self.sums = torch.zeros(SUMS, dtype=torch.int64, device="cuda")
        self.verdicts = torch.zeros(self.copies, dtype=torch.int64, pin_memory=True)

    def _pool(self, shape: PageShape) -> tuple[torch.Tensor, torch.Tensor]:
        """(random pages [num_pages, page bytes] uint8, a page table for each copy [copies, pages] int64)."""
        pages = self.case.pages * self.copies
        words = torch.empty(pages * shape.nbytes // 8, dtype=torch.int64, device="cuda")
        words.random_()
        tables = torch.randperm(pages, device="cuda").view(self.copies, -1)
        return words.view(torch.uint8).view(pages, -1), tables

    def gather(self, copy: int, checksum: bool = True) -> Callable[[], object]:
        return self._bound(
            launch_of(self.sent(copy, self.src_pages[copy]), self.staging[copy], self.sums, None), checksum
        )

    def sent(self, copy: int, pages: torch.Tensor) -> PagedRows:
        """pages: as in src_pages."""
        case = self.case
        return PagedRows(self.src, pages, case.shape(case.src_tp), case.piece, case.slice, SEED + copy)

    def scatter(self, copy: int, checksum: bool = True) -> Callable[[], object]:
        case = self.case
        shape, pages = case.shape(case.dst_tp), self.dst_pages[copy]
        rows = PagedRows(self.dst, pages, shape, case.piece, case.slice, SEED + copy)
        return self._bound(launch_of(rows, self.staging[copy], self.sums, self.verdicts[copy : copy + 1]), checksum)

    def _bound(self, launch: Launch, checksum: bool) -> Callable[[], object]:
        """As the mover begins a move behind another."""
        if not checksum:
            launch = msgspec.structs.replace(launch, constants=launch.constants | {"CHECKSUM": False})
        begin, tensors = self._launcher.bind(launch), launch.tensors
        return lambda: begin(tensors["staging"], tensors["verdict"], False)

    def copy(self, copy: int) -> Callable[[], object]:
        return lambda: self.target[copy].copy_(self.plain[copy])

    def check(self) -> None:
        """Every piece that was gathered is scattered and found again, bit for bit, and no other. Raises AssertionError."""
        case, where = self.case, self.case.slice
        torch.cuda.synchronize()  # what launches move is in place before the first of them
        gathers, scatters = ([plan(copy) for copy in range(self.copies)] for plan in (self.gather, self.scatter))
        for begin in gathers:
            begin()
        damaged = range(0, self.copies, 3)
        for copy in damaged:  # anywhere, the trailer included
            self._flip_bit(copy)
        self._check_verdicts(scatters, dict.fromkeys(damaged, VERDICT_WRONG))
        for copy in damaged:
            self._flip_bit(copy)
        self._check_verdicts(scatters, {})
        for copy in range(self.copies):
            for layer in range(0, LAYERS, 7):
                sent = self._rows(self.src, self.src_pages[copy], case.src_tp, layer, where.src_head_start)
                landed = self._rows(self.dst, self.dst_pages[copy], case.dst_tp, layer, where.dst_head_start)
                assert torch.equal(sent, landed), f"{case}: layer {layer} of copy {copy} differs"

    def _check_verdicts(self, scatters: Sequence[Callable[[], object]], other: dict[int, int]) -> None:
        """other: than VERDICT_OK, by copy."""
        torch.cuda.synchronize()
        self.verdicts.zero_()
        for begin in scatters:
            begin()
        torch.cuda.synchronize()
        wanted = [other.get(copy, VERDICT_OK) for copy in range(self.copies)]
        assert self.verdicts.tolist() == wanted, f"{self.case}: verdicts {self.verdicts.tolist()}, not {wanted}"

    def _flip_bit(self, copy: int) -> None:
        bit = (copy + 1) * 0x9E3779B1 % (8 * framed_bytes(self.case.payload))
        self.staging[copy, bit // 8] ^= 1 << bit % 8

    def _rows(self, pool: torch.Tensor, pages: torch.Tensor, tp: int, layer: int, head: int) -> torch.Tensor:
        """[whole pages, planes, heads, page_tokens, words of a row] of one layer."""
        s = self.case.shape(tp)
        view = pool.view(torch.int64).view(-1, s.layers, s.planes, s.kv_heads, s.page_tokens, s.row_bytes // 8)
        whole = pages[: self.case.tokens // self.case.page_tokens]
        return view[:, layer, :, head : head + self.case.slice.heads].index_select(0, whole)


def measure(case: Case, rounds: int, mover: TritonMover, launcher: Launcher) -> Rates:
    memory = Memory(case, launcher)
    memory.check()
    indexes = range(memory.copies)
    works: dict[str, Sequence[Callable[[], object]]] = {
        "copy": [memory.copy(i) for i in indexes],
        "gather": [memory.gather(i) for i in indexes],
        "gather_plain": [memory.gather(i, checksum=False) for i in indexes],
        "scatter": [memory.scatter(i) for i in indexes],
        "scatter_plain": [memory.scatter(i, checksum=False) for i in indexes],
    }
    for work in works.values():
        for each in work:  # compiles, and warms up
            each()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(_round(work))
    plan, begin = _host_seconds(memory, mover)
    return Rates(**{name: statistics.median(each) for name, each in times.items()}, plan=plan, begin=begin)


def _round(work: Sequence[Callable[[], object]]) -> float:
    """Seconds per launch on the device."""
    busy_cycles = BUSY_CYCLES + BUSY_CYCLES_PER_LAUNCH * len(work)
    marks = [torch.cuda.Event() for _ in work]
    while True:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(busy_cycles)
        begin.record()
        for each, mark in zip(work, marks, strict=True):
            each()
            mark.record()
        in_time = not begin.query()
        end.record()
        end.synchronize()
        if in_time:
            return begin.elapsed_time(end) / 1e3 / len(work)
        busy_cycles *= 2  # the device had to wait for Python


def _host_seconds(memory: Memory, mover: TritonMover) -> tuple[float, float]:
    """Of planning one gather, page table included, and of beginning it, when the device has other things to do."""
    indexes = range(memory.copies)
    tables = [memory.src_pages[copy].tolist() for copy in indexes]
    for _ in range(2):  # the first time makes what moves use again
        torch.cuda._sleep(BUSY_CYCLES + BUSY_CYCLES_PER_LAUNCH * memory.copies)
        times = [time.perf_counter()]
        begins = [mover.prepare_gather(memory.sent(i, mover.pages(tables[i])), memory.staging[i]) for i in indexes]
        times.append(time.perf_counter())
        moves = [begins[i](memory.staging[i]) for i in indexes]
        times.append(time.perf_counter())
        torch.cuda.synchronize()
        assert all(move.done() for move in moves)
    return (times[1] - times[0]) / memory.copies, (times[2] - times[1]) / memory.copies


def _print_ranges(measured: dict[tuple[int, int], list[Rates]]) -> None:
    """measured: of all TP pairs, by payload and tokens of a page."""
    print("\n| MiB | page tokens | copy GB/s | gather | without sum | scatter | without sum |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for (payload, page_tokens), rates in sorted(measured.items()):
        copied = statistics.median(2 * payload / r.copy / 1e9 for r in rates)
        spans = [
            _span([r.copy / seconds for r, seconds in zip(rates, each, strict=True)])
            for each in zip(*((r.gather, r.gather_plain, r.scatter, r.scatter_plain) for r in rates), strict=True)
        ]
        print(f"| {payload // MIB} | {page_tokens} | {copied:.0f} | {' | '.join(spans)} |")


def _span(shares: Sequence[float]) -> str:
    low, high = (f"{share:.2f}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--page-tokens", type=int, nargs="*", default=PAGE_TOKENS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.staging measures kernels on a CUDA device, and there is none here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda")
    queue = CudaQueue(device)  # from here on, all is done on its stream
    mover, launcher = TritonMover(device, queue), Launcher(queue.handle)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; rates are shares of the copy's\n")
    print(
        "| TP | page | tokens | MiB | copy GB/s | gather | without sum | scatter | without sum | plan us | begin us |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    measured: dict[tuple[int, int], list[Rates]] = {}
    costs: list[float] = []
    shares: list[float] = []
    for src_tp, dst_tp in TP_PAIRS:
        for page_tokens in arguments.page_tokens:
            for tokens in arguments.tokens:
                case = Case(tokens, page_tokens, src_tp, dst_tp)
                r = measure(case, arguments.rounds, mover, launcher)
                print(
                    f"| {src_tp}:{dst_tp} | {page_tokens} | {tokens} | {case.payload / MIB:.0f} "
                    f"| {2 * case.payload / r.copy / 1e9:.0f} | {r.copy / r.gather:.3f} | {r.copy / r.gather_plain:.3f} "
                    f"| {r.copy / r.scatter:.3f} | {r.copy / r.scatter_plain:.3f} | {r.plan * 1e6:.0f} | {r.begin * 1e6:.1f} |",
                    flush=True,
                )
                if case.payload >= 32 * MIB:
                    measured.setdefault((case.payload, page_tokens), []).append(r)
                    shares += [r.copy / r.gather, r.copy / r.scatter]
                    costs += [1 - r.gather_plain / r.gather, 1 - r.scatter_plain / r.scatter]
    if shares:
        _print_ranges(measured)
        print(
            f"\nfrom 32 MiB up: at least {min(shares):.3f} of the copy's rate (goal 0.95), median "
            f"{statistics.median(shares):.3f}; the checksum costs at most {max(costs):.1%} (goal 3%), median "
            f"{statistics.median(costs):.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
