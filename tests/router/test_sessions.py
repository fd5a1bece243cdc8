"""Where conversations go on, and that routers which begin alike do not go on alike."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.router.placement import pick_pair
from disagg.router.policies import POLICIES, RequestFacts, turn
from disagg.router.sessions import NOWHERE, Sessions
from disagg.router.view import ClusterView, Pair
from disagg.types.errors import InvalidRequest
from disagg.types.sampling import MAX_SESSION_CHARS

from .conftest import Cluster
from .fake_server import decode, prefill
from .test_policies import d, p

FACTS = RequestFacts(prefill_tokens=100, total_tokens=120)


def test_a_session_is_known_to_its_tenant_only_and_for_a_while() -> None:
    sessions = Sessions(kept_s=10.0)
    sessions.note("a", "s", ("p0", "d0"), 0.0)
    assert sessions.of("a", "s", 9.0) == {"p0", "d0"}
    assert sessions.of("b", "s", 9.0) == sessions.of("a", "t", 9.0) == sessions.of("as", "", 9.0) == NOWHERE
    assert sessions.of("a", "s", 10.0) == NOWHERE
    sessions.note("a", "s", ("p1", "d0"), 10.0)
    assert sessions.of("a", "s", 19.0) == {"p1", "d0"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", max_size=3)), max_size=60), st.integers(1, 5))
def test_those_used_last_are_remembered(noted: list[tuple[str, str]], most: int) -> None:
    sessions = Sessions(most=most)
    last: dict[tuple[str, str], str] = {}
    for number, (tenant, session) in enumerate(noted):
        sessions.note(tenant, session, (f"s{number}",), 0.0)
        if session:
            last.pop((tenant, session), None)
            last[tenant, session] = f"s{number}"
    kept = dict(list(last.items())[-most:])
    assert len(sessions) == len(kept)
    for key, server in last.items():
        assert sessions.of(*key, 0.0) == ({server} if key in kept else NOWHERE)


def picked(policy: str, facts: RequestFacts, *servers: object) -> tuple[str, str]:
    found = pick_pair(ClusterView(servers), facts, POLICIES[policy]())  # type: ignore[arg-type]
    assert isinstance(found, Pair)
    return found.prefill.name, found.decode.name


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded"])
def test_equals_are_decided_by_the_session_and_load_is_not(policy: str) -> None:
    facts = replace(FACTS, session=frozenset({"p1", "d1"}))
    for serial in range(4):
        facts = replace(facts, serial=serial)
        assert picked(policy, facts, p("p0"), p("p1"), d("d0"), d("d1")) == ("p1", "d1")
        busy = p("p1", outstanding_prompts=1, outstanding_prompt_tokens=100), d("d1", running=20)
        assert picked(policy, facts, p("p0"), busy[0], d("d0"), busy[1]) == ("p0", "d0")
        assert picked(policy, facts, p("p0"), d("d0")) == ("p0", "d0"), "where it was, nothing is any more"


async def test_requests_of_a_session_go_to_the_same_servers(cluster: Cluster) -> None:
    names = ("p0", "p1", "p2", "d0", "d1", "d2")
    await cluster.up({name: prefill if name[0] == "p" else decode for name in names})
    for _ in range(6):
        await cluster.ask(session="mine", tenant="a")
    assert sorted(len(server.started) for server in cluster.servers.values()) == [0, 0, 0, 0, 6, 6]
    with pytest.raises(InvalidRequest, match=f"257 characters; at most {MAX_SESSION_CHARS}"):
        await cluster.ask(session="x" * 257)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(0, 50))
def test_in_each_round_every_server_is_first_once(turns: int, count: int, round_: int) -> None:
    firsts = []
    for at in range(count):
        facts = replace(FACTS, serial=round_ * count + at, turns=turns)
        order = [turn(index, count, facts) for index in range(count)]
        assert sorted(order) == list(range(count))
        firsts.append(order.index(0))
    assert sorted(firsts) == list(range(count))


@pytest.mark.parametrize("policy", list(POLICIES))
def test_routers_that_begin_alike_and_hear_the_same_do_not_herd(policy: str) -> None:
    """Both get each request at once, and see idle servers: what they take is the same about once in four times."""
    servers = [p(f"p{n}") for n in range(4)] + [d(f"d{n}") for n in range(4)]
    one, other = 12345, secrets.randbits(32) | 1 << 20
    same = 0
    for serial in range(800):
        both = [picked(policy, replace(FACTS, serial=serial, turns=turns), *servers) for turns in (one, other)]
        same += both[0][0] == both[1][0]
    assert 100 < same < 320, "of 800"
