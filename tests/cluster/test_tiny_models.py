"""Tiny random models whose every token depends on the whole cache, through two pools: token-identical to transformers.

tests/models/test_power shows that a swapped or zeroed page changes at least 99% of what these models say, so a wrong chunk
boundary, page or piece shows here where a trained model might say the same.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.models import reference
from tests.models.tiny import VOCAB_SIZE, make_tiny

LENGTHS = (1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 150)
OUTPUTS = 24
CONFIGURATIONS = [("llama", 4, 16), ("gemma2", 16, 24), ("mixtral", 1, 7)]


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "page_tokens", "chunk_tokens"), CONFIGURATIONS)
def test_a_tiny_model_says_what_transformers_says(
    tmp_path: Path, family: str, page_tokens: int, chunk_tokens: int
) -> None:
    check(tmp_path, family, page_tokens, chunk_tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_oss", "olmo3"])
def test_more_families_say_what_transformers_says(tmp_path: Path, family: str) -> None:
    check(tmp_path, family, 4, 16)


def check(tmp_path: Path, family: str, page_tokens: int, chunk_tokens: int) -> None:
    model_dir = make_tiny(family, tmp_path / family)
    asked = prompts(seed=len(family))
    answers = reference.generate(model_dir, asked, OUTPUTS)
    flags = ("--page-tokens", str(page_tokens), "--chunk-tokens", str(chunk_tokens), "--kv-memory", "1MiB")
    with Cluster(tmp_path / "run", "--model", str(model_dir), "--dtype", "float32", *flags) as cluster:
        assert cluster.model == family  # clients call a directory by its last part
        with ThreadPoolExecutor(len(asked)) as pool:
            futures = [pool.submit(cluster.complete, p, max_tokens=OUTPUTS, ignore_eos=True) for p in asked]
            outputs = [future.result().token_ids[0] for future in futures]
        cluster.check_adds_up()
    ties = 0
    for number, (answer, ours) in enumerate(zip(answers, outputs, strict=True)):
        for step, (mine, theirs) in enumerate(zip(ours, answer.outputs, strict=True)):
            if mine != theirs:
                assert answer.tied(step), f"{family}, prompt {number}: output {step} is {mine}, not {theirs}"
                ties += 1
                break
    assert ties <= 1
