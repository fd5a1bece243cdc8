"""The policy that knows caches: what it expects to be cached, what it prefers, and that it does not herd. On values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.memory.cache import PrefixCache
from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.layout import pool_layout
from disagg.messages.layout import GroupKind
from disagg.messages.legs import (
    KvEvents,
    LoadCosts,
    PrefixGroup,
    PrefixRules,
    ServerState,
    StorageState,
    Tier,
)
from disagg.router.known_kv import KnownKv, Stores
from disagg.router.placement import pick_pair
from disagg.router.policies import KvAware, LeastLoaded, Policy, RequestFacts, hit, prefill_s
from disagg.router.prefixes import (
    MAX_PAGES,
    NO_HIT,
    TURN_PAGES,
    Hit,
    PromptHashing,
    PromptPages,
    hit_of,
    hit_tokens,
    num_pages,
)
from disagg.router.speeds import GUESS, Speed, Speeds
from disagg.router.view import CachedPages, ClusterView, NoPair, Pair, ServerView, others_prompts
from disagg.types.ids import Role
from disagg.wire.server import KvUpdate
from tests.router.test_policies import d, m, p

PAGE = 4
FULL = PrefixRules(("v1", "w"), PAGE, 16, (PrefixGroup("full"),))
SPEED = Speed(0.001, 0.001, 100)


def hashes_of(tokens: Sequence[int], rules: PrefixRules = FULL, salt: str = "") -> tuple[bytes, ...]:
    hashes: list[bytes] = []
    extend_hashes(hashes, chain_root(*rules.root_parts, salt), tokens, rules.page_tokens)
    return tuple(hashes)


def asked(tokens: Sequence[int], rules: PrefixRules = FULL, **changes: Any) -> RequestFacts:
    pages = PromptPages(((rules, hashes_of(tokens, rules)),))
    facts = RequestFacts(prefill_tokens=len(tokens), total_tokens=len(tokens) + 8, pages=pages)
    return replace(facts, **changes)


def having(server: ServerView, *prompts: Sequence[int], rules: PrefixRules = FULL, **changes: Any) -> ServerView:
    """The server says how it names pages, and has cached these prompts, in every group."""
    assert server.hello is not None
    cached = CachedPages()
    for tokens in prompts:
        pages = hashes_of(tokens, rules)
        cached.apply(KvEvents(tuple((g, page) for g in range(len(rules.groups)) for page in pages)))
    hello = replace(server.hello, prefix=rules, max_model_len=1 << 20, max_tokens_in_pool=1 << 20)
    return replace(server, **{"hello": hello, "cached": cached, "speed": SPEED, "usual_speed": SPEED, **changes})


def pick(servers: Sequence[ServerView], facts: RequestFacts, policy: Policy | None = None, **wishes: Any) -> Pair:
    found = pick_pair(ClusterView(tuple(servers)), facts, policy or KvAware(), **wishes)
    assert isinstance(found, Pair), found
    return found


PROMPT = tuple(range(100, 180))


# ---- what is expected to be cached


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


# ---- what is preferred


def test_a_prompt_goes_where_its_prefix_is_and_says_what_is_expected_there() -> None:
    servers = (having(p("p0")), having(p("p1"), PROMPT[:60]), having(p("p2"), PROMPT[:40]), having(d("d0")))
    for serial in range(4):
        found = pick(servers, asked(PROMPT, serial=serial))
        assert (found.prefill.name, found.hit_tokens) == ("p1", 60)
        assert found.pages == hashes_of(PROMPT)


def test_another_salt_shares_nothing() -> None:
    servers = (having(p("p0")), having(p("p1"), PROMPT), having(d("d0")))
    facts = replace(asked(PROMPT), pages=PromptPages(((FULL, hashes_of(PROMPT, salt="tenant")),)))
    assert {pick(servers, replace(facts, serial=serial)).prefill.name for serial in range(2)} == {"p0", "p1"}


def test_a_server_that_does_not_say_how_it_names_pages_has_nothing() -> None:
    old = having(p("p1"), PROMPT)
    assert old.hello is not None
    servers = (having(p("p0")), replace(old, hello=replace(old.hello, prefix=None)), having(d("d0")))
    picked = [pick(servers, asked(PROMPT, serial=serial)) for serial in range(2)]
    assert [each.prefill.name for each in picked] == ["p0", "p1"]
    assert [each.hit_tokens for each in picked] == [0, 0]


@given(queued=st.integers(0, 400), hit_pages=st.integers(1, 19))
def test_a_prefix_is_worth_waiting_for_until_that_costs_more_than_computing_it(queued: int, hit_pages: int) -> None:
    hit = hit_pages * PAGE
    busy = having(p("p0"), PROMPT[:hit], outstanding_prompt_tokens=queued, outstanding_prompts=1)
    facts = asked(PROMPT)
    difference_s = prefill_s(busy, facts) - prefill_s(having(p("p1")), facts)
    assert difference_s == pytest.approx((queued - hit) * SPEED.token_s + SPEED.prompt_s)
    found = pick((busy, having(p("p1")), having(d("d0"))), facts).prefill.name
    if abs(difference_s) > 0.1 * SPEED.seconds(1, len(PROMPT)):
        assert found == ("p0" if difference_s < 0 else "p1")


def test_prompts_that_begin_alike_follow_the_first_of_them() -> None:
    servers = [having(p("p0")), having(p("p1"), coming=frozenset(hashes_of(PROMPT[:60]))), having(d("d0"))]
    servers[1] = replace(servers[1], outstanding_prompt_tokens=20, outstanding_prompts=1)
    assert pick(servers, asked(PROMPT)).prefill.name == "p1"


def test_of_decode_servers_that_are_alike_the_one_with_the_kv_is_taken_and_a_full_one_is_not() -> None:
    prompt = tuple(range(4000))
    facts = asked(prompt)
    d0, d1 = having(d("d0")), having(d("d1"), prompt)
    assert [pick((having(p("p")), d0, d1), replace(facts, serial=n)).decode.name for n in range(2)] == ["d1", "d1"]
    assert pick((having(p("p")), d0, replace(d1, outstanding_choices=50)), facts).decode.name == "d0"


def test_faster_servers_get_more() -> None:
    slow, fast = having(p("p0")), having(p("p1"), speed=Speed(0.001, 0.0002, 100))
    assert pick((slow, fast, having(d("d"))), asked(PROMPT)).prefill.name == "p1"
    waiting = replace(fast, outstanding_prompt_tokens=1000, outstanding_prompts=9)
    assert pick((slow, waiting, having(d("d"))), asked(PROMPT)).prefill.name == "p0"


def test_a_mixed_server_is_compared_with_a_pair_by_the_seconds_of_both_halves() -> None:
    pair = (having(p("p")), having(d("d")))
    assert pick((*pair, having(m("m"), PROMPT)), asked(PROMPT)).whole
    assert not pick((having(p("p"), PROMPT), pair[1], having(m("m"))), asked(PROMPT)).whole
    busy = having(m("m"), PROMPT, outstanding_choices=200)
    assert not pick((*pair, busy), asked(PROMPT)).whole, "its batch costs more than its prefix spares"


def test_wishes_go_before_caches() -> None:
    servers = (having(p("p0")), having(p("p1"), PROMPT), having(d("d0"), PROMPT), having(d("d1")))
    assert pick(servers, asked(PROMPT), avoid={"p1"}).prefill.name == "p0"
    assert pick(servers, asked(PROMPT), prefer_decode=servers[3].peer_ref).decode.name == "d1"
    silent = replace(servers[1], fresh=False)
    assert pick((servers[0], silent, *servers[2:]), asked(PROMPT)).prefill.name == "p0"


STATES = st.sampled_from([ServerState.READY, ServerState.LOADING, ServerState.DRAINING])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pdm"), STATES, st.booleans(), st.booleans(), st.integers(0, 80)), max_size=8)
)
def test_only_servers_that_can_be_used_are_taken_whatever_they_have_cached(
    made: list[tuple[str, ServerState, bool, bool, int]],
) -> None:
    kinds = {"p": p, "d": d, "m": m}
    servers = [
        having(kinds[kind](f"{kind}{index}", state), PROMPT[:hit], connected=connected, fresh=fresh)
        for index, (kind, state, connected, fresh, hit) in enumerate(made)
    ]
    view = ClusterView(tuple(servers))
    found = pick_pair(view, asked(PROMPT), KvAware())
    assert isinstance(found, Pair) == view.has_pair
    if isinstance(found, NoPair):
        return
    by_name = {server.name: server for server in servers}
    assert all(by_name[name].usable for name in found.servers)


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


# ---- speeds


def test_a_speed_is_a_line_through_what_was_timed() -> None:
    rng, speeds, now_s = random.Random(1), Speeds(), 0.0
    assert speeds.of("p0", now_s) == speeds.usual
    assert speeds.usual.seconds(1, 700) == pytest.approx(GUESS.seconds(1, 700))
    for _ in range(200):
        tokens = rng.randrange(10, 2000)
        speeds.ended("p0", tokens, now_s, now_s + 0.02 + tokens * 0.0005, now_s)
        now_s += 2
    line = speeds.of("p0", now_s)
    assert line.prompt_s == pytest.approx(0.02, rel=0.3)
    assert line.token_s == pytest.approx(0.0005, rel=0.1)
    assert speeds.of("p1", now_s).token_s == pytest.approx(0.0005, rel=0.2), (
        "one that is not known is as the others are"
    )
    speeds.forget("p0")
    assert speeds.of("p0", now_s) == speeds.of("p1", now_s)


def test_prompts_computed_at_once_are_timed_as_one_after_the_other() -> None:
    speeds = Speeds()
    for turn in range(100):
        for _ in range(4):
            speeds.ended("p0", 100, turn * 10.0, turn * 10.0 + 0.4, turn * 10.0)
    assert speeds.of("p0", 1000.0).usual_s == pytest.approx(0.1, rel=0.3)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), *[st.floats(0, 60)] * 2, st.floats(0, 1e9)), max_size=30))
def test_a_speed_is_positive_and_finite_whatever_is_timed(seen: list[tuple[int, float, float, float]]) -> None:
    speeds = Speeds()
    for tokens, sent_s, ended_s, now_s in seen:
        speeds.ended("p0", tokens, sent_s, ended_s, now_s)
        for line in (speeds.of("p0", now_s), speeds.of("p1", now_s), speeds.usual):
            assert line.prompt_s >= 0 and 0 < line.token_s < 1e9 and line.prompt_tokens > 0


def test_what_a_server_has_of_others_is_what_it_said_less_what_it_was_sent() -> None:
    load = p("p", running=3, waiting=2).load
    assert load is not None
    assert [others_prompts(role, load, 1) for role in (Role.PREFILL, Role.MIXED, Role.DECODE)] == [4, 1, 0]
    assert others_prompts(Role.PREFILL, load, 9) == 0


# ---- balance


class World:
    """Prefill servers in ticks, and routers that hear of each other's work only in reports, every `stale` ticks."""

    def __init__(self, servers: int, routers: int, stale: int, policy: Policy, fresh: bool = True) -> None:
        self.queues = [[0.0] * servers for _ in range(routers)]  # tokens of each router at each server
        self.prompts = [[0] * servers for _ in range(routers)]
        self.given = [0] * servers
        self.computed = 0
        self.caches = [CachedPages() for _ in range(servers)]
        self.told = [CachedPages() for _ in range(servers)]
        self.others = [[0] * servers for _ in range(routers)]
        self.policy, self.stale, self.fresh = policy, stale, fresh
        self.ticks, self.serials = 0, [0] * routers
        self.longest = 0.0

    def tick(self, rate: float) -> None:
        """Each server computes that many tokens, of all routers alike."""
        self.ticks += 1
        for s in range(len(self.given)):
            left = sum(queue[s] for queue in self.queues)
            share = max(0.0, left - rate) / left if left else 0.0
            for queue, prompts in zip(self.queues, self.prompts, strict=True):
                queue[s] *= share
                prompts[s] = 0 if queue[s] < 1 else prompts[s]
        self.longest = max(self.longest, *(sum(queue[s] for queue in self.queues) for s in range(len(self.given))))
        if self.ticks % self.stale == 0:
            for s, (told, cached) in enumerate(zip(self.told, self.caches, strict=True)):
                told.apply(KvEvents(tuple((0, page) for page in cached.groups[0])) if cached.groups else KvEvents())
                for r in range(len(self.queues)):
                    self.others[r][s] = sum(prompts[s] for i, prompts in enumerate(self.prompts) if i != r)

    def ask(self, router: int, tokens: Sequence[int], rng: random.Random) -> None:
        servers = [
            replace(
                having(p(f"p{s}")),
                cached=self.told[s],
                fresh=self.fresh,
                outstanding_prompt_tokens=round(self.queues[router][s]),
                outstanding_prompts=self.prompts[router][s],
                others_prompts=self.others[router][s],
                speed=replace(SPEED, prompt_tokens=len(tokens)),
            )
            for s in range(len(self.given))
        ]
        facts = asked(tokens, serial=self.serials[router], draw=rng.getrandbits(32))
        self.serials[router] += 1
        s = int(pick((*servers, having(d("d"))), facts, self.policy).prefill.name[1:])
        pages = hashes_of(tokens)
        new = len(tokens) - hit_tokens(FULL, self.caches[s].groups, pages, len(tokens) - 1)
        self.caches[s].apply(KvEvents(tuple((0, page) for page in pages)))
        self.queues[router][s] += new
        self.prompts[router][s] += 1
        self.given[s] += new
        self.computed += new


def run(world: World, routers: int, shared: int, seed: int = 1) -> World:
    """600 prompts that nobody has, each behind a beginning of so many tokens that all have; two thirds of what can be done."""
    rng = random.Random(seed)
    for turn in range(300):
        for router in range(routers):
            for _ in range(2 // routers):
                own = [rng.randrange(1 << 30) for _ in range(rng.randrange(40, 160))]
                world.ask(router, (*range(shared), *own), rng)
        world.tick(75.0)
        del turn
    return world


def spread(world: World) -> float:
    return max(world.given) / (sum(world.given) / len(world.given))


def test_without_caches_it_balances_as_least_loaded_does() -> None:
    ours = run(World(4, 1, 1, KvAware()), 1, 0)
    theirs = run(World(4, 1, 1, LeastLoaded()), 1, 0)
    assert spread(ours) < 1.1 and spread(theirs) < 1.1
    assert ours.longest <= 1.2 * theirs.longest


@pytest.mark.parametrize("stale", [1, 10, 50])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "not heard"])
@pytest.mark.parametrize("shared", [0, 400])
def test_two_routers_with_stale_views_do_not_herd(stale: int, fresh: bool, shared: int) -> None:
    """Neither for want of news of the other's work, nor because one server has what all prompts begin with."""
    world = run(World(4, 2, stale, KvAware(), fresh), 2, shared)
    assert spread(world) < 1.35, world.given
    if shared:
        assert world.computed < 600 * (100 + shared) / 2, "the beginning was computed for most prompts"


def test_servers_whose_times_differ_a_little_are_equally_fast_and_one_that_is_slow_is_not() -> None:
    """Or all that comes while nobody is busy would go to whichever was a little faster before."""
    rng, speeds = random.Random(3), Speeds()
    ended_s = dict.fromkeys(("p0", "p1", "slow"), 0.0)
    for _ in range(200):
        for server, factor in (("p0", 1.0), ("p1", 1.15), ("slow", 4.0)):
            tokens = rng.randrange(100, 2000)
            began_s = ended_s[server]
            ended_s[server] += factor * rng.uniform(0.9, 1.1) * (0.01 + 2e-4 * tokens)
            speeds.ended(server, tokens, began_s, ended_s[server], ended_s[server])
    now_s = min(ended_s.values())
    assert speeds.of("p0", now_s).usual_s == pytest.approx(speeds.of("p1", now_s).usual_s, rel=0.2)
    assert speeds.of("slow", now_s).seconds(1, 1000) > 2 * speeds.of("p0", now_s).seconds(1, 1000)

    alike = Speeds()
    for number, (server, seconds) in enumerate((("p0", 0.10), ("p1", 0.12), ("p0", 0.11), ("p1", 0.13))):
        alike.ended(server, 600, float(number), number + seconds, number + seconds)
    assert alike.of("p0", 4.0) == alike.of("p1", 4.0) == alike.usual


@pytest.mark.parametrize("before", [0, 3, 40])
def test_a_server_that_stood_still_once_is_soon_as_fast_as_the_others(before: int) -> None:
    """Nothing that it is not sent could show that it is."""
    speeds, now_s = Speeds(), 0.0
    for _ in range(before):
        now_s += 1.0
        for server in ("stopped", "p1"):
            speeds.ended(server, 600, now_s, now_s + 0.05, now_s)
    speeds.ended("stopped", 600, now_s, now_s + 60.0, now_s + 60.0)
    now_s += 60.0
    for _ in range(60):
        now_s += 1.0
        speeds.ended("p1", 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("stopped", now_s).seconds(1, 600) < 4 * speeds.of("p1", now_s).seconds(1, 600)
    speeds.ended("stopped", 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("stopped", now_s).seconds(1, 600) < 4 * speeds.of("p1", now_s).seconds(1, 600), "and stays so"


def test_a_server_that_became_slow_is_known_to_be_after_a_few_prompts_and_is_tried_again_later() -> None:
    speeds, now_s = Speeds(), 0.0
    for turn in range(60):
        now_s += 1.0
        for server, seconds in (("p0", 0.05), ("p1", 0.05), ("slow", 0.05 if turn < 40 else 2.0)):
            speeds.ended(server, 600, now_s, now_s + seconds, now_s)
    assert speeds.of("slow", now_s).seconds(1, 600) > 5 * speeds.of("p0", now_s).seconds(1, 600)
    for _ in range(120):
        now_s += 1.0
        for server in ("p0", "p1"):
            speeds.ended(server, 600, now_s, now_s + 0.05, now_s)
    assert speeds.of("slow", now_s).seconds(1, 600) < 2 * speeds.of("p0", now_s).seconds(1, 600)


def test_a_server_that_has_computed_nothing_is_tried() -> None:
    """Also beside one that is faster than anybody guessed."""
    speeds = Speeds()
    for number in range(3):
        speeds.ended("p0", 64, float(number), number + 1e-4, float(number))
        assert speeds.of("p1", float(number)) == speeds.of("p0", float(number))
    for number in range(50):
        speeds.ended("slow", 64, float(number), number + 0.5, float(number))
        speeds.ended("p0", 64, float(number), number + 1e-4, float(number))
    assert speeds.of("p1", 50.0) == speeds.of("p0", 50.0)
    assert speeds.of("p1", 50.0).usual_s < speeds.of("slow", 50.0).usual_s


# ---- a decode server that computes the rest itself


def alone(server: ServerView, most: int = 16) -> ServerView:
    assert server.hello is not None
    return replace(server, hello=replace(server.hello, local_prefill_tokens=most))


@pytest.mark.parametrize(
    ("most", "cached", "local"), [(16, 64, True), (16, 60, False), (15, 64, False), (0, 80, False)]
)
def test_a_decode_server_that_has_almost_all_of_a_prompt_computes_the_rest(most: int, cached: int, local: bool) -> None:
    servers = (having(p("p0"), PROMPT[:40]), alone(having(d("d0"), PROMPT[:cached]), most), having(d("d1")))
    found = pick(servers, asked(PROMPT))
    assert found.local_prefill is local
    assert (found.prefill.name, found.decode.name) == (("d0", "d0") if local else ("p0", found.decode.name))
    if local:
        assert (found.servers, found.hit_tokens) == (("d0",), cached)


def test_not_what_has_several_choices_was_sent_before_or_is_most_of_a_short_prompt() -> None:
    servers = (having(p("p0")), alone(having(d("d0"), PROMPT), 1000))
    assert pick(servers, asked(PROMPT)).local_prefill
    for changes in ({"choices": 2}, {"first": False}):
        assert not pick(servers, asked(PROMPT, **changes)).local_prefill, changes
    assert not pick(servers, asked((*PROMPT, *range(50)))).local_prefill, "50 of 130 tokens"


def test_only_where_that_spares_prefill_something() -> None:
    """Short questions behind a beginning that all servers have are prefill's, however busy it is."""
    prompt = tuple(range(1000))  # of which 50 tokens make no difference
    d0 = alone(having(d("d0"), prompt[:980]), 50)
    assert pick((having(p("p0"), prompt[:960]), d0), asked(prompt)).local_prefill
    p0 = having(p("p0"), prompt[:980])
    for prefill in (p0, replace(p0, outstanding_prompts=9, outstanding_prompt_tokens=9000)):
        assert not pick((prefill, d0), asked(prompt)).local_prefill


def test_not_where_no_prefill_server_is_there_to_take_it_back_or_the_policy_asks_no_caches() -> None:
    d0 = alone(having(d("d0"), PROMPT))
    assert isinstance(pick_pair(ClusterView((d0,)), asked(PROMPT), KvAware()), NoPair)
    assert not pick((having(p("p0")), d0), asked(PROMPT), LeastLoaded()).local_prefill


def test_a_decode_server_with_much_to_do_leaves_it_to_prefill() -> None:
    """Computing what the pair would have to send is worth some sequences more on that server, and not any number."""
    prompt = tuple(range(4096))

    def local(running: int) -> bool:
        d0 = replace(alone(having(d("d0", running=running), prompt)), outstanding_choices=running)
        return pick((having(p("p0"), prompt[:3800]), d0, having(d("d1"))), asked(prompt)).local_prefill

    assert local(0) and not local(1000)
