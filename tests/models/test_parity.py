"""Every served family answers as transformers' own `generate` does, whatever the batching, chunking and page size.

On the CPU; with `TRITON_INTERPRET=0`, on a CUDA device (see tests/conftest).
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from disagg.memory.layout import PageSizing
from disagg.models.families import FAMILIES
from disagg.models.model import PagedModel
from tests.models.driver import Driver
from tests.models.reference import Answer, generate
from tests.models.tiny import FAMILY_CONFIGS, VOCAB_SIZE, families, make_tiny

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
OUTPUTS = 10
# (prompt tokens, chunk): short ones decode while long ones still prefill, and all lengths differ
SHAPES = ((9, 1), (40, 7), (70, 16), (90, 64), (3, 64), (33, 16))


def prompts_of(shapes: tuple[tuple[int, int], ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length, _ in shapes]


def assert_same(name: str, outputs: list[int], logits: list[torch.Tensor], answer: Answer) -> int:
    """Returns how many logit ties were met; what follows one may rightly differ."""
    for index, (token, row) in enumerate(zip(outputs, logits, strict=True)):
        error = ((row - answer.logits[index]).norm() / answer.logits[index].norm()).item()
        assert error < 1e-3, f"{name}: logits of output {index} are off by {error:.1e}"
        if token != answer.outputs[index]:
            assert answer.tied(index), f"{name}: output {index} is {token}, not {answer.outputs[index]}"
            return 1
    return 0


@dataclass(frozen=True)
class Answered:
    """A model, and what transformers answers with it to `prompts_of(SHAPES)`."""

    model: PagedModel
    answers: list[Answer]

    @classmethod
    def of(cls, model_dir: Path) -> Answered:
        answers = generate(model_dir, prompts_of(SHAPES), OUTPUTS, DEVICE)
        return cls(PagedModel.load(model_dir, "float32", DEVICE), answers)

    def ties(self, page_tokens: int) -> int:
        """How many logit ties were met in the same answers of the paged model."""
        sizing = PageSizing.MAX if page_tokens == 4 else PageSizing.LCM
        num_large = len(self.model.groups) * (400 // page_tokens + len(SHAPES))
        driver = Driver(self.model, num_large, page_tokens, seed=page_tokens, sizing=sizing)
        prompts = prompts_of(SHAPES)
        sequences = [driver.sequence(p, chunk) for p, (_, chunk) in zip(prompts, SHAPES, strict=True)]
        driver.run(sequences, OUTPUTS)
        ties = 0
        for sequence, answer in zip(sequences, self.answers, strict=True):
            name = f"prompt of {sequence.known.num_prompt}, page_tokens {page_tokens}"
            ties += assert_same(name, sequence.outputs, sequence.logits, answer)
        return ties


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    if request.param not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    return Answered.of(make_tiny(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_family_is_token_identical_to_generate(family: Answered, page_tokens: int) -> None:
    assert family.ties(page_tokens) <= 1


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILY_CONFIGS) == FAMILIES


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_multi_query_and_multi_head_models_are_token_identical(kv_heads: int, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_attention_heads=8, num_key_value_heads=kv_heads)
    assert Answered.of(tmp_path).ties(page_tokens=4) <= 1


def test_a_rotation_that_looks_at_positions_is_served(tmp_path: Path) -> None:
    """As Phi-3.5-MoE's, whose scale is by the longest position: without values it cannot be probed."""
    factors = [1.0 + 0.1 * i for i in range(8)]
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
    }
    rope |= {"short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 128}
    make_tiny("phimoe", tmp_path, rope_parameters=rope)
    answered = Answered.of(tmp_path)
    assert answered.model.max_model_len == 128
    assert answered.ties(page_tokens=4) <= 1
