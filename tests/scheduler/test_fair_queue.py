"""The queue of tenants against brute force, and passes in which not everything can go."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Container
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.scheduler import fairness
from disagg.scheduler.fairness import MAX_OVERTAKEN, FairQueue
from tests.scheduler.test_fairness import COSTS, MOST, Item

# ---- against brute force


class Brute:
    """The same queue, by looking at everything each time. Items are [name, priority, cost, times]."""

    MAX_OVERTAKEN = 3

    def __init__(self) -> None:
        self.items: dict[str, list[list[Any]]] = {}  # by tenant, as they came
        self.tags: dict[str, float] = {}
        self.overtaken: dict[str, int] = {}
        self.ended: dict[str, float] = {}
        self.now = 0.0
        self.since: dict[str, int] = {}
        self.arrivals = 0

    def append(self, tenant: str, name: str, cost: float, priority: int, times: int) -> None:
        if tenant not in self.items:
            self.items[tenant], self.overtaken[tenant] = [], 0
            self.tags[tenant] = max(self.now, self.ended.pop(tenant, 0.0))
            self.since[tenant] = self.arrivals
        self.arrivals += 1
        self.items[tenant].append([name, priority, cost, times])

    def first_of(self, tenant: str) -> list[Any]:
        items = self.items[tenant]
        return items[0] if self.overtaken[tenant] >= self.MAX_OVERTAKEN else min(items, key=lambda item: item[1])

    def take(self) -> str:
        tenant = min(self.items, key=lambda t: (self.tags[t], self.since[t]))
        item = self.first_of(tenant)
        self.now = max(self.now + item[2] / len(self.items), self.tags[tenant])
        self.tags[tenant] += item[2]
        self.overtaken[tenant] = 0 if item is self.items[tenant][0] else self.overtaken[tenant] + 1
        item[3] -= 1
        if not item[3]:
            self.remove(tenant, item)
        return str(item[0])

    def remove(self, tenant: str, item: list[Any]) -> None:
        if item is self.items[tenant][0]:
            self.overtaken[tenant] = 0
        self.items[tenant].remove(item)
        if not self.items[tenant]:
            del self.items[tenant], self.overtaken[tenant]
            tag = self.tags.pop(tenant)
            if tag > self.now:
                self.ended[tenant] = tag
            if not self.items:
                self.now = max(self.now, *self.ended.values(), 0.0)
                self.ended = {}

    def order(self) -> list[str]:
        """Each once: an iteration gives again only what has been taken."""
        rest, order = copy.deepcopy(self), []
        for items in rest.items.values():
            for item in items:
                item[3] = 1
        while rest.items:
            order.append(rest.take())
        return order


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_queue_does_what_looking_at_everything_does(data: Any) -> None:
    """With turns of those that have waited longest which come sooner than in what is shipped."""
    with mock.patch.object(fairness, "MAX_OVERTAKEN", Brute.MAX_OVERTAKEN):
        compare(data)


def compare(data: Any) -> None:
    queue, brute = FairQueue[str](), Brute()
    urgent = data.draw(st.integers(0, 3))  # of 4 that come: a stream of them, so that the oldest one's turn comes
    for number in range(data.draw(st.integers(1, 120))):
        does = data.draw(st.integers(0, 9))
        if does < 5 or not brute.items:
            tenant = data.draw(st.sampled_from("abc"))
            priority = -1 if data.draw(st.integers(0, 3)) < urgent else data.draw(st.integers(0, 2))
            cost, times = float(data.draw(st.integers(1, 8))), data.draw(st.integers(1, 2))
            brute.append(tenant, name := f"{tenant}{number}", cost, priority, times)
            queue.append(tenant, name, cost, priority, times=times)
        elif does < 8:
            first = next(iter(queue) if does < 7 else queue.a_pass())
            queue.take(first)
            assert first == brute.take()
        else:
            tenant = data.draw(st.sampled_from(sorted(brute.items)))
            item = data.draw(st.sampled_from(brute.items[tenant]))
            queue.remove(next(each for each in queue if each == item[0]))
            brute.remove(tenant, item)
        assert list(queue) == brute.order()
        assert {tenant: queue.count(tenant) for tenant in queue.tenants} == {t: len(i) for t, i in brute.items.items()}


# ---- what cannot go when its turn has come


def served(queue: FairQueue[Item], blocked: Container[Item], most_blocked: int = 1 << 30) -> Item:
    """Whoever can go first. most_blocked: of a tenant, that are asked."""
    asked = Counter[str]()
    for item in queue.a_pass(lambda tenant: asked[tenant] < most_blocked):
        if item not in blocked:
            queue.take(item)
            return item
        queue.passed_over(item)
        asked[item.tenant] += 1
    raise AssertionError("nobody can go")


@pytest.mark.parametrize("blocked", [0, 1, 2, 17, 100])
def test_who_could_not_go_has_no_credit_for_what_comes_behind_it(blocked: int) -> None:
    """As a request whose further choices have no slot: what others were served meanwhile is not its tenant's due."""
    queue: FairQueue[Item] = FairQueue()
    for _ in range(1000):
        queue.append("b", Item("b", 5.0), 5.0)
    held = [Item("a", 1.0) for _ in range(blocked)]
    for item in held:
        queue.append("a", item, 1.0)
    for _ in range(400):
        served(queue, held, most_blocked=16)
    for _ in range(100):
        queue.append("a", Item("a", 5.0), 5.0, priority=-1)
    order = "".join(served(queue, held).tenant for _ in range(100))
    assert 45 <= order.count("a") <= 55 and "aaaa" not in order


@pytest.mark.parametrize("blocked", [0, 1, 200])
def test_what_comes_behind_one_that_cannot_go_is_asked_as_if_that_were_not_there(blocked: int) -> None:
    """Others have a backlog, and each time one goes."""
    queue: FairQueue[Item] = FairQueue()
    for tenant in "bcde" * 100:
        queue.append(tenant, Item(tenant, 5.0), 5.0)
    held = [Item("a", 1000.0) for _ in range(blocked)]
    for item in [*held, short := Item("a", 1.0)]:
        queue.append("a", item, item.cost)
    assert short in [served(queue, held) for _ in range(6)]


@given(costs=st.lists(COSTS, min_size=2, max_size=5), blocked=st.integers(0, 4), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_who_has_some_that_cannot_go_is_served_like_all_others(costs: list[float], blocked: int, data: Any) -> None:
    queue: FairQueue[Item] = FairQueue()
    held = [Item(str(data.draw(st.integers(0, len(costs) - 1))), MOST) for _ in range(blocked)]
    for item in held:
        queue.append(item.tenant, item, item.cost)
    for tenant, cost in enumerate(costs):
        for _ in range(3):
            queue.append(str(tenant), Item(str(tenant), cost), cost)
    had = dict.fromkeys(map(str, range(len(costs))), 0.0)
    for _ in range(200):
        item = served(queue, held)
        had[item.tenant] += item.cost
        queue.append(item.tenant, Item(item.tenant, item.cost), item.cost)
        assert max(had.values()) - min(had.values()) <= 2 * max(costs)


@pytest.mark.parametrize("blocked", [0, 1, 5])
def test_who_has_waited_longest_of_those_that_can_go_comes_through_a_stream_of_urgent_ones(blocked: int) -> None:
    queue: FairQueue[Item] = FairQueue()
    held = [Item("a", 1.0) for _ in range(blocked)]
    for item in [*held, low := Item("a", 1.0)]:
        queue.append("a", item, 1.0)
    urgent = 0
    while low in queue:
        queue.append("a", Item("a", 1.0), 1.0, priority=-1)
        served(queue, held)
        urgent += 1
        assert urgent <= MAX_OVERTAKEN + 2
    rest = list(held)
    held.clear()
    for _ in range((MAX_OVERTAKEN + 2) * (blocked + 1)):
        queue.append("a", Item("a", 1.0), 1.0, priority=-1)
        gone = served(queue, held)
        rest = [item for item in rest if item is not gone]
    assert not rest, "each in its turn, once it can go"


def test_what_is_appended_while_a_pass_goes_on_is_given_or_not_and_nothing_else_is_lost() -> None:
    queue: FairQueue[Item] = FairQueue()
    before = [Item("a", 1.0) for _ in range(3)]
    for item in before:
        queue.append("a", item, 1.0)
    given = []
    for item in queue.a_pass():
        given.append(item)
        queue.passed_over(item)
        if len(given) < 50:
            queue.append("a", Item("a", 1.0), 1.0, priority=-len(given))
    assert set(before) <= set(given)


def test_finding_who_is_next_asks_nobody_else() -> None:
    queue: FairQueue[Item] = FairQueue()
    for number in range(100):
        queue.append(f"tenant {number}", Item("", 1.0), 1.0)
    asked: list[str] = []
    next(queue.a_pass(lambda tenant: not asked.append(tenant)))  # type: ignore[func-returns-value]
    assert asked == ["tenant 0"]
