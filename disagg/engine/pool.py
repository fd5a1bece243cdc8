"""An engine's KV memory, and what it says of it to the outside: load reports, counters, cache events, dumps. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from disagg.engine.facts import MemoryFacts, ModelFacts, SchedulingFacts
from disagg.engine.instructions import Counters, PublishKv
from disagg.memory.kv_memory import KvMemory
from disagg.memory.sequence import SequencePages
from disagg.messages.legs import GroupMemory, HostMemory, KvEvents, LoadReport, MemoryReport, ServerState, StartLeg
from disagg.scheduler.pipeline import plans_in_flight

Fits = Callable[[KvMemory, int, int], bool]  # (memory, num_tokens, chunk_tokens)


def prompt_fits(kv: KvMemory, num_tokens: int, chunk_tokens: int) -> bool:
    """A prompt of so many tokens can be computed when nothing else holds pages."""
    return kv.large_pages_to_prefill(num_tokens, chunk_tokens) <= kv.allocator.num_large


def answer_fits(kv: KvMemory, total_tokens: int, chunk_tokens: int, shared_tokens: int = 0) -> bool:
    """One choice can grow to its end, and be computed again up to there, when nothing else holds pages."""
    grown = kv.large_pages_to_decode(shared_tokens, total_tokens, 1)
    return grown <= kv.allocator.num_large and prompt_fits(kv, total_tokens, chunk_tokens)


class EnginePool:
    """`kv`, with an engine's names for things."""

    def __init__(
        self,
        model: ModelFacts,
        memory: MemoryFacts,
        scheduling: SchedulingFacts,
        stages: int,
        counters: Counters,
        fits_alone: Fits,
        common_late_tokens: int = 0,
    ) -> None:
        """fits_alone: a sequence that comes to so many tokens fits when it is alone. common_late_tokens: see KvMemory."""
        self._memory = memory
        self._counters = counters
        self.kv = KvMemory(
            memory.layout,
            memory.num_large,
            caching=memory.prefix_cache,
            common_late_tokens=common_late_tokens,
            late_runs=plans_in_flight(stages),
        )
        self.longest_alone = _longest(
            model.max_model_len, lambda tokens: fits_alone(self.kv, tokens, scheduling.chunk_tokens)
        )

    def prefix(self, start: StartLeg) -> tuple[bytes, list[bytes]]:
        """The root of a leg's hash chain, and the hashes of its full pages."""
        root = replace(self._memory.scope, salt=start.cache_salt).root
        hashes: list[bytes] = []
        self.kv.extend_hashes(hashes, root, start.token_ids)
        return root, hashes

    def taken(self, pages: SequencePages) -> None:
        """A request has got these."""
        self._counters.observe("run_pages", pages.extent_pages())

    def report(self, host: HostMemory | None = None) -> MemoryReport:
        """host: what the engine has beside the pool, if it has."""
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
            for group, pages in zip(self._memory.layout.groups, stats.groups, strict=True)
        )
        return MemoryReport(
            sizing=self._memory.layout.sizing.value,
            large_bytes=stats.large_bytes,
            large_free=stats.empty_large,
            large_evictable=stats.evictable_large,
            large_used=stats.used_large,
            fragmentation_bytes=stats.fragmentation_bytes,
            groups=groups,
            host=host,
        )

    def load(self, state: ServerState, running: int, waiting: int, host: HostMemory | None = None) -> LoadReport:
        """See `report`."""
        self._count()
        memory = self.report(host)
        return LoadReport(
            state=state,
            running=running,
            waiting=waiting,
            pages_used=memory.large_used,
            pages_free=memory.large_free,
            pages_evictable=memory.large_evictable,
            pages_total=self._memory.num_large,
            memory=memory,
        )

    def _count(self) -> None:
        """Bring the counters up to what the memory has counted."""
        self._counters.hit_tokens = self.kv.hit_tokens
        self._counters.query_tokens = self.kv.query_tokens
        for group, evictions in zip(self._memory.layout.groups, self.kv.allocator.evictions, strict=True):
            self._counters.evictions[group.name] = evictions

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
                for g, group in enumerate(self._memory.layout.groups)
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
