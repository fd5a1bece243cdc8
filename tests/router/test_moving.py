"""An answer stops at a server that drains only where another one has room for it now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disagg.messages.legs import LegEnd, Outcome, ServerState
from disagg.router import machine as r
from disagg.router.live import Live
from disagg.router.moving import MOVES_AT_ONCE, Room, needs_of
from disagg.router.pairing import Pairing
from disagg.router.policies import LeastLoaded
from disagg.router.view import ClusterView, NoPair, ServerView
from disagg.types.ids import LegKey
from tests.router.test_machine import moving, need, pair, running, tokens
from tests.router.test_policies import d


def spare(server: ServerView, pages: int | None, total: int = 100) -> ServerView:
    assert server.load is not None
    return replace(server, load=replace(server.load, pages_spare=pages, pages_total=total, pages_free=total))


def source() -> ServerView:
    return d("d0", ServerState.DRAINING)


def answering(outputs: int = 2, n: int = 1) -> r.RequestMachine:
    m = running(n=n)
    for choice in range(n):
        tokens(m, "d0", choice, 0, *range(10, 10 + outputs))
    return m


class Asked:
    """What `Pairing` would move, and where, over servers that may change."""

    def __init__(self, *machines: r.RequestMachine) -> None:
        self.servers: tuple[ServerView, ...] = ()
        fleet = SimpleNamespace(view=lambda: ClusterView(self.servers))
        none = cast(Any, SimpleNamespace())
        self.pairing = Pairing(cast(Any, fleet), LeastLoaded(), none, none, 0.0)
        self.machines = list(machines)

    def stopped(self, *servers: ServerView) -> int:
        """How many are asked to stop, by what these servers say."""
        self.servers = servers
        lives = [cast(Live, SimpleNamespace(machine=m)) for m in self.machines]
        stopped = 0
        for live in self.pairing.to_move(lives):
            assert live.machine.handle(r.TargetSeen())
            stopped += 1
        return stopped


def test_nothing_stops_where_no_server_has_room_and_all_goes_on_when_one_has() -> None:
    m = answering()
    asked = Asked(m)
    assert asked.stopped(source(), spare(d("d1"), 1)) == 0, (
        "it has 11 tokens at most: two pages, and one for what is cut"
    )
    assert m.movable == pair().decode
    assert asked.stopped(source(), spare(d("d1"), 1), spare(d("d2"), 3)) == 1


def test_a_server_that_does_not_say_it_has_what_it_has_not_used() -> None:
    full = d("d1")
    assert full.load is not None
    full = replace(full, load=replace(full.load, pages_used=100, pages_free=0))
    assert Asked(answering()).stopped(source(), full) == 0
    assert Asked(answering()).stopped(source(), replace(full, load=replace(full.load, pages_evictable=50))) == 1


def test_an_answer_that_takes_all_of_a_server_moves_to_one_that_is_empty() -> None:
    m = answering()
    assert needs_of(m)(spare(d("d1"), 0, total=1)) == 1, "alone it has all pages, however few"


def test_so_many_stop_as_there_is_room_for_and_the_next_when_there_is_more() -> None:
    machines = [answering() for _ in range(30)]
    each = needs_of(machines[0])(d("d1"))
    asked = Asked(*machines)
    said = spare(d("d1"), 3 * each)
    assert asked.stopped(source(), said) == 3
    assert asked.stopped(source(), said) == 0, "the server has not said anything new"
    assert asked.stopped(source(), spare(d("d1"), 4 * each)) == 1, "three stand still, and their pages are still free"
    assert asked.stopped(source(), spare(d("d1"), 100 * each)) == MOVES_AT_ONCE - 4


def test_what_is_on_its_way_counts_where_it_goes() -> None:
    m = answering()
    m.handle(r.TargetSeen())
    room, here, other = Room(), d("d1"), d("d2")
    view = ClusterView((source(), here, other))
    needs = needs_of(m)
    tight = replace(here, load=spare(here, needs(here)).load), replace(other, load=spare(other, needs(other)).load)
    room.look(view, [m])
    assert not any(room.is_there(needs, each) for each in tight), "nobody knows where it goes"
    stands = m.handle(r.LegEnded("d0", LegEnd(LegKey("r", 1, 0), Outcome.HANDED_OVER, "", (), 0)))
    assert need(stands).source == pair().decode
    moving(m)
    room.look(view, [m])
    assert [room.is_there(needs, each) for each in tight] == [False, True]
    tokens(m, "d1", 0, 1, 11)
    room.look(view, [m])
    assert all(room.is_there(needs, each) for each in tight), "it answers there"


def test_what_stands_still_goes_where_there_is_room_and_else_anywhere() -> None:
    m = answering()
    asked = Asked(m)
    wish = SimpleNamespace(source=pair().decode, prefer_decode=None, avoid=())
    live = cast(Live, SimpleNamespace(machine=m, wish=wish))

    def target(*servers: ServerView) -> str:
        asked.servers = (source(), *servers)
        found = asked.pairing.pick(live, 0.0)
        assert not isinstance(found, NoPair) and found.moves
        return found.decode.name

    full, roomy = spare(d("d1"), 0), spare(d("d2", running=50), 50)
    assert target(full, roomy) == "d2"
    assert target(full) == "d1", "it waits there"


@settings(max_examples=200, deadline=None)
@given(
    spares=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_no_server_is_promised_more_than_it_has_and_none_stands_that_has_no_place(
    spares: list[int], sizes: list[int]
) -> None:
    machines = [answering(size) for size in sizes]
    asked = Asked(*machines)
    servers = [spare(d(f"d{number + 1}"), pages) for number, pages in enumerate(spares)]
    stopped = asked.stopped(source(), *servers)
    needed = sorted(needs_of(m)(servers[0]) for m in machines if m.stopping)
    assert stopped == len(needed) <= MOVES_AT_ONCE
    assert sum(needed) <= sum(spares)
    if stopped < min(len(machines), MOVES_AT_ONCE):
        left = min(needs_of(m)(servers[0]) for m in machines if not m.stopping)
        assert stopped or all(pages < left for pages in spares)
