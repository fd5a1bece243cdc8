"""Whose prompt a mixed server computes next, and whom it lets begin: short ones first, urgent ones of a tenant's own, tenants in
turns, and nobody for ever.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from disagg.engine.turns import FIRST_AWAIT, MOST_AWAIT
from disagg.messages.legs import StartLeg
from disagg.scheduler.admission import MOST_BEFORE_AWAITED
from disagg.scheduler.fairness import MAX_OVERTAKEN, PRIORITY_TOKENS
from tests.engine.lone_engine import said
from tests.engine.lone_mixed import Mixed, leg, one_token_pages


@pytest.mark.parametrize("policy", ["sarathi", "orca"])
def test_the_least_urgent_prompt_comes_through_a_stream_of_urgent_ones_that_fill_every_step(policy: str) -> None:
    """It has begun, and each step has room for less than what those have that are more urgent."""
    mixed = Mixed(one_token_pages(8000, 1024, policy=policy))
    told, number, steps = Counter[str](), 0, 0
    while not told["least"]:
        while number - told.total() < 6:
            number += 1
            mixed.start(replace(leg(f"urgent{number}", 1600, 1, first_token=1597 * number % 90_000), priority=-1000))
        if steps == 3:
            mixed.start(replace(leg("least", 20, 1, first_token=95_000), priority=1000))
        told.update(name for name, *_ in said(mixed.compute()))
        steps += 1
        assert 1024 * steps < 3 * PRIORITY_TOKENS * MAX_OVERTAKEN
    assert number > MAX_OVERTAKEN


@pytest.mark.parametrize(("first", "second"), [(-1000, -500), (500, 1000), (900, 1000), (999, 1000)])
def test_who_is_more_urgent_ends_first_wherever_its_priority_lies(first: int, second: int) -> None:
    """It comes later, and is as long; both wait for steps."""
    mixed = Mixed(one_token_pages(800, 64))
    mixed.start(replace(leg("less", 1000, 1, first_token=1000), priority=second))
    mixed.compute()
    mixed.start(replace(leg("more", 1000, 1, first_token=5000), priority=first))
    assert [name for name, *_ in said(mixed.compute_all())] == ["more", "less"]


@pytest.mark.parametrize(("crowd", "tokens", "again"), [(6, 1024, True), (8, 512, False)])
def test_a_long_prompt_comes_through_clients_with_one_short_one_each(crowd: int, tokens: int, again: bool) -> None:
    """Which fill every step. again: they ask anew, as who they were; else each that comes is another one."""
    mixed = Mixed(one_token_pages(8000, 1024))
    told, number, steps = Counter[str](), 0, 0
    while not told["long"]:
        if steps == 5:
            mixed.start(replace(leg("long", 4000, 1, first_token=95_000), tenant="patient"))
        while number - told.total() < crowd:
            number += 1
            client = f"client {number % crowd if again else number}"
            short = leg(f"short{number}", tokens, 1, first_token=1597 * number % 90_000)
            mixed.start(replace(short, tenant=client))
        told.update(name for name, *_ in said(mixed.compute()))
        steps += 1
        assert steps < 60, f"{told.total()} others have ended"
    assert told.total() > 2 * crowd


# ---- short ones first, however far a long one has come


def shorts(mixed: Mixed, **fields: object) -> list[StartLeg]:
    """Twenty."""
    found = [replace(leg(f"short{n}", 20, 1, first_token=50_000 + 100 * n), **fields) for n in range(20)]
    for each in found:
        mixed.start(each)
    return found


def tokens_until_they_end(mixed: Mixed, legs: list[StartLeg], most: int) -> tuple[int, set[str]]:
    """Tokens of steps until all of these have ended; who else has ended by then."""
    waits, others, tokens = {each.key.request_id for each in legs}, set[str](), 0
    while waits:
        tokens += sum(run.num_tokens for run in mixed.unreported[0].runs)
        ended = {name for name, *_ in said(mixed.compute())}
        waits, others = waits - ended, others | ended - waits
        assert tokens < most, f"{len(waits)} still wait"
    return tokens, others


@pytest.mark.parametrize("had", [200, 900, 1100, 1800])
@pytest.mark.parametrize("priority", [0, -1000])
def test_what_a_long_prompt_has_had_itself_does_not_age_it(had: int, priority: int) -> None:
    """It was alone until then: nobody has gone before it."""
    mixed = Mixed(one_token_pages(2000, 40))
    mixed.start(leg("long", 2000, 1))
    while next(iter(mixed.engine.core.batch.running.values())).position < had:
        mixed.compute()
    tokens, others = tokens_until_they_end(mixed, shorts(mixed, priority=priority), 1000)
    assert tokens <= 20 * 20 + 3 * 40 and not others


@pytest.mark.parametrize(("least", "most"), [(0, 0), (1000, -1000)])
def test_what_other_tenants_have_had_does_not_age_a_prompt_among_its_tenants_own(least: int, most: int) -> None:
    """They fill nine of ten steps, which is more than a prompt lets its own tenant's go first."""
    mixed = Mixed(one_token_pages(40_000, 1024, max_model_len=60_000, max_running=64))
    mixed.start(replace(leg("long", 10_000, 1), tenant="X", priority=least))
    for number in range(9):
        mixed.start(replace(leg(f"other{number}", 12_000, 1, first_token=10_000 * number), tenant=f"T{number}"))
    for _ in range(30):
        mixed.compute()
    legs = shorts(mixed, tenant="X", priority=most)
    tokens, others = tokens_until_they_end(mixed, legs, 60_000)
    assert "long" not in others and tokens <= 3 * 10 * 1024, "two of its turns among ten"


# ---- behind one that awaits another's prefix


@pytest.mark.parametrize("tenant", ["A", "B"])
def test_who_waits_for_a_prefix_lets_its_own_tenants_others_begin(tenant: str) -> None:
    mixed = Mixed(one_token_pages(4000, 40))
    mixed.start(replace(leg("document", 3000, 1), tenant="A"))
    mixed.compute()
    mixed.start(replace(leg("again", 2900, 1), tenant=tenant))
    tokens, others = tokens_until_they_end(mixed, shorts(mixed, tenant=tenant), 2000)
    assert tokens <= 2 * (20 * 20 + 3 * 40) and not others
    after = [name for name, *_ in said(mixed.compute_all())]
    assert sorted(after) == ["again", "document"]
    assert mixed.engine.counters.prefill_tokens <= 3000 + 20 * 20 + 100, "what both have is computed once"


def test_who_is_urgent_does_not_wait_for_what_a_stream_of_urgent_ones_keeps_from_being_computed() -> None:
    mixed = Mixed(one_token_pages(30_000, 256, max_running=64, max_waiting=1000))
    number, tokens, told = 0, 0, Counter[str]()

    def stream() -> None:
        nonlocal number
        while number - sum(told[name] for name in told if name.startswith("urgent")) < 6:
            number += 1
            urgent = leg(f"urgent{number}", 600, 1, first_token=1597 * number % 90_000)
            mixed.start(replace(urgent, tenant="X", priority=-1000))

    stream()
    mixed.start(replace(leg("least", 400, 1, first_token=95_000), tenant="X", priority=1000))
    for _ in range(4):
        mixed.compute()
    mixed.start(replace(leg("other's", 420, 1, first_token=95_000), tenant="V"))
    while not told["other's"]:
        stream()
        tokens += sum(run.num_tokens for run in mixed.unreported[0].runs)
        told.update(name for name, *_ in said(mixed.compute()))
        assert tokens < 60_000, "131,072 of the other tenant's go before what it begins with"
    assert not told["least"]


@pytest.mark.parametrize("waiting", [0, 1, 2, 20])
def test_who_waits_for_a_prefix_has_no_credit_for_what_others_were_served_meanwhile(waiting: int) -> None:
    """A burst of its tenant's, more urgent than what waits, takes turns with the other one's backlog."""
    mixed = Mixed(one_token_pages(20_000, 256, max_model_len=30_000, max_running=8, max_waiting=1000))
    numbers = itertools.count()

    def ask(tenant: str, priority: int = 0) -> None:
        name = f"{tenant}{next(numbers)}"
        mixed.start(
            replace(leg(name, 200, 1, first_token=30_000 + 13 * next(numbers)), tenant=tenant, priority=priority)
        )

    mixed.start(replace(leg("document", 20_000, 1), tenant="D"))
    mixed.compute()
    for number in range(waiting):
        mixed.start(replace(leg(f"about{number}", 19_900, 1), tenant="A"))
    for _ in range(30):
        ask("B")
    for _ in range(40):
        mixed.compute()
        ask("B")
    for _ in range(40):
        ask("A", -1)
    heard = ""
    while heard.count("A") < 40:
        ask("B")
        heard += "".join(name[0] for name, *_ in said(mixed.compute()) if name[0] in "AB")
    assert max(map(len, heard.split("B"))) <= 6, heard


def test_a_prompt_that_is_cached_costs_its_tenant_what_is_computed_of_it() -> None:
    """Chats of one tenant are as long as the prompts of another, and all but their ends are cached."""
    mixed = Mixed(one_token_pages(6000, 64, max_running=2, max_waiting=1000))
    mixed.start(leg("chat", 640, 1))
    mixed.compute_all()
    for number in range(40):
        mixed.start(replace(leg(f"A{number}", 648, 1), tenant="A"))
        mixed.start(replace(leg(f"B{number}", 640, 1, first_token=1000 + 700 * number), tenant="B"))
    heard = "".join(name[0] for name, *_ in said(mixed.compute_all()))
    assert heard[:22].count("B") <= 4 and heard.count("A") == heard.count("B") == 40


# ---- choices whose prompt is cached no more


def test_choices_that_compute_their_prompt_anew_take_turns_with_other_tenants_prompts() -> None:
    mixed = Mixed(one_token_pages(8000, 64, max_running=64, max_slots=64 + 63, prefix_cache=False))
    mixed.start(replace(leg("many", 1000, 4, choices=8), tenant="A"))
    while not said(mixed.compute()):
        pass
    for _ in range(3):
        mixed.compute()
    tokens, _ = tokens_until_they_end(mixed, shorts(mixed, tenant="B"), 4000)
    assert tokens <= 2 * (20 * 20 + 3 * 64) + 8 * 20
    told = Counter(choice for name, choice, *_ in said(mixed.compute_all()) if name == "many")
    assert set(told) == set(range(1, 8))


# ---- however many wait for one prefix


def herd(mixed: Mixed, number: int, tenants: int) -> None:
    """That ask about a document of 2,000 tokens which is being computed."""
    mixed.start(replace(leg("document", 2000, 1), tenant="first"))
    mixed.compute()
    for each in range(number):
        mixed.start(replace(leg(f"about{each}", 1904, 1), tenant=f"T{each % tenants}"))


def wide() -> Mixed:
    return Mixed(one_token_pages(6000, 40, max_running=64, max_slots=64 + 63, max_waiting=1000))


@pytest.mark.parametrize(("number", "tenants"), [(100, 1), (300, 300), (400, 4)])
@pytest.mark.parametrize("tenant", ["T0", "other"])
def test_a_herd_that_waits_for_one_prefix_lets_others_begin_and_is_computed_once(
    number: int, tenants: int, tenant: str
) -> None:
    mixed = wide()
    herd(mixed, number, tenants)
    tokens, others = tokens_until_they_end(mixed, shorts(mixed, tenant=tenant), 1600)
    assert tokens <= 3 * (20 * 20 + 3 * 40) and not others
    assert len(said(mixed.compute_all())) == number + 1
    assert mixed.engine.counters.prefill_tokens <= 2000 + 20 * 20 + 8 * number, "what all have is computed once"


@pytest.mark.parametrize("tenants", [1, 300])
def test_not_all_that_come_at_once_are_hashed_and_compared_in_one_step(tenants: int) -> None:
    mixed = wide()
    herd(mixed, 0, 1)
    for number in range(300):
        about = replace(leg(f"about{number}", 1904, 1), tenant=f"T{number % tenants}")
        mixed.engine.start_leg(1, about, mixed.now)
    known = [0]
    for _ in range(6):
        mixed.do([])
        known.append(sum(bool(prompt.root) for prompt in mixed.engine.stages[0].queue))
    new = [later - before for before, later in itertools.pairwise(known)]
    assert all(0 < each <= MOST_AWAIT // FIRST_AWAIT for each in new)
    assert len(said(mixed.compute_all())) == 301


def test_a_herd_does_not_compute_what_its_own_tenants_urgent_ones_keep_from_being_computed() -> None:
    """It would be behind them, too."""
    mixed = Mixed(one_token_pages(30_000, 256, max_running=64, max_waiting=1000))
    number, ended = 0, 0

    def stream() -> None:
        nonlocal number
        while number - ended < 6:
            number += 1
            mixed.start(replace(leg(f"urgent{number}", 600, 1, first_token=1597 * number % 90_000), tenant="X"))

    stream()
    for each in ("document", *(f"about{n}" for n in range(10))):
        mixed.start(replace(leg(each, 400, 1, first_token=95_000), tenant="X", priority=1000))
    while number * 600 < 3 * MOST_BEFORE_AWAITED:
        ended += sum(name.startswith("urgent") for name, *_ in said(mixed.compute()))
        stream()
    begun = [s.key.request_id for s in mixed.engine.core.batch.running.values()]
    assert sum(not name.startswith("urgent") for name in begun) == 1
