"""Whose turn it is among tenants: a queue in which each tenant's items keep their order and no tenant stands before another.

A *tenant* is whoever a router says a request is of (see `router/tenants`). Every item has a cost; the tenant that has been
served least goes next, and one that comes anew begins where the others are, neither with a debt nor with credit for the
time when it asked for nothing:

    waiting                      served in this order (equal costs)
    a: a1 a2 a3 a4 ...           a1  a2  b1  a3  c1  b2  a4 ...
    b: b1 b2        came when a1 was served
    c: c1           came when b1 was served

This is start-time fair queueing: the tag of a tenant's first item is where the tenant's last one ended, or the virtual
time if that is later; the least tag is served. The virtual time goes on with each item served by its cost, divided by the
tenants that wait, so a tag is reached after a bounded amount of work, however many tenants come after it.

An item may be served several times in a row (`times`): it keeps its place until the last one.

Among its own items a tenant may say which are more urgent (*priority*: lower goes first). An item lets so many that are go
ahead of it, and then no more (MAX_OVERTAKEN), so that none starves.

Pure; knows items, tenants, costs and priorities, nothing of time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Generic, TypeVar

from disagg.types.bounded import forget_oldest

MAX_OVERTAKEN = 64  # items that came later and are more urgent, which go before one
PRIORITY_TOKENS = 1024  # that a prompt lets others of its tenant go first, for each step of priority
MOST_GO_FIRST = 2 * MAX_OVERTAKEN * PRIORITY_TOKENS  # of tokens, in all, however many steps lie between
MAX_REMEMBERED = 4096  # tenants that wait for nothing and have been served beyond the virtual time

Item = TypeVar("Item")


class _VirtualTime:
    """How far those who take turns are, by cost: it goes on with what is served, divided by those among whom, and is never
    behind the least of them. Remembers, within a bound, who has left and is ahead of it.
    """

    __slots__ = ("_ended", "_now")

    def __init__(self) -> None:
        self._now = 0.0
        self._ended: OrderedDict[str, float] = OrderedDict()

    def begins(self, tenant: str) -> float:
        """Where one that comes begins: now, or where it ended if that is later."""
        return max(self._now, self._ended.pop(tenant, 0.0))

    def serve(self, cost: float, among: int, least: float) -> None:
        """least: where they were, at the least, before this."""
        self._now = max(self._now + cost / among, least)

    def leaves(self, tenant: str, at: float) -> None:
        if at > self._now:
            self._ended[tenant] = at
            forget_oldest(self._ended, MAX_REMEMBERED)

    def nobody_is_left(self) -> None:
        """So nobody is behind."""
        self._now = max(self._now, *self._ended.values(), 0.0)
        self._ended.clear()


class _Waiting(Generic[Item]):
    __slots__ = ("arrival", "cost", "item", "overtaken", "priority", "tenant", "times")

    def __init__(self, arrival: int, cost: float, item: Item, priority: int, times: int, tenant: str) -> None:
        self.arrival = arrival
        self.cost = cost  # of each time
        self.item = item
        self.priority = priority
        self.times = times
        self.tenant = tenant
        self.overtaken = 0


class _Tenant(Generic[Item]):
    """A tenant that waits. tag: of its first item."""

    __slots__ = ("items", "tag")

    def __init__(self, tag: float) -> None:
        self.tag = tag
        self.items: deque[_Waiting[Item]] = deque()


class FairQueue(Generic[Item]):
    """See the module. Items are told apart by identity; an iteration gives those that are next, best first.

    Appending and taking what is next cost O(log tenants), removing another item O(items of its tenant).
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._time = _VirtualTime()
        self._arrivals = 0
        self._of: dict[int, _Waiting[Item]] = {}  # by the id of an item

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, item: Item) -> bool:
        return id(item) in self._of

    def count(self, tenant: str) -> int:
        """Its items."""
        waiting = self._tenants.get(tenant)
        return 0 if waiting is None else len(waiting.items)

    @property
    def tenants(self) -> Set[str]:
        """That wait for something."""
        return self._tenants.keys()

    @property
    def num_tenants(self) -> int:
        """That wait for something."""
        return len(self._tenants)

    def append(self, tenant: str, item: Item, cost: float, priority: int = 0, *, times: int = 1) -> None:
        """It is the last of its tenant, but for those that are less urgent. times: that it is to be served, for so much each."""
        assert cost > 0 and times > 0
        assert id(item) not in self._of, "an item waits once"
        waiting = self._tenants.get(tenant)
        if waiting is None:
            waiting = self._tenants[tenant] = _Tenant(self._time.begins(tenant))
        items = waiting.items
        at = len(items)
        while at and items[at - 1].priority > priority and items[at - 1].overtaken < MAX_OVERTAKEN:
            at -= 1
            items[at].overtaken += 1
        self._of[id(item)] = entry = _Waiting(self._arrivals, cost, item, priority, times, tenant)
        items.insert(at, entry)
        self._arrivals += 1

    def take(self, item: Item, cost: float | None = None) -> None:
        """It is served: its tenant is charged what it was said to cost, or this."""
        entry = self._of[id(item)]
        waiting = self._tenants[entry.tenant]
        cost = entry.cost if cost is None else cost
        self._time.serve(cost, len(self._tenants), waiting.tag)
        waiting.tag += cost
        self.fewer(item)

    def fewer(self, item: Item) -> None:
        """It wants to be served one time fewer, which costs nothing."""
        entry = self._of[id(item)]
        entry.times -= 1
        if not entry.times:
            self.remove(item)

    def remove(self, item: Item) -> None:
        """It does not want to be served any more, and costs nothing."""
        entry = self._of[id(item)]
        waiting = self._tenants[entry.tenant]
        self._remove(waiting, item)
        self._leave_if_empty(entry.tenant, waiting)

    def discard(self, item: Item) -> None:
        """Remove it if it waits."""
        if id(item) in self._of:
            self.remove(item)

    def __iter__(self) -> Iterator[Item]:
        """In the order in which they would be served if nothing came. Of what waits, only items that have been given may be
        taken or removed meanwhile; one that was taken, and still waits, is given again in its turn.
        """
        return self.of_those(lambda tenant: True)

    def of_those(self, may_go: Callable[[str], bool]) -> Iterator[Item]:
        """The same, but of a tenant only as long as it may go, which is asked before each of its items."""
        heap = [(waiting.tag, waiting.items[0].arrival, tenant) for tenant, waiting in self._tenants.items()]
        heapq.heapify(heap)
        rests: dict[str, deque[_Waiting[Item]]] = {}
        while heap:
            tag, _, tenant = heap[0]
            if not may_go(tenant):
                heapq.heappop(heap)
                continue
            rest = rests.get(tenant)
            if rest is None:
                rest = rests[tenant] = deque(self._tenants[tenant].items)
            first, times = rest[0], rest[0].times
            yield first.item
            if not 0 < first.times < times:
                rest.popleft()
            if rest:
                heapq.heapreplace(heap, (tag + first.cost, rest[0].arrival, tenant))
            else:
                heapq.heappop(heap)

    def displaced_by(self, tenant: str, may_go: Callable[[Item], bool] | None = None) -> Item | None:
        """Who goes when the queue is full and one more of this tenant comes: the last of whoever has the most there, or
        None (the newcomer itself) if that tenant would then have fewer than this one. may_go: items that count; None: all,
        which takes no longer the more there are.
        """
        if may_go is None:
            counts = {name: len(each.items) for name, each in self._tenants.items()}
        else:
            counts = {name: sum(may_go(entry.item) for entry in each.items) for name, each in self._tenants.items()}
        name, most = max(counts.items(), key=lambda each: each[1], default=("", 0))
        if most <= counts.get(tenant, 0) + 1:
            return None
        return next(e.item for e in reversed(self._tenants[name].items) if may_go is None or may_go(e.item))

    def _remove(self, waiting: _Tenant[Item], item: Item) -> None:
        del self._of[id(item)]
        items = waiting.items
        if items[0].item is item:
            items.popleft()
        elif items[-1].item is item:
            items.pop()
        else:
            del items[next(index for index, each in enumerate(items) if each.item is item)]

    def _leave_if_empty(self, tenant: str, waiting: _Tenant[Item]) -> None:
        if waiting.items:
            return
        del self._tenants[tenant]
        self._time.leaves(tenant, waiting.tag)
        if not self._tenants:
            self._time.nobody_is_left()


def prompt_turn(place: int, remaining: int, priority: int, now: int) -> tuple[bool, int]:
    """Sorts prompts of one tenant that are being computed, in tokens: of which least is left goes first, but for one that has let
    so many tokens of others go first as are left of it, and PRIORITY_TOKENS for each step of priority. Who has let
    MOST_GO_FIRST of them go, too, stands before all who have not, so that none starves, however urgent others are.

    place: tokens of prompts that steps had had when it joined; now: that they have had.
    """
    turn = place + remaining
    aged = now - turn >= MOST_GO_FIRST
    return not aged, turn if aged else turn + PRIORITY_TOKENS * priority


class Shares:
    """How much each tenant at work has been served, for work that goes on in small parts.

    `order` gives the tenants, least served first. One that comes begins as in a FairQueue, so whoever is there is reached after
    a bounded amount of work, however many others come and go.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._time = _VirtualTime()

    def order(self, tenants: Sequence[str]) -> list[str]:
        """Each of them once, least served first, else in their order. Others are at work no more."""
        here = dict.fromkeys(tenants)
        for tenant, served in self._served.items():
            if tenant not in here:
                self._time.leaves(tenant, served)
        if not here:
            self._time.nobody_is_left()
        self._served = {
            tenant: self._served[tenant] if tenant in self._served else self._time.begins(tenant) for tenant in here
        }
        return sorted(self._served, key=self._served.__getitem__)

    def charge(self, tenant: str, cost: float) -> None:
        self._time.serve(cost, len(self._served), min(self._served.values()))
        self._served[tenant] += cost
