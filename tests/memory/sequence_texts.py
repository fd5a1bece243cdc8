"""Pools, texts and live sequences of the machine that drives the pages of sequences (`sequence_machine`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st

from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout
from disagg.memory.sequence import SequencePages
from disagg.messages.layout import GroupKind, GroupPages
from disagg.messages.plan import PageCopy

PAGE_TOKENS = 2
CHECKPOINT_TOKENS = 4
WINDOW_TOKENS = 3
CHUNK_TOKENS = 2
MAX_IN_FLIGHT = 2
MAX_TOKENS = 28
MAX_LIVE = 5
ROOT = chain_root("machine")
BLANK = [0] * PAGE_TOKENS


def layout_of(sizing: PageSizing = PageSizing.LCM, **page_bytes: int) -> PoolLayout:
    groups = tuple(
        GroupSpec(name, GroupKind(name), size, window_tokens=WINDOW_TOKENS if name == "window" else 0)
        for name, size in page_bytes.items()
    )
    return pool_layout(groups, PAGE_TOKENS, CHECKPOINT_TOKENS, sizing)


# Small pools, so that nearly everything is evicted, recycled or refused again and again: (layout, large pages).
POOLS = {
    "full": (layout_of(full=4), 18),
    "full and window": (layout_of(full=4, window=6), 10),
    "full and state": (layout_of(full=4, state=6), 8),
    "window and state": (layout_of(window=4, state=6), 7),
    "all three": (layout_of(full=4, window=6, state=12), 12),
    "all three, the largest page": (layout_of(PageSizing.MAX, full=2, window=6, state=5), 12),
}


class Text:
    """A sequence's tokens, now and to come. marks[i]: stands for tokens up to and with i; names: hashes of full pages."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.names: list[bytes] = []
        extend_hashes(self.names, ROOT, tokens, PAGE_TOKENS)
        self.marks: list[int] = []
        mark = 1
        for token in tokens:
            mark = hash((mark, token)) | 1  # never 0, which is blank
            self.marks.append(mark)

    def page(self, page_no: int) -> list[int]:
        return self.marks[page_no * PAGE_TOKENS : (page_no + 1) * PAGE_TOKENS]

    def continued(self, num_tokens: int, choice: int) -> Text:
        """What a choice makes of the first tokens; choice 0 goes on as the text does."""
        return Text(self.tokens[:num_tokens] + [token + 1000 * choice for token in self.tokens[num_tokens:]])


# The second begins as the first does.
DOCUMENTS = (
    Text(list(range(MAX_TOKENS))),
    Text([*range(9), *range(100, 100 + MAX_TOKENS - 9)]),
    Text(list(range(200, 200 + MAX_TOKENS))),
)
NUMBERS = st.integers(0, len(DOCUMENTS) - 1)


@dataclass(eq=False)
class Live:
    """A sequence that runs. tables: as its worker has them; known: tokens that the engine knows; sends: it is prefill's.

    scheduled, computed and reported: tokens for which that is so. sure: up to here `grow` may not fail.
    """

    text: Text
    pages: SequencePages
    tables: list[list[int]]
    hashes: list[bytes]
    num_prompt: int
    known: int
    scheduled: int
    sends: bool
    sure: int
    computed: int = 0
    reported: int = 0
    in_flight: int = 0
    stopped: bool = False
    bound: Arriving | None = None  # ranks may still write what it came from

    def __post_init__(self) -> None:
        self.computed = self.reported = self.scheduled

    @property
    def left(self) -> int:
        """Tokens that can be planned now: all that are known, and the one that is being sampled."""
        if self.stopped or self.in_flight == MAX_IN_FLIGHT:
            return 0
        most = self.num_prompt if self.sends else min(MAX_TOKENS, max(self.known, self.scheduled + 1))
        return most - self.scheduled


@dataclass(eq=False)
class Arriving:
    """Pages for what a transfer brings. landed: by group, positions (of a state group: states) that are there.

    sure: up to here its sequences can grow, whatever happens.
    """

    text: Text
    pages: SequencePages
    tables: tuple[GroupPages, ...]
    num_tokens: int
    sure: int
    choices: int
    landed: list[set[int]]


@dataclass
class Planned:
    """Something of a plan: a run, or copies of pages."""

    lives: list[Live]
    start: int = 0
    stop: int = 0
    new_pages: tuple[tuple[int, ...], ...] = ()
    copies: list[PageCopy] = field(default_factory=list)
    computed: bool = False
