"""Routers and servers of several versions: who is paired, who is refused, and what the operator is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import Drain, ServerState
from disagg.router.alarms import alarms
from disagg.router.placement import pick_pair, pick_target
from disagg.router.policies import LeastLoaded
from disagg.router.versions import mixed_versions
from disagg.router.view import ClusterView, NoPair, NoPairReason, Pair, ServerView
from disagg.types.errors import InvalidRequest, NoCompatiblePeer, UnknownServer
from disagg.types.ids import Role
from disagg.types.protocol import BEFORE_NUMBERS, PROTOCOL, Version, spoken
from disagg.types.version import own_version
from tests.router.conftest import NORMAL, Cluster
from tests.router.fake_server import decode, prefill
from tests.router.test_policies import FACTS, d, p

NEXT = Version(PROTOCOL + 1, PROTOCOL, "next")
TOO_NEW = Version(PROTOCOL + 2, PROTOCOL + 1, "too new")

numbers = st.integers(0, 5)
versions = st.tuples(numbers, numbers).map(lambda ends: Version(max(ends), min(ends), "v"))


def of(server: ServerView, version: Version) -> ServerView:
    assert server.hello is not None
    return replace(server, hello=replace(server.hello, version=version))


def version_of(server: ServerView) -> Version:
    assert server.hello is not None
    return server.hello.version


@settings(deadline=None)
@given(st.lists(versions, max_size=4), st.lists(versions, max_size=4), st.integers(0, 9))
def test_a_pair_is_found_if_some_two_speak_and_what_is_paired_speaks(
    prefills: list[Version], decodes: list[Version], serial: int
) -> None:
    servers = {f"p{i}": of(p(f"p{i}"), v) for i, v in enumerate(prefills)}
    servers |= {f"d{i}": of(d(f"d{i}"), v) for i, v in enumerate(decodes)}
    view = ClusterView(tuple(servers.values()))
    found = pick_pair(view, replace(FACTS, serial=serial), LeastLoaded())
    possible = any(spoken(a, b) is not None for a in prefills for b in decodes)
    assert isinstance(found, Pair) == possible == view.has_pair
    if isinstance(found, Pair):
        pair = [version_of(servers[name]) for name in found.servers]
        assert spoken(*pair) is not None
    for server in view.servers:
        others = decodes if server.role is Role.PREFILL else prefills
        alone = not any(spoken(version_of(server), other) is not None for other in others)
        assert view.state(server) is (ServerState.NO_PEER if alone else ServerState.READY)


def test_the_least_loaded_is_taken_whatever_its_version() -> None:
    old = of(p("p0", outstanding_prompt_tokens=50), BEFORE_NUMBERS)
    view = ClusterView(
        (old, of(p("p1"), own_version()), of(d("d0"), own_version()), of(d("d1", running=3), BEFORE_NUMBERS))
    )
    found = pick_pair(view, FACTS, LeastLoaded())
    assert isinstance(found, Pair)
    assert found.servers == ("p1", "d0")


def test_servers_that_cannot_speak_are_no_pair_and_the_reason_says_so() -> None:
    found = pick_pair(ClusterView((of(p("p"), BEFORE_NUMBERS), of(d("d"), TOO_NEW))), FACTS, LeastLoaded())
    assert found == NoPair(NoPairReason.NO_COMPATIBLE)
    assert "protocols" in NoPairReason.NO_COMPATIBLE.value


def test_what_drains_goes_on_only_where_it_can_be_sent() -> None:
    source = of(d("d0", ServerState.DRAINING), own_version())
    for version, goes in ((own_version(), True), (NEXT, True), (TOO_NEW, False)):
        target = pick_target(ClusterView((source, of(d("d1"), version))), FACTS, LeastLoaded(), source.peer_ref)
        assert (target is not None) == goes


def test_several_versions_are_said_with_who_has_which_and_one_is_not() -> None:
    own = own_version()
    assert mixed_versions(ClusterView((of(p("p"), own), of(d("d"), own))), own) == ""
    gone = replace(of(d("gone"), TOO_NEW), lost=True)
    assert mixed_versions(ClusterView((of(p("p"), own), gone, replace(d("new"), hello=None))), own) == ""
    view = ClusterView((of(p("p"), NEXT), *(of(d(f"d{i}"), BEFORE_NUMBERS) for i in range(7))))
    said = mixed_versions(view, own)
    assert said == (
        f"several versions serve together: disagg next, which speaks {NEXT.range}: p; {own}: this router; "
        "a version that does not say, which speaks protocol 0: d0, d1, d2, d3, d4 and 2 more"
    )
    assert [alarm.text for alarm in alarms(view, {}, 0.0, own=own) if alarm.subject == "router"] == [said]


def test_a_refused_server_is_a_mismatch_whatever_it_was_before() -> None:
    for server in (replace(d("d"), hello=None, load=None), replace(d("d"), lost=True), d("d")):
        refused = replace(server, refused="both named", connected=False)
        view = ClusterView((p("p"), refused))
        assert view.state(refused) is ServerState.MISMATCH
        assert refused.reason == "both named"
        assert not view.has_pair
        assert pick_pair(view, FACTS, LeastLoaded()) == NoPair(NoPairReason.MISMATCH)
        begun = ClusterView(
            (p("p", weights="w"), refused)
        )  # it may come back with the weights that the answer began with
        assert pick_pair(begun, replace(FACTS, weights="w"), LeastLoaded()) == NoPair(NoPairReason.MISMATCH)
        assert [alarm.text for alarm in alarms(view, {}, 0.0) if alarm.subject == "d"] == ["is not used: both named"]


def test_what_drains_moves_only_between_servers_that_know_how() -> None:
    source = of(d("d0", ServerState.DRAINING), own_version())
    old = of(d("d1"), BEFORE_NUMBERS)
    assert old.hello is not None
    older = replace(old, hello=replace(old.hello, hands_over=False))
    for target, goes in ((old, True), (older, False)):
        found = pick_target(ClusterView((source, target)), FACTS, LeastLoaded(), source.peer_ref)
        assert (found is not None) == goes
    view = ClusterView((replace(older, load=source.load), of(d("d2"), own_version())))
    assert pick_target(view, FACTS, LeastLoaded(), older.peer_ref) is None


# ---- over gRPC


async def test_a_server_that_cannot_be_told_to_drain_is_not_told(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.up(NORMAL, hello={"p0": {"version": own_version()}})
    with pytest.raises(InvalidRequest, match=r"p0 is the last prefill server that is ready.*with --force"):
        cluster.router.drain_server("p0", True)
    assert cluster.router.drain_server("p0", True, force=True)["state"] == "ready"
    with pytest.raises(UnknownServer, match=r"there is no server .d7.; there are: \w\w, \w\w"):
        cluster.router.drain_server("d7", True)
    with pytest.raises(
        InvalidRequest, match=r"server d0 cannot be told to drain; send it SIGTERM: Drain needs protocol 1"
    ):
        cluster.router.drain_server("d0", True, force=True)
    cluster.router._dispatch.fleet.send("d0", Drain(True))  # whoever should have asked before: its stream does not end
    assert "not sent to server d0: Drain needs protocol 1" in caplog.text
    assert len((await cluster.ask()).token_ids[0]) == 8
    assert all(len(server.greetings) == 1 for server in cluster.servers.values())


async def test_servers_of_the_version_before_and_the_next_serve_together(cluster: Cluster) -> None:
    hello: dict[str, dict[str, Any]] = {
        "p0": {"version": NEXT},
        "d0": {"version": BEFORE_NUMBERS},
        "d1": {"version": NEXT},
    }
    await cluster.up({**NORMAL, "d1": decode}, hello=hello)
    for _ in range(4):
        assert len((await cluster.ask()).token_ids[0]) == 8
    assert cluster.servers["d1"].greetings[0].version == own_version()
    status = cluster.router.status()
    assert {s["name"]: (s["version"], s["protocol"], s["state"]) for s in status["servers"]} == {
        "p0": ("next", PROTOCOL + 1, "ready"),
        "d0": ("", 0, "no-peer"),  # it is too old for the only prefill server
        "d1": ("next", PROTOCOL + 1, "ready"),
    }
    assert status["routers"][0]["version"] == own_version().software
    assert any(alarm["text"].startswith("several versions serve together") for alarm in status["alarms"])
    assert not cluster.servers["d0"].started


async def test_a_server_that_cannot_speak_with_the_router_is_refused_by_both_names_and_the_others_serve(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hello = {"d1": {"version": TOO_NEW}}
    await cluster.up({**NORMAL, "d1": decode}, hello=hello, ready=False)
    await cluster.until(lambda: cluster.state("d1") == "mismatch" and cluster.router.healthy())
    assert len((await cluster.ask()).token_ids[0]) == 8
    reason = next(s["reason"] for s in cluster.router.status()["servers"] if s["name"] == "d1")
    assert str(own_version()) in reason
    assert f"server d1 is {TOO_NEW}" in reason
    assert "upgrade router" in reason
    assert not cluster.servers["d1"].started
    said = [record for record in caplog.records if "too new" in record.getMessage() and record.levelno == logging.ERROR]
    assert len(said) == 1  # however often it is dialled


async def test_a_server_upgraded_too_far_is_given_up_and_comes_back_when_it_is_put_back(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode})
    server = cluster.servers["d0"]
    await server.kill()
    good, server.hello = server.hello, replace(server.hello, version=TOO_NEW)
    await server.restart()
    await cluster.until(lambda: cluster.state("d0") == "mismatch")
    with pytest.raises(NoCompatiblePeer, match="no protocol"):
        await cluster.ask(deadline_s=0.5)
    await server.kill()
    server.hello = good
    await server.restart()
    await cluster.until(lambda: cluster.state("d0") == "ready")
    assert len((await cluster.ask()).token_ids[0]) == 8
