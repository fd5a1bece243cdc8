"""The decode side's rings: every link gets its turn, and none keeps the others waiting for what it no longer wants."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engine.handoff.ring_table import TURN_S, LiveEntry, RingState, RingTable
from disagg.messages import link as m
from disagg.messages.legs import PeerRef
from disagg.messages.pieces import Piece
from disagg.types.ids import LegKey
from tests.engine.lone_engine import LINK, P_REF, Decode, facts, hello, start

SEGMENT = 64
KEY = LegKey("r", 0, 0)


def table(segments: int = 1, links: int = 2, link_segments: int = 1) -> RingTable:
    rings = RingTable(segments * SEGMENT, SEGMENT, link_segments, ranks=1, idle_s=1.0)
    for link in range(links):
        rings.add(link)
    return rings


def test_a_link_that_waits_makes_an_idle_one_give_its_ring_back() -> None:
    rings = table()
    assert rings.open(0, "a", 0.0)
    assert not rings.open(1, "b", 0.0)
    assert rings.closable(0.1, busy=set()) == [0]
    assert not rings.open(0, "a", 0.2), "it is closing"
    rings.closed(0)
    assert not rings.open(0, "a", 0.3), "the other one was first"
    assert rings.open(1, "b", 0.3)


def test_a_ring_that_nobody_else_wants_is_kept_until_it_has_been_idle_for_long() -> None:
    rings = table()
    assert rings.open(0, "a", 5.0)
    assert rings.closable(5.9, busy=set()) == []
    assert rings.closable(6.0, busy={0}) == []
    assert rings.closable(6.9, busy=set()) == []
    assert rings.closable(7.0, busy=set()) == [0]


def test_a_link_whose_legs_have_gone_does_not_keep_the_others_waiting() -> None:
    rings = table()
    assert rings.open(0, "a", 0.0)
    assert not rings.open(1, "b", 0.0)
    assert rings.closable(0.1, busy=set()) == [0]
    rings.closed(0)
    rings.keep_wishes({0})  # what link 1 waited for was aborted
    assert rings.open(0, "a", 0.2)


def test_a_busy_ring_takes_nothing_new_once_another_link_has_waited_for_its_turn() -> None:
    rings = table()
    assert rings.open(0, "a", 0.0)
    assert not rings.open(1, "b", 0.0)
    assert rings.open(0, "a", TURN_S / 2), "its turn has just begun"
    assert not rings.open(0, "a", TURN_S), "a steady stream of legs would keep it for ever"
    assert rings.closable(TURN_S, busy={0}) == [], "those that were granted finish first"
    assert rings.closable(TURN_S, busy=set()) == [0]
    rings.closed(0)
    assert not rings.open(0, "a", TURN_S)
    assert rings.open(1, "b", TURN_S)


def test_only_the_ring_that_was_held_longest_is_drained_for_another() -> None:
    rings = table(segments=2, links=3)
    assert rings.open(0, "a", 0.0)
    assert rings.open(1, "b", 0.1)
    assert not rings.open(2, "c", 0.2)
    assert rings.open(1, "b", 9.0)
    assert not rings.open(0, "a", 9.0)


def test_a_link_whose_share_is_quarantined_is_blocked_by_quarantine_and_does_not_keep_the_others_waiting() -> None:
    rings = table(segments=4, links=1)
    assert rings.open(0, "a", 0.0)
    assert rings.remove(0, gone=False)
    rings.add(1)  # to the same peer again
    rings.add(2)
    assert rings.blocked_by_quarantine(1, "a")
    assert not rings.open(1, "a", 0.0)
    assert rings.open(2, "b", 0.0)
    rings.quiet(0)
    assert not rings.blocked_by_quarantine(1, "a")
    assert rings.open(1, "a", 0.0)


def test_an_arena_that_is_quarantined_shuts_everybody_out_until_a_peer_is_quiet() -> None:
    rings = table()
    assert rings.open(0, "a", 0.0)
    assert rings.remove(0, gone=False)
    assert rings.blocked_by_quarantine(1, "b")
    rings.quiet(0)
    assert rings.open(1, "b", 0.0)


def test_segments_of_a_lost_link_are_reused_only_if_its_writers_are_gone() -> None:
    for gone in (False, True):
        rings = table()
        assert rings.open(0, "a", 0.0)
        assert rings.remove(0, gone) == (not gone)
        assert rings.arena.quarantined_bytes == (0 if gone else SEGMENT)
        assert rings.open(1, "b", 0.0) == gone


def test_an_entry_is_freed_once_and_an_id_means_one_entry_ever() -> None:
    rings = table(segments=8, links=2)
    assert rings.open(0, "a", 0.0)
    assert rings.open(1, "b", 0.0)
    first, _ = rings.links[0].assign(KEY, 0, 0, 16, 0.0)
    second, _ = rings.links[1].assign(KEY, 0, 0, 16, 0.0)
    assert first != second
    assert rings.links[0].free(second) is None
    assert rings.links[0].free(first) is not None
    assert rings.links[0].free(first) is None
    assert rings.links[1].state is RingState.OPEN


def test_a_tick_looks_at_each_entry_of_a_ring_once_however_many_transfers_there_are() -> None:
    """If each transfer looked at all entries, 256 of them with 16 pieces each would hold the loop for 0.3 s a tick."""
    looks = 0

    class Live(dict[int, LiveEntry]):
        def items(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().items()

        def values(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().values()

    transfers, pieces = 16, 4
    decode = Decode(facts(num_large=200, max_slots=transfers, max_waiting=transfers, spare_tokens=4))
    for number in range(transfers):
        leg = start(f"r{number}", 4 * pieces, first_token=1 + 100 * number, peer=P_REF)
        decode.granted(leg)
        decode.offer(leg, *(Piece(0, 0, 2, 4 * at, 4 * at + 4) for at in range(pieces)))
    ring = decode.receiver.rings.table.links[LINK]
    ring.live = Live(ring.live)
    decode.engine.tick(decode.now)
    assert 0 < looks <= 4 * transfers * pieces


def test_a_link_without_a_ring_is_asked_for_one_once_for_all_legs_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for a ring lets others go on, so all of them are asked in each of an engine's steps."""
    decode = Decode(facts(num_large=100, arena_bytes=4096, max_slots=16))
    decode.start(start("holds", peer=P_REF))
    decode.link(m.Announce(start("holds").key, 6))
    other = PeerRef("other", "o:1", "o1")
    decode.link_up(hello(other), LINK + 1)
    for number in range(6):
        leg = start(f"waits {number}", peer=other)
        decode.start(leg)
        decode.link(m.Announce(leg.key, 6), LINK + 1)
    asked: list[int] = []
    open_ring = RingTable.open

    def noted(self: RingTable, link: int, peer: str, now_s: float) -> bool:
        asked.append(link)
        return open_ring(self, link, peer, now_s)

    monkeypatch.setattr(RingTable, "open", noted)
    decode.do([])
    assert asked == [LINK + 1] and len(decode.engine.core.turns.queue) == 6
