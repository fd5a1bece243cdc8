"""The checks that compare greedy outputs have power: wrong KV in one page changes nearly every answer.

Every test that serves a tiny model and compares text relies on this. One page of 16 tokens of one request's KV is
swapped with another request's, or zeroed, between prefill and decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.messages.plan import PageCopy
from disagg.models.model import PagedModel
from tests.models.driver import STALE, Driver, Sequence
from tests.models.tiny import VOCAB_SIZE, make_tiny

OUTPUTS = 24
PAGE_TOKENS = 16
REQUESTS = 100


def swap(driver: Driver, sequences: list[Sequence], page: int) -> None:
    """Every request's page becomes the next request's, in every group."""
    for group in range(len(driver.pool.groups)):
        ids = live_pages(sequences, group, page)
        driver.pool.copy_pages([PageCopy(group, *pair) for pair in zip(ids[1:] + ids[:1], ids, strict=True)])


def swap_states(driver: Driver, sequences: list[Sequence], page: int) -> None:
    """Every request's newest state becomes the next request's; keys and values stay."""
    for index, group in enumerate(driver.pool.groups):
        if group.is_state:
            ids = [s.known.tables[index][-1] for s in sequences]
            driver.pool.copy_pages([PageCopy(index, *pair) for pair in zip(ids[1:] + ids[:1], ids, strict=True)])


def zero(driver: Driver, sequences: list[Sequence], page: int) -> None:
    for group in range(len(driver.pool.groups)):
        driver.pool.zero_pages(group, live_pages(sequences, group, page))


def live_pages(sequences: list[Sequence], group: int, position: int) -> list[int]:
    """The pages at that position, unless the group's window has left it."""
    return [page for s in sequences if (page := s.known.tables[group][position]) != STALE]


@pytest.mark.parametrize("corrupt", [swap, zero])
@pytest.mark.parametrize(
    ("family", "prompt_tokens", "page"), [("llama", 72, 0), ("llama", 72, 3), ("gemma3_text", 56, 2)]
)
def test_one_wrong_page_changes_at_least_99_of_100_answers(
    family: str, prompt_tokens: int, page: int, corrupt: Callable, tmp_path: Path
) -> None:
    model = PagedModel.load(make_tiny(family, tmp_path), "float32", "cpu")
    assert changed_answers(model, prompt_tokens, page, corrupt) >= 0.99 * REQUESTS


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "lfm2", "qwen3_next"])
def test_one_wrong_state_changes_at_least_99_of_100_answers(family: str, tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny(family, tmp_path), "float32", "cpu")
    assert changed_answers(model, 40, 0, swap_states) >= 0.99 * REQUESTS


def changed_answers(model: PagedModel, prompt_tokens: int, page: int, corrupt: Callable) -> int:
    """Of REQUESTS random prompts, how many are answered differently when their page is corrupted after prefill.

    page: its position in the page tables of attention groups, the same in every one.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(REQUESTS)]
    answers = []
    for spoil in (None, corrupt):
        num_large = len(model.groups) * REQUESTS * (-(-(prompt_tokens + OUTPUTS) // PAGE_TOKENS))
        driver = Driver(model, num_large, PAGE_TOKENS)
        sequences = [driver.sequence(prompt, chunk=prompt_tokens) for prompt in prompts]
        driver.step(sequences)
        if spoil is not None:
            spoil(driver, sequences, page)
        driver.run(sequences, OUTPUTS)
        answers.append([s.outputs for s in sequences])
    return sum(right != wrong for right, wrong in zip(*answers, strict=True))
