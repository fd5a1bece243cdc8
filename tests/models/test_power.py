"""The checks that compare greedy outputs have power: wrong KV in one page changes nearly every answer.

Every test that serves a tiny model and compares text relies on this. One page of 16 tokens of one request's KV is
swapped with another request's, or zeroed, between prefill and decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from disagg.models.model import PagedModel
from tests.models.driver import Driver, Sequence
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 24
PAGE_TOKENS = 16
REQUESTS = 100


def swap(driver: Driver, sequences: list[Sequence], page: int) -> None:
    """Every request's page becomes the next request's."""
    ids = [s.pages[page] for s in sequences]
    driver.pool.copy_pages(list(zip(ids[1:] + ids[:1], ids, strict=True)))


def zero(driver: Driver, sequences: list[Sequence], page: int) -> None:
    driver.pool.bytes[torch.tensor([s.pages[page] for s in sequences])] = 0


def poison(driver: Driver, sequences: list[Sequence], page: int) -> None:
    driver.pool.kv[torch.tensor([s.pages[page] for s in sequences])] = torch.nan


@pytest.mark.parametrize("corrupt", [swap, zero])
@pytest.mark.parametrize(
    ("family", "prompt_tokens", "page"), [("llama", 72, 0), ("llama", 72, 3), ("gemma3_text", 56, 2)]
)
def test_one_wrong_page_changes_at_least_99_of_100_answers(
    family: str, prompt_tokens: int, page: int, corrupt: Callable, tmp_path: Path
) -> None:
    model = PagedModel.load(make_tiny(family, tmp_path), "float32", "cpu")
    assert changed_answers(model, prompt_tokens, page, corrupt) >= 0.99 * REQUESTS


def test_a_page_that_no_window_reaches_is_never_read(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("mistral", tmp_path), "float32", "cpu")
    # NaN would show even with weight zero: the page is not gathered at all
    assert changed_answers(model, prompt_tokens=50, page=1, corrupt=poison) == 0


def changed_answers(model: PagedModel, prompt_tokens: int, page: int, corrupt: Callable) -> int:
    """Of REQUESTS random prompts, how many are answered differently when their page is corrupted after prefill."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(REQUESTS)]
    answers = []
    for spoil in (None, corrupt):
        driver = Driver(model, REQUESTS * (-(-(prompt_tokens + OUTPUTS) // PAGE_TOKENS)), PAGE_TOKENS)
        sequences = [driver.sequence(prompt, chunk=prompt_tokens) for prompt in prompts]
        driver.step(sequences)
        if spoil is not None:
            spoil(driver, sequences, page)
        driver.run(sequences, OUTPUTS)
        answers.append([s.outputs for s in sequences])
    return sum(right != wrong for right, wrong in zip(*answers, strict=True))
