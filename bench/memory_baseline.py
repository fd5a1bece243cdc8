"""The peer to compare with: one-size pages as in PagedAttention (vLLM 0.6), written for `bench.memory` and nothing else.

A page holds 16 tokens in every layer that caches tokens, of whatever kind: a window's layers keep all tokens, layers
for images keep the text and layers for text keep the images, layers with a budget keep everything.
Recurrent layers have their states in slots set aside at the start, one per request that may run at once.
A draft model has as many pages as its target (vLLM splits the memory so), which is one page that holds both.
Prefix cache: full prefixes only, a page being found by the hash of all tokens up to its end; least recently used
first, of one request the longest prefix first. Models with recurrent layers have none (a state cannot be looked up).
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from bench.memory_models import PAGE_TOKENS, BenchModel
from bench.memory_trace import BenchRequest, image_of
from disagg.memory.hashing import chain_root, extend_hashes

ROOT = chain_root("bench")


class OneSizePool:
    """Pages 0 .. num_pages-1. A page without holders stays cached until it is needed, oldest first."""

    def __init__(self, model: BenchModel, slots: int, *, caching: bool) -> None:
        self.page_bytes = model.one_size_page_bytes
        self.slot_bytes = slots * model.state_bytes
        self.free_slots = slots
        self.num_pages = (model.pool_bytes - self.slot_bytes) // self.page_bytes
        self.caching = caching and not model.state_bytes
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders = [0] * self.num_pages
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; first to be evicted first

    def used_bytes(self) -> int:
        return (self.num_pages - len(self._free) - len(self._unused)) * self.page_bytes + self.slot_bytes

    def lookup(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Cached pages of the longest prefix of at most `most` pages."""
        pages: list[int] = []
        if self.caching:
            for key in hashes[:most]:
                page = self._by_hash.get(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def allocate(self, hit: list[int], count: int) -> list[int] | None:
        """Hold the pages of a hit, and `count` new ones behind them; None if there are not as many."""
        unused = self._unused
        revived = sum(1 for page in hit if page in unused)
        if len(self._free) + len(unused) - revived < count:
            return None
        for page in hit:
            unused.pop(page, None)
            self._holders[page] += 1
        pages = list(hit)
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = unused.popitem(last=False)
                del self._by_hash[self._hash_of.pop(page)]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def publish(self, key: bytes, page: int) -> None:
        """A page is full and computed."""
        if self.caching and key not in self._by_hash:
            self._by_hash[key] = page
            self._hash_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """The longest prefix becomes the oldest."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._hash_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)


class OneSizePages:
    """The pages of one running sequence, in `bench.memory_engine`'s terms. An image's tokens lie within those of the text."""

    def __init__(self, pool: OneSizePool, request: BenchRequest, pages: list[int], hit_pages: int) -> None:
        self._pool = pool
        self._before_image = request.document_tokens
        self._image_tokens = request.image_tokens
        self._pages = pages
        self._published = hit_pages
        hit = hit_pages * PAGE_TOKENS
        self.hit_image_tokens = min(max(0, hit - self._before_image), self._image_tokens)
        self.hit_tokens = hit - self.hit_image_tokens

    def longest_run(self, start: int) -> int:
        return sys.maxsize

    def grow(self, start: int, stop: int) -> bool:
        missing = -(-self._position(stop) // PAGE_TOKENS) - len(self._pages)
        if missing > 0:
            pages = self._pool.allocate([], missing)
            if pages is None:
                return False
            self._pages += pages
        return True

    def _position(self, num_tokens: int) -> int:
        """Tokens of text and image together, when there are so many of text."""
        return num_tokens + (self._image_tokens if num_tokens > self._before_image else 0)

    def advance(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        full = min(self._position(num_tokens) // PAGE_TOKENS, len(hashes))
        for page_no in range(self._published, full):
            self._pool.publish(hashes[page_no], self._pages[page_no])
        self._published = max(self._published, full)

    def end_prefill(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        pass

    def close(self, step: int) -> None:
        self._pool.release(self._pages)
        self._pool.free_slots += 1
        self._pages = []


class OneSizeMemory:
    """The pool above, in `bench.memory_engine`'s terms. slots: as many requests as may ever run at once."""

    keeps_back = False

    def __init__(self, model: BenchModel, slots: int, *, caching: bool) -> None:
        self.model = model
        self.pool = OneSizePool(model, slots, caching=caching)
        self.caching = self.pool.caching

    def extend_hashes(self, hashes: list[bytes], request: BenchRequest, text: array[int]) -> None:
        if request.image_tokens:
            text = text[: request.document_tokens] + image_of(request) + text[request.document_tokens :]
        extend_hashes(hashes, ROOT, text, PAGE_TOKENS)

    def land(self, request: BenchRequest, num_tokens: int, step: int) -> OneSizePages | None:
        return self.open(request, [], num_tokens, step)

    def open(self, request: BenchRequest, hashes: list[bytes], num_tokens: int, step: int) -> OneSizePages | None:
        if self.pool.free_slots == 0:
            return None
        tokens = num_tokens + request.image_tokens
        hit = self.pool.lookup(hashes, (tokens - 1) // PAGE_TOKENS)
        pages = self.pool.allocate(hit, -(-tokens // PAGE_TOKENS) - len(hit))
        if pages is None:
            return None
        self.pool.free_slots -= 1
        return OneSizePages(self.pool, request, pages, len(hit))

    def used_bytes(self) -> int:
        return self.pool.used_bytes()
