"""A worker's steps on one GPU against what the GPU could do at most: `python -m bench.engine`.

The executor is given plans as an engine would give them, of a model of Llama-3.1-8B's shape with random weights; nothing is
sent, received or scheduled. Floors are of the same run (disagg/bench/engine/ceilings):

    decode     per product the larger of bytes over a copy's rate and operations over a product's, and the bytes of KV
    prefill    operations of products and attention, over the rate of a large product held as long

Columns: step, the wall time of one of many steps, launched and collected as a worker does; GPU, that of the captured graph
alone, replayed back to back.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, LlamaConfig

from disagg.bench.engine.ceilings import Ceilings, measure_ceilings, seconds
from disagg.messages.control import Computation
from disagg.messages.layout import GroupPages
from disagg.messages.plan import Run, SamplerStart, SequenceStart, WorkerPlan
from disagg.models import overlap
from disagg.models.attention.calls import ATTENTION_NAME
from disagg.models.fused.passes import FUSIONS
from disagg.models.layers import lay_out
from disagg.models.loader import LoadedModel
from disagg.models.model import PagedModel
from disagg.models.pool import AttentionPages, Pool
from disagg.models.ranks import Ranks
from disagg.types.sampling import SamplingParams
from disagg.worker.executor import Executor, captures_of

DECODES = (
    (1, 1024),
    (32, 1024),
    (64, 1024),
    (128, 1024),
    (256, 1024),
    (32, 8192),
    (1, 32768),
)  # (sequences, tokens of each)
PREFILLS = ((2048, 8192), (8192, 8192), (32768, 8192), (2048, 512), (8192, 512), (32768, 512))  # (tokens, of one chunk)
MIXED = ((16, 512), (64, 512), (128, 512), (64, 256), (128, 768))  # (sequences of 1024 tokens, rows with the chunk's)
PROFILED = 5  # replays
MIXED_STEPS = 8  # of one measurement, after as many
STEPS = 24  # of one measurement, after as many to warm up
MAX_LEN = 33 * 1024
MOST_KV_GIB = 80
BESIDE_KV_GIB = 28  # weights 15, the largest step and graphs 5, what measures the ceilings 6, the driver
DTYPE_BYTES = 2
SHAPE = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=MAX_LEN,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    tie_word_embeddings=False,
)


class Work(Struct, frozen=True):
    """Of one step: products (rows, columns of weights, their depth), operations and bytes of attention."""

    products: tuple[tuple[int, int, int], ...]
    attention_flops: float
    attention_bytes: float

    def floor_s(self, ceilings: Ceilings, rate: float) -> float:
        """rate: FLOP/s of products."""
        total = max(self.attention_bytes / ceilings.copy, self.attention_flops / rate)
        for rows, columns, depth in self.products:
            moved = DTYPE_BYTES * (columns * depth + rows * (columns + depth))
            total += max(moved / ceilings.copy, 2 * rows * columns * depth / rate)
        return total


def work_of(config: LlamaConfig, rows: int, sampled: int, keys: int, visible: int) -> Work:
    """keys: tokens whose KV is read; visible: pairs of a row and a key that it sees."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = (
        (rows, (heads + 2 * kv_heads) * dim, hidden),
        (rows, hidden, heads * dim),
        (rows, 2 * inner, hidden),
        (rows, hidden, inner),
    )
    layers = config.num_hidden_layers
    return Work(
        layer * layers + ((sampled, config.vocab_size, hidden),),
        attention_flops=4.0 * layers * heads * dim * visible,
        attention_bytes=2.0 * layers * kv_heads * dim * DTYPE_BYTES * keys,
    )


def random_model(config: LlamaConfig, computation: Computation) -> PagedModel:
    """Made on the GPU; nothing is read."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    module.train(False).requires_grad_(False)
    places = lay_out(Path("random"), module, "bfloat16", MAX_LEN)
    loaded = LoadedModel(module, places, config.vocab_size, MAX_LEN, (), weights_hash="", files={})
    return PagedModel(loaded, Ranks(), computation)


class Bench:
    """One executor, and the plans that it is given."""

    def __init__(self, model: PagedModel, computation: Computation, page_tokens: int, kv_gib: int, slots: int) -> None:
        self._page_tokens = page_tokens
        self._executor = Executor(rank=0)
        self._executor.adopt(model, captures_of(computation))
        (group,) = model.groups
        page_bytes = group.page_bytes(page_tokens)
        self._num_pages = (kv_gib << 30) // page_bytes
        self._executor.make_pool(self._num_pages, page_bytes, (page_bytes,), page_tokens, slots)
        (view,) = self._executor.pool.views
        assert isinstance(view, AttentionPages)
        for part in view.elements.split(1 << 28):
            part.normal_()
        self._plan_no = self._seq_id = 0
        self._rng = random.Random(0)

    @property
    def pool(self) -> Pool:
        return self._executor.pool

    def _plan(self, **fields: object) -> WorkerPlan:
        self._plan_no += 1
        return WorkerPlan(self._plan_no - 1, **fields)

    def _run(self, plans: Sequence[WorkerPlan]) -> float:
        """Seconds of all of them, each launched before the one before it is collected, as a worker does."""
        started = time.perf_counter()
        under_way = None
        for plan in plans:
            launched = self._executor.launch(plan)
            if under_way is not None:
                self._executor.collect(under_way)
            under_way = launched
        if under_way is not None:
            self._executor.collect(under_way)
        return time.perf_counter() - started

    def _starts(self, count: int, tokens: int, computed: int, room: int) -> tuple[SequenceStart, ...]:
        """Sequences with pages for so many more tokens, anywhere in the pool."""
        per_sequence = -(-(tokens + room) // self._page_tokens)
        pages = self._rng.sample(range(self._num_pages), count * per_sequence)
        params = SamplingParams(max_tokens=room, temperature=0.0)
        starts = []
        for index in range(count):
            mine = tuple(pages[index * per_sequence : (index + 1) * per_sequence])
            ids = tuple(self._rng.randrange(SHAPE.vocab_size) for _ in range(tokens))
            table = (GroupPages(0, mine),)
            slots = (SamplerStart(index, 0),)
            starts.append(SequenceStart(self._seq_id + index, ids, tokens, computed, table, params, slots))
        self._seq_id += count
        return tuple(starts)

    def decode(self, count: int, tokens: int) -> tuple[float, float]:
        """(seconds of a step, seconds of the GPU alone or 0 where nothing is captured)."""
        starts = self._starts(count, tokens, tokens - 1, 2 * STEPS + 2)
        runs = tuple(Run(start.seq_id, 1, True) for start in starts)
        self._run([self._plan(starts=starts, runs=runs)])
        self._run([self._plan(runs=runs) for _ in range(STEPS)])
        step_s = self._run([self._plan(runs=runs) for _ in range(STEPS)]) / STEPS
        graphs = self._executor.graphs
        gpu_s = 0.0 if graphs is None else seconds(graphs.graph_of(count).replay, STEPS)
        self._run([self._plan(ends=tuple(start.seq_id for start in starts))])
        return step_s, gpu_s

    def kernels(self, count: int, tokens: int) -> list[str]:
        """Lines of what a replay launches: microseconds a step, launches, name. After `decode` of the same."""
        graphs = self._executor.graphs
        if graphs is None:
            return []
        starts = self._starts(count, tokens, tokens - 1, 8)
        self._run([self._plan(starts=starts, runs=tuple(Run(start.seq_id, 1, True) for start in starts))])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                graphs.graph_of(count).replay()
            torch.cuda.synchronize()
        self._run([self._plan(ends=tuple(start.seq_id for start in starts))])
        found = [(event.device_time_total, event.count, event.key) for event in profile.key_averages()]
        return [
            f"{total_us / PROFILED:10.1f} us {launches / PROFILED:6.0f} x {total_us / launches:8.2f}  {name[:90]}"
            for total_us, launches, name in sorted(found, reverse=True)
            if total_us
        ]

    def logits(self, count: int, tokens: int) -> torch.Tensor:
        """Of the first decode step of as many sequences, [count, vocab], by graphs. Others with the same weights say the same."""
        torch.manual_seed(1)
        (view,) = self._executor.pool.views
        assert isinstance(view, AttentionPages) and self._executor.graphs is not None
        for part in view.elements.split(1 << 28):
            part.normal_()
        starts = self._starts(count, tokens, tokens - 1, 2)
        self._run([self._plan(starts=starts, runs=tuple(Run(start.seq_id, 1, True) for start in starts))])
        found = self._executor.graphs._logits[:count].double()
        self._run([self._plan(ends=tuple(start.seq_id for start in starts))])
        return found

    def mixed(self, count: int, tokens: int, rows: int) -> float:
        """Seconds of a step of as many sequences and of a prompt's next chunk, which fills it up to so many rows."""
        starts = self._starts(count, tokens, tokens - 1, 2 * MIXED_STEPS + 3)
        (prompt,) = self._starts(1, (rows - count) * 2 * MIXED_STEPS + 1, 0, 1)
        decodes = tuple(Run(start.seq_id, 1, True) for start in starts)
        runs = (*decodes, Run(prompt.seq_id, rows - count, False))
        prompt = replace(prompt, samplers=(SamplerStart(count, 0),))
        self._run([self._plan(starts=(*starts, prompt), runs=decodes)])
        self._run([self._plan(runs=runs) for _ in range(MIXED_STEPS)])
        step_s = self._run([self._plan(runs=runs) for _ in range(MIXED_STEPS)]) / MIXED_STEPS
        self._run([self._plan(ends=(*(start.seq_id for start in starts), prompt.seq_id))])
        return step_s

    def prefill(self, tokens: int, chunk: int, rounds: int = 3) -> float:
        """Seconds of one prompt, the median of some behind a first one."""
        taken = []
        for _ in range(1 + rounds):
            (start,) = self._starts(1, tokens, 0, 1)
            torch.cuda.synchronize()
            plans = [
                self._plan(
                    starts=(start,) if done == 0 else (),
                    runs=(Run(start.seq_id, min(chunk, tokens - done), done + chunk >= tokens),),
                )
                for done in range(0, tokens, chunk)
            ]
            taken.append(self._run(plans))
            self._run([self._plan(ends=(start.seq_id,))])
        return statistics.median(taken[1:])

    def prefill_kernels(self, tokens: int, chunk: int) -> list[str]:
        """Lines of what a prompt launches, as `kernels` has them, with how long the GPU was busy and the host launched."""
        (start,) = self._starts(1, tokens, 0, 1)
        runs = [
            Run(start.seq_id, min(chunk, tokens - done), done + chunk >= tokens) for done in range(0, tokens, chunk)
        ]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started_s = time.perf_counter()
            launched = [
                self._executor.launch(self._plan(starts=() if index else (start,), runs=(run,)))
                for index, run in enumerate(runs)
            ]
            host_s = time.perf_counter() - started_s
            for each in launched:
                self._executor.collect(each)
            torch.cuda.synchronize()
        self._run([self._plan(ends=(start.seq_id,))])
        found = [(event.device_time_total, event.count, event.key) for event in profile.key_averages()]
        busy_us = sum(total_us for total_us, _, _ in found)
        return [
            f"{tokens} tokens in chunks of {chunk}: the GPU busy for {busy_us / 1e3:.1f} ms, launched in {host_s * 1e3:.1f} ms",
            *(
                f"{total_us:10.1f} us {launches:6.0f} x {total_us / launches:8.2f}  {name[:90]}"
                for total_us, launches, name in sorted(found, reverse=True)[:14]
                if total_us
            ),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill-attention", default="auto")
    parser.add_argument("--decode-attention", default="auto")
    parser.add_argument("--fusions", default=FUSIONS, nargs="*")
    parser.add_argument("--each-fusion", action="store_true", help="none first, then one more at a time")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument(
        "--parity", action="store_true", help="no times: how far bfloat16 logits of all fusions are from those of none"
    )
    parser.add_argument("--no-overlap", action="store_true", help="no kernel begins while the one before it ends")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--kernels", action="store_true", help="what each decode step launches, and how long it takes")
    parser.add_argument("--kv-gib", type=int, default=0, help="0: 80, or what the device has beside the model")
    parser.add_argument("--phases", default=["decode", "prefill"], nargs="+")
    parser.add_argument("--most-sequences", type=int, default=256)
    arguments = parser.parse_args()
    arguments.kv_gib = arguments.kv_gib or kv_gib_that_fit(torch.cuda.get_device_properties(0).total_memory)
    if arguments.parity:
        return parity(arguments)
    if arguments.no_overlap:
        overlap.LEAST_CAPABILITY = (99, 0)
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {ceilings.describe()}", flush=True)
    fusions = tuple(arguments.fusions)
    for count in range(len(fusions) + 1) if arguments.each_fusion else (len(fusions),):
        computation = Computation(
            *(arguments.prefill_attention, arguments.decode_attention, not arguments.no_graphs, fusions[:count]),
            mixed="mixed" in arguments.phases and not arguments.no_graphs,
        )
        print(f"\n{computation}", flush=True)
        measure(computation, arguments, ceilings)
        torch.cuda.empty_cache()
    return 0


def kv_gib_that_fit(device_bytes: int) -> int:
    """Of the most that is asked for, beside the model and its steps."""
    return min(MOST_KV_GIB, max(1, (device_bytes >> 30) - BESIDE_KV_GIB))


def parity(arguments: argparse.Namespace) -> int:
    counts = [count for count in (1, 8, 32, 64, 128, 256) if count <= arguments.most_sequences]
    found = []
    for fusions in ((), ("norm",), tuple(arguments.fusions)):
        computation = Computation(fusions=fusions)
        model = random_model(SHAPE, computation)
        bench = Bench(model, computation, arguments.page_tokens, arguments.kv_gib, arguments.most_sequences)
        found.append([bench.logits(count, 1024) for count in counts])
        del model, bench
        torch.cuda.empty_cache()
    plain, normed, fused = found
    for count, right, near, got in zip(counts, plain, normed, fused, strict=True):
        errors = [float((each - right).norm() / right.norm()) for each in (near, got)]
        same = float((got.argmax(-1) == right.argmax(-1)).double().mean())
        print(
            f"{count:4d} sequences: relative error of logits {errors[1]:.4f} (of `norm` alone {errors[0]:.4f}); the same token "
            f"in {same:.0%} of rows",
            flush=True,
        )
    return 0


def measure(computation: Computation, arguments: argparse.Namespace, ceilings: Ceilings) -> None:
    model = random_model(SHAPE, computation)
    started = time.perf_counter()
    bench = Bench(model, computation, arguments.page_tokens, arguments.kv_gib, arguments.most_sequences)
    print(f"pool and graphs made in {time.perf_counter() - started:.1f} s", flush=True)
    if "decode" in arguments.phases:
        print("decode     tokens     step ms      GPU ms    floor ms   step/floor   GPU/floor", flush=True)
        for count, tokens in DECODES:
            if count <= arguments.most_sequences:
                print(decode_row(bench, count, tokens, ceilings), flush=True)
                if arguments.kernels:
                    print(*bench.kernels(count, tokens), sep="\n", flush=True)
    if "mixed" in arguments.phases:
        print("decode  rows in all     step ms    floor ms   step/floor", flush=True)
        for count, rows in MIXED:
            if count < arguments.most_sequences:
                print(mixed_row(bench, count, rows, ceilings), flush=True)
    if "prefill" in arguments.phases:
        print("prefill     chunk   prompt ms    floor ms (burst)   (sustained)    of burst   of sustained", flush=True)
        for tokens, chunk in PREFILLS:
            print(prefill_row(bench, tokens, chunk, ceilings), flush=True)
            if arguments.kernels:
                print(*bench.prefill_kernels(tokens, chunk), sep="\n", flush=True)


def mixed_row(bench: Bench, count: int, rows: int, ceilings: Ceilings) -> str:
    tokens, chunk = 1024, rows - count
    seen, before = count * (tokens + 3 * MIXED_STEPS // 2), 3 * MIXED_STEPS * chunk // 2
    visible = seen + chunk * before + chunk * (chunk + 1) // 2
    work = work_of(SHAPE, rows, count, seen + before + chunk, visible)
    floor_s = work.floor_s(ceilings, ceilings.burst)
    step_s = bench.mixed(count, tokens, rows)
    return f"{count:6d} {rows:10d} {step_s * 1e3:11.3f} {floor_s * 1e3:11.3f} {step_s / floor_s:12.2f}"


def decode_row(bench: Bench, count: int, tokens: int, ceilings: Ceilings) -> str:
    seen = count * (tokens + 3 * STEPS // 2)
    floor_s = work_of(SHAPE, count, count, seen, seen).floor_s(ceilings, ceilings.burst)
    step_s, gpu_s = bench.decode(count, tokens)
    times = f"{step_s * 1e3:11.3f} {gpu_s * 1e3:11.3f} {floor_s * 1e3:11.3f}"
    return f"{count:6d} {tokens:10d} {times} {step_s / floor_s:12.2f} {gpu_s / floor_s:11.2f}"


def prefill_row(bench: Bench, tokens: int, chunk: int, ceilings: Ceilings) -> str:
    work = work_of(SHAPE, tokens, 0, tokens, tokens * (tokens + 1) // 2)
    burst_s, sustained_s = (work.floor_s(ceilings, rate) for rate in (ceilings.burst, ceilings.sustained))
    taken_s = bench.prefill(tokens, chunk)
    times = f"{taken_s * 1e3:11.2f} {burst_s * 1e3:19.2f} {sustained_s * 1e3:13.2f}"
    return f"{tokens:7d} {chunk:9d} {times} {burst_s / taken_s:11.2f} {sustained_s / taken_s:14.2f}"


if __name__ == "__main__":
    sys.exit(main())
