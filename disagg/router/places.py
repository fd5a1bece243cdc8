"""Who waits for a place among the requests in flight, and whether one more may wait. Pure; the clock is an argument.

    arriving ──> waiting, tenants in turns ──> in flight, at most max_inflight ──> ended
                  at most max_queued, and as many more as there are places free for them

Whoever has many places leaves some to others: a tenant takes one more only while it has at most so many for each that would
stay free. The fewer are free, the fewer it may have, so tenants that want all they can get share, and there is always room
for another one:

    tenant_share = 0.9    one tenant    at most 9 for 1 that is free: 0.9 of all
                          two           9 : 9 : 1

The same holds for the queue as far as it is of requests whose text is being read, which cannot give way to others.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from disagg.scheduler.fairness import FairQueue
from disagg.types.errors import Overloaded
from disagg.types.sampling import SamplingParams

MAX_COST_TOKENS = 4096  # a request that asks for more costs its tenant no more
RATE_WINDOW_S = 30.0

Item = TypeVar("Item")


def queue_cost(prompt_tokens: int, params: SamplingParams) -> int:
    """What a request costs its tenant when it is dispatched: tokens that it may come to, as far as one says so. 0 is "as many as
    fit", and nobody comes to all of them.
    """
    asked = params.max_tokens or MAX_COST_TOKENS // 4
    return max(1, min(MAX_COST_TOKENS, prompt_tokens + params.n * asked))


def may_take(own: int, free: int, share: float) -> bool:
    """Whether a tenant that has `own` places takes one more of the free ones. share: of all places, what a tenant may have
    that is alone; with 1, no room is kept for others. Who has none takes the last one, too.
    """
    if free <= 0:
        return False
    return own == 0 or share >= 1 or own * (1 - share) < (free - 1) * share


class Places(Generic[Item]):
    """Of one router. tenant_share: see `may_take`."""

    def __init__(self, max_inflight: int, max_queued: int, tenant_share: float) -> None:
        self.waiting: FairQueue[Item] = FairQueue()
        self.inflight = 0
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._tenant_share = tenant_share
        self._of_tenant: Counter[str] = Counter()  # in flight
        self._arriving: Counter[str] = Counter()  # of each tenant, requests whose text is being read
        self._ended_s: deque[float] = deque(maxlen=256)

    @property
    def free(self) -> int:
        return self._max_inflight - self.inflight

    @property
    def arriving(self) -> int:
        """Requests whose text is being read."""
        return self._arriving.total()

    @contextlib.contextmanager
    def reading(self, tenant: str) -> Iterator[None]:
        """The text of one of its requests, which has a place in the queue meanwhile."""
        self._arriving[tenant] += 1
        try:
            yield
        finally:
            self._arriving[tenant] -= 1
            if not self._arriving[tenant]:
                del self._arriving[tenant]

    def may_take(self, tenant: str) -> bool:
        return may_take(self._of_tenant[tenant], self.free, self._tenant_share)

    def others(self, tenant: str) -> bool:
        """Whether anybody else is in flight or waits, if this one does."""
        return self.waiting.num_tenants > 1 or len(self._of_tenant) > (tenant in self._of_tenant)

    def next_ones(self, may_go: Callable[[str], bool]) -> Iterator[Item]:
        """Of those that wait, who may take a place, tenants in turns, if that tenant may go. What has been given may be taken
        meanwhile."""
        return self.waiting.a_pass(lambda tenant: self.may_take(tenant) and may_go(tenant))

    def take(self, tenant: str, item: Item) -> None:
        """It waits no more: it is in flight."""
        self.waiting.take(item)
        self.inflight += 1
        self._of_tenant[tenant] += 1

    def leave(self, tenant: str, now_s: float) -> None:
        """One that was in flight has ended."""
        self.inflight -= 1
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._ended_s.append(now_s)

    def check_room(self, tenant: str, served: bool, now_s: float) -> None:
        """Raises Overloaded if the queue is full, and this tenant has as much of it as any other. served: there are servers,
        so that whoever comes where places are free does not wait."""
        full = self._full(tenant, served, now_s)
        if full is not None and self.waiting.displaced_by(tenant) is None:
            raise full

    def check_reading(self, tenant: str, served: bool, now_s: float) -> None:
        """Raises Overloaded as `check_room`, and where so much is being read for this tenant that others would find no room."""
        self.check_room(tenant, served, now_s)
        free, own = self._most_taken(tenant, served) - self._taken, self._arriving[tenant]
        if free > 0 and not may_take(own, free, self._tenant_share):
            raise self._overloaded(f", and this client's {own} that are being read are its share", now_s)

    def make_room(self, tenant: str, served: bool, now_s: float) -> tuple[Item, Overloaded] | None:
        """For one more in a queue that may be full: the youngest of whoever has most there goes, for this reason. Raises as
        `check_room`."""
        full = self._full(tenant, served, now_s)
        if full is None:
            return None
        displaced = self.waiting.displaced_by(tenant)
        if displaced is None:
            raise full
        return displaced, full

    def _full(self, tenant: str, served: bool, now_s: float) -> Overloaded | None:
        if self._taken < self._most_taken(tenant, served):
            return None
        own = self._of_tenant[tenant]
        return self._overloaded(f", and this client's {own} are its share" if self.free > 0 and own else "", now_s)

    @property
    def _taken(self) -> int:
        return len(self.waiting) + self.arriving

    def _most_taken(self, tenant: str, served: bool) -> int:
        return self._max_queued + (max(0, self.free) if served and self.may_take(tenant) else 0)

    def _overloaded(self, at_share: str, now_s: float) -> Overloaded:
        return Overloaded(
            f"{self.inflight} requests are running and {self._taken} are waiting; "
            f"at most {self._max_inflight} and {self._max_queued} may{at_share}",
            self._retry_after_s(now_s),
        )

    def _retry_after_s(self, now_s: float) -> float:
        """About when a place in the queue will be free, by how fast requests ended lately."""
        lately = [ended_s for ended_s in self._ended_s if now_s - ended_s < RATE_WINDOW_S]
        if not lately:
            return 1.0
        return min(60.0, max(0.1, (now_s - lately[0]) / len(lately)))
