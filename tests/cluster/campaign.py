"""Asks a cluster the same questions cold, warm, and with so little memory that pages are evicted and sequences give way.

Every answer is compared, token by token, with what `transformers` says; the counters prove that the memory was really
used so: hits where a prefix cache is on, none where it is off, evictions and preemptions where memory is short.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from disagg.memory.groups import spec_of
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import PoolLayout, pool_layout, stage_layout
from disagg.models.model import PagedModel
from disagg.models.stage_links import StageLinks
from disagg.scheduler.pipeline import plans_in_flight
from tests.cluster.cluster import Cluster
from tests.models.reference import Answer

MAX_TIE_SHARE = 0.001
MAX_TIGHT_ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """How a model is cut for a test. tight_bytes: a pool in which the longest request fits, and little else; so many large pages.

    layout, late_runs: of a rank's pool, see KvMemory.
    """

    page_tokens: int
    chunk_tokens: int
    checkpoint_tokens: int
    tight_bytes: int
    num_large: int
    layout: PoolLayout
    late_runs: int

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--page-tokens", str(self.page_tokens), "--chunk-tokens", str(self.chunk_tokens), "--dtype", "float32")

    @property
    def sets(self) -> tuple[str, ...]:
        return (f"engine.checkpoint_tokens={self.checkpoint_tokens}", "engine.grant_headroom_tokens=0")


def sizes(
    model_dir: Path,
    longest: int,
    page_tokens: int,
    chunk_tokens: int,
    checkpoint_tokens: int,
    tp: int = 1,
    pp: int = 1,
    slack: int = 4,
) -> Sizes:
    """tp, pp: of servers whose ranks' pools are to be so small. slack: beyond the longest sequence, one part in so many of it."""
    model = PagedModel.load(model_dir, "float32", "cpu", links=StageLinks(0, pp))
    groups = [group.on_rank(tp) for group in model.whole_groups]
    layout: PoolLayout = pool_layout([spec_of(group, page_tokens) for group in groups], page_tokens, checkpoint_tokens)
    memory = KvMemory(layout, 1, late_runs=plans_in_flight(pp))
    large_bytes = layout.large_bytes
    if pp > 1:  # the stage with most bytes says how many pages there are
        parts = [[group.on_stage(*span) for group in groups] for span in pairwise(model.cuts)]
        specs = [[part and spec_of(part, page_tokens) for part in stage] for stage in parts]
        large_bytes = max(stage_layout(layout, stage).large_bytes for stage in specs)
    alone = max(
        max(memory.large_pages_to_prefill(n, chunk_tokens), memory.large_pages_to_decode(0, n, 1))
        for n in range(1, longest + 1)
    )
    num_large = alone + max(1, alone // slack)
    tight_bytes = num_large * large_bytes
    return Sizes(page_tokens, chunk_tokens, checkpoint_tokens, tight_bytes, num_large, layout, memory.late_runs)


def conversations(seed: int, vocab: int, lengths: Sequence[int], documents: int = 3) -> list[list[int]]:
    """Prompts of these lengths. Most begin like others do: with a part of one of few documents."""
    rng = random.Random(seed)
    longest = max(lengths)
    texts = [[rng.randrange(3, vocab) for _ in range(longest)] for _ in range(documents)]
    prompts = []
    for length in lengths:
        shared = rng.choice((0, length // 2, 3 * length // 4, length - 1))
        own = [rng.randrange(3, vocab) for _ in range(length - shared)]
        prompts.append(rng.choice(texts)[:shared] + own)
    return prompts


def ask(cluster: Cluster, prompts: Sequence[Sequence[int]], outputs: int, concurrency: int) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [
            pool.submit(cluster.complete, list(prompt), max_tokens=outputs, ignore_eos=True, timeout_s=900)
            for prompt in prompts
        ]
        return [future.result().token_ids[0] for future in futures]


def check(answers: Sequence[Answer], outputs: Sequence[Sequence[int]], what: str) -> tuple[int, int]:
    """(steps compared, ties): what follows a tie is not compared."""
    steps = ties = 0
    for number, (answer, ours) in enumerate(zip(answers, outputs, strict=True)):
        assert len(ours) == len(answer.outputs), f"{what}, prompt {number}: {len(ours)} tokens"
        for step, (mine, theirs) in enumerate(zip(ours, answer.outputs, strict=True)):
            steps += 1
            if mine != theirs:
                assert answer.tied(step), f"{what}, prompt {number}: output {step} is {mine}, not {theirs}"
                ties += 1
                break
    assert ties <= max(1, MAX_TIE_SHARE * steps), f"{what}: {ties} ties in {steps} steps"
    return steps, ties


def total(cluster: Cluster, name: str, role: str = "") -> float:
    """A counter, over servers (of a role) and labels."""
    servers = [s for s in cluster.status()["servers"] if role in ("", s["role"])]
    samples = [cluster.metrics(s["name"]) for s in servers]
    return sum(value for each in samples for key, value in each.items() if key.partition("{")[0] == f"{name}_total")


def tight_as_shipped(
    run_dir: Path, model_dir: Path, cut: Sizes, prompts: list[list[int]], answers: list[Answer], concurrency: int = 8
) -> None:
    """With little memory and room kept ahead of what runs, as by default: perhaps nobody gives way, and answers are the same."""
    flags = ("--model", str(model_dir), *cut.flags, "--kv-memory", str(cut.tight_bytes))
    with Cluster(run_dir, *flags, sets=cut.sets) as cluster:
        compared = check(answers, ask(cluster, prompts, len(answers[0].outputs), concurrency), "tight, as shipped")
        print(f"(steps, ties) {compared}; {total(cluster, 'disagg_preemptions'):g} preemptions")
        cluster.check_adds_up()


def campaign(
    run_dir: Path,
    model_dir: Path,
    cut: Sizes,
    prompts: list[list[int]],
    answers: list[Answer],
    *,
    concurrency: int = 8,
    must_preempt: bool = True,
) -> None:
    """Cold and warm with plenty of memory; then evicting and preempting with little; then with the cache off.

    must_preempt: sequences are so many and grow so far that some of them have to give way.
    """
    outputs = len(answers[0].outputs)
    model = ("--model", str(model_dir), *cut.flags)
    compared = []
    with Cluster(run_dir / "plenty", *model, "--kv-memory", "1GiB", sets=cut.sets) as cluster:
        for what in ("cold", "warm"):
            before = total(cluster, "disagg_prefix_hit_tokens", "prefill")
            compared.append((what, *check(answers, ask(cluster, prompts, outputs, concurrency), what)))
        warm = total(cluster, "disagg_prefix_hit_tokens", "prefill") - before
        long = sum(len(p) - 1 for p in prompts if len(p) > max(cut.page_tokens, cut.checkpoint_tokens))
        assert warm > 0.5 * long, f"{warm} of {long} tokens were cached the second time"
        assert total(cluster, "disagg_kv_evictions") == 0
        cluster.check_adds_up()
    tight = (*cut.sets, "engine.lookahead_tokens=0")  # what begins may come to lack pages: it is what is tried here
    with Cluster(run_dir / "tight", *model, "--kv-memory", str(cut.tight_bytes), sets=tight) as cluster:
        preempted = 0.0
        for number in range(MAX_TIGHT_ROUNDS):  # who has to give way to whom is a matter of timing
            what = f"tight, round {number}"
            compared.append((what, *check(answers, ask(cluster, prompts, outputs, concurrency), what)))
            preempted = total(cluster, "disagg_preemptions")
            if number and (preempted or not must_preempt):
                break
        assert total(cluster, "disagg_kv_evictions") > 0, "nothing was evicted"
        evicted, hits = total(cluster, "disagg_kv_evictions"), total(cluster, "disagg_prefix_hit_tokens")
        cluster.check_adds_up()
    off = (*tight, "engine.prefix_cache=off")
    with Cluster(run_dir / "off", *model, "--kv-memory", str(cut.tight_bytes), sets=off) as cluster:
        compared.append(("off", *check(answers, ask(cluster, prompts, outputs, concurrency), "off")))
        assert total(cluster, "disagg_prefix_hit_tokens") == 0
        preempted += total(cluster, "disagg_preemptions")
        cluster.check_adds_up()
    assert preempted > 0 or not must_preempt, "no sequence gave way"
    print(f"{model_dir.name}: (what, steps, ties) {compared}")
    print(f"warm: {warm:g} hits; tight: {hits:g} hits, {evicted:g} evictions; {preempted:g} preemptions")
