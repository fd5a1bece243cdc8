"""What keeping the books of memory costs, next to hashing a prompt, in one run: `python -m bench.memory_cost`.

    prompt       128k tokens, pages of 16, two layer groups (9 full layers and 27 windowed ones, as Ministral 8B): one hash
                 chain for both, the lookup in the prefix cache, and pages for the whole prompt; against the chain alone
    extension    16 more tokens of a sequence of 1k, 16k and 128k: its hash, its page in each group, and what leaves the
                 window; the same for each, since it is O(new pages)
    decode step  one token for each of 256 running sequences

Everything is the shipped code on one thread, whose own CPU time is what is measured. Figures are medians over rounds, in
which the parts take turns, and the ratios are what counts. Goals: prompt at most 2.0 times the chain alone, a decode step
at most 1/20 of the prompt.
"""

from __future__ import annotations

import argparse
import statistics
from array import array
from collections.abc import Callable
from random import Random
from time import thread_time

from rich.console import Console
from rich.table import Table

from bench.memory_models import CHECKPOINT_TOKENS, PAGE_TOKENS, ministral
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import pool_layout
from disagg.memory.sequence import SequencePages

ROOT = chain_root("bench")
PROMPT_TOKENS = 128 * 1024
CHUNK_TOKENS = 512
EXTENSION_CONTEXTS = (1024, 16 * 1024, 128 * 1024)
EXTENSIONS = 64
RUNNING = 256
DECODE_STEPS = 32
DECODE_CONTEXT = 2048

Times = dict[str, list[float]]


def new_memory(num_large: int) -> KvMemory:
    return KvMemory(pool_layout(ministral().groups, PAGE_TOKENS, CHECKPOINT_TOKENS), num_large)


def random_tokens(seed: int, count: int) -> list[int]:
    """As a request has them: a list of ints."""
    return array("I", Random(seed).randbytes(4 * count)).tolist()


def timed(call: Callable[[], object]) -> float:
    started = thread_time()
    call()
    return thread_time() - started


def compute(pages: SequencePages, tokens: list[int], hashes: list[bytes], start: int) -> None:
    """Run tokens [start, len(tokens)) of a prompt in chunks, one after the other."""
    for first in range(start, len(tokens), CHUNK_TOKENS):
        stop = min(first + CHUNK_TOKENS, len(tokens))
        assert pages.grow(first, stop) is not None
        pages.advance(stop, hashes, step=0)


class Prompt:
    """A 128k prompt that begins like one which is cached already, for `cached` tokens of it."""

    def __init__(self, seed: int, cached: int) -> None:
        # Large pages for the two prompts, cached and new, in both groups.
        self._memory = new_memory(2 * (PROMPT_TOKENS // PAGE_TOKENS) * 2)
        self._tokens = random_tokens(seed, PROMPT_TOKENS)
        if cached:
            before = self._tokens[:cached] + random_tokens(seed + 1, PAGE_TOKENS)
            hashes = self._chain(before)
            pages = self._open(hashes, before)
            compute(pages, before, hashes, 0)
            pages.close(step=1)

    @staticmethod
    def _chain(tokens: list[int]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, ROOT, tokens, PAGE_TOKENS)
        return hashes

    def _open(self, hashes: list[bytes], tokens: list[int]) -> SequencePages:
        pages = self._memory.open(hashes, len(tokens), len(tokens), CHUNK_TOKENS, step=0)
        assert pages is not None
        return pages

    def hash_alone(self) -> None:
        self._chain(self._tokens)

    def hash_look_up_and_allocate(self) -> None:
        self._open(self._chain(self._tokens), self._tokens)


def measure_prompt(times: Times, seed: int) -> None:
    for name, cached in (("nothing", 0), ("half", PROMPT_TOKENS // 2), ("all but a page", PROMPT_TOKENS - PAGE_TOKENS)):
        prompt = Prompt(seed, cached)
        prompt.hash_alone()  # whoever comes first pays for fetching the tokens
        times.setdefault("hash", []).append(timed(prompt.hash_alone))
        times.setdefault(f"prompt, {name} cached", []).append(timed(prompt.hash_look_up_and_allocate))


def measure_extension(times: Times, seed: int) -> None:
    for context in EXTENSION_CONTEXTS:
        memory = new_memory(2 * context // PAGE_TOKENS + 2 * EXTENSIONS)
        tokens = random_tokens(seed, context + EXTENSIONS * PAGE_TOKENS)
        known, later = tokens[:context], tokens[context:]
        hashes: list[bytes] = []
        extend_hashes(hashes, ROOT, known, PAGE_TOKENS)
        pages = memory.open(hashes, context, context, CHUNK_TOKENS, step=0)
        assert pages is not None
        compute(pages, known, hashes, 0)
        pages.end_prefill(hashes, 0, goes_on=True)
        began = thread_time()
        for start in range(0, len(later), PAGE_TOKENS):
            known += later[start : start + PAGE_TOKENS]
            extend_hashes(hashes, ROOT, known, PAGE_TOKENS)
            grown = pages.grow(len(known) - PAGE_TOKENS, len(known))
            assert grown
            pages.advance(len(known), hashes, step=1)
        times.setdefault(f"extension at {context // 1024}k", []).append((thread_time() - began) / EXTENSIONS)


def measure_decode(times: Times, seed: int) -> None:
    memory = new_memory(RUNNING * 2 * (DECODE_CONTEXT + 2 * DECODE_STEPS) // PAGE_TOKENS)
    sequences: list[tuple[SequencePages, list[int], list[bytes]]] = []
    for number in range(RUNNING):
        # Spread over the positions within a page, so that every step has its share of sequences that need a new one.
        tokens = random_tokens(seed + number, DECODE_CONTEXT + number % PAGE_TOKENS)
        pages = memory.receive([], len(tokens), spare_tokens=0, choices=1, step=0)
        assert pages is not None
        hashes: list[bytes] = []
        extend_hashes(hashes, ROOT, tokens, PAGE_TOKENS)
        pages.landed(len(tokens), hashes, step=0)
        sequences.append((pages, tokens, hashes))
    took = []
    for step in range(DECODE_STEPS):
        began = thread_time()
        for pages, tokens, hashes in sequences:
            grown = pages.grow(len(tokens), len(tokens) + 1)
            assert grown is not None
            tokens.append(step)
            if len(tokens) % PAGE_TOKENS == 0:
                extend_hashes(hashes, ROOT, tokens, PAGE_TOKENS)
            pages.advance(len(tokens), hashes, step)
        took.append(thread_time() - began)
    times.setdefault(f"decode step of {RUNNING}", []).append(statistics.median(took))


def report(times: Times) -> Table:
    median = {name: statistics.median(each) for name, each in times.items()}
    alone = median["hash"]
    prompt = median["prompt, nothing cached"]
    base = median[f"extension at {EXTENSION_CONTEXTS[0] // 1024}k"]
    table = Table(title=f"128k tokens, pages of {PAGE_TOKENS}, two groups; medians of {len(times['hash']) // 3} rounds")
    for header in ("", "time", "ratio", "goal"):
        table.add_column(header, justify="left" if not header else "right")
    table.add_row("hash chain alone", f"{alone * 1e3:.2f} ms", "1.00", "")
    for name in (name for name in median if name.startswith("prompt")):
        ratio = statistics.median(each / alone for each in times[name])
        table.add_row(
            f"hash, lookup, allocate: {name[8:]}", f"{median[name] * 1e3:.2f} ms", f"{ratio:.2f}", "at most 2.0"
        )
    for name in (name for name in median if name.startswith("extension")):
        table.add_row(f"{name}, 16 tokens", f"{median[name] * 1e6:.1f} us", f"{median[name] / base:.2f}", "about 1")
    step = median[f"decode step of {RUNNING}"]
    table.add_row(
        f"decode step of {RUNNING}, of the prompt", f"{step * 1e3:.3f} ms", f"1/{prompt / step:.1f}", "at most 1/20"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    console = Console()
    times: Times = {}
    with console.status("measuring") as status:
        for number in range(args.rounds):
            status.update(f"round {number + 1} of {args.rounds}")
            measure_prompt(times, 1000 * number)
            measure_extension(times, 1000 * number)
            measure_decode(times, 1000 * number)
    console.print(report(times))


if __name__ == "__main__":
    main()
