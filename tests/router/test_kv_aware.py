"""The policy that knows caches: what it prefers, and when a decode server computes the rest itself. On values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import ServerState
from disagg.router.placement import pick_pair
from disagg.router.policies import KvAware, LeastLoaded, prefill_s
from disagg.router.prefixes import PromptPages
from disagg.router.speeds import Speed
from disagg.router.view import ClusterView, NoPair, Pair, ServerView
from tests.router.cached_servers import FULL, PAGE, PROMPT, SPEED, asked, hashes_of, having, pick
from tests.router.test_policies import d, m, p


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
