"""Turns among tenants, against brute force and by their promises."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.scheduler.fairness import MAX_OVERTAKEN, MOST_GO_FIRST, PRIORITY_TOKENS, FairQueue, Shares, prompt_turn

TENANTS = st.sampled_from("abcdef")
MOST = 20.0  # the largest cost
COSTS = st.floats(1.0, MOST)


class Item:
    def __init__(self, tenant: str, cost: float) -> None:
        self.tenant, self.cost = tenant, cost

    def __repr__(self) -> str:
        return f"{self.tenant}:{self.cost:g}"


def taken(queue: FairQueue[Item]) -> Item:
    item = next(iter(queue))
    queue.take(item)
    return item


class QueueMachine(RuleBasedStateMachine):
    """Whatever comes, goes and is served: nothing is lost, each tenant's stay in order, and nobody waits without end."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue()
        self.model: dict[str, deque[Item]] = {}
        self.waited: dict[str, float] = {}  # by tenant that waits: what others were served since it last was

    @rule(tenant=TENANTS, cost=COSTS)
    def comes(self, tenant: str, cost: float) -> None:
        item = Item(tenant, cost)
        self.queue.append(tenant, item, cost)
        self.model.setdefault(tenant, deque()).append(item)
        self.waited.setdefault(tenant, 0.0)

    @precondition(lambda self: len(self.queue) > 0)
    @rule()
    def is_served(self) -> None:
        item = taken(self.queue)
        assert self.model[item.tenant].popleft() is item, "a tenant's items keep their order"
        for tenant in self.waited:
            self.waited[tenant] += item.cost
        self._gone(item.tenant)

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def goes(self, data: Any) -> None:
        item = data.draw(st.sampled_from([each for items in self.model.values() for each in items]))
        self.queue.remove(item)
        assert item not in self.queue
        self.model[item.tenant].remove(item)
        if not self.model[item.tenant]:
            self._gone(item.tenant)

    def _gone(self, tenant: str) -> None:
        self.waited[tenant] = 0.0
        if not self.model[tenant]:
            del self.model[tenant], self.waited[tenant]

    @invariant()
    def who_waits_is_served_before_long(self) -> None:
        assert all(waited <= 2 * 6 * MOST for waited in self.waited.values()), self.waited

    @invariant()
    def it_holds_what_it_should(self) -> None:
        given = list(self.queue)
        assert len(given) == len(self.queue) == sum(map(len, self.model.values()))
        assert self.queue.num_tenants == len(self.model)
        for tenant, items in self.model.items():
            assert [item for item in given if item.tenant == tenant] == list(items)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)
TestQueueMachine = QueueMachine.TestCase


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(TENANTS, COSTS), min_size=1, max_size=60))
def test_an_iteration_is_the_order_of_service_while_nothing_comes(items: list[tuple[str, float]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    for tenant, cost in items:
        queue.append(tenant, Item(tenant, cost), cost)
    order = list(queue)
    assert [taken(queue) for _ in items] == order


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(TENANTS, COSTS, min_size=2))
def test_tenants_that_always_wait_are_served_alike(costs: dict[str, float]) -> None:
    queue: FairQueue[Item] = FairQueue()
    for tenant, cost in costs.items():
        for _ in range(400):
            queue.append(tenant, Item(tenant, cost), cost)
    served = dict.fromkeys(costs, 0.0)
    for _ in range(300):
        item = taken(queue)
        served[item.tenant] += item.cost
        assert max(served.values()) - min(served.values()) <= 2 * max(costs.values())


@given(st.lists(st.tuples(TENANTS, COSTS, st.integers(1, 4)), min_size=1, max_size=12), st.integers(0, 6))
def test_an_item_that_is_served_several_times_is_as_many_in_a_row(
    items: list[tuple[str, float, int]], at_once: int
) -> None:
    """at_once: how many are served in one iteration, before the next one begins."""
    whole, apart = FairQueue[Item](), FairQueue[Item]()
    for tenant, cost, times in items:
        whole.append(tenant, Item(tenant, cost), cost, times=times)
        for _ in range(times):
            apart.append(tenant, Item(tenant, cost), cost)

    def served(queue: FairQueue[Item]) -> list[str]:
        said = []
        while len(queue):
            for count, item in enumerate(queue):
                if count > at_once:
                    break
                queue.take(item)
                said.append(str(item))
        return said

    assert served(whole) == served(apart)


def test_an_item_that_could_not_be_served_is_given_once_and_may_want_less() -> None:
    queue: FairQueue[Item] = FairQueue()
    often, once = Item("a", 1.0), Item("a", 1.0)
    queue.append("a", often, 1.0, times=3)
    queue.append("a", once, 1.0)
    assert list(queue) == [often, once]
    queue.fewer(often)
    assert [taken(queue) for _ in range(3)] == [often, often, once] and not len(queue)


def test_a_thousand_of_one_do_not_stand_before_one_of_another() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(1000):
        queue.append("a", Item("a", 1.0), 1.0)
    for _ in range(100):
        taken(queue)
    one = Item("b", 1.0)
    queue.append("b", one, 1.0)
    assert one in [taken(queue), taken(queue)]


def test_new_tenants_without_end_do_not_keep_another_waiting_for_ever() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(10):
        queue.append("a", Item("a", 1.0), 1.0)
    backlog = deque(f"new {number}" for number in range(5))
    served = []
    for number in range(5, 400):
        queue.append(backlog[0], Item(backlog[0], 1.0), 1.0)
        backlog.append(f"new {number}")
        backlog.popleft()
        served.append(taken(queue).tenant)
    assert served.count("a") == 10


def test_who_asked_for_nothing_has_no_credit_and_who_was_served_no_debt_when_nobody_waits() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(100):
        queue.append("a", Item("a", 5.0), 5.0)
        taken(queue)
    order = [Item("b", 1.0), Item("a", 1.0), Item("b", 1.0), Item("a", 1.0)]
    for item in order:
        queue.append(item.tenant, item, item.cost)
    assert [taken(queue) for _ in order] == order


def test_what_goes_unserved_costs_nothing() -> None:
    queue: FairQueue[Item] = FairQueue()
    gone = [Item("a", 20.0) for _ in range(50)]
    for item in gone:
        queue.append("a", item, item.cost)
    queue.append("b", Item("b", 1.0), 1.0)
    for item in gone:
        queue.remove(item)
    queue.append("a", again := Item("a", 1.0), 1.0)
    assert again in [taken(queue), taken(queue)]


def test_a_full_queue_loses_the_youngest_of_whoever_has_most() -> None:
    queue: FairQueue[Item] = FairQueue()
    flood = [Item("a", 1.0) for _ in range(5)]
    for item in flood:
        queue.append("a", item, 1.0)
    assert queue.displaced_by("a") is None, "of its own, the newcomer"
    assert queue.displaced_by("b") is flood[-1]
    for _ in range(4):
        queue.append("b", Item("b", 1.0), 1.0)
    assert queue.displaced_by("b") is None, "it would have as many"
    assert FairQueue[Item]().displaced_by("a") is None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sets(TENANTS, min_size=1), min_size=1, max_size=100))
def test_shares_go_to_who_has_been_served_least(rounds: list[set[str]]) -> None:
    shares = Shares()
    waited: dict[str, int] = {}
    for tenants in rounds:
        order = shares.order(sorted(tenants))
        assert sorted(order) == sorted(tenants)
        shares.charge(order[0], 1.0)
        waited = {tenant: waited.get(tenant, 0) + 1 for tenant in tenants}
        waited[order[0]] = 0
        assert max(waited.values()) <= 6, "of six tenants each is served in every six steps"


@settings(max_examples=50, deadline=None, derandomize=True)
@given(beside=st.integers(1, 6), again=st.booleans(), costs=st.lists(st.floats(1, 1024), min_size=1, max_size=5))
def test_tenants_that_come_without_end_for_one_part_each_keep_nobody_from_the_second(
    beside: int, again: bool, costs: list[float]
) -> None:
    """again: those that come have been there before."""
    shares, served = Shares(), 0.0
    shares.order(["a"])
    shares.charge("a", costs[0])
    names, cost_of = itertools.count(), itertools.cycle(costs)
    others = [f"new {next(names)}" for _ in range(beside)]
    while (first := shares.order([*others, "a"])[0]) != "a":
        cost = next(cost_of)
        shares.charge(first, cost)
        served += cost
        others.remove(first)
        others.append(f"new {next(names) % (2 * beside) if again else next(names)}")
        assert served <= (beside + 2) * (costs[0] + max(costs)) * 2, "one after the other goes first"


def test_who_was_served_while_others_were_there_has_that_debt_when_it_is_back_and_none_once_all_have_gone() -> None:
    shares = Shares()
    assert shares.order(["a", "b"]) == ["a", "b"]
    shares.charge("a", 10.0)
    assert shares.order(["b"]) == ["b"]
    assert shares.order(["a", "b"]) == ["b", "a"]
    assert shares.order([]) == [] and shares.order(["a", "b"]) == ["a", "b"]


# ---- priorities


def test_the_more_urgent_go_first_among_their_tenants_own() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("low", 5), ("usual", 0), ("usual too", 0), ("urgent", -1)):
        queue.append("a", name, 1.0, priority)
    assert list(queue) == ["urgent", "usual", "usual too", "low"]


def test_urgency_puts_no_tenant_before_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.append("a", f"a{number}", 1.0)
        queue.append("b", f"b{number}", 1.0, priority=-1000)
    assert [name[0] for name in queue] == ["a", "b"] * 3


@given(priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=300), often=st.integers(1, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_nobody_is_overtaken_without_end(priorities: list[int], often: int) -> None:
    """However urgent what comes later is: who has waited longest lets so many go first and then no more."""
    queue: FairQueue[int] = FairQueue()
    numbers = itertools.count()
    waiting: list[int] = []
    overtaken = 0

    def serve() -> None:
        nonlocal overtaken
        first = next(iter(queue))
        queue.take(first)
        overtaken = 0 if first == waiting[0] else overtaken + 1
        assert overtaken <= MAX_OVERTAKEN
        waiting.remove(first)

    for priority in priorities:
        number = next(numbers)
        queue.append("a", number, 1.0, priority)
        waiting.append(number)
        if number % often == 0:
            serve()
    while waiting:
        serve()


@pytest.mark.parametrize(("backlog", "every"), [(1000, 1), (1000, 10), (100, 2)])
def test_an_urgent_one_goes_before_a_backlog_however_many_have_before_it(backlog: int, every: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(backlog):
        queue.append("a", f"low {number}", 1.0, priority=1000)
    for number in range(3 * MAX_OVERTAKEN):
        queue.append("a", urgent := f"urgent {number}", 1.0, priority=-1000)
        served = 0
        while urgent in queue:
            queue.take(next(iter(queue)))
            served += 1
        assert served <= 2, "one that had waited for 64 of them goes between"
        for _ in range(min(every - 1, len(queue))):
            queue.take(next(iter(queue)))


def test_one_that_is_least_urgent_comes_through_a_stream_of_urgent_ones() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.append("a", -1, 1.0, priority=1000)
    for number in range(200):
        queue.append("a", number, 1.0, priority=-1000)
        first = next(iter(queue))
        queue.take(first)
        if first == -1:
            break
    assert first == -1 and number == MAX_OVERTAKEN


PRIORITIES = st.integers(-1000, 1000)
TOKENS = st.integers(1, 1 << 17)


@given(one=PRIORITIES, other=PRIORITIES, place=TOKENS, remaining=TOKENS)
def test_each_step_of_priority_counts_as_much_wherever_it_is(one: int, other: int, place: int, remaining: int) -> None:
    """Of two that joined in one moment, as long as each other; and one that is a step more urgent may be so much longer."""
    turn = prompt_turn(place + remaining, one, place)
    assert (turn < prompt_turn(place + remaining, other, place)) == (one < other)
    longer = prompt_turn(place + remaining + PRIORITY_TOKENS, one - 1, place)
    assert longer == turn > prompt_turn(place + remaining + PRIORITY_TOKENS - 1, one - 1, place)


@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=30), least=st.integers(1, 50_000))
@settings(deadline=None)
def test_the_least_urgent_prompt_lets_no_more_than_so_many_tokens_go_first(lengths: list[int], least: int) -> None:
    """However urgent those are that come without end."""
    now = 0
    for tokens in itertools.cycle(lengths):
        if prompt_turn(least, 1000, now) < prompt_turn(now + tokens, -1000, now):
            break
        now += tokens
    assert MOST_GO_FIRST <= now - least < MOST_GO_FIRST + max(lengths)
