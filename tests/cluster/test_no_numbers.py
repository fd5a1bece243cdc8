"""Logits that overflow while requests are served: an error that says so, and no text that nobody computed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 3
LOUD = 77  # a token whose logit is often infinite


def overflowing(directory: Path) -> Path:
    """Each weight is a number, as is looked at when they are loaded."""
    model_dir = make_tiny("llama", directory)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[LOUD] = 0.0
        model.lm_head.weight[LOUD, 0] = 3e38  # one product, so that no order of adding up matters
    model.save_pretrained(model_dir)
    return model_dir


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], bool]:
    """transformers' own outputs, up to the first that is of no numbers, and whether there is one."""
    outputs: list[int] = []
    with torch.inference_mode():
        while len(outputs) < OUTPUTS:
            logits = model(torch.tensor([prompt + outputs])).logits[0, -1]
            if logits.isnan().any() or logits.isposinf().any():
                return outputs, True
            outputs.append(int(logits.argmax()))
    return outputs, False


@pytest.mark.timeout(600)
def test_logits_that_overflow_fail_their_request_and_no_other(tmp_path: Path) -> None:
    model_dir = overflowing(tmp_path / "model")
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))] for _ in range(24)]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    right = [greedy(model, prompt) for prompt in prompts]
    assert {fails and bool(outputs) for outputs, fails in right} == {True, False}, "some fail at once, some later"
    assert any(not fails for _, fails in right), "and some do not"

    with Cluster(tmp_path / "run", "--model", str(model_dir), "--dtype", "float32", "--kv-memory", "16MiB") as cluster:

        def ask(prompt: list[int]) -> httpx.Response:
            body = {"model": cluster.model, "prompt": prompt, "max_tokens": OUTPUTS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            return httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=120)

        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(ask, prompts))
        for (outputs, fails), reply in zip(right, replies, strict=True):
            if fails:
                assert reply.status_code == 500 and "no numbers" in reply.text, reply.text
            else:
                assert reply.status_code == 200, reply.text
                assert reply.json()["choices"][0]["token_ids"] == outputs
        servers = ("prefill-0", "decode-0")
        failed = sum(fails for _, fails in right)

        def counted() -> bool:
            return sum(cluster.metrics(name)["disagg_bad_logits_total"] for name in servers) >= failed

        cluster.wait(counted, 60, "the count of what failed")  # servers export it a beat later than they say it
        assert not any(server["circuits"] for server in cluster.status()["servers"]), "prompts cannot shut servers out"
        cluster.wait_healthy()
        cluster.check_adds_up()
