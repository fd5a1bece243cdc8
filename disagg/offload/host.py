"""Which pages of the host pool hold what: the same small pages as on the GPU, of the same layer groups. Pure.

Pages come from an allocator as the GPU's do (memory/allocator), and are known by the hashes of the same chain
(memory/cache). A page is *held* while it is being copied, written to storage or loaded; else it stays until its memory is
needed. The least recently used go first; of what was let go of together, the longest prefix. Without storage behind it, what
goes on from a page that has gone is of no use to anybody, and goes with it: whole prefixes.

    a ── b ── c ── d      b is evicted: c, d and e go, too, if nobody holds them
         └── e
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import PrefixCache
from disagg.memory.layout import PoolLayout
from disagg.messages.layout import GroupKind
from disagg.messages.legs import KvEvents

Placed = tuple[int, int, int]  # group, page number, page


class HostPool:
    """num_large large pages. gone(hash): a page that holds what the hash names has left; it must not call back.

    whole_prefixes: nothing else has what is evicted here. evicted: pages, since the start.
    """

    def __init__(
        self, layout: PoolLayout, num_large: int, gone: Callable[[bytes], object] = lambda page_hash: None
    ) -> None:
        self.layout = layout
        self.whole_prefixes = True
        self.evicted = 0
        self._cache = PrefixCache(layout)
        self._allocator = PageAllocator(layout, num_large, self._on_evict)
        self._held: Counter[tuple[int, int]] = Counter()  # how often each page is, by group and page
        self._hash_of: dict[tuple[int, int], bytes] = {}  # by group and page, of pages that are known
        self._groups_of: dict[bytes, set[int]] = {}  # by hash: the groups that have a page of that name
        self._parent: dict[bytes, bytes] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._pending: list[bytes] = []  # hashes of pages of full attention that were evicted just now
        self._gone = gone
        self._owner = 0
        self._step = 0

    # ---- finding

    def find(self, g: int, page_hash: bytes) -> int | None:
        """The page of a group that holds what the hash names."""
        return self._cache.find(g, page_hash)

    def lookup(self, hashes: Sequence[bytes], num_tokens_cap: int) -> int:
        """Tokens of the longest prefix that is valid in every group, by the rules of the prefix cache."""
        return self._cache.lookup(hashes, num_tokens_cap)

    def take_events(self) -> KvEvents:
        """What has come and gone since this was last asked."""
        return self._cache.take_events()

    def snapshot(self) -> KvEvents:
        """Everything that is here."""
        return self._cache.snapshot()

    @property
    def used_large(self) -> int:
        return self._allocator.used_large

    @property
    def filled_large(self) -> int:
        """Large pages that hold something, needed now or not."""
        return self._allocator.num_large - self._allocator.free_large

    @property
    def num_large(self) -> int:
        return self._allocator.num_large

    # ---- holding

    def take(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Pages of every group, each held once. None, and nothing has changed: not now."""
        self._owner += 1
        taken = self._allocator.allocate_all(needs, self._owner)
        self._allocator.forget_owner(self._owner)
        self._held.update((g, page) for g, pages in enumerate(taken or ()) for page in pages)
        while self._pending:
            self._drop_descendants(self._pending.pop())
        return taken

    def hold(self, g: int, page: int) -> None:
        """Once more."""
        self._allocator.share(g, [page])
        self._held[g, page] += 1

    def name(self, g: int, page: int, page_hash: bytes, parent: bytes) -> None:
        """A page that is held has its content now. parent: the hash of the page before it, or the chain's root."""
        is_new = self._cache.insert(g, page_hash, page)
        assert is_new, f"two pages of group {g} hold one thing"
        self._allocator.keep(g, page)
        self._hash_of[g, page] = page_hash
        self._groups_of.setdefault(page_hash, set()).add(g)
        self._parent[page_hash] = parent
        self._children.setdefault(parent, {})[page_hash] = None

    def release(self, pages: Iterable[Placed]) -> None:
        """Let go of them, used until now. Pages without a name are free from then on."""
        self._step += 1
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for g, page_no, page in pages:
            released, lengths = by_group.setdefault(g, ([], []))
            released.append(page)
            self._held[g, page] -= 1
            if not self._held[g, page]:
                del self._held[g, page]
            lengths.append(page_no + 1)
        for g, (released, lengths) in by_group.items():
            self._allocator.release(g, released, self._step, lengths)

    # ---- going

    def _on_evict(self, g: int, page: int) -> None:
        page_hash = self._forget_name(g, page)
        if self.whole_prefixes and self.layout.groups[g].kind is GroupKind.FULL:
            self._pending.append(page_hash)

    def _forget_name(self, g: int, page: int) -> bytes:
        page_hash = self._hash_of.pop((g, page))
        self._cache.remove(g, page)
        self.evicted += 1
        groups = self._groups_of[page_hash]
        groups.discard(g)
        if not groups:
            del self._groups_of[page_hash]
            parent = self._parent.pop(page_hash)
            siblings = self._children[parent]
            siblings.pop(page_hash, None)
            if not siblings:
                del self._children[parent]
        self._gone(page_hash)
        return page_hash

    def _drop_descendants(self, page_hash: bytes) -> None:
        """Of a page of full attention that has gone, and what is there of it in other groups."""
        left = [page_hash]
        while left:
            each = left.pop()
            left += self._children.get(each, ())
            for g in tuple(self._groups_of.get(each, ())):
                page = self._cache.find(g, each)
                assert page is not None
                if (g, page) not in self._held:
                    self._forget_name(g, page)
                    self._allocator.forget(g, page)

    def holders(self) -> dict[tuple[int, int], int]:
        """How often each page is held."""
        return dict(self._held)

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
        self._cache.check_integrity()
        assert not self._pending
        assert self._held == self._allocator.all_holders(), "what is held, and what the allocator says is, differ"
        named = {(g, page_hash) for (g, _), page_hash in self._hash_of.items()}
        assert named == {(g, each) for each, groups in self._groups_of.items() for g in groups}
        assert set(self._parent) == set(self._groups_of)
        assert {(self._parent[each], each) for each in self._parent} == {
            (parent, each) for parent, children in self._children.items() for each in children
        }
        assert all(self._cache.find(g, page_hash) == page for (g, page), page_hash in self._hash_of.items())
