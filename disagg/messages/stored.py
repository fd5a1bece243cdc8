"""What stored objects say of themselves (see offload/objects), and what of them a rank is told to read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

HASH_BYTES = 32
MAX_PAGES = 4096  # of one span
MAX_PARTS = 4096  # of one group in one span
MAX_GROUPS = 64

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Count = Annotated[int, Meta(ge=0, le=2**48)]


class PartRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An object that holds heads [head_start, head_stop) of a share's pages. nbytes: of the whole object."""

    path: Annotated[str, Meta(max_length=256)]
    head_start: Count
    head_stop: Count
    nbytes: Count


class Share(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a span holds of one group. pages: their numbers, rising. unit_bytes: uncompressed."""

    group: Hash  # its root
    unit_bytes: Count
    heads: Count
    pages: Annotated[tuple[Count, ...], Meta(max_length=MAX_PAGES)]
    parts: Annotated[tuple[PartRef, ...], Meta(max_length=MAX_PARTS)]


class Span(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive pages [start, start + len(hashes)) of a chain. parent: the hash of the page before, or the root.

    before: the hashes of the pages just before `start` that shares refer to: a window's, for a hit at the end.
    """

    root: Hash
    parent: Hash
    start: Count
    hashes: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=MAX_PAGES)]
    before: Annotated[tuple[Hash, ...], Meta(max_length=MAX_PAGES)]
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_GROUPS)]

    @property
    def stop(self) -> int:
        return self.start + len(self.hashes)

    def hash_at(self, page: int) -> bytes:
        """The hash of a page that the span, or a share of it, has."""
        index = page - self.start
        return self.hashes[index] if index >= 0 else self.before[index]


class PartRead(Struct, frozen=True):
    """Of one part, heads [head_start, head_stop), for pages of these numbers."""

    span: Span
    group: int
    ref: PartRef
    head_start: int
    head_stop: int
    page_nos: tuple[int, ...]
