"""How one pool of bytes is cut into large pages, and those into the small pages of each layer group. Pure arithmetic.

The pool of a vision model whose images take 256 bytes a page and whose text takes 384, sized by least common multiple:

    byte    0               768             1536            2304
    large   │       0       │       1       │       2       │
            │ image         │ text          │ image         │
    small   │ 0  │ 1  │ 2  │   2   │   3   │ 6  │ 7  │ 8  │

A group's small pages are numbered through the pool as if all of it were theirs, so small page p begins at byte
p * stride and lies in large page p // per_large, whichever large pages the group happens to have.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from disagg.memory.groups import GroupSpec
from disagg.messages.layout import GroupKind
from disagg.types.arithmetic import ceil_div, round_up


class PageSizing(enum.StrEnum):
    """How large a large page is. The greatest common divisor would waste nothing either, but cut pages into pieces."""

    LCM = "lcm"  # the least common multiple of the small pages: no byte is lost between them
    MAX = "max"  # the largest small page: short, but smaller pages may be padded


class PoolLayout(Struct, frozen=True):
    """How a pool is cut. per_large: small pages of each group in a large page; strides: bytes from one to the next.

    per_large[g] * strides[g] == large_bytes and strides[g] >= groups[g].page_bytes, always. checkpoint_tokens: how far
    apart the checkpoints of STATE groups are. reason: why `sizing` is not what was asked for, in a sentence for the
    log, or "".
    """

    page_tokens: int
    checkpoint_tokens: int
    large_bytes: int
    groups: tuple[GroupSpec, ...]
    per_large: tuple[int, ...]
    strides: tuple[int, ...]
    sizing: PageSizing
    reason: str = ""

    def __post_init__(self) -> None:
        for group, per_large, stride in zip(self.groups, self.per_large, self.strides, strict=True):
            assert per_large * stride == self.large_bytes, f"{group.name}: {per_large} x {stride} B"
            assert stride >= group.page_bytes and stride % group.align_bytes == 0, f"{group.name}: stride {stride} B"

    def pages_for(self, g: int, num_tokens: int) -> int:
        """How many pages of an attention group hold this many tokens."""
        assert self.groups[g].kind is not GroupKind.STATE, "a state's page holds any number of tokens"
        return ceil_div(num_tokens, self.page_tokens)

    def padding_bytes(self, g: int) -> int:
        """Bytes lost behind each small page of a group."""
        return self.strides[g] - self.groups[g].page_bytes


def pool_layout(
    groups: Sequence[GroupSpec],
    page_tokens: int,
    checkpoint_tokens: int = 512,
    sizing: PageSizing = PageSizing.LCM,
    max_small: int = 128,
) -> PoolLayout:
    """Sizes the large page. LCM gives way to MAX, with a reason, if it would hold more than max_small pages of a group.

    Raises ValueError if checkpoints are not at page boundaries.
    """
    assert groups, "a pool has at least one layer group"
    if checkpoint_tokens <= 0 or checkpoint_tokens % page_tokens != 0:
        raise ValueError(
            f"checkpoint_tokens is {checkpoint_tokens}; it must be a multiple of page_tokens, which is {page_tokens}, "
            "because a checkpoint is found by the hash of the page that ends where it was taken"
        )
    reason = ""
    if sizing is PageSizing.LCM:
        large_bytes = math.lcm(*(group.page_bytes for group in groups))
        smallest = min(groups, key=lambda group: group.page_bytes)
        if large_bytes // smallest.page_bytes > max_small:
            sizing = PageSizing.MAX
            reason = (
                f"The least common multiple of the page sizes, {large_bytes} bytes, is "
                f"{large_bytes // smallest.page_bytes} pages of {smallest.name}, and the limit is {max_small}: "
                "large pages have the size of the largest page instead"
            )
    if sizing is PageSizing.MAX:
        align_bytes = math.lcm(*(group.align_bytes for group in groups))
        large_bytes = round_up(max(group.page_bytes for group in groups), align_bytes)
    per_large = tuple(_most_per_large(group, large_bytes) for group in groups)
    return PoolLayout(
        page_tokens=page_tokens,
        checkpoint_tokens=checkpoint_tokens,
        large_bytes=large_bytes,
        groups=tuple(groups),
        per_large=per_large,
        strides=tuple(large_bytes // count for count in per_large),
        sizing=sizing,
        reason=reason,
    )


def stage_layout(whole: PoolLayout, parts: Sequence[GroupSpec | None]) -> PoolLayout:
    """How a pipeline stage cuts its pool: large pages have as many small pages of each group as the whole's, so that page ids
    are equal on all stages, and as many bytes as the stage's layers need.

    parts: per group of the whole, the stage's layers of it, or None; one of them at least has some.
    """
    own = [(part, count) for part, count in zip(parts, whole.per_large, strict=True) if part is not None]
    step_bytes = math.lcm(*(count * part.align_bytes for part, count in own))
    needed = max(count * round_up(part.page_bytes, part.align_bytes) for part, count in own)
    large_bytes = round_up(needed, step_bytes)
    return replace(
        whole,
        large_bytes=large_bytes,
        groups=tuple(part for part, _ in own),
        per_large=tuple(count for _, count in own),
        strides=tuple(large_bytes // count for _, count in own),
    )


def _most_per_large(group: GroupSpec, large_bytes: int) -> int:
    """The largest number of equal, aligned parts of a large page that each hold a small page."""
    return next(
        count
        for count in range(large_bytes // group.page_bytes, 0, -1)
        if large_bytes % count == 0 and (large_bytes // count) % group.align_bytes == 0
    )
