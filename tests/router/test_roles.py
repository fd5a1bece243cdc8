"""Which server may be given another role, on views made by hand."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from disagg.messages.legs import RoleChange, ServerState
from disagg.router.alarms import alarms
from disagg.router.roles import ANSWER_S, Leaving, change_begun, check_drain, needs_change, role_named
from disagg.router.status import server_status
from disagg.router.view import ClusterView, ServerView
from disagg.types.errors import InvalidRequest, Unavailable, UnknownServer
from disagg.types.ids import Role
from tests.router.conftest import Cluster
from tests.router.fake_server import answer, decode, prefill
from tests.router.test_policies import d, p, server


def with_change(server: ServerView, **said: object) -> ServerView:
    change = RoleChange(**{"started": server.role, **said})
    return replace(server, hello=replace(server.hello, role_change=change))


POOLS = tuple(with_change(server) for server in (p("p0"), d("d0"), d("d1")))


def asked(name: str, role: Role, *servers: ServerView, force: bool = False) -> bool:
    return needs_change(ClusterView(servers or POOLS), name, role, force=force)


def test_one_of_several_may_change_and_the_last_of_its_role_only_by_force() -> None:
    assert asked("d0", Role.PREFILL) and asked("d1", Role.MIXED)
    with pytest.raises(InvalidRequest, match=r"p0 is the last prefill server that is ready.*allowed are d0, d1"):
        asked("p0", Role.DECODE)
    assert asked("p0", Role.DECODE, force=True)
    draining = with_change(d("d1", ServerState.DRAINING))
    with pytest.raises(InvalidRequest, match=r"d0 is the last decode server that is ready.*allowed are none now"):
        asked("d0", Role.PREFILL, POOLS[0], POOLS[1], draining)


def test_the_last_ready_server_of_its_role_drains_only_by_force() -> None:
    view = ClusterView(POOLS)
    assert check_drain(view, "d0", force=False).name == "d0"
    with pytest.raises(
        InvalidRequest, match=r"p0 is the last prefill server that is ready.*allowed are d0, d1.*--force"
    ):
        check_drain(view, "p0", force=False)
    assert check_drain(view, "p0", force=True).name == "p0"
    with pytest.raises(InvalidRequest, match=r"p0 is the last prefill server that is ready \(no-peer now\)"):
        check_drain(ClusterView((POOLS[0],)), "p0", force=False)
    others = (d("d1", ServerState.LOADING), d("d2", ServerState.DRAINING), d("d3", connected=False))
    for not_ready in others:
        with pytest.raises(InvalidRequest, match="d0 is the last decode server that is ready"):
            check_drain(ClusterView((*POOLS[:2], not_ready)), "d0", force=False)
    assert check_drain(ClusterView((*POOLS[:2], others[0])), "d1", force=False).name == "d1"
    for unheard in (d("d1", connected=False, error="refused"), d("d1", lost=True, error="refused")):
        with pytest.raises(Unavailable, match="d1 is not heard now: refused"):
            check_drain(ClusterView((*POOLS[:2], unheard)), "d1", force=True)


def test_a_server_that_fits_nobody_is_no_substitute() -> None:
    p0, d0, d1 = POOLS
    odd = replace(d1, hello=replace(d1.hello, fingerprint="of another model"))
    view = ClusterView((p0, d0, odd))
    words = r"d0 is the last decode server that is ready; d1 fits no prefill server, and requests may need one; allowed are d1,"
    with pytest.raises(InvalidRequest, match=words):
        check_drain(view, "d0", force=False)
    with pytest.raises(InvalidRequest, match=words):
        asked("d0", Role.MIXED, *view.servers)
    assert check_drain(view, "d1", force=False).name == "d1", "nothing goes there"
    assert check_drain(ClusterView((replace(p0, hello=replace(p0.hello, fingerprint="b")), d0, odd)), "d0", force=False)


def test_the_last_of_its_role_may_leave_where_mixed_servers_or_in_their_place_a_pair_do_its_work() -> None:
    m0, m1 = (with_change(server(name, Role.MIXED)) for name in ("m0", "m1"))
    p0, d0, _ = POOLS
    beside = ClusterView((p0, d0, m0))
    for name, wanted in (("p0", Role.DECODE), ("d0", Role.PREFILL), ("m0", Role.DECODE)):
        assert check_drain(beside, name, force=False).name == name
        assert needs_change(beside, name, wanted, force=False)
    for gone in ("p0", "d0"):  # then the mixed one has everything
        with pytest.raises(InvalidRequest, match=f"m0 is the last mixed server.*; {gone} was told to leave a moment"):
            check_drain(beside, "m0", force=False, leaving={gone})
        with pytest.raises(InvalidRequest, match=f"{gone} is the last .* server.*; m0 was told to leave a moment ago"):
            needs_change(beside, gone, Role.MIXED, force=False, leaving={"m0"})
    unready = (with_change(server("m0", Role.MIXED, state)) for state in (ServerState.LOADING, ServerState.DRAINING))
    for other in (*unready, replace(m0, fresh=False, silent_s=2.0), replace(m0, lost=True)):
        with pytest.raises(InvalidRequest, match="d0 is the last decode server that is ready"):
            check_drain(ClusterView((p0, d0, other)), "d0", force=False)
    no_pair = with_change(d("d0", fingerprint="other"))
    with pytest.raises(InvalidRequest, match="m0 is the last mixed server that is ready"):
        check_drain(ClusterView((p0, no_pair, m0)), "m0", force=False)
    assert check_drain(ClusterView((m0, m1)), "m0", force=False).name == "m0"


def test_a_server_that_was_told_to_leave_or_is_silent_is_no_other_that_goes_on() -> None:
    with pytest.raises(InvalidRequest, match=r"d1 is the last decode server.*; d0 was told to leave a moment ago, and"):
        check_drain(ClusterView(POOLS), "d1", force=False, leaving={"d0"})
    with pytest.raises(InvalidRequest, match=r"d0 was told to leave a moment ago"):
        needs_change(ClusterView(POOLS), "d1", Role.PREFILL, force=False, leaving={"d0"})
    assert check_drain(ClusterView(POOLS), "d1", force=True, leaving={"d0"}).name == "d1"
    silent = ClusterView((*POOLS[:2], replace(POOLS[2], fresh=False, silent_s=3.2)))
    with pytest.raises(InvalidRequest, match=r"d0 is the last decode server.*; d1 has been silent for 3 s, and"):
        check_drain(silent, "d0", force=False)
    assert check_drain(silent, "d1", force=False).name == "d1"


def test_what_was_told_to_leave_is_remembered_until_it_must_have_said_so_or_it_is_undone() -> None:
    leaving = Leaving()
    leaving.told("d0", True, 10.0)
    leaving.told("d1", True, 11.0)
    assert leaving.now(11.0) == {"d0", "d1"} and leaving.now(10.5 + ANSWER_S) == {"d1"}
    leaving.told("d1", False, 12.0)
    assert leaving.now(12.0) == {"d0"}


def test_what_it_is_or_becomes_already_needs_nothing() -> None:
    assert not asked("d0", Role.DECODE)
    becoming = with_change(d("d0", ServerState.DRAINING), becomes=Role.PREFILL)
    assert not asked("d0", Role.PREFILL, becoming)
    with pytest.raises(Unavailable, match="d0 is becoming prefill now"):
        asked("d0", Role.MIXED, becoming, force=True)


def test_who_drains_loads_is_not_heard_too_old_or_not_there_is_refused_with_what_helps() -> None:
    with pytest.raises(Unavailable, match=r"d0 is draining: .*`disagg drain d0 --undo`"):
        asked("d0", Role.PREFILL, with_change(d("d0", ServerState.DRAINING, running=1)))
    loading = with_change(d("d0", ServerState.LOADING))
    with pytest.raises(Unavailable, match="d0 is loading"):
        asked("d0", Role.PREFILL, replace(loading, hello=replace(loading.hello, incarnation="")))
    with pytest.raises(Unavailable, match="d0 is not heard now"):
        asked("d0", Role.PREFILL, with_change(d("d0", connected=False)))
    with pytest.raises(InvalidRequest, match="version that keeps the role"):
        asked("d0", Role.PREFILL, d("d0"), d("d1"))
    with pytest.raises(UnknownServer, match="no server 'x'; there are: p0, d0, d1"):
        asked("x", Role.PREFILL)
    with pytest.raises(InvalidRequest, match="must be one of prefill, decode, mixed"):
        role_named("router")


def test_a_server_says_what_comes_of_it_once_it_has_heard() -> None:
    before = with_change(d("d0"), asked=3, failed="of another time")
    assert change_begun(before, Role.PREFILL, 3) is None and change_begun(None, Role.PREFILL, 3) is None
    begun = with_change(d("d0"), asked=4, becomes=Role.PREFILL)
    assert change_begun(begun, Role.PREFILL, 3)
    assert change_begun(with_change(p("d0"), asked=4), Role.PREFILL, 3), "it is done already"
    with pytest.raises(Unavailable, match="server d0: it cannot be prefill: no room"):
        change_begun(with_change(d("d0"), asked=4, failed="it cannot be prefill: no room"), Role.PREFILL, 3)


def test_status_and_reason_say_what_it_becomes_and_why_it_did_not() -> None:
    for said, becomes, reason in (
        ({"becomes": Role.PREFILL}, "prefill", "it becomes a prefill server"),
        ({"failed": "no room"}, "", "no room"),
        ({"started": Role.PREFILL}, "", "it was started as a prefill server"),
        ({}, "", ""),
    ):
        server = with_change(d("d0"), **said)
        shown = server_status(server, ClusterView((server,)))
        assert (shown["becomes"], shown["reason"]) == (becomes, reason)


def test_a_role_that_was_asked_for_is_no_alarm_and_one_that_failed_is() -> None:
    for said, alarmed in (({"started": Role.PREFILL}, []), ({"failed": "no room"}, ["no room"])):
        view = ClusterView((p("p0"), with_change(d("d0"), **said)))
        assert [alarm.text for alarm in alarms(view, {}, 0.0)] == alarmed


HELLO = {"p0": {"role_change": RoleChange(Role.PREFILL)}, "d1": {"role_change": RoleChange(Role.DECODE)}}


async def test_a_server_that_has_become_another_is_used_as_that_and_is_no_loss(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.up({"p0": prefill, "d0": decode, "d1": decode}, HELLO)
    changed = cluster.servers["d1"]

    def become(role: Role) -> None:
        changed.become(role, prefill if role is Role.PREFILL else decode, asked=changed.hello.role_change.asked + 1)

    changed.on_role = become
    with caplog.at_level(logging.INFO):
        assert await cluster.router.set_role("d1", "prefill", False)
    assert cluster.metric("disagg_router_servers_lost_total", server="d1") == 0 and "is lost" not in caplog.text
    assert "has ended: it was asked to be a prefill server" in caplog.text
    assert [s["role"] for s in cluster.router.status()["servers"]] == ["prefill", "decode", "prefill"]
    before = len(changed.started)
    for _ in range(6):
        got = await cluster.ask("hi")
        assert got.text[0] == answer(0, 8) and got.finished.attempts == 1
    assert len(changed.started) > before and changed.started[-1].peer.name == "d0"
    with pytest.raises(InvalidRequest, match="d0 is of a version"):
        await cluster.router.set_role("d0", "prefill", False)
    assert not await cluster.router.set_role("d1", "prefill", False)
    assert await cluster.router.set_role("d1", "decode", False)
    assert (await cluster.ask("hi")).text[0] == answer(0, 8)


async def test_two_calls_at_once_do_not_empty_a_pool(cluster: Cluster) -> None:
    knows = {"role_change": RoleChange(Role.DECODE), "drains": True}
    await cluster.up({"p0": prefill, "d0": decode, "d1": decode}, {"d0": knows, "d1": knows})
    asked = [cluster.router.set_role(name, "prefill", False) for name in ("d0", "d1")]
    for name in ("d0", "d1"):
        cluster.servers[name].on_role = lambda role: None  # nothing is heard of it yet
    first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(second, InvalidRequest) and "d0 was told to leave a moment ago" in str(second)
    assert isinstance(first, Unavailable), "it never said what becomes of it"
    cluster.router.drain_server("d1", True)
    with pytest.raises(InvalidRequest, match="d1 was told to leave a moment ago"):
        cluster.router.drain_server("d0", True)
    cluster.router.drain_server("d1", False)
    assert cluster.router.drain_server("d0", True)["name"] == "d0"


async def test_a_server_that_refuses_another_role_says_why(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode, "d1": decode}, HELLO)
    server = cluster.servers["d1"]
    server.on_role = lambda role: server.become(
        Role.DECODE, decode, asked=1, failed=f"it cannot be {role.value}: no room"
    )
    with pytest.raises(Unavailable, match="server d1: it cannot be prefill: no room"):
        await cluster.router.set_role("d1", "prefill", False)
    assert {s["role_failed"] for s in cluster.router.status()["servers"]} == {"", "it cannot be prefill: no room"}


async def test_a_server_that_was_started_in_another_role_than_it_is_listed_in_is_refused(cluster: Cluster) -> None:
    listed = {"role": Role.PREFILL, "role_change": RoleChange(Role.PREFILL)}
    await cluster.up({"p0": prefill, "d0": decode, "d1": decode}, {"d1": listed}, ready=False)
    await cluster.until(cluster.router.healthy)
    await cluster.until(lambda: "says that it is prefill server d1" in cluster.router.status()["servers"][2]["error"])
