"""Pools so small that every request gives way at least once, and goes on from the host; then workers die in mid-offload.

Every answer is compared, token by token, with what `transformers` says. That each request was parked its timeline says, and
the timelines' sum is what the servers counted. Who was never parked is asked again, last of a crowd that grows, or behind one
that it fits beside at first and not to the end: who began last gives way. Prompts end on and beside pages, strides
and checkpoints, and answers go over more of these; some requests have three choices.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from disagg.convert.model_dir import resolve
from disagg.memory.spans import pages_for, window_pages
from disagg.messages.layout import GroupKind
from tests.cluster.campaign import Sizes, check, sizes, total
from tests.cluster.cluster import Cluster
from tests.models import reference
from tests.models.reference import Answer
from tests.models.tiny import VOCAB_SIZE, make_tiny

CACHE = Path("~/.cache/disagg/models").expanduser()
CONCURRENCY = 8
MAX_ROUNDS = 30
ANSWER_S = 900.0
DRIFT = 24  # tokens that an answer gets until one that is asked for now begins beside it
DEATHS = ("copying", "writing")  # see dying_worker


@dataclass(frozen=True)
class Case:
    """model: a known name, or a tiny family. around: prompts have so many tokens, one less and one more, beside 1 and those
    around a page."""

    model: str
    around: tuple[int, ...]
    outputs: int
    page_tokens: int = 4
    chunk_tokens: int = 16
    checkpoint_tokens: int = 16
    stride_tokens: int = 32
    tp: int = 1
    stores: bool = True
    slack: int = 4  # of the pool, as `sizes` has it
    behind: bool = (
        False  # who was never parked is asked behind one that grows: of a crowd of long prompts hardly two run at once
    )
    vocab: int = VOCAB_SIZE
    fields: dict[str, Any] = field(default_factory=dict)  # what differs in a tiny configuration

    def __str__(self) -> str:
        return f"{self.model}-tp{self.tp}" + ("" if self.stores else "-host")

    def make(self, directory: Path) -> Path:
        if self.model in ("smollm2-135m", "gemma3-270m"):
            return resolve(self.model, CACHE)
        return make_tiny(self.model, directory / self.model, **self.fields)

    def prompts(self) -> list[list[int]]:
        lengths = {1, *(at + d for at in (self.page_tokens, *self.around) for d in (-1, 0, 1))}
        rng = random.Random(str(self))
        return [[rng.randrange(3, self.vocab) for _ in range(length)] for length in sorted(lengths)]

    def companion(self, model_dir: Path, prompts: Sequence[Sequence[int]]) -> Companion:
        prompt = [prompts[-1][0]]
        (answer,) = reference.generate(model_dir, [prompt], len(prompts[-1]) + self.outputs - len(prompt))
        return Companion(prompt, answer)

    def cut(self, model_dir: Path, longest: int) -> Sizes:
        pages = self.page_tokens, self.chunk_tokens, self.checkpoint_tokens
        return sizes(model_dir, longest, *pages, self.tp, slack=self.slack)


TINY = (16, 32, 48, 64)  # checkpoints, of which every second one ends a stride
REAL = {"page_tokens": 16, "vocab": 49_000}
WIDE = {"num_key_value_heads": 4}  # so that an answer's KV takes much memory beside a state
CASES = (
    Case("jamba", (16,), 48, stride_tokens=16, fields=WIDE),
    Case("jamba", TINY, 64, fields=WIDE, stores=False),
    Case("falcon_h1", TINY, 64, fields=WIDE),
    Case("falcon_h1", TINY, 64, fields=WIDE, stores=False),
    Case("gemma3_text", TINY, 64, fields=WIDE),
    Case("smollm2-135m", (64, 128), 48, chunk_tokens=64, stride_tokens=64, **REAL),
    Case("smollm2-135m", (64, 128), 48, chunk_tokens=64, stride_tokens=64, tp=3, **REAL),
    Case(
        "gemma3-270m",
        (256, 512),
        256,
        chunk_tokens=64,
        stride_tokens=256,
        slack=7,
        behind=True,
        **{**REAL, "vocab": 200_000},
    ),
)


def choices_of(number: int) -> int:
    return 3 if number % 4 == 1 else 1


@dataclass(frozen=True)
class Companion:
    """One request that grows from one token to the longest of all."""

    prompt: list[int]
    answer: Answer

    def ask(self, cluster: Cluster, salt: str, most: int, at: int, reached: threading.Event) -> tuple[list[int], str]:
        """So many outputs at most, and the request's id. reached: set when it has so many tokens."""
        fields = {"max_tokens": most, "ignore_eos": True, "cache_salt": salt}
        outputs: list[int] = []
        request_id = ""
        for event in cluster.stream(self.prompt, ANSWER_S, **fields):
            request_id = event["id"]
            outputs += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            if len(self.prompt) + len(outputs) >= at:
                reached.set()
        return outputs, request_id


def pressing(cut: Sizes, length: int, outputs: int, companion: Companion) -> tuple[int, int]:
    """(outputs, tokens): when an answer of so many outputs has so many tokens, a prompt of that length is to be asked.

    A request begins where there is room for what all keep in windows at their ends, whatever may be late, and for what they
    attend to now: it is what is attended to that grows beyond the pool.
    """

    def large(tokens: int, limit: int, late_runs: int) -> float:
        found = 0.0
        for group, per_large in zip(cut.layout.groups, cut.layout.per_large, strict=True):
            pages = pages_for(tokens, cut.page_tokens)
            if group.kind is GroupKind.WINDOW:
                kept = window_pages(group.window_tokens, late_runs, cut.page_tokens)
                pages = min(kept, pages_for(limit, cut.page_tokens))
            found += pages / per_large
        return found

    best = (0.0, 0, 0)
    for limit in range(2 * DRIFT, len(companion.prompt) + len(companion.answer.outputs), 8):
        for at in range(max(1, limit - outputs - DRIFT), limit - DRIFT, 8):
            steps = min(outputs, limit - at - DRIFT)
            begins = large(at + DRIFT, limit, cut.late_runs) + large(length + 1, length + outputs, cut.late_runs) + 1
            ends = large(at + DRIFT + steps, limit, 0) + large(length + steps, length + outputs, 0)
            best = max(best, (min(cut.num_large - begins, ends - cut.num_large), limit - len(companion.prompt), at))
    spare, most, at = best
    assert spare > 0, f"nothing presses {length} tokens out of {cut.num_large} large pages"
    return most, at


class Crowd:
    """Asks, compares, and counts how often each request was parked."""

    def __init__(
        self, case: Case, cut: Sizes, cluster: Cluster, prompts: Sequence[list[int]], answers: Sequence[Answer]
    ) -> None:
        self._case, self._cut, self._cluster, self._prompts, self._answers = case, cut, cluster, prompts, answers
        self.never = set(range(len(prompts)))  # parked
        self.parked = self.steps = self.ties = 0
        self._rng = random.Random(str(case))

    def all(self, what: str, salt: str) -> None:
        """Who was never parked comes last."""
        order = sorted(range(len(self._prompts)), key=lambda n: (n in self.never, self._rng.random()))
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for each in [pool.submit(self._one, number, what, salt) for number in order]:
                each.result()

    def behind(self, number: int, companion: Companion, what: str, salt: str) -> None:
        """Asked when another one has grown so far that it fits beside that one at first, and not to its end."""
        outputs, at = pressing(self._cut, len(self._prompts[number]), self._case.outputs, companion)
        # Prefill has it already when it is asked for: else the other one would have grown too far meanwhile.
        self._cluster.complete(self._prompts[number], timeout_s=ANSWER_S, max_tokens=1, cache_salt=salt)
        with ThreadPoolExecutor(1) as pool:
            reached = threading.Event()
            first = pool.submit(companion.ask, self._cluster, salt, outputs, at, reached)
            while not reached.wait(0.1):
                if first.done():
                    break
            self._one(number, what, salt)
            ours, request_id = first.result()
        steps, ties = check([companion.answer.first(outputs)], [ours], f"{what}, the one before it")
        self.steps, self.ties, self.parked = (
            self.steps + steps,
            self.ties + ties,
            self.parked + self._parkings(request_id),
        )

    def _parkings(self, request_id: str) -> int:
        return sum(event["name"].endswith("/parked") for event in self._cluster.timeline(request_id))

    def _one(self, number: int, what: str, salt: str) -> None:
        choices = choices_of(number)
        fields = {"max_tokens": self._case.outputs, "ignore_eos": True, "cache_salt": salt, "n": choices}
        got = self._cluster.complete(self._prompts[number], timeout_s=ANSWER_S, **fields)
        steps, ties = check([self._answers[number]] * choices, got.token_ids, f"{what}, prompt {number}")
        parked = self._parkings(got.id)
        self.steps, self.ties, self.parked = self.steps + steps, self.ties + ties, self.parked + parked
        if parked:
            self.never.discard(number)


def run(case: Case, tmp_path: Path) -> None:
    model_dir, prompts = case.make(tmp_path), case.prompts()
    answers = reference.generate(model_dir, prompts, case.outputs)
    companion = case.companion(model_dir, prompts) if case.behind else None
    cut = case.cut(model_dir, max(map(len, prompts)) + case.outputs)
    orders = tmp_path / "orders"
    orders.mkdir()
    sets = (
        *cut.sets,
        f"offload.stride_tokens={case.stride_tokens}",
        "engine.lookahead_tokens=0",  # what begins may come to lack pages: it is what is tried here
        f"worker.command={sys.executable} -m tests.cluster.dying_worker {orders}",
    )
    tp = ("--prefill-tp", str(case.tp), "--decode-tp", str(case.tp))
    tiers = ("--offload", "on", "--host-memory", str(8 * cut.tight_bytes))
    store = ("--storage", f"file://{tmp_path / 'store'}") if case.stores else ()
    memory = ("--kv-memory", str(cut.tight_bytes))
    with Cluster(tmp_path / "run", "--model", str(model_dir), *cut.flags, *memory, *tp, *tiers, *store, sets=sets) as c:
        crowd = Crowd(case, cut, c, prompts, answers)
        for number in range(MAX_ROUNDS):
            if number and companion is not None:
                for last in sorted(crowd.never):
                    crowd.behind(last, companion, f"round {number}, {last} last", f"salt {number}")
            else:
                crowd.all(f"round {number}", f"salt {number // 2}")  # what one round has stored the next one finds
            print(f"{case}: after round {number}, {crowd.parked} parkings, and never of {sorted(crowd.never)}")
            if number and not crowd.never:
                break
        assert not crowd.never, f"requests {sorted(crowd.never)} of {len(prompts)} never gave way"
        c.check_adds_up()
        parked, resumed = total(c, "disagg_preemptions"), c.metrics("decode-0")["disagg_parked_seconds_count"]
        # One that gives way may come to its end by the step that is under way.
        assert parked >= resumed == crowd.parked, f"{parked:g} gave way, {resumed:g} went on, {crowd.parked} said so"
        from_host = c.metrics("decode-0").get('disagg_prefix_hit_tokens_total{tier="host"}', 0)
        assert from_host > 0, "nobody came back from the host"
        for when in DEATHS if case.stores else DEATHS[:1]:
            (orders / when).touch()
            crowd.all(f"a worker dies {when}", when)
            assert not (orders / when).exists(), "no worker died"
            c.wait_healthy()
        crowd.all("after workers died", when)
        attempts = c.router_metrics()
        again = sum(v for key, v in attempts.items() if "attempts_total" in key and '"first"' not in key)
        assert again > 0, "nothing was replayed"
        c.check_adds_up()
    print(f"{case}: {crowd.steps} steps, {crowd.ties} ties; {len(prompts)} requests gave way {parked:g} times")
    print(f"{from_host:g} tokens came from the host; {again:g} attempts were replays")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_requests_that_all_gave_way_say_what_transformers_says(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path)
