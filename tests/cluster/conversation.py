"""Conversations turn by turn, and by formula what storage then holds of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disagg.memory.groups import spec_of
from disagg.memory.layout import PoolLayout, pool_layout
from disagg.memory.spans import last_checkpoint
from disagg.messages.layout import GroupKind
from disagg.models.model import PagedModel
from disagg.offload.rules import OffloadRules, offload_rules
from tests.models import reference
from tests.models.reference import Answer

Page = tuple[int, tuple[int, ...]]  # layer group, and the tokens up to the page's end


@dataclass(frozen=True)
class Shape:
    """How many conversations and turns, and of how many tokens. opening: what all of them begin with."""

    conversations: int
    turns: int
    opening: int
    first: tuple[int, int]  # of the first turn's prompt, after the opening: from, to
    said: tuple[int, int]  # by the user, later
    outputs: int


@dataclass
class Conversation:
    prompts: list[list[int]] = field(default_factory=list)  # of each turn, whole
    answers: list[Answer] = field(default_factory=list)


def converse(model_dir: Path, shape: Shape, seed: int, vocab: int) -> list[Conversation]:
    """What `transformers` makes of them. No answer is a matter of rounding."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(count)]

    opening = tokens(shape.opening)
    talks = [Conversation() for _ in range(shape.conversations)]
    for turn in range(shape.turns):
        left = talks
        while left:  # where two tokens are equally right, who says the other one has another conversation
            prompts = []
            for talk in left:
                before = [*talk.prompts[-1], *talk.answers[-1].outputs] if turn else opening
                prompts.append([*before, *tokens(rng.randint(*(shape.said if turn else shape.first)))])
            answers = reference.generate(model_dir, prompts, shape.outputs)
            tied = []
            for talk, prompt, answer in zip(left, prompts, answers, strict=True):
                if any(answer.tied(step) for step in range(shape.outputs)):
                    tied.append(talk)
                else:
                    talk.prompts.append(prompt)
                    talk.answers.append(answer)
            left = tied
    return talks


class Formula:
    """What is stored, in tokens and pages, of a model whose groups these are."""

    def __init__(self, model_dir: Path, page_tokens: int, checkpoint_tokens: int, stride_tokens: int) -> None:
        groups = PagedModel.load(model_dir, "float32", "cpu").groups
        specs = [spec_of(group, page_tokens) for group in groups]
        self.layout: PoolLayout = pool_layout(specs, page_tokens, checkpoint_tokens)
        self.rules: OffloadRules = offload_rules(self.layout, stride_tokens)

    def hit_tokens(self, known: int) -> int:
        """Of so many tokens whose KV was written: all up to the last page's end, or the last checkpoint."""
        page_tokens = self.layout.page_tokens
        return self.rules.last_point(known // page_tokens) * page_tokens

    def turn(self, prompt: Sequence[int], outputs: Sequence[int]) -> tuple[set[Page], set[Page]]:
        """What a decode server stores of one turn, and what it stores beside that if it was sent in time.

        Of full attention every page; of windows and states what a prefix needs that ends with the prompt, an increment or
        the answer. What earlier points need of them left the window, or was written over, while the prompt was computed. The
        KV of the last output is never written. The state at the prompt's last checkpoint is a gift, which nobody waits for; of a
        prompt that ends on a checkpoint, it is of use where a stride ends there.
        """
        said = (*prompt, *outputs[:-1])
        prompt_end, end = self.rules.prompt_end(len(prompt)), self._end(said)
        points = {end, *self._cuts(prompt_end, end, prompt_end=0)}
        sure, gifts = self._needed(points, said), self._needed({prompt_end}, said)
        sure |= {page for page in gifts if not self._is_state(page)}
        given = last_checkpoint(len(prompt), self.layout.checkpoint_tokens) // self.layout.page_tokens
        if given in self._cuts(0, prompt_end, prompt_end=prompt_end):
            gifts |= {page for page in self._needed({given}, said) if self._is_state(page)}
        return sure, gifts - sure

    def prompt(self, prompt: Sequence[int]) -> set[Page]:
        """What a prefill server stores of a prompt: it has computed all that any of its cuts needs."""
        end = self._end(prompt)
        return self._needed({end, *self._cuts(0, end, prompt_end=end)}, prompt)

    def _is_state(self, page: Page) -> bool:
        return self.layout.groups[page[0]].kind is GroupKind.STATE

    def _end(self, tokens: Sequence[int]) -> int:
        return self.rules.last_point(len(tokens) // self.layout.page_tokens)

    def _cuts(self, at: int, end: int, prompt_end: int) -> Iterator[int]:
        """Where whole strides between two points end."""
        while (at := self.rules.cut(at, prompt_end)) < end:
            yield at

    def _needed(self, points: Iterable[int], tokens: Sequence[int]) -> set[Page]:
        """Of all groups, for prefixes that end there."""
        positions = {(g, p) for at in points for g in range(len(self.layout.groups)) for p in self.rules.needed(g, at)}
        return {(g, tuple(tokens[: (p + 1) * self.layout.page_tokens])) for g, p in positions}

    def nbytes(self, pages: Iterable[Page]) -> int:
        return sum(self.layout.groups[g].page_bytes for g, _ in pages)
