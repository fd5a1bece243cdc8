"""A server's side of offload that outlives its workers: the store, what it has done, and a keeper for each incarnation.

With `storage.budget_bytes` the store is kept to it. Without `offload.enabled` or without `storage.url` there is no store, and
nothing of obstore is imported.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from disagg.config.tree import Config
from disagg.engine.facts import EngineFacts
from disagg.messages.legs import StorageState, Tier
from disagg.messages.tiers import PartsWritten, TierCommand
from disagg.offload.instructions import StoreEvent
from disagg.server.tier_sums import WAYS, TierSums
from disagg.types.errors import ConfigError

if TYPE_CHECKING:
    from disagg.offload.store import ObjectStore
    from disagg.server.store_budget import StoreBudget
    from disagg.server.store_keeper import StoreKeeper


def open_storage(config: Config) -> ObjectStore | None:
    """None: there is none to be used. Raises ConfigError for what no call could succeed with; one that is merely down is none
    of it. Blocks."""
    if not (config.offload.enabled and config.storage.url):
        return None
    try:
        from disagg.offload.store import open_store
    except ImportError as error:
        raise ConfigError(f"storage needs what `pip install disagg[storage]` installs: {error}") from error
    return open_store(config.storage.url, config.storage.options)


def storage_name(config: Config) -> str:
    """Servers of which this is the same find what each other has stored; empty without storage.

    A directory is a host's own, as far as anybody can tell from its name.
    """
    if not (config.offload.enabled and config.storage.url):
        return ""
    url = config.storage.url
    where = [url, *(f"{key}={value}" for key, value in sorted(config.storage.options.items()) if "endpoint" in key)]
    if url.startswith("file:"):
        where.append(socket.gethostname())
    return hashlib.sha256("\n".join(where).encode()).hexdigest()[:32]


class Offloading:
    """`open` once, then `up` and `down` with every incarnation."""

    def __init__(self, config: Config) -> None:
        self.sums = TierSums()
        self._config = config
        self._store: ObjectStore | None = None
        self._keeper: StoreKeeper | None = None
        self._budget: StoreBudget | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """That this server may have KV in."""
        if not self._config.offload.enabled:
            return (Tier.GPU,)
        return (Tier.GPU, Tier.HOST, Tier.STORAGE) if self._config.storage.url else (Tier.GPU, Tier.HOST)

    def open(self) -> None:
        """See open_storage."""
        self._store = open_storage(self._config)
        if self._store is not None and self._config.storage.budget_bytes:
            from disagg.server.store_budget import StoreBudget

            written = WAYS[PartsWritten]
            self._budget = StoreBudget(self._store, self._config.storage, lambda: self.sums.nbytes[written])

    def up(
        self,
        facts: EngineFacts,
        send: Callable[[int, Sequence[TierCommand]], None],
        tell: Callable[[StoreEvent], None],
    ) -> StoreKeeper | None:
        """Workers are up, whose engine has storage if this is not None."""
        if self._store is None:
            return None
        from disagg.server.keeper_facts import KeeperFacts
        from disagg.server.store_keeper import StoreKeeper

        kept = KeeperFacts(
            facts.memory.scope, facts.tp, facts.memory.layout.checkpoint_tokens, self._config.storage.compression
        )
        self._keeper = StoreKeeper(self._store, kept, send, tell, self.sums)
        return self._keeper

    async def down(self) -> None:
        """The workers are lost, or end."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.close()

    async def close(self) -> None:
        """The server ends."""
        await self.down()
        if self._budget is not None:
            await self._budget.close()

    def tick(self) -> None:
        if self._keeper is not None:
            self._keeper.tick()
        if self._budget is not None:
            self._budget.tick()

    @property
    def removed_bytes(self) -> int:
        """By this server, to keep storage to its budget."""
        return self._budget.removed_bytes if self._budget is not None else 0

    @property
    def idle(self) -> bool:
        """Nothing is being written to storage."""
        return self._keeper is None or self._keeper.idle

    @property
    def state(self) -> StorageState:
        if self._store is None:
            return StorageState.OFF
        works = self._keeper.works if self._keeper is not None else self._store.state == "ok"
        return StorageState.OK if works else StorageState.DEGRADED

    @property
    def failures(self) -> int:
        """Of this process's calls of the store, and of what ranks reported."""
        calls = self._store.breaker.failed_calls.values() if self._store is not None else ()
        return self.sums.failures + sum(calls)

    def describe(self) -> dict[str, object]:
        """For a person."""
        return {"store": self.state, **(self._keeper.describe() if self._keeper is not None else {})}
