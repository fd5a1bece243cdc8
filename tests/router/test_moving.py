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
from disagg.router.moving import MOVES_AT_ONCE, PART_TOKENS, Room, tokens_of
from disagg.router.pairing import Pairing
from disagg.router.policies import LeastLoaded
from disagg.router.view import ClusterView, NoPair, ServerView
from disagg.types.ids import LegKey
from tests.router.request_machines import moving, need, pair, running, tokens
from tests.router.test_policies import d


def spare(server: ServerView, tokens: int | None, used: int = 1) -> ServerView:
    assert server.load is not None
    return replace(server, load=replace(server.load, spare_tokens=tokens, pages_used=used))


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
    assert tokens_of(m) == 3 + 8 + PART_TOKENS, "it has 8 tokens of output at most"
    assert asked.stopped(source(), spare(d("d1"), tokens_of(m) - 1)) == 0
    assert m.movable == pair().decode
    assert asked.stopped(source(), spare(d("d1"), 0), spare(d("d2"), tokens_of(m))) == 1


def test_a_server_that_is_too_old_to_say_it_has_room() -> None:
    assert Asked(answering()).stopped(source(), spare(d("d1"), None, used=100)) == 1


def test_an_answer_that_takes_all_of_a_server_moves_to_one_that_is_empty_alone() -> None:
    asked = Asked(answering(), answering())
    assert asked.stopped(source(), spare(d("d1"), 0, used=0)) == 1


def test_so_many_stop_as_there_is_room_for_and_the_next_when_there_is_more() -> None:
    machines = [answering() for _ in range(30)]
    each = tokens_of(machines[0])
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
    needs = tokens_of(m)
    tight = spare(here, needs), spare(other, needs)
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

    full, roomy = spare(d("d1"), 0), spare(d("d2", running=50), 500)
    assert target(full, roomy) == "d2"
    assert target(full) == "d1", "it waits there"


@settings(max_examples=200, deadline=None)
@given(
    spares=st.lists(st.integers(0, 500), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_no_server_is_promised_more_than_it_has_and_none_stands_that_has_no_place(
    spares: list[int], sizes: list[int]
) -> None:
    machines = [answering(size) for size in sizes]
    asked = Asked(*machines)
    servers = [spare(d(f"d{number + 1}"), tokens) for number, tokens in enumerate(spares)]
    stopped = asked.stopped(source(), *servers)
    needed = [tokens_of(m) for m in machines if m.stopping]
    assert stopped == len(needed) <= MOVES_AT_ONCE
    assert sum(needed) <= sum(spares)
    if stopped < min(len(machines), MOVES_AT_ONCE):
        left = min(tokens_of(m) for m in machines if not m.stopping)
        assert stopped or all(tokens < left for tokens in spares)
