"""Whether something new may begin: how much memory those that decode will come to need, as `scheduler/admission` sees it.

Where a request begins only if those that have begun can go on beside it, none of them gives way for want of pages: not for
`lookahead_tokens` steps after the last one that began, and not at all if no answer is longer than that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as List
from dataclasses import dataclass
from math import ceil

from disagg.engine.batch import Batch
from disagg.engine.sequences import SOON_TOKENS, Sequence
from disagg.memory.kv_memory import KvMemory
from disagg.memory.spans import pages_for, window_pages
from disagg.messages.layout import GroupKind
from disagg.scheduler.admission import Growing, peak_growth
from disagg.types.ids import LegKey

FIRST_CHOICES_SHARE = 8  # one slot, and one page, in so many is for the first choice of a request


@dataclass(slots=True)
class Begun:
    """Choices of one leg that have pages, or would have, and run later."""

    growing: list[Growing]
    limit: int  # most tokens of each


class Lookahead:
    """See the module. granted: what has begun, but whose choices do not run yet; whoever lets it begin keeps it."""

    def __init__(self, lookahead_tokens: int, memory: KvMemory, batch: Batch) -> None:
        self._lookahead_tokens = lookahead_tokens
        self._memory = memory
        self._batch = batch
        self.granted: dict[LegKey, Begun] = {}

    @property
    def alone(self) -> bool:
        """Nobody holds memory."""
        return not self._memory.allocator.used_large

    @property
    def large_for_first(self) -> int:
        """Large pages that further choices of requests leave, as they do with slots (see `Turns.slots_for_more`)."""
        return self._memory.allocator.num_large // FIRST_CHOICES_SHARE

    def enough(self, new: Begun, *, alone: bool | None = None, left_large: int = 0) -> bool:
        """All that have begun, and these, can go on together for as long as is looked ahead, and leave so many large pages.

        alone: nobody but these holds memory; None: nobody at all does, if that is so.
        """
        growing, limits = self._begun()
        if not growing and (self.alone if alone is None else alone):
            return True
        growth = self._grown_to([*growing, *new.growing], [*limits, *[new.limit] * len(new.growing)])
        return self._memory.allocator.used_large + growth + left_large <= self._memory.allocator.num_large

    def most_choices(self, most: int, num_tokens: int, total_tokens: int) -> int:
        """Of so many choices behind a prompt of num_tokens that is to land, those that can go on together, each up to
        total_tokens, and leave pages to requests that have none; at least one."""
        page_tokens = self._memory.layout.page_tokens
        each = after_grant(num_tokens, total_tokens, 0, num_tokens, page_tokens)
        left_large = self.large_for_first + ceil(pages_for(num_tokens, page_tokens) * self._large_per_page)

        def too_many(count: int) -> bool:
            begun = Begun([each] * count, total_tokens + 1)
            return not self.enough(begun, alone=False, left_large=left_large)

        return 1 + bisect_left(range(2, most + 1), True, key=too_many)

    @property
    def spare_large(self) -> int:
        """Large pages that are free, and that those which have begun do not come to need for as long as is looked ahead."""
        allocator = self._memory.allocator
        return int(allocator.num_large - allocator.used_large - self._grown_to(*self._begun()))

    @property
    def spare_tokens(self) -> int:
        """The same, in tokens that are attended to; where none are, as if each page held as many as it is named for."""
        pages = max(0, self.spare_large) / (self._large_per_page or 1.0)
        return int(pages) * self._memory.layout.page_tokens

    def _begun(self) -> tuple[list[Growing], list[int]]:
        """Of all choices that run, or that something which has begun will have: how they grow, and most tokens of each."""
        running = [s for s in self._batch.running.values() if not s.is_prompt]
        growing = [running_on(s) for s in running]
        limits = [s.limit for s in running]
        for begun in self.granted.values():
            growing += begun.growing
            limits += [begun.limit] * len(begun.growing)
        return growing, limits

    @property
    def _large_per_page(self) -> float:
        """Large pages for the tokens of one page, where all of them are attended to."""
        layout = self._memory.layout
        return sum(
            1 / per_large
            for group, per_large in zip(layout.groups, layout.per_large, strict=True)
            if group.kind is GroupKind.FULL
        )

    def _grown_to(self, growing: List[Growing], limits: List[int]) -> float:
        """Large pages, beyond those that are used, that these come to need at most. limits: most tokens of each."""
        layout, large = self._memory.layout, 0.0
        late = self._memory.late_runs
        for group, per_large in zip(layout.groups, layout.per_large, strict=True):
            if group.kind is not GroupKind.WINDOW:
                continue
            most = window_pages(group.window_tokens, late, layout.page_tokens)
            for each, limit in zip(growing, limits, strict=True):
                held = pages_for(max(0, limit - 1 - each.steps), layout.page_tokens)
                large += (min(most, pages_for(limit, layout.page_tokens)) - min(most, held)) / per_large
        return large + self._large_per_page * peak_growth(
            growing, layout.page_tokens, self._lookahead_tokens, late + 1 + SOON_TOKENS
        )


def running_on(sequence: Sequence) -> Growing:
    """How a sequence that holds pages will grow. The KV of its last token is never written."""
    assert sequence.pages is not None
    total = sequence.limit - 1
    return Growing(
        steps=max(0, total - sequence.position),
        room_tokens=sequence.pages.room_tokens - sequence.position,
        own_tokens=max(0, total - sequence.shared_tokens),
    )


def after_grant(num_tokens: int, total_tokens: int, spare_tokens: int, shared_tokens: int, page_tokens: int) -> Growing:
    """How a choice will grow after its grant, which gives it pages for num_tokens and for spare_tokens more."""
    room = pages_for(num_tokens + spare_tokens, page_tokens) * page_tokens
    return Growing(total_tokens - num_tokens, room - num_tokens, total_tokens - shared_tokens)
