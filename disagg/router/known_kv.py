"""What a router knows of the KV that one server has, by tier.

What a server says of its prefix cache and its host is its own. What it says of storage holds for all that store at the same place
(`ServerHello.storage`): so it is kept once for them, and a server that has just come up has it.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from disagg.messages.legs import Tier
from disagg.router.view import CachedPages
from disagg.wire.server import KvUpdate

Stores = WeakValueDictionary[str, CachedPages]  # by ServerHello.storage, as long as a server of it is there


class KnownKv:
    """Of one server."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self.cached = CachedPages()
        self.on_host = CachedPages()
        self.stored = CachedPages()

    def stores_at(self, storage: str) -> None:
        """It has said where it stores KV; empty: nowhere."""
        self.stored = self._stores.setdefault(storage, CachedPages()) if storage else CachedPages()

    def apply(self, update: KvUpdate) -> None:
        """It has said something of a tier. What is in storage others may have stored: that is never void at once."""
        if update.tier is Tier.STORAGE:
            self.stored.apply(update.events)
        else:
            pages = self.cached if update.tier is Tier.GPU else self.on_host
            pages.apply(update.events, reset=update.reset)

    def clear(self) -> None:
        """Its workers are others now: what they had is gone."""
        self.cached.clear()
        self.on_host.clear()
