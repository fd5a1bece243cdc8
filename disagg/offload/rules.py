"""Where the offload of a sequence is cut, and which pages of each group a cut needs. Pure arithmetic over pages.

A *point* is a length at which a stored prefix can be a hit: any page's end, or, where a group keeps states, a checkpoint.

    pages      0    4    8    12   16   20   24   28             page_tokens 16, stride 64 tokens, a prompt of 170
    prompt     [span][span][s]                                   cut at strides; its end is the last point within it
    increments                [span][span]                       a stride each, as it decodes
    the end                              [s]                     the last point; what is behind it is dropped
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from disagg.memory.layout import PoolLayout
from disagg.messages.layout import GroupKind
from disagg.messages.stored import MAX_PAGES


class OffloadRules(Struct, frozen=True):
    """unit: pages between two points. stride: pages of an increment, whole units."""

    layout: PoolLayout
    unit: int
    stride: int

    def last_point(self, pages: int) -> int:
        """The last point, in pages, of so many."""
        return pages // self.unit * self.unit

    def prompt_end(self, prompt_tokens: int) -> int:
        return self.last_point(prompt_tokens // self.layout.page_tokens)

    def cut(self, at: int, prompt_end: int) -> int:
        """Where the span that begins at page `at` ends."""
        if at < prompt_end:
            return min(prompt_end, (at // self.stride + 1) * self.stride)
        return self.last_point(at) + self.stride

    def needed(self, g: int, point: int) -> range:
        """The numbers of a group's pages without which a prefix of `point` pages, a point, is no hit."""
        group = self.layout.groups[g]
        if group.kind is GroupKind.FULL:
            return range(point)
        if group.kind is GroupKind.WINDOW:
            return range(max(0, point - self.layout.pages_for(g, group.window_tokens)), point)
        return range(max(0, point - 1), point)

    def wanted(
        self, g: int, pages: range, prompt_end: int, there: Callable[[int], bool], kept: Callable[[int], bool]
    ) -> list[int] | None:
        """Positions of a group's pages that the span of these pages has: those that are not kept already, as far as they are
        there. None: it cannot be made, since a page is gone that every prefix from here on needs.
        """
        if self.layout.groups[g].kind is GroupKind.FULL:
            lacking = [page_no for page_no in pages if not kept(page_no)]
            return lacking if all(map(there, lacking)) else None
        needed = self.needed(g, pages.stop)
        page_nos = set(needed) if all(kept(each) or there(each) for each in needed) else set()
        if pages.start < prompt_end:
            page_nos |= set(self.needed(g, prompt_end)) & set(pages)
        return sorted(each for each in page_nos if not kept(each) and there(each))


def offload_rules(layout: PoolLayout, stride_tokens: int) -> OffloadRules:
    """stride_tokens: as it is wanted; rounded down to whole pages (or checkpoints), to one at least, and to what a span may have.

    Raises ValueError for a group whose pages cannot be stored, and for checkpoints that are further apart than that.
    """
    for group in layout.groups:
        if group.kind not in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE):
            raise ValueError(f"layer group {group.name} keeps {group.kind.value} pages, which cannot be offloaded")
    has_states = any(group.kind is GroupKind.STATE for group in layout.groups)
    unit_tokens = layout.checkpoint_tokens if has_states else layout.page_tokens
    unit = unit_tokens // layout.page_tokens
    if unit > MAX_PAGES:
        raise ValueError(
            f"checkpoints are {unit} pages of {layout.page_tokens} tokens apart; at most {MAX_PAGES} are stored at once"
        )
    return OffloadRules(layout, unit, min(max(1, stride_tokens // unit_tokens), MAX_PAGES // unit) * unit)
