"""What a router expects to be cached: on the GPU, on hosts and in storage, and what a hit there is worth. On values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.memory.cache import PrefixCache
from disagg.memory.groups import GroupSpec
from disagg.memory.layout import pool_layout
from disagg.messages.layout import GroupKind
from disagg.messages.legs import KvEvents, LoadCosts, PrefixGroup, PrefixRules, StorageState, Tier
from disagg.router.known_kv import KnownKv, Stores
from disagg.router.policies import hit, prefill_s
from disagg.router.prefixes import MAX_PAGES, NO_HIT, TURN_PAGES, Hit, PromptHashing, hit_of, hit_tokens, num_pages
from disagg.router.view import CachedPages, ServerView
from disagg.wire.server import KvUpdate
from tests.router.cached_servers import FULL, PAGE, PROMPT, SPEED, asked, hashes_of, having, pick
from tests.router.test_policies import d, p

GROUPS = st.lists(
    st.one_of(
        st.just(PrefixGroup("full")),
        st.builds(PrefixGroup, st.just("window"), st.integers(1, 40)),
        st.just(PrefixGroup("state")),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(0, 24), st.data())
def test_the_hit_is_what_the_servers_own_cache_finds(
    groups: list[PrefixGroup], pages: int, data: st.DataObject
) -> None:
    """Where the beginning of full attention outlives its end, as eviction has it. Other groups have whatever they have."""
    rules = PrefixRules(("v1",), PAGE, 3 * PAGE, tuple(groups))
    specs = [
        GroupSpec(f"g{index}", GroupKind(group.kind), 64, window_tokens=group.window_tokens)
        for index, group in enumerate(groups)
    ]
    cache = PrefixCache(pool_layout(specs, PAGE, 3 * PAGE))
    hashes = hashes_of(range(pages * PAGE + 3), rules)
    for g, group in enumerate(groups):
        if group.kind == "full":
            held = set(range(data.draw(st.integers(0, pages))))
        else:
            held = data.draw(st.sets(st.integers(0, max(0, pages - 1)), max_size=pages))
        for page in held:
            cache.insert(g, hashes[page], page)
    cap = data.draw(st.integers(0, pages * PAGE + 3))
    told = CachedPages()
    told.apply(cache.snapshot())
    assert hit_tokens(rules, told.groups, hashes, cap) == cache.lookup(hashes, cap)


@given(st.integers(0, 20), st.sets(st.integers(0, 19)), st.sets(st.integers(0, 19)), st.integers(0, 20 * PAGE + 3))
def test_hosts_and_storage_may_have_gaps(gpu: int, host: set[int], storage: set[int], cap: int) -> None:
    """A conversation's next turn is copied behind what is stored, and outlives what was copied before."""
    pages = hashes_of(range(20 * PAGE))
    tiers = [({pages[n] for n in each},) for each in (range(gpu), host, storage)]
    rest, expected = set(range(gpu)), []
    for further in (set(), host, storage):
        rest |= further
        expected.append(min(next(n for n in range(21) if n not in rest), cap // PAGE) * PAGE)
    hit = hit_of(FULL, tiers, pages, cap)
    assert [hit.gpu, hit.gpu + hit.host, hit.tokens] == expected


def test_a_group_of_a_kind_that_is_not_known_has_no_hits() -> None:
    rules = replace(FULL, groups=(PrefixGroup("full"), PrefixGroup("spiral")))
    pages = hashes_of(PROMPT, rules)
    cached = CachedPages()
    cached.apply(KvEvents(tuple((g, page) for g in (0, 1) for page in pages)))
    assert hit_tokens(rules, cached.groups, pages, 80) == 0
    assert hit_tokens(FULL, cached.groups, pages, 80) == 80


def test_what_is_being_computed_counts_as_cached_only_where_all_attention_is_full() -> None:
    pages = hashes_of(PROMPT)
    assert hit_tokens(FULL, (), pages, 79, frozenset(pages[:10])) == 10 * PAGE
    assert hit_tokens(FULL, (set(pages[:4]),), pages, 79, frozenset(pages[4:10])) == 10 * PAGE
    windowed = replace(FULL, groups=(PrefixGroup("full"), PrefixGroup("window", 8)))
    assert hit_tokens(windowed, (set(pages), set()), pages, 79, frozenset(pages)) == 0


def test_a_prompt_is_hashed_in_turns_as_servers_do_with_its_salt_and_not_without_end() -> None:
    tokens = tuple(range(10_000))
    other = replace(FULL, page_tokens=1, root_parts=("v1", "other"))

    hashing = PromptHashing((FULL, other), "salt", tokens)
    turns = 0
    while not hashing.done:
        hashing.step()
        turns += 1
    found = hashing.pages
    assert found.of(replace(FULL)) == hashes_of(tokens, salt="salt") != hashes_of(tokens)
    assert found.of(other) == hashes_of(tokens, other, "salt")
    assert turns == -(-2_500 // TURN_PAGES) + -(-10_000 // TURN_PAGES), "a step is as much as a loop can bear"
    assert found.of(None) == found.of(replace(FULL, page_tokens=8)) == ()
    assert num_pages((other,), 1 << 30) == MAX_PAGES


# ---- other tiers


def below(server: ServerView, tier: str, tokens: Sequence[int], store: StorageState = StorageState.OK) -> ServerView:
    """The server has this prompt in a tier below its prefix cache, too."""
    pages = CachedPages()
    pages.apply(KvEvents(tuple((0, page) for page in hashes_of(tokens))))
    assert server.load is not None
    return replace(server, **{tier: pages, "load": replace(server.load, store=store)})


def test_tokens_count_where_they_are_nearest() -> None:
    server = below(below(having(p("p"), PROMPT[:20]), "on_host", PROMPT[:40]), "stored", PROMPT[:60])
    facts = asked(PROMPT)
    assert hit(server, facts, 79) == Hit(20, 20, 20)
    assert hit(server, facts, 30) == Hit(20, 8, 0), "whole pages, as far as they are of use"
    assert hit(having(p("p")), facts, 79) == NO_HIT
    degraded = below(server, "stored", PROMPT[:60], StorageState.DEGRADED)
    assert hit(degraded, facts, 79) == Hit(20, 20, 0)


def test_a_decode_server_is_sent_what_is_in_storage_only() -> None:
    server = below(below(having(d("d"), PROMPT[:20]), "on_host", PROMPT[:40]), "stored", PROMPT)
    assert hit(server, asked(PROMPT), 80) == Hit(20, 20, 0)


def test_a_prompt_goes_where_its_host_has_it_and_rather_where_it_is_cached() -> None:
    host, cached = below(having(p("p1")), "on_host", PROMPT), having(p("p2"), PROMPT)
    decode = having(d("d"))
    for serial in range(3):
        found = pick((having(p("p0")), host, decode), asked(PROMPT, serial=serial))
        assert (found.prefill.name, found.hit_tokens) == ("p1", 76)
        assert pick((host, cached, decode), asked(PROMPT, serial=serial)).prefill.name == "p2"
    busy = replace(host, outstanding_prompt_tokens=100, outstanding_prompts=1)
    assert pick((having(p("p0")), busy, decode), asked(PROMPT)).prefill.name == "p0"


def test_what_is_in_storage_is_everywhere_so_the_least_busy_server_takes_it() -> None:
    servers = [below(having(p(f"p{n}")), "stored", PROMPT) for n in range(3)]
    busy = [replace(each, outstanding_prompt_tokens=40, outstanding_prompts=1) for each in servers[:2]]
    assert pick((*busy, servers[2], having(d("d"))), asked(PROMPT)).prefill.name == "p2"


def test_what_is_slower_to_bring_than_to_compute_is_worth_no_more_than_nothing() -> None:
    slow = below(having(p("p1")), "on_host", PROMPT)
    assert slow.load is not None
    facts = asked(PROMPT)
    for token_s in (1e-5, 1e-4):
        measured = replace(slow, load=replace(slow.load, loads=LoadCosts(token_s)))
        left_s = SPEED.seconds(1, len(PROMPT) - 76)
        assert prefill_s(measured, facts) == pytest.approx(left_s + 76 * token_s)
    slower = replace(slow, load=replace(slow.load, loads=LoadCosts(10 * SPEED.token_s)))
    assert prefill_s(slower, facts) == pytest.approx(prefill_s(having(p("p0")), facts))
    storage = below(having(p("p1")), "stored", PROMPT)
    assert storage.load is not None
    both = replace(storage, load=replace(storage.load, loads=LoadCosts(1e-5, 3e-5)))
    assert prefill_s(both, facts) == pytest.approx(SPEED.seconds(1, 4) + 76 * 4e-5)


def test_windows_and_states_are_looked_up_across_tiers_as_a_load_would_find_them() -> None:
    rules = replace(FULL, groups=(PrefixGroup("full"), PrefixGroup("window", 2 * PAGE)))
    pages = hashes_of(PROMPT, rules)
    gpu = (set(pages[:10]), set(pages[8:9]))
    host = (set(pages[:10]), set(pages[9:10]))
    assert hit_of(rules, (gpu, ()), pages, 80) == NO_HIT, "half of a window"
    assert hit_of(rules, (gpu, host), pages, 80) == Hit(0, 40)


def test_what_is_in_storage_is_known_of_all_that_store_there_and_the_rest_is_each_ones_own() -> None:
    stores = Stores()
    one, other, elsewhere = KnownKv(stores), KnownKv(stores), KnownKv(stores)
    one.stores_at("s3")
    elsewhere.stores_at("another")
    page = (0, b"a")
    for tier in Tier:
        one.apply(KvUpdate(KvEvents((page,)), True, tier))
    other.stores_at("s3")
    assert other.stored.holds(*page) and not other.on_host.holds(*page) and not other.cached.holds(*page)
    assert not elsewhere.stored.holds(*page)
    one.clear()
    assert not one.cached.holds(*page) and not one.on_host.holds(*page) and one.stored.holds(*page)
    other.apply(KvUpdate(KvEvents(), True, Tier.STORAGE))
    assert one.stored.holds(*page), "one that has just come up knows of nothing, which makes nothing untrue"
    other.apply(KvUpdate(KvEvents(removed=(page,)), False, Tier.STORAGE))
    assert not one.stored.holds(*page)
    one.stores_at("")
    other.stores_at("")
    assert not stores.get("s3"), "nobody stores there any more"
