"""Conversations that come back from storage, on servers that never saw them, at other TP sizes: the same tokens, less work."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster import reference
from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

PAGE, CHECKPOINT = 16, 32
PROMPTS = (PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 10 * PAGE + 5)
OUTPUTS = 2 * CHECKPOINT + 3
TIERS = ("gpu", "host", "storage")
PUBLISHED = "disagg_store_published_pages_total"


def flags(model: Path, store: Path, prefill_tp: int, decode_tp: int) -> tuple[str, ...]:
    tp = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp))
    tiers = ("--offload", "on", "--host-memory", "32MiB", "--storage", f"file://{store}")
    return ("--model", str(model), "--dtype", "float32", "--kv-memory", "32MiB", *tp, *tiers)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma3_text", "jamba"])
def test_second_turns_come_from_storage_at_any_tp_size(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / family)
    draw = random.Random(family)
    prompts = [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPTS]
    sets = (f"engine.checkpoint_tokens={CHECKPOINT}", "offload.stride_tokens=64", "offload.load=always")
    first = reference.compute(model, prompts, OUTPUTS)
    with Cluster(tmp_path / "run", *flags(model, tmp_path / "store", 2, 1), sets=sets) as cluster:
        check(cluster, first, cached=False)
        # All pages of every conversation, and what windows and states need of them, is published in the end.
        cluster.check_adds_up()
        cluster.wait_offloaded()
        cluster.wait(lambda: cluster.metrics("decode-0").get(PUBLISHED, 0) > 0, 30, "what is published")
    second = reference.compute(model, [(*a.prompt, *a.outputs, 5, 7, 11) for a in first], 4)
    with Cluster(tmp_path / "run", *flags(model, tmp_path / "store", 1, 2), sets=sets) as cluster:
        check(cluster, second, cached=True)
        hits = {
            tier: cluster.metrics("prefill-0").get(f'disagg_prefix_hit_tokens_total{{tier="{tier}"}}', 0)
            for tier in TIERS
        }
        assert hits["storage"] > hits["gpu"] + hits["host"], hits


def check(cluster: Cluster, answers: tuple[reference.Answer, ...], *, cached: bool) -> None:
    for answer in answers:
        got = cluster.complete(list(answer.prompt), max_tokens=len(answer.outputs), ignore_eos=True, timeout_s=300)
        _, _, wrong = reference.compare(answer, got.token_ids[0])
        assert not wrong, wrong
        here = got.usage["prompt_tokens_details"]["cached_tokens"]
        # All whole pages but what was said last, whose KV was never written; of states, up to the last checkpoint.
        known = len(answer.prompt) - 4
        assert here >= known // CHECKPOINT * CHECKPOINT if cached else here == 0, f"{here} of {known} tokens are cached"
