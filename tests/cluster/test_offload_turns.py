"""Conversations whose every turn is on servers that never saw them, at another TP size than the writer's.

From the second turn on prefill computes what is new, and nothing else; storage holds one copy of every page; both by formula.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from disagg.convert.model_dir import resolve
from tests.cluster.campaign import check, total
from tests.cluster.cluster import CLI, Answer, Cluster
from tests.cluster.conversation import Conversation, Formula, Page, Shape, converse
from tests.models import reference
from tests.models.reference import Answer as Reference
from tests.models.tiny import VOCAB_SIZE, make_tiny

CACHE = Path("~/.cache/disagg/models").expanduser()
TIERS = ("gpu", "host", "storage")
PUBLISHED = "disagg_store_published_pages_total"


@dataclass(frozen=True)
class Case:
    """model: a known name, or a tiny family. tps: of all servers, by turns. load: `offload.load`."""

    model: str
    shape: Shape
    tps: tuple[int, int] = (1, 2)
    checkpoint_tokens: int = 16  # so that every answer goes over one
    stride_tokens: int = 64
    vocab: int = VOCAB_SIZE
    kv_memory: str = "32MiB"
    load: str = "always"  # with tiny models on a busy machine it often does not pay
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.model}-{self.shape.conversations}x{self.shape.turns}"
        return (
            name + ("-opening" if self.shape.opening else "") + "".join(f"-{value}" for value in self.fields.values())
        )

    def make(self, directory: Path) -> Path:
        if self.model in ("smollm2-135m", "gemma3-270m"):
            return resolve(self.model, CACHE)
        return make_tiny(self.model, directory / self.model, **self.fields)

    def cluster(self, run_dir: Path, model_dir: Path, store: Path, tp: int) -> Cluster:
        flags = ("--model", str(model_dir), "--dtype", "float32", "--page-tokens", "16", "--kv-memory", self.kv_memory)
        tps = ("--prefill-tp", str(tp), "--decode-tp", str(tp))
        tiers = ("--offload", "on", "--host-memory", self.kv_memory, "--storage", f"file://{store}")
        sets = (
            f"engine.checkpoint_tokens={self.checkpoint_tokens}",
            f"offload.stride_tokens={self.stride_tokens}",
            f"offload.load={self.load}",
        )
        return Cluster(run_dir, *flags, *tps, *tiers, sets=sets)

    def formula(self, model_dir: Path) -> Formula:
        return Formula(model_dir, 16, self.checkpoint_tokens, self.stride_tokens)


QUICK_SHAPE = Shape(conversations=4, turns=4, opening=0, first=(20, 70), said=(3, 25), outputs=20)
LONG_SHAPE = Shape(conversations=16, turns=10, opening=0, first=(20, 300), said=(3, 80), outputs=24)
SHIPPED: dict[str, Any] = {"load": "faster", "kv_memory": "512MiB", "stride_tokens": 128}
OPENING_SHAPE = replace(QUICK_SHAPE, opening=40, first=(8, 30))
CASES = (
    Case("jamba", QUICK_SHAPE),
    Case("llama", OPENING_SHAPE),  # in other orders these prompts are cut into other spans
    Case("gemma3_text", QUICK_SHAPE, fields={"sliding_window": 64}),
    Case("llama", LONG_SHAPE),
    Case("gemma3_text", LONG_SHAPE),
    Case("falcon_h1", LONG_SHAPE),
    Case("smollm2-135m", LONG_SHAPE, (1, 3), vocab=49_000, **SHIPPED),
    Case("gemma3-270m", LONG_SHAPE, vocab=200_000, **SHIPPED),
)


def stats(store: Path) -> dict[str, int]:
    command = (*CLI, "cache", "stats", "--storage", f"file://{store}", "--json")
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def ask(cluster: Cluster, prompts: Sequence[Sequence[int]], outputs: int, salt: str) -> list[Answer]:
    """All at once."""
    fields = {"max_tokens": outputs, "ignore_eos": True, "cache_salt": salt, "timeout_s": 600}
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: cluster.complete(list(prompt), **fields), prompts))


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def hits(cluster: Cluster) -> dict[str, float]:
    metrics = cluster.metrics("prefill-0")
    return {tier: metrics.get(f'disagg_prefix_hit_tokens_total{{tier="{tier}"}}', 0) for tier in TIERS}


def settled(cluster: Cluster) -> None:
    """All that is to be stored is."""
    cluster.check_adds_up()
    cluster.wait_offloaded()


class Stored:
    """What storage should hold by now, by formula. gifts: what it may hold, too."""

    def __init__(self, formula: Formula) -> None:
        self._formula = formula
        self.pages: set[tuple[str, Page]] = set()  # by tenant
        self.gifts: set[tuple[str, Page]] = set()

    def add(self, tenant: str, prompts: Sequence[Sequence[int]], answers: Sequence[Reference]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            sure, gifts = self._formula.turn(prompt, answer.outputs)
            self.pages |= {(tenant, page) for page in sure}
            self.gifts |= {(tenant, page) for page in gifts}

    def check(self, store: Path, what: str) -> None:
        found = stats(store)
        gifts = self.gifts - self.pages
        least, most = (self._formula.nbytes(page for _, page in pages) for pages in (self.pages, self.pages | gifts))
        print(f"{what}: {found}; by formula {len(self.pages)} pages, {least} bytes, and at most {len(gifts)} gifts")
        assert found["pages"] == found["distinct_pages"], "one copy of every page"
        assert len(self.pages) <= found["distinct_pages"] <= len(self.pages | gifts)
        assert least <= found["bytes"] <= most
        assert found["tenants"] == len({tenant for tenant, _ in self.pages}) and found["damaged"] == 0


def run(case: Case, tmp_path: Path) -> None:
    model_dir = case.make(tmp_path)
    talks = converse(model_dir, case.shape, 13, case.vocab)
    formula = case.formula(model_dir)
    stored, store = Stored(formula), tmp_path / "store"
    for turn in range(case.shape.turns):
        with case.cluster(tmp_path / "run", model_dir, store, case.tps[turn % 2]) as cluster:
            prompts, answers = [talk.prompts[turn] for talk in talks], [talk.answers[turn] for talk in talks]
            loaded_s = one_turn(case, cluster, talks, turn, formula)
            stored.add("one", prompts, answers)
            stored.check(store, f"{case}, turn {turn + 1}")
            if turn == case.shape.turns - 1:
                computed_s = another_tenant(case, cluster, talks, formula)
                stored.add("two", prompts, answers)
                stored.check(store, f"{case}, two tenants")
                print(f"{case}, last turns: {computed_s:.2f} s when computed, {loaded_s:.2f} s when loaded")


def one_turn(case: Case, cluster: Cluster, talks: list[Conversation], turn: int, formula: Formula) -> float:
    """How long it took."""
    prompts, answers = [talk.prompts[turn] for talk in talks], [talk.answers[turn] for talk in talks]
    started = time.monotonic()
    got = ask(cluster, prompts, case.shape.outputs, "one")
    took_s = time.monotonic() - started
    check(answers, [answer.token_ids[0] for answer in got], f"turn {turn + 1}")
    if turn:
        before = [len(talk.prompts[turn - 1]) + case.shape.outputs - 1 for talk in talks]
        known = [formula.hit_tokens(tokens) for tokens in before]
        assert cached(got) == known
        computed = total(cluster, "disagg_prefill_tokens", "prefill")
        assert computed == sum(map(len, prompts)) - sum(known), f"{computed:g} tokens were computed"
        by_tier = hits(cluster)
        # What all begin with may be on the GPU already when the next one asks.
        assert sum(by_tier.values()) == sum(known) and by_tier["storage"] >= 0.5 * sum(known), by_tier
    settled(cluster)
    return took_s


def another_tenant(case: Case, cluster: Cluster, talks: list[Conversation], formula: Formula) -> float:
    """Whose last turns are the same, but whose salt is not, finds nothing, and stores all of it again. How long it took."""
    prompts, answers = [talk.prompts[-1] for talk in talks], [talk.answers[-1] for talk in talks]
    before = hits(cluster)
    started = time.monotonic()
    got = ask(cluster, prompts, case.shape.outputs, "two")
    took_s = time.monotonic() - started
    check(answers, [answer.token_ids[0] for answer in got], "another tenant")
    # Of what these prompts share with each other, some may find what others have computed.
    opening = formula.hit_tokens(case.shape.opening)
    assert all(tokens <= opening for tokens in cached(got)), cached(got)
    assert opening or hits(cluster) == before
    settled(cluster)
    return took_s


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_on_servers_that_never_saw_the_others_compute_what_is_new(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)


# ---- prompts that no decode server sees


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["gemma3_text"])
def test_prompts_of_which_one_token_was_wanted_are_found_by_another_prefill_server(family: str, tmp_path: Path) -> None:
    case = Case(family, QUICK_SHAPE)
    model_dir = case.make(tmp_path)
    formula = case.formula(model_dir)
    rng = random.Random(family)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(30 + 7 * number)] for number in range(16)]
    first = reference.generate(model_dir, prompts, 1)
    with case.cluster(tmp_path / "run", model_dir, tmp_path / "store", 2) as cluster:
        got = ask(cluster, prompts, 1, "")
        check(first, [answer.token_ids[0] for answer in got], "first turns")
        settled(cluster)
        assert cluster.metrics("decode-0").get(PUBLISHED, 0) == 0 < cluster.metrics("prefill-0")[PUBLISHED]
    stored = set().union(*(formula.prompt(prompt) for prompt in prompts))
    found = stats(tmp_path / "store")
    assert found["distinct_pages"] == found["pages"] == len(stored)
    turns = [[*prompt, *answer.outputs, 5, 7, 11] for prompt, answer in zip(prompts, first, strict=True)]
    second = reference.generate(model_dir, turns, 4)
    with case.cluster(tmp_path / "run", model_dir, tmp_path / "store", 1) as cluster:
        got = ask(cluster, turns, 4, "")
        check(second, [answer.token_ids[0] for answer in got], "second turns")
        known = [formula.hit_tokens(len(prompt)) for prompt in prompts]
        assert cached(got) == known
        assert hits(cluster) == {"gpu": 0, "host": 0, "storage": sum(known)}
        cluster.check_adds_up()
