"""Which pages hold which prefixes, in every layer group, and how much of a prompt they can spare computing.

A page of tokens is known by the hash of all tokens up to its end (see hashing), the same in every group. So a prompt's
hashes are looked up once, and each group says which prefixes are valid in it (see groups for what each kind needs);
a hit is the longest prefix that is valid in all of them. With pages of one token, and a window of two:

    tokens      A B C D E F G H I J
    full        x x x x x x x x x ·        valid: A, A to B, ... A to I
    window      · · x x · · · x x x        valid: A to D, A to I, A to J
    hit                         A to I

Knows hashes and page numbers; whether a page may be evicted, and when, is the allocator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat, takewhile

from msgspec import Struct

from disagg.memory.changes import Changes
from disagg.memory.layout import PoolLayout
from disagg.memory.prefixes import longest_checkpointed, longest_windowed
from disagg.messages.layout import GroupKind
from disagg.messages.legs import KvEvents

_NO_PAGE = -1


class ImageRef(Struct, frozen=True):
    """An image of a prompt. hash: of its content. start_token: where it begins. num_pages: how many each group has."""

    hash: bytes
    start_token: int
    num_pages: int


def image_key(image_hash: bytes, index: int) -> bytes:
    """What the cache knows page `index` of an image by, whatever prompt it is in."""
    return image_hash + index.to_bytes(4, "little")


def snapshot_key(prefix_hash: bytes, index: int) -> bytes:
    """What the cache knows page `index` of a budget's choice by, made at the end of the prefix."""
    return prefix_hash + index.to_bytes(4, "little")


class PrefixCache:
    """The cached pages of one pool."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self._pages: list[dict[bytes, int]] = [{} for _ in layout.groups]
        self._keys: list[dict[int, bytes]] = [{} for _ in layout.groups]
        self._changes: Changes[tuple[int, bytes]] = Changes()

    def __len__(self) -> int:
        return sum(map(len, self._pages))

    # ---- finding

    def lookup(self, hashes: Sequence[bytes], num_tokens_cap: int, images: Sequence[ImageRef] = ()) -> int:
        """Tokens, in whole pages and at most the cap, of the longest prefix that is valid in every group, or 0."""
        return self.lookup_known(hashes, self.known(hashes, num_tokens_cap), images)

    def known(self, hashes: Sequence[bytes], num_tokens_cap: int) -> int:
        """Tokens, in whole pages and at most the cap, of the longest prefix that is valid in the FULL groups. What was computed
        before, in other words, and up to where: another prompt went on from there, or was evicted from there on.
        """
        page_tokens = self.layout.page_tokens
        found = min(num_tokens_cap // page_tokens, len(hashes))
        for g, group in enumerate(self.layout.groups):
            if group.kind is GroupKind.FULL:
                found = self._first_missing(g, hashes, 0, found)
        return found * page_tokens

    def lookup_known(self, hashes: Sequence[bytes], known_tokens: int, images: Sequence[ImageRef] = ()) -> int:
        """As `lookup`, of a prefix that is `known`."""
        page_tokens = self.layout.page_tokens
        found = known_tokens // page_tokens
        # Of full attention and images, what is valid for a prefix is valid for all shorter ones: asking once is enough.
        rest = []
        for g, group in enumerate(self.layout.groups):
            if group.kind is GroupKind.IMAGE:
                found = self._before_missing_image(g, images, found)
            elif group.kind is not GroupKind.FULL:
                rest.append(g)
        before = -1
        while found != before:
            before = found
            for g in rest:
                found = self._longest_valid(g, hashes, found)
        return found * page_tokens

    def _longest_valid(self, g: int, hashes: Sequence[bytes], most: int) -> int:
        """Pages of the longest prefix of at most so many that is valid in a group whose shorter ones need not be."""
        group = self.layout.groups[g]
        if group.kind is GroupKind.WINDOW:
            return longest_windowed(self._pages[g], hashes, most, self.layout.pages_for(g, group.window_tokens))
        if group.kind is GroupKind.STATE:
            every = self.layout.checkpoint_tokens // self.layout.page_tokens
            return longest_checkpointed(self._pages[g], hashes, most, every)
        return self._budgeted(g, hashes, most, group.budget_tokens)

    def _first_missing(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> int:
        """The first of page numbers [first, stop) whose page is not cached, or stop."""
        cached = takewhile(self._pages[g].__contains__, hashes[first:stop])
        return first + len(list(cached))

    def _before_missing_image(self, g: int, images: Sequence[ImageRef], most: int) -> int:
        pages, page_tokens = self._pages[g], self.layout.page_tokens
        for image in images:
            begins_within = image.start_token < most * page_tokens
            if begins_within and not all(image_key(image.hash, index) in pages for index in range(image.num_pages)):
                most = image.start_token // page_tokens
        return most

    def _budgeted(self, g: int, hashes: Sequence[bytes], most: int, budget_tokens: int) -> int:
        pages = self._pages[g]
        whole = budget_tokens // self.layout.page_tokens
        kept = range(self.layout.pages_for(g, budget_tokens))
        for end in range(most, whole, -1):
            if all(snapshot_key(hashes[end - 1], index) in pages for index in kept):
                return end
        return self._first_missing(g, hashes, 0, min(most, whole))

    def receivable(self, g: int, hashes: Sequence[bytes], start_token: int, stop_token: int) -> int:
        """The first token of [start_token, stop_token) that is not cached together with all before it, or stop_token.

        Of a FULL or WINDOW group: what a transfer of these tokens has to begin with.
        """
        page_tokens = self.layout.page_tokens
        stop = min(self.layout.pages_for(g, stop_token), len(hashes))
        missing = self._first_missing(g, hashes, start_token // page_tokens, stop)
        return min(stop_token, max(start_token, missing * page_tokens))

    def pages(self, g: int, hashes: Sequence[bytes], first: int, stop: int) -> list[int]:
        """The pages of numbers [first, stop), up to the first that is not cached."""
        found = list(map(self._pages[g].get, hashes[first:stop], repeat(_NO_PAGE)))
        return found[: found.index(_NO_PAGE)] if _NO_PAGE in found else found

    def find(self, g: int, key: bytes) -> int | None:
        """The page that a key names; see `image_key` and `snapshot_key`."""
        return self._pages[g].get(key)

    # ---- changing

    def insert(self, g: int, key: bytes, page: int) -> bool:
        """The page holds what the key names. False if another page does already; that one stays."""
        pages, keys = self._pages[g], self._keys[g]
        if key in pages:
            return False
        assert page not in keys, f"page {page} of group {g} is cached under another key"
        pages[key] = page
        keys[page] = key
        self._changes.came((g, key))
        return True

    def remove(self, g: int, page: int) -> None:
        """The page no longer holds what it did. Pages that are not cached are none of our business."""
        key = self._keys[g].pop(page, None)
        if key is not None:
            del self._pages[g][key]
            self._changes.left((g, key))

    # ---- telling

    def take_events(self) -> KvEvents:
        """What has changed since this was last asked."""
        stored, removed = self._changes.take()
        return KvEvents(tuple(stored), tuple(removed))

    def snapshot(self) -> KvEvents:
        """Everything that is cached."""
        return KvEvents(stored=tuple((g, key) for g, pages in enumerate(self._pages) for key in pages))

    def check_integrity(self) -> None:
        for g, (pages, keys) in enumerate(zip(self._pages, self._keys, strict=True)):
            assert {page: key for key, page in pages.items()} == keys, f"the two maps of group {g} differ"
            assert len(pages) == len(keys), f"two keys of group {g} name one page"
