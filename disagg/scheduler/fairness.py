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

Among its own items a tenant may say which are more urgent (*priority*: lower goes first). Once MAX_OVERTAKEN of them have
gone before the one that has waited longest, that one goes, so that none starves.

What is next may be unable to go (`passed_over`): then its tenant's others may, as if it were not there. While nothing of a
tenant can go, its tag goes on with the virtual time, so that it has neither credit for that time nor a debt.

Pure; knows items, tenants, costs and priorities, nothing of time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Generic, TypeVar

from disagg.types.bounded import forget_oldest

MAX_OVERTAKEN = 64  # items of its tenant that are more urgent, which go before the oldest one
PRIORITY_TOKENS = 1024  # that a prompt lets others of its tenant go first, for each step of priority
MOST_GO_FIRST = 2 * MAX_OVERTAKEN * PRIORITY_TOKENS  # of tokens, in all, however many steps lie between
MAX_REMEMBERED = 4096  # tenants that wait for nothing and have been served beyond the virtual time

Item = TypeVar("Item")
Place = tuple[float, int, str]  # of a tenant among those that wait: its tag, the arrival of its first item, its name


class _VirtualTime:
    """How far those who take turns are, by cost: it goes on with what is served, divided by those among whom, and is never
    behind the least of them. Remembers, within a bound, who has left and is ahead of it.
    """

    __slots__ = ("_ended", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._ended: OrderedDict[str, float] = OrderedDict()

    def begins(self, tenant: str) -> float:
        """Where one that comes begins: now, or where it ended if that is later."""
        return max(self.now, self._ended.pop(tenant, 0.0))

    def serve(self, cost: float, among: int, least: float) -> None:
        """least: where they were, at the least, before this."""
        self.now = max(self.now + cost / among, least)

    def leaves(self, tenant: str, at: float) -> None:
        if at > self.now:
            self._ended[tenant] = at
            forget_oldest(self._ended, MAX_REMEMBERED)

    def nobody_is_left(self) -> None:
        """So nobody is behind."""
        self.now = max(self.now, *self._ended.values(), 0.0)
        self._ended.clear()


class _Waiting(Generic[Item]):
    __slots__ = ("arrival", "cost", "item", "passed_over", "priority", "tenant", "times")

    def __init__(self, arrival: int, cost: float, item: Item, priority: int, times: int, tenant: str) -> None:
        self.arrival = arrival
        self.cost = cost  # of each time
        self.item = item
        self.priority = priority
        self.times = times
        self.tenant = tenant
        self.passed_over = -2  # in which pass it could not go last


class _Tenant(Generic[Item]):
    """A tenant that waits. tag: of its next item."""

    __slots__ = ("ages", "entries", "overtaken", "place", "stands", "stood", "tag", "urgent")

    def __init__(self, name: str, tag: float, since: int) -> None:
        self.tag = tag
        self.entries: dict[int, _Waiting[Item]] = {}  # by arrival
        self.ages: list[int] = []  # arrivals, the oldest first
        self.urgent: list[tuple[int, int]] = []  # priority and arrival, the most urgent first
        self.overtaken = 0  # how many have gone before the oldest one since it is that
        self.place: Place = (tag, since, name)  # where it stands in the queue
        self.stands: float | None = None  # the virtual time when its next item could not go, and none since that could
        self.stood: float | None = None  # the same, before the item that is being asked

    def add(self, entry: _Waiting[Item]) -> None:
        """The youngest one."""
        self.entries[entry.arrival] = entry
        self.ages.append(entry.arrival)
        insort(self.urgent, (entry.priority, entry.arrival))

    def remove(self, entry: _Waiting[Item]) -> None:
        del self.entries[entry.arrival]
        del self.urgent[bisect_left(self.urgent, (entry.priority, entry.arrival))]
        at = bisect_left(self.ages, entry.arrival)
        del self.ages[at]
        if at == 0:
            self.overtaken = 0

    def serve(self, entry: _Waiting[Item], last_pass: int) -> None:
        self.overtaken = 0 if entry.arrival == self.oldest(last_pass) else self.overtaken + 1

    def oldest(self, last_pass: int) -> int:
        """The arrival of the oldest one that could go, for what the last pass knows; of all, if none could."""
        could = (arrival for arrival in self.ages if self.entries[arrival].passed_over < last_pass)
        return next(could, self.ages[0])


class _Cursor(Generic[Item]):
    """Goes through what a tenant waits for, in the order of service, while what it has given may go."""

    __slots__ = ("_age", "_given", "_last_pass", "_of", "_oldest", "_overtaken", "_urgency")

    def __init__(self, of: _Tenant[Item], last_pass: int) -> None:
        """last_pass: what could not go in it, or since, is not waited for: it is given when its urgency says so."""
        self._of = of
        self._last_pass = last_pass
        self._overtaken = of.overtaken
        self._given: set[int] = set()  # arrivals
        self._age = self._oldest = -1  # up to `_age` there is none whose age counts
        self._urgency: tuple[float, int] = (-math.inf, -1)  # up to this, all have been given

    def next(self) -> _Waiting[Item] | None:
        """The same until it has gone on."""
        entries, ages, urgent = self._of.entries, self._of.ages, self._of.urgent
        at = bisect_right(ages, self._age)
        while at < len(ages) and (ages[at] in self._given or entries[ages[at]].passed_over >= self._last_pass):
            self._age = ages[at]
            at += 1
        self._oldest = ages[at] if at < len(ages) else -1
        if self._overtaken >= MAX_OVERTAKEN and self._oldest >= 0:
            return entries[self._oldest]
        at = bisect_right(urgent, self._urgency)
        while at < len(urgent) and urgent[at][1] in self._given:
            self._urgency = urgent[at]
            at += 1
        return entries[urgent[at][1]] if at < len(urgent) else None

    def go_on(self, entry: _Waiting[Item], *, again: bool, passed_over: bool) -> None:
        """Behind what `next` has given. again: it is to be served once more."""
        if not again:
            self._given.add(entry.arrival)
        if not passed_over:
            self._overtaken = 0 if entry.arrival == self._oldest else self._overtaken + 1


class FairQueue(Generic[Item]):
    """See the module. Items are told apart by identity; an iteration gives those that are next, best first.

    Finding what is next, appending and taking cost O(log items), and what moves places in a list.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._places: list[Place] = []  # of all tenants, who is next first
        self._time = _VirtualTime()
        self._arrivals = 0
        self._passes = 0
        self._asked: _Waiting[Item] | None = None  # that could not go when it was given last
        self._of: dict[int, _Waiting[Item]] = {}  # by the id of an item

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, item: Item) -> bool:
        return id(item) in self._of

    def count(self, tenant: str) -> int:
        """Its items."""
        waiting = self._tenants.get(tenant)
        return 0 if waiting is None else len(waiting.entries)

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
            waiting = self._tenants[tenant] = _Tenant(tenant, self._time.begins(tenant), self._arrivals)
        self._of[id(item)] = entry = _Waiting(self._arrivals, cost, item, priority, times, tenant)
        waiting.add(entry)
        self._stand(waiting)
        self._arrivals += 1

    def take(self, item: Item, cost: float | None = None) -> None:
        """It is served: its tenant is charged what it was said to cost, or this."""
        entry = self._of[id(item)]
        waiting = self._tenants[entry.tenant]
        cost = entry.cost if cost is None else cost
        self._time.serve(cost, len(self._tenants), waiting.tag)
        waiting.tag += cost
        waiting.serve(entry, self._passes - 1)
        waiting.stands = waiting.stood = None
        self._stand(waiting)
        self.fewer(item)

    def fewer(self, item: Item) -> None:
        """It wants to be served one time fewer, which costs nothing."""
        entry = self._of[id(item)]
        entry.times -= 1
        if not entry.times:
            self.remove(item)

    def remove(self, item: Item) -> None:
        """It does not want to be served any more, and costs nothing."""
        entry = self._of.pop(id(item))
        waiting = self._tenants[entry.tenant]
        waiting.remove(entry)
        self._stand(waiting)
        if waiting.entries:
            return
        del self._tenants[entry.tenant]
        self._time.leaves(entry.tenant, waiting.tag)
        if not self._tenants:
            self._time.nobody_is_left()

    def discard(self, item: Item) -> None:
        """Remove it if it waits."""
        if id(item) in self._of:
            self.remove(item)

    def passed_over(self, item: Item) -> None:
        """In a pass, when it has been given: it cannot go, and its tenant's others are asked as if it were not there."""
        entry = self._of.get(id(item))
        if entry is None:
            return
        entry.passed_over, self._asked = self._passes, entry
        waiting = self._tenants[entry.tenant]
        if waiting.stood is not None:
            waiting.tag += self._time.now - waiting.stood
            self._stand(waiting)
        waiting.stands = self._time.now

    def _stand(self, waiting: _Tenant[Item]) -> None:
        """Where its tag says, if it waits for anything."""
        at = bisect_left(self._places, waiting.place)
        if at < len(self._places) and self._places[at] == waiting.place:
            del self._places[at]
        if waiting.entries:
            waiting.place = (waiting.tag, *waiting.place[1:])
            insort(self._places, waiting.place)

    def __iter__(self) -> Iterator[Item]:
        """In the order in which they would be served if nothing came. Of what waits, only items that have been given may be
        taken or removed meanwhile; one that was taken, and still waits, is given again in its turn.
        """
        return (entry.item for entry in self._in_order(lambda tenant: True))

    def a_pass(self, may_go: Callable[[str], bool] = lambda tenant: True) -> Iterator[Item]:
        """The same, but of a tenant only as long as it may go, which is asked before each of its items; and each item that is
        given is taken or `passed_over`, or is the last one that is asked for.
        """
        self._passes += 1
        stopped: set[str] = set()  # tenants of which something could not go
        for entry in self._in_order(may_go):
            waiting = self._tenants[entry.tenant]
            waiting.stood = waiting.stands
            if entry.tenant in stopped:
                waiting.stands = None  # this one can, for all that is known
            yield entry.item
            if self._asked is entry:
                stopped.add(entry.tenant)

    def _in_order(self, may_go: Callable[[str], bool]) -> Iterator[_Waiting[Item]]:
        begun: dict[str, _Cursor[Item]] = {}
        again: list[Place] = []  # a heap: of those of which something was given, and more waits
        last: Place = (-math.inf, -1, "")  # up to here, all who wait have been asked
        while True:
            at = bisect_right(self._places, last)
            while at < len(self._places) and self._places[at][2] in begun:
                last = self._places[at]
                at += 1
            next_ones = [*again[:1], *self._places[at : at + 1]]
            if not next_ones:
                return
            tag, since, tenant = place = min(next_ones)
            if tenant in begun:
                heapq.heappop(again)
            else:
                last = place
            if not may_go(tenant):
                continue
            waiting = self._tenants.get(tenant)
            cursor = begun.get(tenant)
            if cursor is None:
                assert waiting is not None
                cursor = begun[tenant] = _Cursor(waiting, self._passes - 1)
            if waiting is None or (entry := cursor.next()) is None:
                continue
            times, before, self._asked = entry.times, waiting.tag, None
            yield entry
            passed_over = self._asked is entry
            cursor.go_on(entry, again=0 < entry.times < times, passed_over=passed_over)
            following = cursor.next()
            if following is not None:
                tag += waiting.tag - before if passed_over else entry.cost
                heapq.heappush(again, (tag, since, tenant))

    def displaced_by(self, tenant: str, may_go: Callable[[Item], bool] | None = None) -> Item | None:
        """Who goes when the queue is full and one more of this tenant comes: the last of whoever has the most there, or
        None (the newcomer itself) if that tenant would then have fewer than this one. may_go: items that count; None: all,
        which takes no longer the more there are.
        """
        if may_go is None:
            counts = {name: len(each.entries) for name, each in self._tenants.items()}
        else:
            counts = {
                name: sum(may_go(entry.item) for entry in each.entries.values()) for name, each in self._tenants.items()
            }
        name, most = max(counts.items(), key=lambda each: each[1], default=("", 0))
        if most <= counts.get(tenant, 0) + 1:
            return None
        last = self._tenants[name]
        items = (last.entries[arrival].item for _, arrival in reversed(last.urgent))
        return next(item for item in items if may_go is None or may_go(item))


def prompt_turn(turn: int, priority: int, now: int) -> tuple[bool, int]:
    """Sorts prompts of one tenant that are being computed, in tokens: of which least is left goes first, but for one that has let
    so many tokens of the others go first as are left of it, and PRIORITY_TOKENS for each step of priority. Who has let
    MOST_GO_FIRST of them go, too, stands before all who have not, so that none starves, however urgent others are.

    turn: tokens of the tenant's prompts that steps had had when it joined, and its own that they were to have from then on.
    now: that they have had. So turn - now is what is left of it, less what others have had since: its own tokens do not age it.
    """
    aged = now - turn >= MOST_GO_FIRST
    return not aged, turn if aged else turn + PRIORITY_TOKENS * priority


class Shares:
    """How much each tenant at work has been served, for work that goes on in small parts.

    `order` gives the tenants, least served first. One that comes begins as in a FairQueue, so whoever is there is reached after
    a bounded amount of work, however many others come and go.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._least = 0.0  # of them, when the order was given last
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
        order = sorted(self._served, key=self._served.__getitem__)
        self._least = self._served[order[0]] if order else 0.0
        return order

    def charge(self, tenant: str, cost: float) -> None:
        """Of one that the last order gave."""
        self._time.serve(cost, len(self._served), self._least)
        self._served[tenant] += cost
