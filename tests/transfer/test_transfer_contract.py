"""What every transfer thread does: the driver of workers, as on a CPU and as on a GPU, and the simulation's stand-in.

    source ── writes ──> arena ── notifications ──> target

Each of these says one thing that engines count on. What one of them has beyond this is tried where that one is.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import pytest
import torch
from msgspec.structs import replace

from disagg.messages.layout import GroupPages
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    ForgetEntry,
    Landing,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    TransferCommand,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.staging.pieces import group_piece_bytes
from disagg.worker import transfer_driver
from tests.engine.lone_engine import facts
from tests.engine.sim_pages import SimPages
from tests.engine.sim_transfer import GRANULE, SimTransfer, Write
from tests.transfer.driver_pair import ENTRY_STRIDE, FULL, KEY, LINK, PAGE_TOKENS, Pair
from tests.transfer.slow_mover import SlowMover
from tests.transfer_backends.loopback import Hub

SENT, BOUND = (3, 2), (9, 4)  # pages of the source, and of the target
WHOLE = Piece(0, 0, 2, 0, 8)


class Threads(Protocol):
    """A source and a target that know each other."""

    frozen: bool  # the wire between them moves nothing

    def source(self, *commands: TransferCommand) -> list[TransferEvent]:
        """Tell the source, and let all go that can."""

    def target(self, *commands: TransferCommand) -> list[TransferEvent]:
        """Tell the target; of what came it has not had the time to look at anything."""

    def look(self) -> list[TransferEvent]:
        """The target looks at what came."""

    def computed(self, plan_no: int) -> None:
        """By the source."""

    def spoil(self, entry: ExpectPiece) -> None:
        """What lies in the arena is not what was sent."""

    def same(self, piece: Piece) -> bool:
        """The target's pages hold what the source's do."""

    def contents(self, page: int) -> Any:
        """Of the target, to be compared."""

    def is_blank(self, page: int) -> bool:
        """Nothing is in it."""


class Drivers:
    """The real ones."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._pair = Pair(hub, (FULL,))
        self._frozen = False

    @property
    def frozen(self) -> bool:
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = frozen
        self._hub.freeze(self._pair.opened.metadata.decode(), frozen)

    def source(self, *commands: TransferCommand) -> list[TransferEvent]:
        for command in commands:
            self._pair.src.handle(command)
        for _ in range(3):
            self._pair.src.turn()
        return list(self._pair.src.take_events())

    def target(self, *commands: TransferCommand) -> list[TransferEvent]:
        return self._pair.tell(self._pair.dst, *commands)

    def look(self) -> list[TransferEvent]:
        self._pair.dst.turn()
        return list(self._pair.dst.take_events())

    def computed(self, plan_no: int) -> None:
        self._pair.src.plan_computed(plan_no)

    def spoil(self, entry: ExpectPiece) -> None:
        agent = self._hub.find(self._pair.opened.metadata.decode())
        assert agent is not None
        ((_, arena),) = agent.regions
        assert isinstance(arena, torch.Tensor)
        arena[entry.arena_offset] ^= 1

    def same(self, piece: Piece) -> bool:
        layers, tokens = slice(piece.layer_start, piece.layer_stop), slice(piece.token_start, piece.token_stop)
        source, target = (
            self._pair.rows(pool, 0, pages)[layers, :, :, tokens]
            for pool, pages in ((self._pair.src_pool, SENT), (self._pair.dst_pool, BOUND))
        )
        return bool((source == target).all())

    def contents(self, page: int) -> Any:
        return self._pair.rows(self._pair.dst_pool, 0, (page,)).tolist()

    def is_blank(self, page: int) -> bool:
        return not self._pair.rows(self._pair.dst_pool, 0, (page,)).any()


class SimWire:
    """Between the stand-ins: nothing is lost on it."""

    gather_buffers = 2

    def __init__(self) -> None:
        self.to: SimTransfer | None = None

    def target(self, link: int, rank: int) -> SimTransfer | None:
        return self.to

    def breaks(self) -> bool:
        return False

    def corrupts(self) -> bool:
        return False

    def notify(self, target: SimTransfer, entry_id: int) -> None:
        target.notifications.append(entry_id)

    def stray(self, writer: SimTransfer, write: Write) -> None:
        pass

    def bad_checksum(self) -> None:
        pass


class Simulated:
    """The stand-ins."""

    def __init__(self, overwrites: bool) -> None:
        self.frozen = False
        self._computed = -1
        own = facts(FULL, arena_bytes=16 * ENTRY_STRIDE, gather_bytes=ENTRY_STRIDE, segment_bytes=ENTRY_STRIDE)
        self._pages = [SimPages(own, name) for name in ("source", "target")]
        for number, pages in enumerate(self._pages):
            for page, row in itertools.product(range(12), range(PAGE_TOKENS)):
                pages.write_row(0, page, row, (100 * number + page, row))
        wire = SimWire()
        self._source, self._target = (
            SimTransfer(own, pages, wire, lambda: self._computed, overwrites=overwrites) for pages in self._pages
        )
        wire.to = self._target
        self.source(AddPeer(LINK, 0, b"", 0, 0, 16 * ENTRY_STRIDE))

    def source(self, *commands: TransferCommand) -> list[TransferEvent]:
        self._source.commands.extend(commands)
        while self._source.commands:
            self._source.serve()
        while self._source.sendable or (self._source.writing and not self.frozen):
            if self._source.sendable:
                self._source.start_write()
            else:
                self._source.advance(self._source.writing[0])
        return _taken(self._source)

    def target(self, *commands: TransferCommand) -> list[TransferEvent]:
        self._target.commands.extend(commands)
        while self._target.commands:
            self._target.serve()
        return _taken(self._target)

    def look(self) -> list[TransferEvent]:
        for entry_id in list(self._target.notifications):
            self._target.notified(entry_id)
        return _taken(self._target)

    def computed(self, plan_no: int) -> None:
        self._computed = plan_no

    def spoil(self, entry: ExpectPiece) -> None:
        write = self._target.arena[entry.arena_offset // GRANULE]
        assert write is not None
        write.corrupt = True

    def same(self, piece: Piece) -> bool:
        part = HeadSlice(0, 0, 0, 0, FULL.kv_heads)
        source, target = (pages.gather(piece, part, of) for pages, of in zip(self._pages, (SENT, BOUND), strict=True))
        return source == target

    def contents(self, page: int) -> Any:
        return self._pages[1].contents(0, page)

    def is_blank(self, page: int) -> bool:
        return not self.contents(page)


def _taken(thread: SimTransfer) -> list[TransferEvent]:
    events = list(thread.events)
    thread.events.clear()
    return events


@pytest.fixture(params=["driver", "driver as on a GPU", "stand-in", "stand-in as on a GPU"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Threads:
    on_gpu = "GPU" in request.param
    if "stand-in" in request.param:
        return Simulated(overwrites=on_gpu)
    if on_gpu:
        monkeypatch.setattr(transfer_driver, "create_mover", lambda kernels, device: immediate())
    return Drivers(request.getfixturevalue("hub"))


def immediate() -> SlowMover:
    """Scatters as a GPU does, and is never late."""
    mover = SlowMover()
    mover.at_once = True
    return mover


def piece(number: int, whole: Piece = WHOLE, after_plan: int = -1) -> tuple[SendPiece, ExpectPiece]:
    """Both sides' view of an entry for tokens of the pages SENT, which are to land in BOUND."""
    nbytes = group_piece_bytes(whole, FULL.kv_heads, FULL)
    of = RankSlice(KEY, whole, HeadSlice(0, 0, 0, 0, FULL.kv_heads), "P", "D")
    offset = number * ENTRY_STRIDE
    pages = SENT[whole.token_start // PAGE_TOKENS : -(-whole.token_stop // PAGE_TOKENS)]
    return SendPiece(LINK, number, of, pages, offset, nbytes, after_plan), ExpectPiece(LINK, number, of, offset, nbytes)


def bind(threads: Threads) -> None:
    assert threads.target(Bind(KEY, (GroupPages(0, BOUND),))) == [Bound(KEY)]


def landings(events: list[TransferEvent]) -> list[tuple[int, bool, str]]:
    return [(each.entry_id, each.ok, each.reason) for each in events if isinstance(each, Landing)]


def sent(events: list[TransferEvent]) -> list[int]:
    return [each.entry_id for each in events if isinstance(each, PieceSent)]


def failed(events: list[TransferEvent]) -> list[tuple[int, str]]:
    return [(each.entry_id, each.reason) for each in events if isinstance(each, PieceFailed)]


def move(threads: Threads, number: int, whole: Piece, *, spoiled: bool = False) -> list[tuple[int, bool, str]]:
    """Write one piece, and let it land."""
    send, expect = piece(number, whole)
    assert threads.target(expect) == []
    assert sent(threads.source(send)) == [number]
    if spoiled:
        threads.spoil(expect)
    return landings(threads.look())


def test_a_piece_lands_in_the_pages_that_are_bound(threads: Threads) -> None:
    bind(threads)
    assert not threads.same(WHOLE)
    assert move(threads, 0, WHOLE) == [(0, True, "")]
    assert threads.same(WHOLE)


def test_a_piece_may_be_there_before_it_is_expected(threads: Threads) -> None:
    bind(threads)
    send, expect = piece(0)
    threads.source(send)
    assert threads.look() == []
    assert landings(threads.target(expect)) == [(0, True, "")]
    assert threads.same(WHOLE)


def test_what_comes_after_the_unbinding_writes_nothing(threads: Threads) -> None:
    bind(threads)
    before = threads.contents(BOUND[0])
    send, expect = piece(0)
    assert threads.target(expect, Unbind(KEY)) == [Unbound(KEY)]
    threads.source(send)
    assert landings(threads.look()) == [(0, False, "unbound")]
    assert threads.contents(BOUND[0]) == before


def test_a_forgotten_entry_is_lost_and_what_comes_of_it_is_nobodys(threads: Threads) -> None:
    bind(threads)
    before = threads.contents(BOUND[0])
    send, expect = piece(0)
    assert landings(threads.target(expect, ForgetEntry(LINK, 0))) == [(0, False, "lost")]
    threads.source(send)
    assert threads.look() == []
    assert threads.contents(BOUND[0]) == before


@pytest.mark.parametrize("looked", [False, True])
def test_an_entry_that_has_come_is_not_forgotten(threads: Threads, looked: bool) -> None:
    """Nor one of which it has had no time to hear."""
    bind(threads)
    send, expect = piece(0)
    threads.target(expect)
    threads.source(send)
    heard = threads.look() if looked else []
    assert landings(heard + threads.target(ForgetEntry(LINK, 0))) == [(0, True, "")]


def test_a_piece_waits_for_its_plan_and_holds_up_no_other(threads: Threads) -> None:
    late, final = piece(0, after_plan=5)[0], piece(1)[0]
    assert sent(threads.source(late, final)) == [1]
    threads.computed(4)
    assert sent(threads.source()) == []
    threads.computed(5)
    assert sent(threads.source()) == [0]


def test_sends_are_dropped_once_no_write_is_under_way(threads: Threads) -> None:
    threads.frozen = True
    writing, waiting = piece(0)[0], piece(1, after_plan=9)[0]
    assert threads.source(writing, waiting) == []
    assert threads.source(DropSends(LINK, KEY)) == []
    threads.frozen = False
    events = threads.source()
    assert sent(events) == [0] and events[-1] == SendsDropped(LINK, KEY)
    threads.computed(9)
    assert threads.source() == [], "what had not begun is forgotten"


def test_a_link_whose_writes_fail_is_not_known_to_be_quiet(threads: Threads) -> None:
    threads.frozen = True
    assert threads.source(piece(0)[0], piece(1, after_plan=9)[0]) == []
    events = threads.source(RemovePeer(LINK))
    assert [number for number, _ in failed(events)] == [0], "what had not begun is forgotten"
    assert events[-1] == PeerRemoved(LINK, False)


def test_a_link_whose_writes_are_complete_is_quiet_and_its_peer_unknown(threads: Threads) -> None:
    assert sent(threads.source(piece(0)[0])) == [0]
    assert threads.source(RemovePeer(LINK)) == [PeerRemoved(LINK, True)]
    assert failed(threads.source(piece(1)[0])) == [(1, "its peer is not known here")]


def test_a_piece_that_is_not_what_was_to_come_does_not_land(threads: Threads) -> None:
    bind(threads)
    assert move(threads, 0, WHOLE, spoiled=True) == [(0, False, "checksum")]
    send, expect = piece(1)
    threads.target(replace(expect, slice=replace(expect.slice, src_incarnation="P-before")))
    threads.source(send)
    events = landings(threads.look())
    assert events in ([(1, False, "checksum")], []), "nobody is listened to but its writer"
    assert not threads.same(WHOLE)


def test_rows_that_have_landed_are_never_replaced_by_what_does_not_verify(threads: Threads) -> None:
    bind(threads)
    begun = Piece(0, 0, 2, 0, 6)
    assert move(threads, 0, begun) == [(0, True, "")]
    assert move(threads, 1, WHOLE, spoiled=True) == [(1, False, "checksum")]
    assert threads.same(begun)
    assert move(threads, 2, WHOLE) == [(2, True, "")]
    assert threads.same(WHOLE)


def test_a_piece_all_of_which_has_landed_changes_nothing(threads: Threads) -> None:
    bind(threads)
    assert move(threads, 0, WHOLE) == [(0, True, "")]
    assert move(threads, 1, Piece(0, 0, 2, 4, 8), spoiled=True) == [(1, True, "")]
    assert threads.same(WHOLE)


def test_pages_go_back_without_bytes_that_never_verified(threads: Threads) -> None:
    bind(threads)
    before = threads.contents(BOUND[1])
    assert move(threads, 0, Piece(0, 0, 2, 0, 4)) == [(0, True, "")]
    assert move(threads, 1, Piece(0, 0, 2, 4, 8), spoiled=True) == [(1, False, "checksum")]
    assert threads.target(Unbind(KEY)) == [Unbound(KEY)]
    assert threads.same(Piece(0, 0, 2, 0, 4)), "what landed stays"
    assert threads.is_blank(BOUND[1]) or threads.contents(BOUND[1]) == before


def test_pages_of_a_leg_that_is_not_trusted_go_back_blank(threads: Threads) -> None:
    """What prefill sent before it failed may be no numbers, though it is what it sent."""
    bind(threads)
    untouched = threads.contents(BOUND[1])
    assert move(threads, 0, Piece(0, 0, 1, 0, 3)) == [(0, True, "")]
    assert threads.target(Unbind(KEY, blank=True)) == [Unbound(KEY)]
    assert threads.is_blank(BOUND[0]) and threads.contents(BOUND[1]) == untouched
