"""Attention backends on a GPU against their floors, in one run: `python -m bench.attention`.

The attention of a model of Llama-3.1-8B's shape: LAYERS layers, 32 query and 8 KV heads of 128 dims, bfloat16, over a
page-major pool whose pages lie in random order. Each case runs all layers once, in a CUDA graph where the backend may be
captured, so that no layer finds its KV in the level-2 cache.

    decode     floor: the bytes of KV over the rate of a copy. Also with one long sequence among short ones
    prefill    floor: the products' operations over the rate of a large product as a burst
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct

from disagg.bench.engine.ceilings import Ceilings, graph_seconds, measure_ceilings, seconds
from disagg.messages.layout import LayerGroup
from disagg.models.attention.backend import AttentionPlan, DecodeWork, Phase, PrefillWork, Scoring
from disagg.models.attention.choice import OFFERS, Offer
from disagg.models.batch import DecodeBatch, PageTable, PrefillRun
from disagg.models.pool import AttentionPages

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, DTYPE_BYTES = 32, 32, 8, 128, 2
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE_BYTES  # of KV, in one layer
POOL_BYTES = 40 << 30
DECODES = {
    "1 x 1k": [1064],
    "32 x 1k": [1064] * 32,
    "128 x 1k": [1064] * 128,
    "256 x 1k": [1064] * 256,
    "32 x 8k": [8064] * 32,
    "1 x 32k": [32064],
    "31 x 1k and 32k": [1064] * 31 + [32064],
    "100 of 10 to 2k": [10 + 20 * n for n in range(100)],
}
PREFILLS = {
    "2k": [(0, 2048)],
    "8k": [(0, 8192)],
    "32k, last 8k": [(24576, 8192)],
    "512 after 7.5k": [(7680, 512)],
    "512 after 31k": [(32256, 512)],
    "8k of five": [(0, 2048), (3000, 1024), (7000, 512), (0, 2500), (1111, 2108)],
    "16 x 512": [(0, 512)] * 16,
}
SCORING = Scoring(HEAD_DIM**-0.5)


class Measured(Struct, frozen=True):
    """Of all layers: seconds, and of their floor. how: "graph" or "eager"."""

    taken_s: float
    floor_s: float
    how: str


class Bench:
    """One pool, whose pages cases take at random."""

    def __init__(self, page_tokens: int) -> None:
        group = LayerGroup("full", tuple(range(LAYERS)), KV_HEADS, HEAD_DIM, "bfloat16")
        page_bytes = group.page_bytes(page_tokens)
        storage = torch.empty(POOL_BYTES // page_bytes * page_bytes, dtype=torch.uint8, device="cuda")
        for part in storage.view(torch.bfloat16).split(1 << 28):
            part.normal_()
        self.view = AttentionPages(group, storage, page_bytes, page_tokens)
        self.layers = LAYERS

    def table(self, lengths: list[int]) -> PageTable:
        page_tokens = self.view.page_tokens
        width = -(-max(lengths) // page_tokens)
        free = torch.randperm(self.view.num_pages, device="cuda")
        pages = torch.zeros((len(lengths), width), dtype=torch.int64, device="cuda")
        taken = 0
        for row, length in enumerate(lengths):
            count = -(-length // page_tokens)
            pages[row, :count] = free[taken : taken + count]
            taken += count
        assert taken <= self.view.num_pages, "the pool is too small"
        return PageTable(pages, torch.zeros(len(lengths), dtype=torch.int64, device="cuda"), (0,) * len(lengths))

    def decode(self, offer: Offer, lengths: list[int], ceilings: Ceilings) -> Measured:
        batch = DecodeBatch(0, torch.tensor(lengths, device="cuda"), max(lengths), sum(lengths))
        plan = offer.make().plan(DecodeWork(self.view, batch, self.table(lengths)))
        floor_s = self.layers * sum(lengths) * TOKEN_BYTES / ceilings.copy
        return self._measure(offer, plan, len(lengths), floor_s)

    def prefill(self, offer: Offer, chunks: list[tuple[int, int]], ceilings: Ceilings) -> Measured:
        runs, rows, flops = [], 0, 0
        for context, count in chunks:
            runs.append(PrefillRun(rows, count, context, True))
            rows += count
            flops += 4 * QUERY_HEADS * HEAD_DIM * count * (context + (count + 1) // 2)
        table = self.table([run.total_tokens for run in runs])
        plan = offer.make().plan(PrefillWork(self.view, tuple(runs), table, tuple(range(len(runs)))))
        return self._measure(offer, plan, rows, self.layers * flops / ceilings.burst)

    def _measure(self, offer: Offer, plan: AttentionPlan, rows: int, floor_s: float) -> Measured:
        def some(heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16).transpose(0, 1)

        query, key, value = some(QUERY_HEADS), some(KV_HEADS), some(KV_HEADS)
        out = torch.empty(rows, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            for layer_in_group in range(self.layers):
                plan.run(layer_in_group, query, key, value, SCORING, out)

        try:
            return Measured(graph_seconds(step), floor_s, "graph")
        except RuntimeError:
            torch.cuda.synchronize()
            return Measured(seconds(step, 3), floor_s, "eager")


def table_of(title: str, cases: dict[str, Any], measure: Callable[[Offer, Any], Measured], offers: list[Offer]) -> None:
    print(f"{title:18s}" + "".join(f"{offer.name:>28s}" for offer in offers) + "    floor", flush=True)
    for name, case in cases.items():
        line, floor_s = "", 0.0
        for offer in offers:
            torch.cuda.empty_cache()
            try:
                found = measure(offer, case)
                floor_s = found.floor_s
                line += f"{found.taken_s * 1e3:10.3f} ms {found.taken_s / found.floor_s:5.2f}x {found.how:>6s}  "
            except (RuntimeError, AssertionError) as error:
                line += f"{str(error).splitlines()[0][:24]:>26s}  "
        print(f"{name:18s}{line}{floor_s * 1e3:8.3f} ms", flush=True)


def measure_all(bench: Bench, page_tokens: int, phases: list[str], offers: list[Offer], ceilings: Ceilings) -> None:
    by_phase = {phase: [offer for offer in offers if offer.capabilities.phase is phase] for phase in Phase}
    if Phase.DECODE in phases:
        title = f"decode, page {page_tokens}"
        table_of(title, DECODES, lambda offer, case: bench.decode(offer, case, ceilings), by_phase[Phase.DECODE])
    if Phase.PREFILL in phases:
        title = f"prefill, page {page_tokens}"
        table_of(title, PREFILLS, lambda offer, case: bench.prefill(offer, case, ceilings), by_phase[Phase.PREFILL])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-tokens", type=int, default=[16, 64], nargs="+")
    parser.add_argument("--backends", default=[], nargs="+", help="by name; all, if none is given")
    parser.add_argument("--phases", default=[phase.value for phase in Phase], nargs="+")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings.describe()}", flush=True)
    offers = [offer for offer in OFFERS if not arguments.backends or offer.name in arguments.backends]
    for page_tokens in arguments.page_tokens:
        measure_all(Bench(page_tokens), page_tokens, arguments.phases, offers, ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
