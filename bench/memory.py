"""Jenga's pages against one-size pages, side by side, on the same requests and the same bytes: `python -m bench.memory`.

Both sides are driven step by step by the shipped scheduling policies (`bench.memory_engine`). Ours is the shipped memory
manager; the peer is PagedAttention's, with 16 tokens to a page in every layer (`bench.memory_baseline`). No model runs:
what is measured is memory, steps, and the time that managing takes.

    decode       requests land, computed elsewhere, and decode: bytes wasted, requests that fit, batch, steps to the end
    rag          20 long requests at once on Ministral 8B, where the published figures are 300 steps instead of 600
    prefill      prompts computed in chunks, two at a time: bytes wasted
    prefix       questions about more and more shared documents: hit rate, and tokens that are left to compute

waste = 1 - needed bytes / bytes held. Needed is what the model reads or writes in a step, or has to keep of the prompt when
it is complete: all tokens in full layers, those in the window in windowed ones, one state, an image in the layers that
attend to images, at most the budget where there is one. Held is what no other request can have: pages in use, and with
ours also the empty small pages in large pages of their group. Both are summed over steps.

Goals: our waste below 1% in every decode pool; the peer's near 38.2% for Ministral and near 79.6% for the vision model; half
the steps in `rag`; a hit rate never below the peer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench.memory_baseline import OneSizeMemory
from bench.memory_engine import DecodeEngine, Memory, Outcome, PrefillEngine
from bench.memory_models import CHECKPOINT_TOKENS, MODELS, BenchModel, ministral
from bench.memory_ours import DirectMemory, EngineMemory
from bench.memory_trace import WORKLOADS, BenchRequest, long_articles, shared
from disagg.messages.layout import GroupKind

MAX_RUNNING = 256  # vLLM's default `max_num_seqs`
# What the peer sets aside for recurrent states. vLLM takes its `max_num_seqs`, 256 by default, which would be a quarter of
# Jamba's pool; this is what an operator would choose who knows this workload.
STATE_SLOTS = 16
PROMPTS_AT_ONCE = 2
CHUNK_TOKENS = 512
DECODED = {"arXiv-QA": 60, "MMLU-pro": 400, "MMMU-pro": 400}  # requests
PREFILLED = 20
QUESTIONS = 8  # about each shared document
WORKING_SETS = (0.4, 0.8, 1.2, 1.6, 2.4)  # tokens of all documents, as shares of what one-size pages hold
PUBLISHED_WASTE = {"Ministral-8B": 0.382, "Llama-3.2-11B-Vision": 0.796}
BLOCKS = " ▁▂▃▄▅▆▇█"


class Pair(Struct, frozen=True):
    """What came of the same requests on either side."""

    peer: Outcome
    ours: Outcome


class DecodeRow(Struct, frozen=True):
    """fit: requests that are in the pool at once, the peer's and ours."""

    model: BenchModel
    pair: Pair
    fit: tuple[int, int]


class PrefillRow(Struct, frozen=True):
    model: BenchModel
    pair: Pair


class PrefixRow(Struct, frozen=True):
    """working_set: tokens of all documents, as a share of what the peer's pool holds."""

    model: BenchModel
    documents: int
    working_set: float
    pair: Pair

    @property
    def gain(self) -> float:
        """Of our hit rate over the peer's, in points."""
        return (self.pair.ours.hit_rate - self.pair.peer.hit_rate) * 100

    @property
    def slowdown_ms(self) -> float:
        """How much longer we manage a request than the peer does."""
        return managing_ms(self.pair.ours, self.pair.ours.requests) - managing_ms(
            self.pair.peer, self.pair.peer.requests
        )


def managing_ms(outcome: Outcome, parts: int) -> float:
    return outcome.management_s / parts * 1e3


def our_memory(model: BenchModel, *, caching: bool, prefills: bool) -> Memory:
    if model.kinds & {GroupKind.IMAGE, GroupKind.BUDGET}:
        return DirectMemory(model, caching=caching)
    return EngineMemory(model, CHUNK_TOKENS, caching=caching, prefills=prefills)


def peer_memory(model: BenchModel, running: int, *, caching: bool) -> Memory:
    return OneSizeMemory(model, running if model.state_bytes else MAX_RUNNING, caching=caching)


def decode(model: BenchModel, requests: Sequence[BenchRequest]) -> Pair:
    """Requests to their ends, in a pool that decodes."""
    return Pair(
        DecodeEngine(peer_memory(model, STATE_SLOTS, caching=False), requests, MAX_RUNNING).run(),
        DecodeEngine(our_memory(model, caching=False, prefills=False), requests, MAX_RUNNING).run(),
    )


def fit(model: BenchModel, requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Requests, in their order, that are in the pool at once: the peer's, and ours."""
    return (
        DecodeEngine(peer_memory(model, STATE_SLOTS, caching=False), requests, MAX_RUNNING).fill(),
        DecodeEngine(our_memory(model, caching=False, prefills=False), requests, MAX_RUNNING).fill(),
    )


def prefill(model: BenchModel, requests: Sequence[BenchRequest], *, caching: bool) -> Pair:
    """Prompts to their ends, in a pool that prefills. Bytes are counted only without caching: pages are not shared then."""

    def run(memory: Memory) -> Outcome:
        return PrefillEngine(memory, requests, PROMPTS_AT_ONCE, CHUNK_TOKENS, measure=not caching).run()

    return Pair(
        run(peer_memory(model, PROMPTS_AT_ONCE, caching=caching)),
        run(our_memory(model, caching=caching, prefills=True)),
    )


def shared_requests(model: BenchModel, working_set: float) -> list[BenchRequest]:
    """Questions about as many documents as are this share of what the peer's pool holds, at least two."""
    draw = WORKLOADS[model.workload]
    samples = draw(100, model.context_tokens - CHECKPOINT_TOKENS)
    mean = sum(sample.document_tokens + sample.image_tokens for sample in samples) / len(samples)
    capacity = model.pool_bytes // model.one_size_token_bytes
    documents = draw(max(2, round(working_set * capacity / mean)), model.context_tokens - CHECKPOINT_TOKENS)
    return shared(documents, QUESTIONS, CHECKPOINT_TOKENS)


# ---- the parts; progress is told what is being measured


def measure_decode(models: Sequence[BenchModel], progress: Callable[[str], None]) -> Iterator[DecodeRow]:
    for model in models:
        progress(f"decode: {model.name}")
        draw = WORKLOADS[model.workload]
        pair = decode(model, draw(DECODED[model.workload], model.context_tokens))
        yield DecodeRow(model, pair, fit(model, draw(MAX_RUNNING, model.context_tokens)))


def measure_prefill(models: Sequence[BenchModel], progress: Callable[[str], None]) -> Iterator[PrefillRow]:
    for model in models:
        progress(f"prefill: {model.name}")
        requests = WORKLOADS[model.workload](PREFILLED, model.context_tokens)
        yield PrefillRow(model, prefill(model, requests, caching=False))


def measure_prefix(models: Sequence[BenchModel], progress: Callable[[str], None]) -> Iterator[PrefixRow]:
    for model in models:
        for working_set in WORKING_SETS:
            requests = shared_requests(model, working_set)
            documents = len(requests) // QUESTIONS
            progress(f"prefix: {model.name}, {QUESTIONS} questions about each of {documents} documents")
            yield PrefixRow(model, documents, working_set, prefill(model, requests, caching=True))


# ---- tables


def percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f}%"


def new_table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    return table


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    table = new_table(
        "decode: peer / ours", "", "requests", "waste", "fit", "mean batch", "steps", "preempted", "managing, ms/step"
    )
    for row in rows:
        peer, ours = row.pair.peer, row.pair.ours
        table.add_row(
            row.model.name,
            f"{peer.requests} {row.model.workload}",
            f"{percent(peer.waste)} / {percent(ours.waste, 2)}",
            f"{row.fit[0]} / {row.fit[1]}",
            f"{peer.mean_batch:.2f} / {ours.mean_batch:.2f}",
            f"{peer.steps} / {ours.steps}",
            f"{peer.preemptions} / {ours.preemptions}",
            f"{managing_ms(peer, peer.steps):.2f} / {managing_ms(ours, ours.steps):.2f}",
        )
    return table


def spark(values: Sequence[int], top: int, steps_per_block: int) -> str:
    """Means of runs of values, as heights."""
    runs = [values[start : start + steps_per_block] for start in range(0, len(values), steps_per_block)]
    return "".join(BLOCKS[round(sum(run) / len(run) / top * (len(BLOCKS) - 1))] for run in runs)


def rag_lines(pair: Pair) -> list[str]:
    lines = ["rag: 20 long requests at once, Ministral-8B; sequences that decode, ten steps to a column"]
    for name, outcome in (("peer", pair.peer), ("ours", pair.ours)):
        curve = spark(outcome.batches, max(pair.ours.batches), 10)
        lines.append(f"  {name}  {outcome.steps} steps, mean batch {outcome.mean_batch:.2f}  {curve}")
    return lines


def prefill_table(rows: Sequence[PrefillRow]) -> Table:
    title = f"prefill, {PROMPTS_AT_ONCE} prompts at once in chunks of {CHUNK_TOKENS}: peer / ours"
    table = new_table(title, "", "waste", "steps", "managing, ms/step")
    for row in rows:
        peer, ours = row.pair.peer, row.pair.ours
        table.add_row(
            row.model.name,
            f"{percent(peer.waste)} / {percent(ours.waste, 2)}",
            f"{peer.steps} / {ours.steps}",
            f"{managing_ms(peer, peer.steps):.3f} / {managing_ms(ours, ours.steps):.3f}",
        )
    return table


def prefix_table(rows: Sequence[PrefixRow]) -> Table:
    table = new_table(
        f"prefix, {QUESTIONS} questions about each document in random order: peer / ours",
        "",
        "documents",
        "of peer's pool",
        "hit rate",
        "points",
        "tokens computed, M",
        "managing, ms/request",
    )
    for row in rows:
        peer, ours = row.pair.peer, row.pair.ours
        table.add_row(
            row.model.name if row.working_set == WORKING_SETS[0] else "",
            f"{row.documents}",
            f"{row.working_set:.1f}",
            f"{percent(peer.hit_rate)} / {percent(ours.hit_rate)}",
            f"{row.gain:+.1f}",
            f"{peer.computed_tokens / 1e6:.2f} / {ours.computed_tokens / 1e6:.2f}",
            f"{managing_ms(peer, peer.requests):.1f} / {managing_ms(ours, ours.requests):.1f}",
            end_section=row.working_set == WORKING_SETS[-1],
        )
    return table


def decode_goals(rows: Sequence[DecodeRow]) -> list[str]:
    worst = max(rows, key=lambda row: row.pair.ours.waste)
    lines = [f"our waste is {percent(worst.pair.ours.waste, 2)} at most ({worst.model.name}); goal: below 1%"]
    for row in rows:
        published = PUBLISHED_WASTE.get(row.model.name)
        if published is not None:
            lines.append(
                f"peer's waste, {row.model.name}: {percent(row.pair.peer.waste)}; published: {percent(published)}"
            )
    return lines


def prefix_goals(rows: Sequence[PrefixRow]) -> list[str]:
    worst, best = min(rows, key=lambda row: row.gain), max(rows, key=lambda row: row.gain)
    below = sum(row.gain < 0 for row in rows)
    small = max((row for row in rows if row.working_set < 1), key=lambda row: row.slowdown_ms)
    return [
        f"our hit rate is below the peer's in {below} of {len(rows)} rows, by {-worst.gain:.1f} points at most "
        f"({worst.model.name}, {worst.documents} documents), and above it by up to {best.gain:.1f} ({best.model.name}, "
        f"{best.documents} documents); goal: never below",
        f"where everything fits on either side, managing takes up to {small.slowdown_ms:.1f} ms a request longer "
        f"({small.model.name}, {small.documents} documents)",
        f"documents end on multiples of {CHECKPOINT_TOKENS} tokens, where states and budgets are kept; elsewhere their hits "
        f"would end up to {CHECKPOINT_TOKENS - 1} tokens sooner",
    ]


PARTS = ("decode", "rag", "prefill", "prefix")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models, parts = ", ".join(MODELS), ", ".join(PARTS)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=tuple(MODELS), metavar="MODEL", help=f"of {models}"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {parts}")
    args = parser.parse_args()
    console = Console()
    chosen = [MODELS[name]() for name in args.models]
    notes: list[str] = []
    with console.status("starting") as status:
        if "decode" in args.parts:
            decoded = list(measure_decode(chosen, status.update))
            console.print(decode_table(decoded))
            notes += decode_goals(decoded)
        if "rag" in args.parts:
            status.update("rag")
            pair = decode(ministral(), long_articles(20))
            console.print("\n".join(rag_lines(pair)), highlight=False)
            notes.append(
                f"rag takes {percent(pair.ours.steps / pair.peer.steps)} of the peer's steps, with a mean batch of "
                f"{pair.ours.mean_batch:.2f}; published: half, 5.39"
            )
        if "prefill" in args.parts:
            console.print(prefill_table(list(measure_prefill(chosen, status.update))))
        if "prefix" in args.parts:
            prefixes = list(measure_prefix(chosen, status.update))
            console.print(prefix_table(prefixes))
            notes += prefix_goals(prefixes)
    console.print("\n".join(f"- {note}" for note in notes), highlight=False)


if __name__ == "__main__":
    main()
