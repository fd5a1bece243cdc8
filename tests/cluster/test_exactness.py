"""Token-identical to transformers through router, two pools and the wire, and counters that prove the road taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.convert.inspect import inspect_model
from disagg.text.tokenizer import Tokenizer
from tests.cluster import reference
from tests.cluster.cluster import Cluster

FP32_BYTES = 4


def ask(cluster: Cluster, answers: list[reference.Answer], concurrency: int = 16) -> tuple[int, int, list[str]]:
    """(steps compared, ties, mismatches) of all answers, `concurrency` at a time."""

    def one(answer: reference.Answer) -> tuple[int, int, str]:
        got = cluster.complete(list(answer.prompt), max_tokens=len(answer.outputs), ignore_eos=True, timeout_s=600)
        assert got.usage["prompt_tokens"] == len(answer.prompt)
        assert got.usage["completion_tokens"] == len(answer.outputs)
        return reference.compare(answer, got.token_ids[0])

    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(one, answers))
    wrong = [f"prompt {i}: {result[2]}" for i, result in enumerate(results) if result[2]]
    return sum(r[0] for r in results), sum(r[1] for r in results), wrong


def test_kept_references_are_for_the_prompts_that_the_code_makes(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    assert [a.prompt for a in reference.load("boundary", smollm2)] == reference.boundary_prompts(tokenizer)
    assert [a.prompt for a in reference.load("long", smollm2)] == reference.long_prompts(tokenizer)


def test_boundary_prompts_come_out_as_transformers_says_and_the_counters_prove_the_road(
    cluster: Cluster, smollm2: Path
) -> None:
    answers = list(reference.load("boundary", smollm2))
    cluster.check_adds_up()  # what others have asked just before is counted by now
    before = {name: cluster.metrics(name) for name in ("prefill-0", "decode-0")}
    steps, ties, wrong = ask(cluster, answers)
    assert not wrong, "\n".join(wrong)
    assert ties <= max(1, steps // 1000), f"{ties} ties in {steps} steps"
    cluster.check_adds_up()

    def grown(server: str, name: str) -> float:
        return cluster.metrics(server).get(name, 0.0) - before[server].get(name, 0.0)

    facts = inspect_model(smollm2)
    token_bytes = facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * FP32_BYTES
    prompt_tokens = sum(len(answer.prompt) for answer in answers)
    # What was in a prefix cache was not computed there, and not sent there.
    hits = {name: grown(name, 'disagg_prefix_hit_tokens_total{tier="gpu"}') for name in before}
    sent_bytes = (prompt_tokens - hits["decode-0"]) * token_bytes
    assert grown("decode-0", "disagg_prefill_tokens_total") == 0
    assert grown("decode-0", "disagg_recomputed_tokens_total") == 0
    assert grown("prefill-0", "disagg_prefill_tokens_total") == prompt_tokens - hits["prefill-0"]
    assert grown("prefill-0", 'disagg_transfer_payload_bytes_total{direction="sent"}') == sent_bytes
    assert grown("decode-0", 'disagg_transfer_payload_bytes_total{direction="received"}') == sent_bytes
    assert grown("decode-0", "disagg_decode_tokens_total") == len(answers) * (reference.BOUNDARY_OUTPUTS - 1)
    assert grown("decode-0", "disagg_checksum_failures_total") == 0
    for server in ("prefill-0", "decode-0"):
        sent, engine_steps = grown(server, "disagg_router_messages_total"), grown(server, "disagg_engine_steps_total")
        assert 0 < sent <= engine_steps, f"{server} sent {sent} frames with tokens in {engine_steps} steps"


def test_the_first_piece_lands_while_later_chunks_are_computed(cluster: Cluster) -> None:
    # A cluster that sends only what is whole does so each time. One whose process stood still just then does so once.
    for number in range(3):
        events = all_phases(cluster, f"nobody else's {number}: all of it is computed")
        chunks = [event for event in events if event["name"] == "prefill-0/chunk"]
        pieces = [event for event in events if event["name"] == "decode-0/piece"]
        assert len(chunks) == 5  # 300 tokens in chunks of 64
        first_s, last_s = min(p["end_unix_s"] for p in pieces), max(c["end_unix_s"] for c in chunks)
        if first_s < last_s:
            break
    assert first_s < last_s


def all_phases(cluster: Cluster, salt: str) -> list[dict[str, Any]]:
    """The timeline of a request, once both servers have told their parts, which may come after its answer."""
    body = {"model": cluster.model, "prompt": list(range(1000, 1300)), "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{cluster.http}/v1/completions", json={**body, "cache_salt": salt}, timeout=240)
    asked = {"request_id": reply.headers["x-request-id"]}
    phases = {"queued", "chunk", "first_token", "grant", "piece", "transfer", "decode"}

    def told() -> list[dict[str, Any]]:
        events = httpx.get(f"{cluster.http}/debug/timeline", params=asked, timeout=60).json()["events"]
        return events if phases <= {event["name"].rpartition("/")[2] for event in events} else []

    return cluster.wait(told, 60, "the parts of both servers")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
def test_long_prompts_come_out_as_transformers_says(
    tmp_path: Path, smollm2: Path, chunk_tokens: int, page_tokens: int
) -> None:
    answers = list(reference.load("long", smollm2))
    with Cluster(tmp_path, "--chunk-tokens", str(chunk_tokens), "--page-tokens", str(page_tokens)) as cluster:
        steps, ties, wrong = ask(cluster, answers)
        print(f"chunk {chunk_tokens}, page {page_tokens}: {steps} steps compared, {ties} ties, {len(wrong)} wrong")
        assert not wrong, "\n".join(wrong)
        assert ties <= steps // 1000, f"{ties} ties in {steps} steps"
        cluster.check_adds_up()
