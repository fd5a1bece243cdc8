"""Server states and pairs, on views made by hand."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from disagg.messages.legs import KvEvents, LoadReport, PeerRef, ServerHello, ServerState
from disagg.router.placement import pick_pair, pick_target
from disagg.router.policies import LeastLoaded, RequestFacts, RoundRobin
from disagg.router.view import CachedPages, ClusterView, NoPair, NoPairReason, Pair, ServerView
from disagg.types.ids import Role

FACTS = RequestFacts(prefill_tokens=10, total_tokens=20)


def server(name: str, role: Role, state: ServerState = ServerState.READY, **changes: Any) -> ServerView:
    load = LoadReport(state, changes.pop("running", 0), changes.pop("waiting", 0), 0, 100, 0, 100)
    hello = ServerHello(
        name=name,
        role=role,
        tp=1,
        pid=1,
        worker_pids=(2,),
        incarnation=f"{name}-i",
        fingerprint=changes.pop("fingerprint", "f"),
        model="m",
        max_model_len=changes.pop("max_model_len", 1000),
        max_tokens_in_pool=changes.pop("pool", 1000),
        link_address=f"{name}:1",
        load=load,
        weights_hash=changes.pop("weights", ""),
        note=changes.pop("note", ""),
        hands_over=role is Role.DECODE,
    )
    made = ServerView(name=name, role=role, address=f"{name}:1", hello=hello, load=load, connected=True)
    return replace(made, **changes)


def p(name: str, state: ServerState = ServerState.READY, **changes: Any) -> ServerView:
    return server(name, Role.PREFILL, state, **changes)


def d(name: str, state: ServerState = ServerState.READY, **changes: Any) -> ServerView:
    return server(name, Role.DECODE, state, **changes)


def pick(*servers: ServerView, facts: RequestFacts = FACTS, **wishes: Any) -> tuple[str, str] | NoPair:
    found = pick_pair(ClusterView(servers), facts, LeastLoaded(), **wishes)
    return (found.prefill.name, found.decode.name) if isinstance(found, Pair) else found


def test_a_ready_server_without_a_fitting_ready_counterpart_has_no_peer() -> None:
    view = ClusterView((p("p"), d("d", fingerprint="g"), d("e", ServerState.LOADING)))
    assert [view.state(s) for s in view.servers] == [ServerState.NO_PEER, ServerState.NO_PEER, ServerState.LOADING]
    assert not view.has_pair
    view = ClusterView((p("p"), d("d")))
    assert [view.state(s) for s in view.servers] == [ServerState.READY, ServerState.READY]
    assert view.has_pair


def test_a_server_never_heard_is_loading_and_a_lost_one_is_dead() -> None:
    view = ClusterView((replace(p("p"), hello=None, load=None), replace(d("d"), lost=True)))
    assert [view.state(s) for s in view.servers] == [ServerState.LOADING, ServerState.DEAD]


def test_a_server_without_counterpart_has_nothing_to_do_beside_a_mixed_one_however_busy_that_is() -> None:
    """As `disagg up` says of such clusters (cli/up.without_work)."""
    mixed = server("m", Role.MIXED, running=90, outstanding_prompt_tokens=10**6)
    assert pick(p("p0"), mixed) == pick(d("d0"), mixed) == ("m", "m")


def test_the_less_loaded_servers_are_taken() -> None:
    servers = (p("p0", outstanding_prompt_tokens=50), p("p1"), d("d0", running=3), d("d1", outstanding_choices=2))
    assert pick(*servers) == ("p1", "d1")


def test_equally_loaded_servers_take_turns() -> None:
    servers = (p("p0"), p("p1"), d("d0"), d("d1"))
    chosen = [pick(*servers, facts=replace(FACTS, serial=serial)) for serial in range(4)]
    assert chosen == [("p0", "d0"), ("p1", "d1")] * 2


def test_only_equal_layouts_are_paired() -> None:
    servers = (p("p0"), p("p1", fingerprint="g", outstanding_prompt_tokens=99), d("d1", fingerprint="g"))
    assert pick(*servers) == ("p1", "d1")


def test_the_wishes_of_a_replay_count_before_load_but_never_leave_it_without_servers() -> None:
    servers = (p("p0"), p("p1", outstanding_prompt_tokens=99), d("d0", running=50), d("d1"))
    assert pick(*servers, prefer_decode=servers[2].peer_ref, avoid={"p0"}) == ("p1", "d0")
    gone = PeerRef("gone", "gone:1", "gone-i")
    assert pick(p("p0"), d("d0"), prefer_decode=gone, avoid={"p0", "d0"}) == ("p0", "d0")


def test_a_preferred_decode_server_counts_while_it_is_ready_and_the_same_incarnation() -> None:
    p0, d0, d1 = p("p0"), d("d0", running=50), d("d1")
    assert pick(p0, d0, d1, prefer_decode=d0.peer_ref) == ("p0", "d0")
    assert pick(p0, d("d0", ServerState.DRAINING, running=50), d1, prefer_decode=d0.peer_ref) == ("p0", "d1")
    assert pick(p0, replace(d0, connected=False), d1, prefer_decode=d0.peer_ref) == ("p0", "d1")
    assert pick(p0, d0, d1, prefer_decode=replace(d0.peer_ref, incarnation="before")) == ("p0", "d1")


def test_a_server_that_fell_silent_is_taken_last() -> None:
    assert pick(p("p0", fresh=False), p("p1", outstanding_prompt_tokens=99), d("d0")) == ("p1", "d0")
    assert pick(p("p0", fresh=False), d("d0")) == ("p0", "d0")


def test_a_request_goes_where_it_fits_or_hears_what_would() -> None:
    large = RequestFacts(prefill_tokens=10, total_tokens=500)
    assert pick(p("p0"), d("d0", pool=100), d("d1", running=9), facts=large) == ("p0", "d1")
    assert pick(p("p0"), d("d0", pool=100), d("d1", pool=300), facts=large) == NoPair(NoPairReason.TOO_LARGE, 300)


def test_why_there_is_no_pair() -> None:
    assert pick(p("p"), d("d", ServerState.LOADING)) == NoPair(NoPairReason.LOADING)
    assert pick(p("p"), d("d", lost=True)) == NoPair(NoPairReason.EMPTY_POOL)
    assert pick(p("p"), d("d", ServerState.DRAINING)) == NoPair(NoPairReason.EMPTY_POOL)
    assert pick(p("p"), d("d", connected=False)) == NoPair(NoPairReason.EMPTY_POOL)
    assert pick(p("p")) == NoPair(NoPairReason.EMPTY_POOL)
    assert pick(p("p"), d("d", fingerprint="g")) == NoPair(NoPairReason.NO_COMPATIBLE)
    assert pick(p("p"), d("d", fingerprint="g"), d("e", ServerState.LOADING)) == NoPair(NoPairReason.LOADING)


def test_round_robin_ignores_load() -> None:
    view = ClusterView((p("p0", outstanding_prompt_tokens=99), p("p1"), d("d0")))
    names = []
    for serial in range(4):
        found = pick_pair(view, replace(FACTS, serial=serial), RoundRobin())
        assert isinstance(found, Pair)
        names.append(found.prefill.name)
    assert names == ["p0", "p1", "p0", "p1"]


def test_cached_pages_follow_what_the_server_says_group_by_group() -> None:
    cached = CachedPages()
    cached.apply(KvEvents(stored=((0, b"a"), (2, b"a"), (0, b"b"))))
    assert cached.counts() == (2, 0, 1)
    assert (cached.holds(0, b"a"), cached.holds(1, b"a"), cached.holds(2, b"a")) == (True, False, True)
    cached.apply(KvEvents(stored=((0, b"a"),), removed=((0, b"b"), (1, b"never"), (2, b"a"))))
    assert cached.counts() == (1, 0, 0)
    cached.apply(KvEvents(stored=((1, b"c"),)), reset=True)
    assert cached.counts() == (0, 1)
    cached.clear()
    assert cached.counts() == ()
    assert not cached.holds(1, b"c")


def test_a_server_whose_files_are_not_the_routers_gets_nothing_and_says_why() -> None:
    spoilt = d("d0", differing=("tokenizer.json",))
    view = ClusterView((p("p0"), spoilt))
    assert view.state(spoilt) is ServerState.MISMATCH
    assert view.state(view.servers[0]) is ServerState.NO_PEER
    assert not view.has_pair
    assert "tokenizer.json" in spoilt.reason and "restart" in spoilt.reason
    assert pick(*view.servers) == NoPair(NoPairReason.MISMATCH)
    assert pick(p("p0"), spoilt, d("d1", ServerState.LOADING)) == NoPair(NoPairReason.LOADING)
    assert pick(p("p0"), spoilt, d("d1")) == ("p0", "d1")
    assert d("d0", note="other weights").reason == "other weights"


def test_a_server_that_loads_is_not_said_to_have_other_files() -> None:
    loading = d("d0", ServerState.LOADING, differing=("tokenizer.json",))
    assert ClusterView((p("p0"), loading)).state(loading) is ServerState.LOADING


def test_an_answer_that_has_begun_goes_on_with_the_same_weights_only() -> None:
    begun = replace(FACTS, weights="old")
    old = {"weights": "old", "fingerprint": "old f"}
    new = {"weights": "new", "fingerprint": "new f"}
    idle_new = (p("p1", **new), d("d1", **new))
    busy_old = (p("p0", outstanding_prompt_tokens=99, **old), d("d0", outstanding_choices=9, **old))
    assert pick(*busy_old, *idle_new) == ("p1", "d1")
    assert pick(*busy_old, *idle_new, facts=begun) == ("p0", "d0")
    assert pick(*busy_old, *idle_new, facts=begun, avoid=("p0", "d0")) == ("p0", "d0")
    assert pick(*idle_new, facts=begun) == NoPair(NoPairReason.OTHER_WEIGHTS)
    # One that loads, or is lost, may come back with the weights that are asked for.
    assert pick(*idle_new, d("d0", ServerState.LOADING), facts=begun) == NoPair(NoPairReason.OTHER_WEIGHTS)
    assert pick(
        *idle_new, p("p0", ServerState.LOADING, **old), d("d0", ServerState.LOADING, **old), facts=begun
    ) == NoPair(NoPairReason.LOADING)
    assert pick(*idle_new, p("p0", lost=True), d("d0", **old), facts=begun) == NoPair(NoPairReason.EMPTY_POOL)


def test_weights_need_not_be_paired_alike_to_be_the_same() -> None:
    """Servers with another page size have another layout, and may go on with the answer as a pair."""
    other_pages = {"weights": "w", "fingerprint": "other pages"}
    assert pick(p("p0", **other_pages), d("d0", **other_pages), facts=replace(FACTS, weights="w")) == ("p0", "d0")


def test_of_a_server_that_does_not_say_its_weights_all_must_be_the_same() -> None:
    servers = (p("p0", fingerprint="f"), d("d0", fingerprint="f"))
    assert pick(*servers, facts=replace(FACTS, weights="f")) == ("p0", "d0")
    assert pick(*servers, facts=replace(FACTS, weights="g")) == NoPair(NoPairReason.OTHER_WEIGHTS)


# ---- mixed servers


def m(name: str, state: ServerState = ServerState.READY, **changes: Any) -> ServerView:
    return server(name, Role.MIXED, state, **changes)


def test_a_mixed_server_needs_no_peer_and_is_a_pair_with_itself() -> None:
    view = ClusterView((m("m"),))
    assert view.has_pair and view.state(view.servers[0]) is ServerState.READY
    found = pick_pair(view, FACTS, LeastLoaded())
    assert isinstance(found, Pair) and found.whole and found.servers == ("m",) and found.max_total_tokens == 1000
    assert not p("p").fits(m("m")) and not m("m").fits(d("d")), "it is nobody's other half"


def test_whole_requests_go_to_whoever_has_least_to_do() -> None:
    assert pick(p("p", outstanding_prompt_tokens=9), d("d"), m("m")) == ("m", "m")
    assert pick(p("p"), d("d"), m("m", outstanding_prompt_tokens=9)) == ("p", "d")
    assert pick(p("p"), d("d", running=8), m("m", outstanding_choices=2)) == ("m", "m")
    assert pick(m("m0", outstanding_prompt_tokens=9), m("m1")) == ("m1", "m1")


def test_where_all_are_idle_pairs_and_mixed_servers_take_turns() -> None:
    servers = (p("p0"), p("p1"), d("d0"), d("d1"), m("m0"), m("m1"))
    for policy in (LeastLoaded(), RoundRobin()):
        found = [pick_pair(ClusterView(servers), replace(FACTS, serial=serial), policy) for serial in range(8)]
        whole = [each.whole for each in found if isinstance(each, Pair)]
        assert sum(whole) == 4 and len(whole) == 8
        assert {name for each in found if isinstance(each, Pair) for name in each.servers} == {s.name for s in servers}


def test_mixed_servers_take_everything_while_a_pool_is_empty() -> None:
    busy = m("m", outstanding_prompt_tokens=10_000, running=50)
    for others in ((p("p"),), (d("d"),), (p("p"), d("d", lost=True)), (p("p", ServerState.LOADING), d("d"))):
        assert pick(*others, busy) == ("m", "m")
    assert pick(p("p"), d("d"), m("m", ServerState.DRAINING)) == ("p", "d")


def test_a_replay_avoids_the_mixed_server_that_failed_it_and_prefers_where_kv_landed() -> None:
    servers = (p("p", outstanding_prompt_tokens=99), d("d", running=9), m("m"))
    assert pick(*servers, avoid={"m"}) == ("p", "d")
    assert pick(*servers, prefer_decode=servers[1].peer_ref) == ("p", "d")
    assert pick(m("m"), avoid={"m"}) == ("m", "m")


def test_what_only_one_route_can_hold_goes_there_and_the_largest_limit_is_said() -> None:
    large = RequestFacts(prefill_tokens=10, total_tokens=500)
    assert pick(p("p"), d("d", pool=100), m("m", running=30), facts=large) == ("m", "m")
    assert pick(p("p"), d("d"), m("m", pool=100), facts=large) == ("p", "d")
    assert pick(p("p"), d("d", pool=100), m("m", pool=300), facts=large) == NoPair(NoPairReason.TOO_LARGE, 300)


def test_why_there_is_no_pair_beside_mixed_servers() -> None:
    assert pick(m("m", ServerState.LOADING)) == NoPair(NoPairReason.LOADING)
    assert pick(m("m", lost=True)) == NoPair(NoPairReason.EMPTY_POOL)
    assert pick(p("p"), d("d", fingerprint="g"), m("m", lost=True)) == NoPair(NoPairReason.EMPTY_POOL)
    begun = replace(FACTS, weights="w")
    assert pick(m("m", weights="v"), facts=begun) == NoPair(NoPairReason.OTHER_WEIGHTS)
    assert pick(m("m", weights="v"), p("p", weights="w"), d("d", weights="w"), facts=begun) == ("p", "d")
    assert pick(m("m", weights="v"), p("p", weights="w"), d("d", weights="v"), facts=begun) == NoPair(
        NoPairReason.OTHER_WEIGHTS
    )
    assert pick(m("m", weights="v"), p("p", lost=True), d("d", lost=True), facts=begun) == NoPair(
        NoPairReason.EMPTY_POOL
    )


def target(source: ServerView, *others: ServerView, facts: RequestFacts = FACTS) -> str | None:
    found = pick_target(ClusterView((source, *others)), facts, LeastLoaded(), source.peer_ref)
    assert found is None or (found.moves and found.prefill == source.peer_ref)
    return found.decode.name if found is not None else None


def test_what_drains_goes_to_a_decode_server_that_fits_and_takes_requests() -> None:
    source = d("d0", ServerState.DRAINING)
    assert target(source, p("p0"), d("d1", outstanding_choices=3), d("d2")) == "d2"
    assert target(source, d("d1", fingerprint="g"), d("d2", ServerState.DRAINING), d("d3", pool=19), p("p0")) is None
    assert target(d("d0"), d("d1")) == "d1", "that it drains was undone, and what stands still there is kept"
    assert target(replace(source, lost=True), d("d1")) is target(replace(source, connected=False), d("d1")) is None


def test_a_server_that_drains_is_drained_when_nobody_has_anything_there() -> None:
    def state(**changes: Any) -> ServerState:
        each = d("d0", ServerState.DRAINING, **changes)
        return ClusterView((each,)).state(each)

    assert state() is ServerState.DRAINED
    assert state(running=1) is state(waiting=1) is state(outstanding_choices=1) is ServerState.DRAINING
    assert state(connected=False) is ServerState.DRAINING
