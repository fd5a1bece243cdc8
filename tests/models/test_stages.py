"""Cut by pipeline stages, every family that may be cut gives the logits that it gives whole, and others are refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from disagg.models.check import check_model
from disagg.models.families import FAMILIES
from disagg.models.model import PagedModel
from disagg.models.stage_links import StageLinks
from disagg.text.model_files import ModelFiles
from disagg.types.errors import ConfigError
from tests.models.driver import Driver
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 4
SHAPES = ((9, 4), (37, 16), (3, 64))  # (prompt tokens, chunk)
PAGE_TOKENS = 4
# Their layers are given something that follows from the prompt's tokens, beside hidden states.
REFUSED = frozenset({"gemma3n_text", "gemma4_text"})

# Windows, states of each kind, layers that give tuples, embeddings that are scaled or normed, heads of other shapes.
QUICK = frozenset(
    {"gemma3_text", "bamba", "mamba", "mamba2", "gpt_neox", "modernbert-decoder", "qwen3_next", "granite"}
)


def chain(model_dir: Path, count: int) -> list[PagedModel]:
    """All stages of a model, in one process."""
    return [PagedModel.load(model_dir, "float32", "cpu", links=StageLinks(stage, count)) for stage in range(count)]


class Chain:
    """Drives stages one after the other: what one leaves, the next one receives. Each has a pool and pages of its own."""

    def __init__(self, stages: list[PagedModel]) -> None:
        self.drivers = [Driver(model, len(model.groups) * 40, PAGE_TOKENS) for model in stages]

    def run(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Logits of every output, by prompt: [OUTPUTS, vocab]."""
        shaped = list(zip(prompts, SHAPES, strict=True))
        kept = [[driver.sequence(prompt, chunk) for prompt, (_, chunk) in shaped] for driver in self.drivers]
        while left := [place for place, each in enumerate(kept[-1]) if len(each.outputs) < OUTPUTS]:
            given, owned = None, []
            for driver, sequences in zip(self.drivers, kept, strict=True):
                batch, owned = driver.batch_of([sequences[place] for place in left])
                given = driver.model.forward(batch, driver.pool, hidden=given)
                for sequence, run in owned:
                    sequence.known.computed += run.num_tokens
                    driver._release_pages(sequence)
            assert given is not None
            sampled = [sequence for sequence, run in owned if run.sample]
            for sequence, row in zip(sampled, given, strict=True):
                sequence.logits.append(row)
                for sequences in kept:
                    sequences[kept[-1].index(sequence)].known.tokens.append(int(row.argmax()))
        return [torch.stack(sequence.logits) for sequence in kept[-1]]


def prompts_of(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length, _ in SHAPES]


def same(model_dir: Path, count: int) -> list[PagedModel]:
    """The stages, which give what the model gives whole."""
    whole = Chain(chain(model_dir, 1)).run(prompts_of())
    stages = chain(model_dir, count)
    for one, other in zip(whole, Chain(stages).run(prompts_of()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return stages


@pytest.mark.parametrize(
    "family",
    [
        *sorted(QUICK),
        *(pytest.param(each, marks=pytest.mark.slow) for each in sorted(FAMILIES - REFUSED - QUICK)),
    ],
)
def test_two_stages_give_what_one_gives(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    same(make_tiny(family, tmp_path), 2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "jamba", "nemotron_h"])
def test_a_stage_for_each_layer_that_keeps_something_gives_what_one_stage_gives(family: str, tmp_path: Path) -> None:
    """Where tied embeddings are in the first and the last stage, too; groups without layers in some stages among them."""
    stages = same(make_tiny(family, tmp_path, tie_word_embeddings=True), 3)
    layers = [sum(len(group.layers) for group in model.groups) for model in stages]
    assert min(layers) >= 1 and sum(layers) == sum(len(group.layers) for group in stages[0].whole_groups)
    weights = [sum(each.numel() for each in model._loaded.module.parameters()) for model in stages]
    whole = sum(each.numel() for each in chain(tmp_path, 1)[0]._loaded.module.parameters())
    assert max(weights) < whole, "a stage has its own layers only"


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_layers_that_need_more_than_hidden_states_are_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    files = ModelFiles.read(make_tiny(family, tmp_path))
    check_model(files, "float32")
    with pytest.raises(
        ConfigError, match=r"gives its layers per_layer_input.* beside hidden states.*server\.pp must be 1"
    ):
        check_model(files, "float32", pp=2)


def test_more_stages_than_layers_are_refused_with_what_is_allowed(tmp_path: Path) -> None:
    files = ModelFiles.read(make_tiny("llama", tmp_path))
    with pytest.raises(ConfigError, match=r"server\.pp = 4: .* it must be at most 3"):
        check_model(files, "float32", pp=4)
