"""One sequence's KV on its way back: what `loads` notes of it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from disagg.offload.host import Placed


class Urgency(enum.Enum):
    """When who asks may begin."""

    AHEAD = "ahead"  # it is not its turn yet
    BY_TURN = "by turn"  # now, as those before it do not begin for reasons of their own
    FIRST = "first"  # before all others, so that it waits for room of none of them


class LoadState(enum.Enum):
    """What a load waits for."""

    ASKED = "asked"  # storage, what it has
    WAITING = "waiting"  # for another load (`waits_for`), for room (`for_room`), or for one of MOST_AT_ONCE places
    FETCHING = "fetching"  # from storage to the host
    LOADING = "loading"  # from the host to the GPU
    OVER = "over"


@dataclass(slots=True, eq=False)
class Load:
    """One sequence's. hashes: of its whole pages, as far as a hit may go. stored: by group, what storage has of them."""

    salt: str
    root: bytes
    hashes: tuple[bytes, ...]
    since_s: float  # from when on it is waited for
    large: int  # large pages that its sequence begins with, the cached ones with them
    urgency: Urgency
    state: LoadState = LoadState.WAITING
    waits_for: Load | None = None  # who brings some of the same, or holds the host
    # It waits for what others have brought to be used; once it has reserved, for pages of the pool.
    for_room: bool = False
    had_turn: bool = False  # since it was last asked ahead
    progress: int = 0  # of others, when it was last asked
    reserved: int = 0  # large pages: `large` from when it begins to bring something until its sequence begins
    ask: int = 0
    stored: tuple[frozenset[int], ...] = ()
    rounds: int = 1  # which load of this sequence it is
    looked_at: int = -1  # KvMemory.releases when it was last seen to be cached still
    slower: bool = False  # than to compute it
    tries: int = 0
    point: int = 0  # pages of the prefix that it brings
    gain: int = 0  # pages that need not be computed
    host: list[Placed] = field(default_factory=list)  # held there, also while it waits for pages of the pool
    fetched: list[Placed] = field(default_factory=list)  # of those, what comes from storage
    gpu: list[Placed] = field(default_factory=list)  # pages that it fills
    pinned: list[Placed] = field(default_factory=list)  # pages of the prefix that are on the GPU
    reported: set[int] = field(default_factory=set)  # ranks that have read their parts
    failed: bool = False
    given_up: bool = False  # nobody waits for it any more
    from_storage: set[int] = field(default_factory=set)  # pages of the sequence that came from there
    brought: Counter[str] = field(default_factory=Counter)  # tokens that are cached now, by tier: host, storage

    @property
    def waits_for_pool(self) -> bool:
        """All that it brings is on the host. Its sequence need not wait for it: it cannot begin either."""
        return self.for_room and bool(self.reserved)

    @property
    def under_way(self) -> bool:
        return self.state in (LoadState.FETCHING, LoadState.LOADING)
