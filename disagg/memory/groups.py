"""What memory needs to know of a layer group: what it keeps of a sequence, and how large its pages are. Pure values.

    kind     keeps of a sequence of n tokens              so a prefix of n tokens can be reused when it has
    FULL     every token                                  every page of the n tokens
    WINDOW   the last `window_tokens`, for the next one   every page that overlaps [n - window_tokens, n)
    STATE    one state, and checkpoints of it             the checkpoint taken at n
    IMAGE    all of each image                            all of every image that begins before n
    BUDGET   `budget_tokens` that the layers chose        as FULL while n fits; else what was chosen at n

A page of a STATE group holds one state; one of any other group holds `page_tokens` tokens.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.layout import GroupKind, LayerGroup


class GroupSpec(Struct, frozen=True):
    """One layer group. page_bytes: of one small page. align_bytes: what the distance of two pages is a multiple of.

    window_tokens: how many tokens before a new one it attends to (one less than transformers' `sliding_window`, which
    counts the new one). budget_tokens: how many a BUDGET group keeps.
    """

    name: str
    kind: GroupKind
    page_bytes: int
    align_bytes: int = 1
    window_tokens: int = 0
    budget_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.page_bytes > 0 and self.align_bytes > 0, f"{self.name}: {self.page_bytes} B, {self.align_bytes} B"
        assert self.page_bytes % self.align_bytes == 0, (
            f"{self.name}: pages of {self.page_bytes} B, aligned to {self.align_bytes}"
        )
        assert self.window_tokens == 0 or (self.kind is GroupKind.WINDOW and self.window_tokens > 0), (
            f"{self.name}: {self.kind.value} with {self.window_tokens} window tokens"
        )
        assert (self.kind is GroupKind.BUDGET) == (self.budget_tokens > 0), (
            f"{self.name}: {self.kind.value} with a budget of {self.budget_tokens} tokens"
        )


def spec_of(group: LayerGroup, page_tokens: int) -> GroupSpec:
    """What memory needs to know of a layer group of a model."""
    return GroupSpec(
        name=group.name,
        kind=group.kind,
        page_bytes=group.page_bytes(page_tokens),
        align_bytes=group.align_bytes(page_tokens),
        window_tokens=max(group.window - 1, 0),
    )
