"""What is asked: how long prompts and answers are, what prompts have in common, who says several things. Pure.

A prompt is a row of *parts*; equal parts are equal tokens, and what a part is made of follows from its key alone:

    shared prefix    ("prefix", 3) 256 tokens  │ ("own", 17) 512 tokens
    trace            ("block", 46) 512 │ ("block", 47) 512 │ ("own", 18) 75
    conversation     turn 0: own  ──answer──>  turn 1: all of that, and own  ──answer──>  ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from disagg.bench.serve.trace import Traced


class Lengths(Struct, frozen=True):
    """From `low` to `high` tokens, each equally often."""

    low: int
    high: int

    @staticmethod
    def parse(text: str, most: int) -> Lengths:
        """ "512" or "100-2000". Raises ValueError."""
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        if found is None:
            raise ValueError(f'"{text}" is neither a number of tokens nor a range such as 100-2000')
        low = int(found[1])
        high = int(found[2] or low)
        if not 1 <= low <= high <= most:
            raise ValueError(f'"{text}": tokens go from 1 to {most}, and the lower end comes first')
        return Lengths(low, high)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        return [int(n) for n in rng.integers(self.low, self.high, count, endpoint=True)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


class Part(Struct, frozen=True):
    kind: str
    key: int
    tokens: int


class Turn(Struct, frozen=True):
    """One request: what its prompt adds to what was said before, and how many tokens the answer has."""

    parts: tuple[Part, ...]
    output_tokens: int


class Conversation(Struct, frozen=True):
    """Requests of which each one waits for the answer to the one before, and begins with all that was said."""

    turns: tuple[Turn, ...]


class Synthetic(Struct, frozen=True):
    """Conversations of random lengths. prefix_tokens: before the first turn's own, the same in each of `prefix_groups`."""

    requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    turns: int = 1
    prefix_tokens: int = 0
    prefix_groups: int = 1

    def draw(self, rng: np.random.Generator) -> tuple[Conversation, ...]:
        """The last conversation may have fewer turns: there are `requests` turns in all."""
        inputs = self.input_tokens.draw(self.requests, rng)
        outputs = self.output_tokens.draw(self.requests, rng)
        groups = rng.integers(0, self.prefix_groups, self.requests)
        out = []
        for first in range(0, self.requests, self.turns):
            turns = []
            for number in range(first, min(first + self.turns, self.requests)):
                parts = [Part("own", number, inputs[number])]
                if number == first and self.prefix_tokens:
                    parts.insert(0, Part("prefix", int(groups[first]), self.prefix_tokens))
                turns.append(Turn(tuple(parts), outputs[number]))
            out.append(Conversation(tuple(turns)))
        return tuple(out)


def from_trace(traced: Sequence[Traced], block_tokens: int) -> tuple[Conversation, ...]:
    """One request each: a block for each hash id, as far as the prompt goes, and tokens of its own for the rest."""
    out = []
    for number, each in enumerate(traced):
        parts, left = [], each.input_tokens
        for hash_id in each.hash_ids:
            parts.append(Part("block", hash_id, min(left, block_tokens)))
            left -= parts[-1].tokens
        if left:
            parts.append(Part("own", number, left))
        out.append(Conversation((Turn(tuple(parts), each.output_tokens),)))
    return tuple(out)


class PromptIds:
    """Prompts as token ids. seed: with another one every part is made of other tokens."""

    def __init__(self, low: int, high: int, seed: int) -> None:
        """Ids from low to high - 1."""
        assert 0 <= low < high
        self._low, self._high, self._seed = low, high, seed

    def part(self, part: Part) -> list[int]:
        """A shorter part is the beginning of a longer one with its key."""
        rng = np.random.default_rng((self._seed, *part.kind.encode(), part.key))
        ids: list[int] = rng.integers(self._low, self._high, part.tokens).tolist()
        return ids

    def parts(self, parts: Sequence[Part]) -> list[int]:
        return [token for part in parts for token in self.part(part)]


class PromptWords:
    """Prompts as text: common words, which are about a token each; `tokens_per_word` of this server's tokenizer."""

    def __init__(self, tokens_per_word: float, seed: int) -> None:
        self._tokens_per_word = tokens_per_word
        self._ids = PromptIds(0, len(WORDS), seed)

    def part(self, part: Part) -> str:
        words = max(1, round(part.tokens / self._tokens_per_word))
        chosen = self._ids.part(Part(part.kind, part.key, words))
        return "".join(f" {WORDS[each]}" for each in chosen)

    def parts(self, parts: Sequence[Part]) -> str:
        return "".join(map(self.part, parts))


_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into than them "
    "can only other new some could time these two may then do first any my now such like our over man me even most made after "
    "also did many before must through back years where much your way well down should because each just those people too"
)
WORDS = tuple(_COMMON.split())
