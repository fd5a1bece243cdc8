"""Who gets a place among the requests in flight: all that a tenant wants, but what others need to get in."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.router.outstanding import (
    CALL_CHOICES,
    TENANT_CHOICES,
    Outstanding,
    Stage,
    call_may_go,
    tenant_may_go,
)
from disagg.router.places import Places, may_take
from disagg.router.view import Work
from disagg.types.errors import Overloaded

SHARES = st.floats(0.01, 1.0)


class Item:
    """One that waits; told apart by identity."""


def filled(places: Places[Item], tenants: dict[str, int]) -> dict[str, int]:
    """Each tenant asks for so many, in turns; what each has got."""
    for tenant, count in tenants.items():
        for _ in range(count):
            places.waiting.append(tenant, Item(), 1.0)
    taken = Counter(dict.fromkeys(tenants, 0))
    for item in places.next_ones(lambda tenant: True):
        tenant = places.waiting._of[id(item)].tenant
        places.take(tenant, item)
        taken[tenant] += 1
    return dict(taken)


@given(most=st.integers(1, 3000), share=SHARES)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_one_that_is_alone_has_its_share_and_never_all_of_several(most: int, share: float) -> None:
    own = 0
    while may_take(own, most - own, share):
        own += 1
    if share == 1.0:
        assert own == most
    else:
        assert own <= max(1, math.ceil(share * (most - 1) + 1e-9))
        assert own >= min(most, math.floor(share * (most - 1)))
        assert own < most or most == 1


@given(most=st.integers(2, 400), share=st.floats(0.01, 0.99), tenants=st.integers(1, 12))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_however_many_want_all_there_is_room_for_another_one_and_equals_get_the_same(
    most: int, share: float, tenants: int
) -> None:
    places: Places[Item] = Places(most, 0, share)
    taken = filled(places, {f"t{number}": most for number in range(tenants)})
    if tenants < most:
        assert places.free > 0 and places.may_take("another")
        assert max(taken.values()) - min(taken.values()) <= 1
    assert sum(taken.values()) == places.inflight <= most


def test_two_that_want_all_share_what_one_would_have() -> None:
    assert filled(Places(1024, 0, 0.9), {"a": 5000}) == {"a": 921}
    assert filled(Places(1024, 0, 0.9), {"a": 5000, "b": 5000}) == {"a": 485, "b": 485}
    assert filled(Places(1024, 0, 0.9), {"a": 5000, "b": 3}) == {"a": 919, "b": 3}
    assert filled(Places(1, 0, 0.9), {"a": 5}) == {"a": 1}
    assert filled(Places(5, 0, 1.0), {"a": 9}) == {"a": 5}


def test_who_is_at_its_share_may_queue_no_more_than_the_queue_and_another_still_comes_in() -> None:
    places: Places[Item] = Places(10, 3, 0.9)
    assert filled(places, {"a": 9 + 3}) == {"a": 9}
    with pytest.raises(Overloaded, match=r"9 requests are running and 3 are waiting.*this client's 9 are its share"):
        places.check_room("a", True, 0.0)
    assert places.make_room("b", True, 0.0) is None, "for whom a place is free nobody has to go"


class TakingAndLeaving(RuleBasedStateMachine):
    """Tenants come and go in any order; counts are those of a brute-force model."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Places[Item] = Places(9, 100, 0.8)
        self.inflight: list[str] = []

    @rule(tenant=st.sampled_from("abcd"), count=st.integers(1, 12))
    def come(self, tenant: str, count: int) -> None:
        for _ in range(count):
            self.places.waiting.append(tenant, Item(), 1.0)
        for item in self.places.next_ones(lambda tenant: True):
            of = self.places.waiting._of[id(item)].tenant
            assert self.places.free > 1 or of not in self.inflight, "the last place is for who has none"
            self.places.take(of, item)
            self.inflight.append(of)

    @precondition(lambda self: self.inflight)
    @rule(at=st.integers(0, 99))
    def leave(self, at: int) -> None:
        self.places.leave(self.inflight.pop(at % len(self.inflight)), 0.0)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.places.inflight == len(self.inflight) <= 9
        assert dict(self.places._of_tenant) == {of: self.inflight.count(of) for of in set(self.inflight)}


TestTakingAndLeaving = TakingAndLeaving.TestCase
TestTakingAndLeaving.settings = settings(derandomize=True, deadline=None, max_examples=50)


# ---- what is under way


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    servers=st.integers(0, 4),
    ends=st.lists(st.integers(0, 99), max_size=60),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_prompts_of_a_call_leave_room_on_each_prefill_server_and_all_get_their_turn(
    sizes: list[int], servers: int, ends: list[int]
) -> None:
    outstanding = Outstanding()
    waiting, running = list(sizes), []
    for end in [*ends, *[0] * len(sizes)]:
        while waiting and call_may_go(outstanding.of_call("c", Work.PREFILL), waiting[0], servers):
            account = outstanding.account("t", "c")
            account.begin(Stage("p", Work.PREFILL, 100, waiting[0]), Stage("d", Work.DECODE, waiting[0], waiting[0]))
            running.append((account, waiting.pop(0)))
        computing = outstanding.of_call("c", Work.PREFILL)
        assert computing == outstanding.of_tenant("t", Work.PREFILL) == sum(choices for _, choices in running)
        assert computing <= max(CALL_CHOICES * max(1, servers), max(sizes))
        assert outstanding.amount("p", Work.PREFILL) == 100 * len(running)
        if running:
            account, _ = running.pop(end % len(running))
            assert account.end([Work.PREFILL]) and not account.end([Work.PREFILL])
            account.end(Work)
    assert not waiting and not running
    assert not outstanding._amounts and not outstanding._calls and not outstanding._tenants


def test_a_tenant_is_held_back_in_prefill_only_while_there_are_others() -> None:
    assert tenant_may_go(TENANT_CHOICES, others=False, prefill_servers=1)
    assert not tenant_may_go(TENANT_CHOICES, others=True, prefill_servers=1)
    assert tenant_may_go(TENANT_CHOICES - 1, others=True, prefill_servers=0)
    assert tenant_may_go(TENANT_CHOICES, others=True, prefill_servers=2)
    places: Places[Item] = Places(10, 3, 0.9)
    places.waiting.append("a", Item(), 1.0)
    assert not places.others("a")
    assert filled(places, {"b": 1}) == {"a": 1, "b": 1}
    assert places.others("a") and places.others("b")
