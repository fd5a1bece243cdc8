"""A prefix cache, eviction and preemption change no token, for every kind of layer, through two pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.convert.model_dir import resolve
from tests.cluster.campaign import Sizes, campaign, conversations, sizes, tight_as_shipped
from tests.models import reference
from tests.models.tiny import VOCAB_SIZE, make_tiny

LENGTHS = (1, 4, 5, 16, 17, 31, 33, 48, 64, 65, 90, 96, 120, 150)
OUTPUTS = 32
SLOW_FAMILIES = ["mistral", "ministral", "gemma2", "gemma3_text", "bamba", "falcon_h1", "gemma3n_text", "llama"]


def tiny_sizes(model_dir: Path) -> Sizes:
    return sizes(model_dir, max(LENGTHS) + OUTPUTS, page_tokens=4, chunk_tokens=16, checkpoint_tokens=16)


def tiny(tmp_path: Path, family: str) -> None:
    model_dir = make_tiny(family, tmp_path / family)
    prompts = conversations(len(family), VOCAB_SIZE, LENGTHS)
    answers = reference.generate(model_dir, prompts, OUTPUTS)
    campaign(tmp_path, model_dir, tiny_sizes(model_dir), prompts, answers)


@pytest.mark.timeout(600)
def test_sixty_answers_are_the_same_short_of_memory_with_the_default_lookahead(tmp_path: Path) -> None:
    model_dir = make_tiny("jamba", tmp_path / "jamba")
    prompts = conversations(60, VOCAB_SIZE, LENGTHS[2:])
    answers = reference.generate(model_dir, prompts, OUTPUTS)
    tight_as_shipped(tmp_path / "tight", model_dir, tiny_sizes(model_dir), 5 * prompts, 5 * answers)


@pytest.mark.timeout(600)
def test_a_tiny_hybrid_with_states_says_what_transformers_says_cold_warm_and_short_of_memory(tmp_path: Path) -> None:
    tiny(tmp_path, "jamba")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", SLOW_FAMILIES)
def test_tiny_models_say_what_transformers_says_cold_warm_and_short_of_memory(tmp_path: Path, family: str) -> None:
    tiny(tmp_path, family)


def gemma(tmp_path: Path, lengths: tuple[int, ...], outputs: int, *, must_preempt: bool) -> None:
    model_dir = resolve("gemma3-270m", Path("~/.cache/disagg/models").expanduser())
    prompts = conversations(270, 200_000, lengths)
    answers = reference.generate(model_dir, prompts, outputs)
    cut = sizes(model_dir, max(lengths) + outputs, page_tokens=16, chunk_tokens=256, checkpoint_tokens=512)
    campaign(tmp_path, model_dir, cut, prompts, answers, concurrency=4, must_preempt=must_preempt)


@pytest.mark.timeout(900)
def test_gemma_3_says_what_transformers_says_past_its_window_cold_warm_and_short_of_memory(tmp_path: Path) -> None:
    gemma(tmp_path, (5, 540, 600), 16, must_preempt=False)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_gemma_3_says_what_transformers_says_for_prompts_of_all_lengths(tmp_path: Path) -> None:
    lengths = (1, 2, 15, 16, 17, 100, 255, 257, 500, 511, 512, 513, 700, 1000, 1023, 1025, 1500, 1777, 1999, 2000)
    gemma(tmp_path, lengths, 48, must_preempt=True)
