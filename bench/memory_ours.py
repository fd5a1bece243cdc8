"""The shipped memory manager, in `bench.memory_engine`'s terms.

Models of full, windowed and recurrent layers go through `KvMemory` and `SequencePages`, as in the engines. Models with
images or budgets, which engines do not serve yet, use the same `PageAllocator` and `PrefixCache`, one step below.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from bench.memory_models import CHECKPOINT_TOKENS, PAGE_TOKENS, BenchModel
from bench.memory_trace import BenchRequest
from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import ImageRef, PrefixCache, image_key, snapshot_key
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import PoolLayout, pool_layout
from disagg.memory.sequence import SequencePages
from disagg.memory.spans import PLANS_IN_FLIGHT, last_checkpoint, pages_for
from disagg.messages.layout import GroupKind
from tests.memory.images import image_rank

ROOT = chain_root("bench")


def _used_bytes(layout: PoolLayout, allocator: PageAllocator) -> int:
    """Used pages, empty ones that only their own group can have, and padding."""
    total = 0
    for g, stride in enumerate(layout.strides):
        empty, _, used = allocator.small_counts(g)
        total += (empty + used) * stride
    return total


def _to_checkpoint(start: int) -> int:
    return CHECKPOINT_TOKENS - start % CHECKPOINT_TOKENS


class EngineMemory:
    """A pool as an engine has it. chunk_tokens: of prompts, at most so many in one step.

    prefills: it is a prefill server's.
    """

    def __init__(self, model: BenchModel, chunk_tokens: int, *, caching: bool, prefills: bool) -> None:
        self.model = model
        self.caching = caching
        self.chunk_tokens = chunk_tokens
        layout = pool_layout(model.groups, PAGE_TOKENS, CHECKPOINT_TOKENS)
        self.kv = KvMemory(
            layout,
            model.pool_bytes // layout.large_bytes,
            caching=caching,
            common_late_tokens=PLANS_IN_FLIGHT * chunk_tokens if prefills else 0,
        )
        self.keeps_back = self.kv.keeps_back

    def extend_hashes(self, hashes: list[bytes], request: BenchRequest, text: array[int]) -> None:
        self.kv.extend_hashes(hashes, ROOT, text)

    def land(self, request: BenchRequest, num_tokens: int, step: int) -> EnginePages | None:
        pages = self.kv.receive([], num_tokens, spare_tokens=0, choices=1, step=step)
        if pages is None:
            return None
        pages.landed(num_tokens, [], step)
        return EnginePages(self.model, pages, hit_tokens=0)

    def open(self, request: BenchRequest, hashes: list[bytes], num_tokens: int, step: int) -> EnginePages | None:
        pages = self.kv.open(hashes, num_tokens, num_tokens, self.chunk_tokens, step)
        if pages is None:
            return None
        pages.hold_for_sending(num_tokens)
        return EnginePages(self.model, pages, pages.computed)

    def used_bytes(self) -> int:
        return _used_bytes(self.kv.layout, self.kv.allocator)


class EnginePages:
    """One running sequence."""

    hit_image_tokens = 0

    def __init__(self, model: BenchModel, pages: SequencePages, hit_tokens: int) -> None:
        self.hit_tokens = hit_tokens
        self._pages = pages
        self._recurrent = bool(model.state_bytes)

    def longest_run(self, start: int) -> int:
        return _to_checkpoint(start) if self._recurrent else sys.maxsize

    def grow(self, start: int, stop: int) -> bool:
        return self._pages.grow(start, stop) is not None

    def advance(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        self._pages.advance(num_tokens, hashes, step)

    def end_prefill(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        self._pages.end_prefill(hashes, step, goes_on=False)
        self._pages.seal(num_tokens, hashes)

    def close(self, step: int) -> None:
        self._pages.close(step)


class DirectMemory:
    """A pool of a model with images or budgets, straight on the allocator and the cache."""

    keeps_back = False

    def __init__(self, model: BenchModel, *, caching: bool) -> None:
        self.model = model
        self.caching = caching
        self.layout = pool_layout(model.groups, PAGE_TOKENS, CHECKPOINT_TOKENS)
        self.cache = PrefixCache(self.layout)
        self.allocator = PageAllocator(self.layout, model.pool_bytes // self.layout.large_bytes, self.cache.remove)
        self.owners = 0

    def extend_hashes(self, hashes: list[bytes], request: BenchRequest, text: array[int]) -> None:
        """Text that follows an image depends on it."""
        extra = {request.document_tokens // PAGE_TOKENS: _image_hash(request)} if request.image_tokens else {}
        extend_hashes(hashes, ROOT, text, PAGE_TOKENS, extra)

    def land(self, request: BenchRequest, num_tokens: int, step: int) -> DirectPages | None:
        return self.open(request, [], num_tokens, step)

    def open(self, request: BenchRequest, hashes: list[bytes], num_tokens: int, step: int) -> DirectPages | None:
        kind = ImagePages if GroupKind.IMAGE in self.model.kinds else BudgetPages
        pages = kind(self, request, hashes, num_tokens)
        if pages.reserve(num_tokens):
            return pages
        pages.close(step)
        return None

    def publish(self, g: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """What pages hold is final."""
        if self.caching:
            for key, page in zip(keys, pages, strict=True):
                if self.cache.insert(g, key, page):
                    self.allocator.keep(g, page)

    def find(self, g: int, keys: Sequence[bytes]) -> list[int]:
        """The pages of all these keys, held from now on; none if one of them is missing."""
        pages = [page for key in keys if (page := self.cache.find(g, key)) is not None]
        if len(pages) < len(keys):
            return []
        self.allocator.share(g, pages)
        return pages

    def used_bytes(self) -> int:
        return _used_bytes(self.layout, self.allocator)


def _image_hash(request: BenchRequest) -> bytes:
    return hashlib.sha256(request.document.to_bytes(8, "little")).digest()


class ImagePages:
    """One running sequence of a model with layers for text and layers for images: every token of either, in its group."""

    def __init__(self, memory: DirectMemory, request: BenchRequest, hashes: list[bytes], num_tokens: int) -> None:
        self._memory = memory
        memory.owners += 1
        self._owner = memory.owners
        count = pages_for(request.image_tokens, PAGE_TOKENS)
        image = ImageRef(_image_hash(request), request.document_tokens, count)
        self._rank = image_rank(image.hash)
        self._text_group = [group.kind for group in memory.model.groups].index(GroupKind.FULL)
        self._image_group = [group.kind for group in memory.model.groups].index(GroupKind.IMAGE)
        self._image_keys = [image_key(image.hash, index) for index in range(count)]
        self.hit_tokens = memory.cache.lookup(hashes, num_tokens - 1, [image]) if memory.caching else 0
        self._text = memory.find(self._text_group, hashes[: self.hit_tokens // PAGE_TOKENS])
        # The image is the same whatever text is before it, so it may be found when the text is not.
        self._image = memory.find(self._image_group, self._image_keys)
        self.hit_image_tokens = request.image_tokens if self._image else 0
        self._published = len(self._text)

    def _allocate(self, text: int, image: int) -> bool:
        needs = [0, 0]
        needs[self._text_group], needs[self._image_group] = text, image
        taken = self._memory.allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        self._text += taken[self._text_group]
        self._image += taken[self._image_group]
        return True

    def reserve(self, num_tokens: int) -> bool:
        return self._allocate(
            pages_for(num_tokens, PAGE_TOKENS) - len(self._text), len(self._image_keys) - len(self._image)
        )

    def longest_run(self, start: int) -> int:
        return sys.maxsize

    def grow(self, start: int, stop: int) -> bool:
        missing = pages_for(stop, PAGE_TOKENS) - len(self._text)
        return missing <= 0 or self._allocate(missing, 0)

    def advance(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        if hashes and not self._published:
            self._memory.publish(self._image_group, self._image_keys, self._image)
        full = min(num_tokens // PAGE_TOKENS, len(hashes))
        if full > self._published:
            span = slice(self._published, full)
            self._memory.publish(self._text_group, hashes[span], self._text[span])
            self._published = full

    def end_prefill(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        pass

    def close(self, step: int) -> None:
        release = self._memory.allocator.release
        release(self._text_group, self._text, step, range(1, len(self._text) + 1))
        release(self._image_group, self._image, step, [self._rank] * len(self._image))
        self._memory.allocator.forget_owner(self._owner)


class BudgetPages:
    """One running sequence of a model whose every group has a budget.

    A group holds every token up to its budget. Past that it chooses anew, each run, what its pages keep: they are no
    prefix any more, so pages that the cache knows are left as they are, and others are written. What was chosen at the
    last checkpoint of the prompt enters the cache as a snapshot.
    """

    hit_image_tokens = 0

    def __init__(self, memory: DirectMemory, request: BenchRequest, hashes: list[bytes], num_tokens: int) -> None:
        self._memory = memory
        memory.owners += 1
        self._owner = memory.owners
        self._budgets = [group.budget_tokens for group in memory.model.groups]
        self._snapshot_at = last_checkpoint(num_tokens, CHECKPOINT_TOKENS)
        self.hit_tokens = memory.cache.lookup(hashes, num_tokens - 1) if memory.caching else 0
        hit = hashes[: self.hit_tokens // PAGE_TOKENS]
        self._tables = [
            memory.find(g, self._snapshot_keys(g, hit[-1]) if self.hit_tokens > budget else hit) if hit else []
            for g, budget in enumerate(self._budgets)
        ]
        self._known = [len(table) for table in self._tables]  # pages, the first of a table, that the cache was offered
        self._left: list[tuple[int, list[int]]] = []  # (group, pages) that the next run reads only

    def _snapshot_keys(self, g: int, prefix: bytes) -> list[bytes]:
        return [snapshot_key(prefix, index) for index in range(pages_for(self._budgets[g], PAGE_TOKENS))]

    def _allocate(self, num_tokens: int) -> bool:
        """Pages to write when num_tokens tokens are held."""
        moves = [num_tokens > budget and known > 0 for budget, known in zip(self._budgets, self._known, strict=True)]
        needs = [
            pages_for(min(num_tokens, budget), PAGE_TOKENS) - (0 if move else len(table))
            for budget, table, move in zip(self._budgets, self._tables, moves, strict=True)
        ]
        taken = self._memory.allocator.allocate_all(needs, self._owner)
        if taken is None:
            return False
        for g, pages in enumerate(taken):
            if moves[g]:
                self._left.append((g, self._tables[g]))
                self._tables[g], self._known[g] = pages, 0
            else:
                self._tables[g] += pages
        return True

    def reserve(self, num_tokens: int) -> bool:
        return self._allocate(num_tokens)

    def longest_run(self, start: int) -> int:
        if self._memory.caching and start < self._snapshot_at:
            return self._snapshot_at - start
        return sys.maxsize

    def grow(self, start: int, stop: int) -> bool:
        return self._allocate(stop)

    def advance(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        for g, pages in self._left:
            self._release(g, pages, step)
        self._left.clear()
        full = min(num_tokens // PAGE_TOKENS, len(hashes))
        for g, budget in enumerate(self._budgets):
            known, table = self._known[g], self._tables[g]
            if num_tokens <= budget:
                self._memory.publish(g, hashes[known:full], table[known:full])
                self._known[g] = max(known, full)
            elif num_tokens == self._snapshot_at and hashes:
                self._memory.publish(g, self._snapshot_keys(g, hashes[full - 1]), table)
                self._known[g] = len(table)

    def end_prefill(self, num_tokens: int, hashes: list[bytes], step: int) -> None:
        pass

    def _release(self, g: int, pages: list[int], step: int) -> None:
        self._memory.allocator.release(g, pages, step, range(1, len(pages) + 1))

    def close(self, step: int) -> None:
        for g, pages in (*enumerate(self._tables), *self._left):
            self._release(g, pages, step)
        self._memory.allocator.forget_owner(self._owner)


DirectPages = ImagePages | BudgetPages
