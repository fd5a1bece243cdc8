"""An engine's KV memory, and what it says of it to the outside: load reports, counters, cache events, dumps. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from disagg.engine.facts import EngineFacts
from disagg.engine.instructions import PublishKv, Tally
from disagg.memory.hashing import chain_root
from disagg.memory.sequence import KvMemory, SequencePages
from disagg.messages.legs import GroupMemory, KvEvents, LoadReport, MemoryReport, ServerState, StartLeg


class EnginePool:
    """`kv`, with an engine's names for things."""

    def __init__(
        self,
        facts: EngineFacts,
        tally: Tally,
        fits_alone: Callable[[KvMemory, int], bool],
        common_late_tokens: int = 0,
    ) -> None:
        """fits_alone: (memory, tokens) -> a sequence that comes to so many tokens fits when it is alone.
        common_late_tokens: see KvMemory.
        """
        self._facts = facts
        self._tally = tally
        self.kv = KvMemory(
            facts.layout, facts.num_large, caching=facts.prefix_cache, common_late_tokens=common_late_tokens
        )
        self.longest_alone = _longest(facts.max_model_len, lambda tokens: fits_alone(self.kv, tokens))

    def prefix(self, start: StartLeg) -> tuple[bytes, list[bytes]]:
        """The root of a leg's hash chain, and the hashes of its full pages."""
        root = chain_root(self._facts.cache_root, start.cache_salt)
        hashes: list[bytes] = []
        self.kv.extend_hashes(hashes, root, start.token_ids)
        return root, hashes

    def taken(self, pages: SequencePages) -> None:
        """A request has got these."""
        self._tally.observe("run_pages", pages.run_pages())

    def report(self) -> MemoryReport:
        stats = self.kv.allocator.stats()
        groups = tuple(
            GroupMemory(
                name=group.name,
                kind=group.kind.value,
                page_bytes=group.page_bytes,
                empty_pages=pages.empty_pages,
                evictable_pages=pages.evictable_pages,
                used_pages=pages.used_pages,
            )
            for group, pages in zip(self._facts.layout.groups, stats.groups, strict=True)
        )
        return MemoryReport(
            sizing=self._facts.layout.sizing.value,
            large_bytes=stats.large_bytes,
            large_free=stats.empty_large,
            large_evictable=stats.evictable_large,
            large_used=stats.used_large,
            fragmentation_bytes=stats.fragmentation_bytes,
            groups=groups,
        )

    def load(self, state: ServerState, running: int, waiting: int) -> LoadReport:
        self._count()
        memory = self.report()
        return LoadReport(
            state=state,
            running=running,
            waiting=waiting,
            pages_used=memory.large_used,
            pages_free=memory.large_free,
            pages_evictable=memory.large_evictable,
            pages_total=self._facts.num_large,
            memory=memory,
        )

    def _count(self) -> None:
        """Bring the tally up to what the memory has counted."""
        self._tally.hit_tokens = self.kv.hit_tokens
        self._tally.query_tokens = self.kv.query_tokens
        for group, evictions in zip(self._facts.layout.groups, self.kv.allocator.evictions, strict=True):
            self._tally.evictions[group.name] = evictions

    def take_events(self) -> list[PublishKv]:
        """At most one instruction: what has changed in the prefix cache since this was last asked."""
        events = self.kv.cache.take_events()
        return [PublishKv(events)] if events.stored or events.removed else []

    def snapshot(self) -> KvEvents:
        """Everything that is in the prefix cache."""
        return self.kv.cache.snapshot()

    def dump(self) -> dict[str, object]:
        """For a person."""
        allocator = self.kv.allocator
        return {
            "large pages": {
                "free": allocator.free_large,
                "evictable": allocator.evictable_large,
                "used": allocator.used_large,
                "total": allocator.num_large,
            },
            "groups": {
                group.name: dict(zip(("empty", "evictable", "used"), allocator.small_counts(g), strict=True))
                for g, group in enumerate(self._facts.layout.groups)
            },
            "prefix cache": {"pages": len(self.kv.cache), "hit tokens": self.kv.hit_tokens},
        }


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """The most tokens, up to `most`, that fit; what fits so many fits fewer."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
