"""What a pool is used for at one moment, in pages and bytes. Plain values."""

from __future__ import annotations

from msgspec import Struct


class GroupStats(Struct, frozen=True):
    """One layer group's share of the pool. The bytes add up to large_pages * the size of a large page.

    empty_bytes: of empty small pages in large pages that no other group can use meanwhile; padding_bytes: behind every
    small page. Both are lost. evictions: small pages whose content was given up, since the start.
    """

    name: str
    large_pages: int
    empty_pages: int
    evictable_pages: int
    used_pages: int
    empty_bytes: int
    used_bytes: int
    padding_bytes: int
    evictions: int


class PoolStats(Struct, frozen=True):
    """A pool at one moment. Large pages are empty, evictable or used."""

    large_bytes: int
    empty_large: int
    evictable_large: int
    used_large: int
    groups: tuple[GroupStats, ...]

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes of assigned large pages in which no content can be."""
        return sum(group.empty_bytes + group.padding_bytes for group in self.groups)
