"""What a sequence holds of one layer group: one class per kind of group, behind one protocol.

Of n tokens, with pages of p:

    kind     keeps                             a prefix of n needs      lets go, when a run has reported
    full     every page                        pages [0, n / p)         nothing
    window   pages that overlap [n - W, n)     those pages              what left the window
    state    the state after n tokens          the checkpoint at n      the states that the run read and replaced

`SequencePages` holds one of these for each group, and decides what concerns several of them: what is taken is taken of all
groups or of none. Knows the pages of one group; nothing of the others, nor of requests, plans or tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from disagg.memory.groups import GroupSpec
from disagg.memory.spans import pages_for
from disagg.messages.layout import GroupPages


class Arrival(Struct, frozen=True):
    """What a transfer brings, and what goes on after it; see `KvMemory.receive`. reuse: begin with what is cached.

    checkpoint: pages for the last checkpoint are taken, too. moved: it comes from where it ran, which has less of windows.
    """

    num_tokens: int
    spare_tokens: int
    choices: int
    reuse: bool
    checkpoint: bool
    moved: bool = False

    def extra_pages(self, page_tokens: int) -> int:
        """Pages that the choices will come to need of a group of tokens: spare ones, and copies of a partial page."""
        landing = pages_for(self.num_tokens, page_tokens)
        each = pages_for(self.num_tokens + self.spare_tokens, page_tokens) - landing
        copies = self.choices - 1 if self.num_tokens % page_tokens else 0
        return each * self.choices + copies


class Peak(Struct, frozen=True):
    """The most that `choices` sequences come to, which share their first shared_tokens. late_tokens: of runs under way."""

    shared_tokens: int
    total_tokens: int
    choices: int
    late_tokens: int


class KindPages(Protocol):
    """The pages that one sequence holds of one layer group."""

    table: list[int]  # by page number; entries before `first` are gone
    first: int
    spare: list[int]  # held, and not in the table yet

    @staticmethod
    def large_pages(group: GroupSpec, peak: Peak, page_tokens: int, per_large: int) -> int:
        """Large pages with which sequences can always come to that peak, when nothing else is held."""

    # ---- how a sequence begins

    def pin_hit(self, hashes: Sequence[bytes], hit_tokens: int) -> None:
        """Hold what a cached prefix of so many tokens needs."""

    def reserve(self, num_tokens: int, chunk_tokens: int) -> int:
        """How many pages have to be set aside, so that num_tokens tokens can be computed in chunks."""

    def await_landing(self, hashes: Sequence[bytes], arrival: Arrival) -> tuple[int, int]:
        """Hold what is cached of what a transfer would bring: the first position wanted of it, and how many pages it needs."""

    def take_landing(self, arrival: Arrival, pages: list[int]) -> None:
        """These are the pages that `await_landing` asked for."""

    def lacks_checkpoint(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """The last checkpoint of so many tokens is worth bringing."""

    def hold_for_sending(self, num_tokens: int) -> None:
        """Keep, until the end, what a transfer of num_tokens tokens may need."""

    def branch_at(self, lengths: tuple[int, ...], tail_tokens: int) -> None:
        """See `SequencePages.branch_at`."""

    # ---- while it runs

    def needs(self, start: int, stop: int) -> int:
        """Pages without which a run of tokens [start, stop) is not possible."""

    def soon(self, start: int, stop: int) -> int:
        """Pages that a later run of tokens [start, stop) needs beside what is set aside, and what it lets go of by then."""

    def wishes(self, start: int) -> int:
        """Pages that are of use to it beside those."""

    def grow(self, start: int, pages: list[int]) -> int:
        """A run from `start` on has these. Up to how many tokens runs need nothing more, and are not forbidden."""

    @property
    def recyclable(self) -> int:
        """Own pages that are needed no more, are in no cache, and can be written again at once."""

    def recycle(self, count: int) -> list[int]: ...

    def advance(self, num_tokens: int, hashes: Sequence[bytes], step: int) -> int:
        """Runs up to num_tokens have reported: what is full enters the cache, what is needed no more is let go. From how many
        tokens on there is something to do again."""

    def end_prefill(self, num_tokens: int, hashes: Sequence[bytes], step: int, goes_on: bool) -> None:
        """See `SequencePages.end_prefill`."""

    def seal(self, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """No run is under way: what of num_tokens tokens is written in place, and worth keeping, is not written any more."""

    # ---- what landed, what goes on, the end

    def landed_partly(self, num_tokens: int, hashes: Sequence[bytes], ranges: Sequence[tuple[int, int]]) -> None:
        """See `SequencePages.landed_partly`."""

    def take_checkpoint(self, full_pages: int, hashes: Sequence[bytes], landed: bool, step: int) -> None:
        """No rank writes into the last checkpoint any more: it is the state after full_pages full pages."""

    def fork(self, *, partial: bool) -> tuple[KindPages, tuple[int, int] | None]:
        """Another one that goes on from here. partial: the last page is not full, so it is copied: (from, to)."""

    def share_out(self, forks: Sequence[KindPages]) -> None:
        """What is set aside is theirs alike, of whom this one is the first. Nobody writes in place what they share."""

    def close(self, num_tokens: int, step: int) -> None:
        """Let go of every page."""

    # ---- what others need to know of it

    def to_run(self) -> GroupPages:
        """What a worker has to know before the first run: the pages that hold something, from the first one needed."""

    def to_land(self, num_tokens: int, want: int) -> GroupPages:
        """Pages into which num_tokens tokens will land, from position `want` on, as pieces count."""

    def pages(self, first: int, stop: int) -> tuple[int, ...]:
        """Pages of positions [first, stop), as pieces count them; all of them are held."""

    def held(self) -> Iterator[int]:
        """Each page, once for each time that it is held."""

    @property
    def beyond_quota(self) -> int:
        """Own pages that are held beyond what is set aside for good."""
