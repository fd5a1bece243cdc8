"""The checks that compare greedy outputs have power: wrong KV in one page changes nearly every answer.

Every test that serves a tiny model and compares text relies on this. One page of 16 tokens of one request's KV is
swapped with another request's, or zeroed, between prefill and decode.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

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
    served: Callable[[str], Served], family: str, prompt_tokens: int, page: int, corrupt: Callable
) -> None:
    assert changed_answers(served(family), prompt_tokens, page, corrupt) >= 0.99 * REQUESTS


@pytest.mark.parametrize(
    "family",
    [
        "jamba",
        pytest.param("falcon_h1", marks=pytest.mark.long),
        "lfm2",
        pytest.param("qwen3_next", marks=pytest.mark.long),
    ],
)
def test_one_wrong_state_changes_at_least_99_of_100_answers(served: Callable[[str], Served], family: str) -> None:
    assert changed_answers(served(family), 40, 0, swap_states) >= 0.99 * REQUESTS


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """A family's model, made once."""

    @functools.cache
    def make(family: str) -> Served:
        return Served(PagedModel.load(make_tiny(family, tmp_path_factory.mktemp(family)), "float32", "cpu"))

    return make


class Served:
    """A model, and what it answers to REQUESTS random prompts."""

    def __init__(self, model: PagedModel) -> None:
        self._model = model
        self._right: dict[int, list[list[int]]] = {}  # by the prompts' tokens

    def right_answers(self, prompt_tokens: int) -> list[list[int]]:
        if prompt_tokens not in self._right:
            self._right[prompt_tokens] = self.answers(prompt_tokens, lambda driver, sequences: None)
        return self._right[prompt_tokens]

    def answers(self, prompt_tokens: int, after_prefill: Callable[[Driver, list[Sequence]], None]) -> list[list[int]]:
        rng = random.Random(0)
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(REQUESTS)]
        num_large = len(self._model.groups) * REQUESTS * (-(-(prompt_tokens + OUTPUTS) // PAGE_TOKENS))
        driver = Driver(self._model, num_large, PAGE_TOKENS)
        sequences = [driver.sequence(prompt, chunk=prompt_tokens) for prompt in prompts]
        driver.step(sequences)
        after_prefill(driver, sequences)
        driver.run(sequences, OUTPUTS)
        return [s.outputs for s in sequences]


def changed_answers(served: Served, prompt_tokens: int, page: int, corrupt: Callable) -> int:
    """Of REQUESTS random prompts, how many are answered differently when their page is corrupted after prefill.

    page: its position in the page tables of attention groups, the same in every one.
    """
    wrong = served.answers(prompt_tokens, lambda driver, sequences: corrupt(driver, sequences, page))
    return sum(a != b for a, b in zip(served.right_answers(prompt_tokens), wrong, strict=True))
