"""What an engine has beside its pool: host memory and storage, for KV that goes (`offload`) and that comes back (`loads`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

from disagg.engine.asks import Asks
from disagg.engine.facts import OffloadFacts
from disagg.engine.instructions import Counters, Instruction, PublishKv
from disagg.engine.loads import Loads
from disagg.engine.offload import Offload
from disagg.memory.kv_memory import KvMemory
from disagg.messages.legs import HostMemory, KvEvents, LoadCosts, Tier
from disagg.messages.tiers import CopiedIn, CopiedOut, PartsRead, PartsWritten, TierEvent
from disagg.offload.instructions import StoreEvent, StoreFound, StorePublished, StoreWorks


class Tiers:
    """Of one incarnation. clock: the logical time at which pages are used. Instructions are appended to `out`."""

    def __init__(
        self,
        facts: OffloadFacts,
        tp: int,
        memory: KvMemory,
        counters: Counters,
        out: list[Instruction],
        clock: Callable[[], int],
    ) -> None:
        self._counters = counters
        self._asks = Asks(out)
        self.offload = Offload(facts, tp, memory, self._asks, out, clock)
        self.loads = Loads(facts, tp, memory, self.offload, self._asks, out, clock)
        counters.loaded_tokens, counters.loads_left = self.loads.tokens, self.loads.left

    def begins(self, who: Hashable, cached_tokens: int) -> Mapping[str, int]:
        """A sequence begins, so many of whose tokens are cached: how many of them its load brought, by tier.

        cached_tokens: 0 also when it does not fit now, and will ask again.
        """
        left = cached_tokens
        brought: dict[str, int] = {}
        for tier, tokens in self.loads.forget(who).items():
            brought[tier] = min(tokens, left)
            left -= brought[tier]
            self._counters.brought_tokens[tier] += brought[tier]
        return brought

    def tier_event(self, rank: int, message: TierEvent) -> None:
        """A rank's offload thread has something to say. Raises ProtocolError for what it was not asked."""
        match message:
            case CopiedOut():
                self.offload.copied_out(rank, message)
            case CopiedIn():
                self.loads.copied_in(rank, message)
            case PartsWritten():
                self.offload.parts_written(rank, message)
            case PartsRead():
                self.loads.parts_read(rank, message)

    def store_event(self, message: StoreEvent) -> None:
        """Storage has something to say. Raises ProtocolError for what it was not asked."""
        match message:
            case StoreFound():
                self._asks.found(message)
            case StorePublished():
                self.offload.published(message)
            case StoreWorks():
                self.offload.store_works(message)

    def held(self) -> Counter[tuple[int, int]]:
        """Pages of the pool that copies read or write, by group and page: how often each is held for that."""
        held = self.offload.held()
        held.update(self.loads.held())
        return held

    def take_events(self) -> list[PublishKv]:
        """What has changed in these tiers since this was last asked."""
        manager = self.offload.manager
        news = ((Tier.HOST, manager.host.take_events()), (Tier.STORAGE, manager.stored.take_events()))
        return [PublishKv(events, tier) for tier, events in news if events.stored or events.removed]

    def snapshot(self, tier: Tier) -> KvEvents:
        """Everything that is known to be in one of them."""
        manager = self.offload.manager
        return manager.host.snapshot() if tier is Tier.HOST else manager.stored.snapshot()

    def load_costs(self) -> LoadCosts:
        """What bringing KV back took lately."""
        return self.loads.costs()

    def host_memory(self) -> HostMemory:
        """In large pages of each rank's pool."""
        host = self.offload.host
        return HostMemory(host.filled_large, host.num_large, host.num_large * host.layout.large_bytes)

    def dump(self) -> dict[str, object]:
        """For a person."""
        return {"offload": self.offload.dump(), "loads": self.loads.dump()}

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        self.offload.check_integrity(self.loads.held_on_host())
        self.loads.check_integrity()
