"""The transfer driver while gathers and scatters take time: what overlaps, what waits, and what is in use until when."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from disagg.messages.control import OpenTransfer
from disagg.messages.layout import GroupPages
from disagg.messages.pieces import Piece
from disagg.messages.transfer import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    Landing,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    TransferEvent,
    Unbind,
    Unbound,
)
from disagg.transfer import buffers
from disagg.types.ids import LegKey
from disagg.worker import transfer_driver
from disagg.worker.transfer_driver import IDLE_NAP_S, TransferDriver
from tests.transfer.driver_pair import ENTRY_STRIDE, FLOAT_STATE, FULL, KEY, LINK, STRIDES, WINDOW, Pair
from tests.transfer.slow_mover import SlowMover
from tests.transfer_backends.loopback import Hub

TABLES = (GroupPages(0, (9, 4, 7)), GroupPages(0, ()), GroupPages(0, ()))
FIRST, SECOND, THIRD = (Piece(0, 0, 2, start, start + 4) for start in (0, 4, 8))


@pytest.fixture
def pair(hub: Hub, movers: list[SlowMover], monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(transfer_driver, "LINGER_S", 0.0)  # busy with nothing but pieces
    return Pair(hub, (FULL, WINDOW, FLOAT_STATE), buffers=3)


@pytest.fixture
def gathers(pair: Pair, movers: list[SlowMover]) -> SlowMover:
    return movers[0]


@pytest.fixture
def scatters(pair: Pair, movers: list[SlowMover]) -> SlowMover:
    return movers[1]


def freeze(pair: Pair, frozen: bool = True) -> None:
    pair.hub.freeze(pair.opened.metadata.decode(), frozen)


def turn(driver: TransferDriver) -> list[TransferEvent]:
    driver.turn()
    return list(driver.take_events())


def page(pair: Pair, number: int, *, source: bool = False) -> torch.Tensor:
    """The bytes of one page of the full group."""
    return (pair.src_pool if source else pair.dst_pool).views[0].bytes[number].clone()


def write(pair: Pair, gathers: SlowMover, send: SendPiece) -> None:
    """Gather and write one piece."""
    pair.tell(pair.src, send)
    turn(pair.src)
    gathers.run()
    assert [type(report) for report in turn(pair.src)] == [PieceSent]


def test_a_piece_is_gathered_while_the_one_before_it_is_written(pair: Pair, gathers: SlowMover) -> None:
    sends = [pair.piece(piece, (3,))[0] for piece in (FIRST, SECOND, THIRD)]
    freeze(pair)
    pair.tell(pair.src, *sends)
    assert turn(pair.src) == [] and pair.src.writes_in_flight == 0
    assert len(gathers.waiting) == 3, "as many gathers as there are buffers"
    gathers.run()
    assert turn(pair.src) == []
    assert (pair.src.writes_in_flight, len(gathers.waiting)) == (1, 2)
    gathers.run()
    assert turn(pair.src) == []
    assert (pair.src.writes_in_flight, len(gathers.waiting)) == (2, 1), "two writes are in flight"
    assert pair.src.busy and pair.src.nap_s < IDLE_NAP_S
    freeze(pair, False)
    gathers.run()
    sent = turn(pair.src)
    assert [(type(report), report.entry_id, report.gather_s) for report in sent if isinstance(report, PieceSent)] == [
        (PieceSent, send.entry_id, 0.25) for send in sends
    ]


def test_gathers_are_made_ready_one_by_one_while_their_kv_is_computed(pair: Pair, gathers: SlowMover) -> None:
    pair.tell(pair.src, *(pair.piece(piece, (3,), after_plan=5)[0] for piece in (FIRST, SECOND, THIRD)))
    assert gathers.prepared == [], "the thread is not held up by what is asked of it"
    for prepared in ([0], [0, 4], [0, 4, 8]):
        assert pair.src.busy
        assert turn(pair.src) == [] and gathers.prepared == prepared
    assert not pair.src.busy, "nothing is left to do until the plan is computed"
    pair.src.plan_computed(5)
    turn(pair.src)
    assert len(gathers.waiting) == 3 and gathers.prepared == [0, 4, 8]


@pytest.mark.parametrize(
    ("busy", "on_gpu", "still_s", "naps"),
    [
        (False, False, 9.0, "long"),
        (True, False, 0.0, "for a millisecond"),  # a CPU has other things to do than to poll
        (True, True, 0.0019, "not at all"),
        (True, True, 0.0021, "briefly"),  # bytes may come, or a plan end, at any time
    ],
)
def test_the_thread_naps_no_longer_than_what_it_waits_for_can_wait(
    busy: bool, on_gpu: bool, still_s: float, naps: str
) -> None:
    lengths = {"long": 0.1, "for a millisecond": 0.001, "briefly": 0.0001, "not at all": 0.0}
    assert transfer_driver.nap_of(busy, on_gpu, still_s) == lengths[naps]


def test_a_gather_that_can_begin_is_made_ready_at_once(pair: Pair, gathers: SlowMover) -> None:
    pair.tell(pair.src, *(pair.piece(piece, (3,))[0] for piece in (FIRST, SECOND, THIRD)))
    turn(pair.src)
    assert len(gathers.waiting) == 3
    gathers.run(3)
    assert [type(report) for _ in range(2) for report in turn(pair.src)] == [PieceSent] * 3
    assert gathers.prepared == [0, 4, 8], "each once"


def test_nothing_is_made_ready_for_what_is_dropped(pair: Pair, gathers: SlowMover) -> None:
    pair.tell(pair.src, pair.piece(FIRST, (3,), after_plan=5)[0])
    assert pair.tell(pair.src, DropSends(LINK, KEY)) == [SendsDropped(LINK, KEY)]
    turn(pair.src)
    assert gathers.prepared == [] and not pair.src.busy


def test_scatters_are_made_ready_one_by_one_before_anything_arrives(
    pair: Pair, gathers: SlowMover, scatters: SlowMover
) -> None:
    (send, first), (_, second), (_, third) = (pair.piece(piece, (3,)) for piece in (FIRST, SECOND, THIRD))
    pair.tell(pair.dst, Bind(KEY, TABLES), first, second)
    assert scatters.prepared == []
    for prepared in ([0], [0, 4]):
        assert turn(pair.dst) == [] and scatters.prepared == prepared
    write(pair, gathers, send)
    assert turn(pair.dst) == []
    assert len(scatters.waiting) == 1 and scatters.prepared == [0, 4], "each once"
    scatters.run()
    pair.tell(pair.dst, third, Unbind(KEY))
    turn(pair.dst)
    assert scatters.prepared == [0, 4], "not what is expected no more"


def test_a_piece_lands_when_its_scatter_has_its_verdict(pair: Pair, gathers: SlowMover, scatters: SlowMover) -> None:
    pair.tell(pair.dst, Bind(KEY, TABLES))
    entries = [pair.piece(FIRST, (3,)), pair.piece(SECOND, (2,))]
    for send, expect in entries:
        pair.tell(pair.dst, expect)
        write(pair, gathers, send)
    assert turn(pair.dst) == [], "both are being scattered"
    assert len(scatters.waiting) == 2 and pair.dst.busy
    scatters.run()
    (landing,) = turn(pair.dst)
    assert isinstance(landing, Landing) and landing.ok
    assert (landing.entry_id, landing.scatter_s) == (entries[0][0].entry_id, 0.25)
    scatters.run()
    (landing,) = turn(pair.dst)
    assert isinstance(landing, Landing) and landing.entry_id == entries[1][0].entry_id
    assert torch.equal(page(pair, 9), page(pair, 3, source=True))
    assert torch.equal(page(pair, 4), page(pair, 2, source=True))


def test_sends_are_dropped_only_once_no_gather_reads_the_pages(pair: Pair, gathers: SlowMover) -> None:
    send, expect = pair.piece(FIRST, (3,))
    pair.tell(pair.dst, Bind(KEY, TABLES), expect)
    pair.tell(pair.src, send)
    turn(pair.src)
    assert pair.tell(pair.src, DropSends(LINK, KEY)) == []
    assert turn(pair.src) == []
    gathers.run()
    assert turn(pair.src) == [SendsDropped(LINK, KEY)]
    assert turn(pair.dst) == [], "what was gathered is not written"


def test_a_peer_is_removed_only_once_no_gather_reads_pages_for_it(pair: Pair, gathers: SlowMover) -> None:
    send, _ = pair.piece(FIRST, (3,))
    pair.tell(pair.src, send)
    turn(pair.src)
    assert pair.tell(pair.src, RemovePeer(LINK)) == []
    gathers.run()
    failed, removed = turn(pair.src)
    assert isinstance(failed, PieceFailed) and failed.reason == "its peer was removed"
    assert removed == PeerRemoved(LINK, True)
    pair.tell(pair.src, pair.meet())
    freeze(pair)
    pair.tell(pair.src, *(pair.piece(FIRST, (3,))[0] for _ in range(3)))
    turn(pair.src)
    assert len(gathers.waiting) == 3, "every buffer is free again"


def test_a_link_is_removed_only_once_no_scatter_reads_its_entries(
    pair: Pair, gathers: SlowMover, scatters: SlowMover
) -> None:
    send, expect = pair.piece(FIRST, (3,))
    pair.tell(pair.dst, Bind(KEY, TABLES), expect)
    write(pair, gathers, send)
    turn(pair.dst)
    assert pair.tell(pair.dst, RemovePeer(LINK)) == []
    scatters.run()
    landing, removed = turn(pair.dst)
    assert isinstance(landing, Landing) and landing.ok
    assert removed == PeerRemoved(LINK, True)


def test_pages_are_unbound_only_once_nothing_is_scattered_into_them(
    pair: Pair, gathers: SlowMover, scatters: SlowMover
) -> None:
    send, expect = pair.piece(FIRST, (3,))
    late, expect_late = pair.piece(SECOND, (2,))
    pair.tell(pair.dst, Bind(KEY, TABLES), expect, expect_late)
    write(pair, gathers, send)
    turn(pair.dst)
    before = page(pair, 4)
    assert pair.tell(pair.dst, Unbind(KEY)) == []
    write(pair, gathers, late)
    (dropped,) = turn(pair.dst)
    assert isinstance(dropped, Landing) and (dropped.ok, dropped.reason) == (False, "unbound")
    scatters.run()
    landing, unbound = turn(pair.dst)
    assert isinstance(landing, Landing) and landing.ok and landing.entry_id == send.entry_id
    assert unbound == Unbound(KEY)
    assert torch.equal(page(pair, 4), before)


def test_pages_of_several_dtypes_are_bound_when_they_are_blank(hub: Hub, movers: list[SlowMover]) -> None:
    pair = Pair(hub)
    assert pair.dst_pool.mixed
    assert pair.tell(pair.dst, Bind(KEY, (GroupPages(0, (9, 4)), GroupPages(0, (11,)), GroupPages(0, (400,))))) == []
    movers[1].run()
    assert turn(pair.dst) == [], "one group's pages are not blank yet"
    movers[1].run()
    assert turn(pair.dst) == [Bound(KEY)]
    assert not pair.dst_pool.bytes.view(-1, STRIDES[0])[torch.tensor([9, 4])].any()


def test_a_leg_that_is_unbound_while_it_is_being_bound_is_bound_first(hub: Hub, movers: list[SlowMover]) -> None:
    pair = Pair(hub)
    assert pair.tell(pair.dst, Bind(KEY, (GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ())))) == []
    assert pair.tell(pair.dst, Unbind(KEY)) == []
    movers[1].run()
    assert turn(pair.dst) == [Bound(KEY), Unbound(KEY)]


def test_a_write_to_a_killed_peer_fails_and_gives_its_buffer_back(pair: Pair, gathers: SlowMover) -> None:
    pair.tell(pair.src, pair.piece(FIRST, (3,))[0])
    turn(pair.src)
    pair.hub.kill(pair.opened.metadata.decode())
    gathers.run()
    failed, *_ = turn(pair.src)
    assert isinstance(failed, PieceFailed) and "is gone" in failed.reason
    assert not pair.src.writes_in_flight
    pair.tell(pair.src, *(pair.piece(FIRST, (3,))[0] for _ in range(3)))
    turn(pair.src)
    assert len(gathers.waiting) == 3


def test_a_frozen_peer_takes_no_more_than_half_of_the_buffers_and_none_once_it_is_overdue(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("disagg.worker.sender.time.monotonic", lambda: now_s)
    pair = Pair(hub, (FULL, WINDOW, FLOAT_STATE), buffers=4)
    other = TransferDriver(0, OpenTransfer("loopback", "E", 16 * ENTRY_STRIDE, 0, 0, "", ""), pair.dst_pool)
    opened = other.opened(pid=2)
    pair.tell(pair.src, AddPeer(8, 0, opened.metadata, opened.arena_address, opened.arena_device, opened.arena_bytes))
    freeze(pair)
    pair.tell(pair.src, *(pair.piece(FIRST, (3,))[0] for _ in range(6)))
    turn(pair.src)
    assert pair.src.writes_in_flight == 2
    for _ in range(5):
        lively = [replace(pair.piece(FIRST, (3,))[0], link=8) for _ in range(2)]
        assert pair.tell(pair.src, *lively) == []
        sent = turn(pair.src) + turn(pair.src)
        assert [(type(report), report.link) for report in sent if isinstance(report, PieceSent)] == [(PieceSent, 8)] * 2
        now_s += buffers.OVERDUE_S
    assert "overdue writes to [(7, 0)]" in pair.src.describe()
    freeze(pair, False)
    sent = [report for _ in range(5) for report in turn(pair.src)]
    assert pair.src.writes_in_flight == 0 and not pair.src.waits_for_plans
    assert [type(report) for report in sent] == [PieceSent] * 6, "it has thawed, and goes on"


def other_attempt(expect: ExpectPiece) -> ExpectPiece:
    """The same entry, taken for one that was written for another incarnation: it will not verify."""
    return replace(expect, slice=replace(expect.slice, dst_incarnation="somebody else"))


def test_rows_that_have_landed_are_never_replaced_by_a_piece_that_does_not_verify(
    pair: Pair, gathers: SlowMover, scatters: SlowMover
) -> None:
    pair.tell(pair.dst, Bind(KEY, TABLES))
    scatters.at_once = gathers.at_once = True
    assert pair.move(FIRST, (3,)).ok
    for again, pages in ((FIRST, (1,)), (Piece(0, 0, 2, 0, 8), (1, 2))):
        send, expect = pair.piece(again, pages)
        pair.tell(pair.src, send)
        turn(pair.src)
        pair.tell(pair.dst, other_attempt(expect))
        (landing,) = turn(pair.dst)
        assert isinstance(landing, Landing)
        assert landing.ok == (again == FIRST), "of rows that have all landed nothing is asked; of others the checksum"
        assert torch.equal(page(pair, 9), page(pair, 3, source=True))
    assert pair.move(Piece(0, 0, 2, 0, 8), (1, 2)).ok, "a good one may replace them"
    assert torch.equal(page(pair, 4), page(pair, 2, source=True))


def test_two_pieces_with_rows_in_common_are_scattered_one_after_the_other(
    pair: Pair, gathers: SlowMover, scatters: SlowMover
) -> None:
    gathers.at_once = True
    pair.tell(pair.dst, Bind(KEY, TABLES))
    entries = [pair.piece(FIRST, (3,)), pair.piece(Piece(0, 0, 2, 0, 8), (1, 2)), pair.piece(THIRD, (5,))]
    pair.tell(pair.dst, entries[0][1], other_attempt(entries[1][1]), entries[2][1])
    pair.tell(pair.src, *(send for send, _ in entries))
    turn(pair.src)
    turn(pair.dst)
    assert len(scatters.waiting) == 2, "the first and the third"
    scatters.run(2)
    landings = turn(pair.dst)
    assert [(report.entry_id, report.ok) for report in landings if isinstance(report, Landing)] == [
        (entries[0][0].entry_id, True),
        (entries[2][0].entry_id, True),
        (entries[1][0].entry_id, False),
    ]
    assert torch.equal(page(pair, 9), page(pair, 3, source=True))


def test_pages_go_back_without_bytes_that_never_verified(pair: Pair, gathers: SlowMover, scatters: SlowMover) -> None:
    gathers.at_once = scatters.at_once = True
    pair.tell(pair.dst, Bind(KEY, TABLES))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 6), (1, 2))
    pair.tell(pair.dst, other_attempt(expect))
    pair.tell(pair.src, send)
    turn(pair.src)
    (landing,) = turn(pair.dst)
    assert isinstance(landing, Landing) and (landing.ok, landing.reason) == (False, "checksum")
    assert torch.equal(page(pair, 9), page(pair, 1, source=True)), "a pass that copies and sums has written it"
    assert pair.move(FIRST, (3,)).ok
    assert pair.tell(pair.dst, Unbind(KEY)) == [Unbound(KEY)]
    assert torch.equal(page(pair, 9), page(pair, 3, source=True)), "a whole page that landed since is kept"
    assert not page(pair, 4).any()


def test_entries_of_legs_that_nobody_bound_are_dropped(pair: Pair, gathers: SlowMover) -> None:
    send, expect = pair.piece(FIRST, (3,))
    stranger = replace(expect, slice=replace(expect.slice, key=LegKey("request-2", 0, 0)))
    pair.tell(pair.dst, stranger)
    write(pair, gathers, send)
    (landing,) = turn(pair.dst)
    assert isinstance(landing, Landing) and (landing.ok, landing.reason) == (False, "unbound")
