"""The transfer drivers of a prefill and a decode rank, joined by the loopback backend: what lands where, and what never does."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
import torch

from disagg.messages.layout import GroupPages
from disagg.messages.pieces import Piece
from disagg.messages.transfer import (
    DropSends,
    ForgetEntry,
    Landing,
    PeerRemoved,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendsDropped,
    Unbind,
    Unbound,
)
from disagg.staging.pieces import group_payload_bytes
from disagg.types.errors import ProtocolError
from disagg.worker.entries import notification_of
from tests.transfer.driver_pair import (
    ENTRY_STRIDE,
    FLOAT_STATE,
    FULL,
    GROUPS,
    KEY,
    LINK,
    MIXED_STATE,
    PAGE_TOKENS,
    STRIDES,
    WINDOW,
    Pair,
)
from tests.transfer_backends.loopback import Hub, LoopbackBackend


def test_pieces_of_every_group_land_in_the_pages_bound_for_them_and_nowhere_else(hub: Hub) -> None:
    pair = Pair(hub)
    # Full: 11 tokens, the first page from decode's prefix cache; window: tokens 4 to 11; a final state and a checkpoint.
    pair.bind(GroupPages(1, (9, 4)), GroupPages(1, (11, 12)), GroupPages(0, (400, 500)))
    before = pair.dst_pool.bytes.clone()
    assert pair.move(Piece(0, 0, 2, 4, 9), (3, 2)).ok
    assert pair.move(Piece(0, 0, 2, 9, 11), (2,)).ok
    assert pair.move(Piece(1, 0, 1, 4, 11), (8, 6)).ok
    assert pair.move(Piece(1, 1, 2, 4, 11), (8, 6)).ok
    assert pair.move(Piece(2, 0, 1, 1, 2), (77,)).ok
    landing = pair.move(Piece(2, 0, 1, 0, 1), (78,))
    assert landing.payload_bytes == group_payload_bytes(Piece(2, 0, 1, 0, 1), 1, MIXED_STATE)
    for group, source, target in ((0, (3, 2), (9, 4)), (1, (8, 6), (11, 12))):
        landed, sent = pair.rows(pair.dst_pool, group, target), pair.rows(pair.src_pool, group, source)
        assert torch.equal(landed[:, :, :, :7], sent[:, :, :, :7])
        assert not landed[:, :, :, 7:].any(), "rows that no piece fills are zeros"
    assert torch.equal(pair.rows(pair.dst_pool, 2, (400, 500)), pair.rows(pair.src_pool, 2, (78, 77)))
    for group, pages in ((0, (9, 4)), (1, (11, 12)), (2, (400, 500))):
        for pool_bytes in (before, pair.dst_pool.bytes):
            pool_bytes.view(-1, STRIDES[group])[torch.tensor(pages), : GROUPS[group].page_bytes(PAGE_TOKENS)] = 0
    assert torch.equal(pair.dst_pool.bytes, before), "no other byte has changed"


@pytest.mark.parametrize(
    ("piece", "pages"),
    [
        (Piece(0, 0, 2, 4, 9), (3, 2)),
        (Piece(1, 0, 2, 8, 13), (3, 2)),
        (Piece(2, 0, 1, 1, 2), (3,)),
        (Piece(0, 0, 1, 0, 2), (3,)),
    ],
    ids=["begins before what is bound", "ends after it", "a checkpoint without a page", "all before"],
)
def test_nothing_is_scattered_outside_of_what_was_bound(hub: Hub, piece: Piece, pages: tuple[int, ...]) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(2, (9,)), GroupPages(2, (11,)), GroupPages(0, (400,)))
    before = pair.dst_pool.bytes.clone()
    with pytest.raises(ProtocolError, match="page numbers"):
        pair.move(piece, pages)
    assert torch.equal(pair.dst_pool.bytes, before)


def test_pages_of_a_pool_of_several_dtypes_are_blank_before_they_are_said_to_be_bound(hub: Hub) -> None:
    pair = Pair(hub)
    assert pair.dst_pool.mixed
    before = pair.dst_pool.bytes.clone()
    pair.bind(GroupPages(1, (9, 4)), GroupPages(0, ()), GroupPages(0, (400,)))
    before.view(-1, STRIDES[0])[torch.tensor([9, 4])] = 0
    assert torch.equal(pair.dst_pool.bytes, before), "states are written whole, so they need it not"


def test_pages_of_a_pool_of_one_dtype_hold_numbers_already(hub: Hub) -> None:
    pair = Pair(hub, (FULL, WINDOW, FLOAT_STATE))
    assert not pair.dst_pool.mixed
    before = pair.dst_pool.bytes.clone()
    pair.bind(GroupPages(0, (9, 4)), GroupPages(0, (11,)), GroupPages(0, (400,)))
    assert torch.equal(pair.dst_pool.bytes, before)


def test_a_piece_taken_for_one_of_another_group_or_place_does_not_verify(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9, 4)), GroupPages(0, (11, 12)), GroupPages(0, (400, 500)))
    before = pair.dst_pool.bytes.clone()
    for piece, taken_for in (
        (Piece(0, 0, 2, 0, 4), Piece(1, 0, 2, 0, 4)),
        (Piece(0, 0, 2, 0, 4), Piece(0, 0, 2, 4, 8)),
        (Piece(0, 0, 1, 0, 4), Piece(0, 1, 2, 0, 4)),
        (Piece(2, 0, 1, 1, 2), Piece(2, 0, 1, 0, 1)),
    ):
        landing = pair.move(piece, (3,), of=taken_for)
        assert (landing.ok, landing.reason) == (False, "checksum")
    assert torch.equal(pair.dst_pool.bytes, before)


def test_a_piece_may_arrive_before_the_engine_has_said_what_it_is(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, ()), GroupPages(0, ()), GroupPages(0, (400,)))
    send, expect = pair.piece(Piece(2, 0, 1, 0, 1), (77,))
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    assert pair.dst.take_events() == ()
    (landing,) = pair.tell(pair.dst, expect)
    assert isinstance(landing, Landing) and landing.ok
    assert torch.equal(pair.rows(pair.dst_pool, 2, (400,)), pair.rows(pair.src_pool, 2, (77,)))


def test_a_piece_is_gathered_only_after_the_plan_that_makes_it_final(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,), after_plan=5)
    pair.tell(pair.dst, expect)
    pair.src.plan_computed(4)
    assert pair.tell(pair.src, send) == []
    pair.src.turn()
    assert pair.src.waits_for_plans and pair.src.writes_in_flight == 0
    pair.src_pool.attention(0).kv[3] = 1.5  # what plan 5 writes
    pair.src.plan_computed(5)
    pair.src.turn()
    pair.dst.turn()
    assert [type(report) for report in pair.dst.take_events()] == [Landing]
    assert bool((pair.dst_pool.attention(0).kv[9] == 1.5).all())


def test_layers_go_as_soon_as_they_are_computed_and_states_when_the_plan_is(hub: Hub) -> None:
    pair = Pair(hub)
    assert GROUPS[0].layers == (0, 2)
    first, _ = pair.piece(Piece(0, 0, 1, 0, 4), (3,), after_plan=5)
    second, _ = pair.piece(Piece(0, 1, 2, 0, 4), (3,), after_plan=5)
    state, _ = pair.piece(Piece(2, 0, 1, 0, 1), (77,), after_plan=5)
    assert pair.tell(pair.src, first, second, state) == []

    def sent() -> list[int]:
        pair.src.turn()
        return [report.entry_id for report in pair.src.take_events() if isinstance(report, PieceSent)]

    assert not pair.src.layer_written(4, 2), "of an earlier plan"
    assert not pair.src.layer_written(5, 1), "nothing waits for this layer by itself"
    assert sent() == []
    assert pair.src.layer_written(5, 0), "or the thread that sends would not be woken"
    assert sent() == [first.entry_id]
    assert not pair.src.layer_written(5, 0), "nothing waits for it any more"
    assert pair.src.layer_written(5, 2)
    assert sent() == [second.entry_id]
    pair.src.plan_computed(5)
    assert sent() == [state.entry_id]


class Asked:
    """An event of a device that is over when the test says so."""

    over: ClassVar[bool] = False

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return Asked.over


def test_on_a_gpu_pieces_that_are_asked_for_after_all_is_launched_go_layer_by_layer_too(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's later layers are asked for when a ring has room again, and a step is launched long before it is over."""
    monkeypatch.setattr(torch.cuda, "Event", Asked)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    pair = Pair(hub)
    monkeypatch.setattr(pair.src, "_on_gpu", True)
    monkeypatch.setattr(pair.dst, "_on_gpu", True)
    assert not pair.src.layer_written(5, 0), "nothing waits for it"
    Asked.over = True
    first, _ = pair.piece(Piece(0, 0, 1, 0, 4), (3,), after_plan=5)
    second, _ = pair.piece(Piece(0, 1, 2, 0, 4), (3,), after_plan=5)
    assert pair.tell(pair.src, first, second) == []
    pair.src.turn()
    assert [report.entry_id for report in pair.src.take_events() if isinstance(report, PieceSent)] == [first.entry_id]
    assert not pair.dst.layer_written(5, 0) and not pair.dst._computing, "it sends nothing"


def test_what_arrives_after_the_unbinding_writes_nothing(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    before = pair.dst_pool.bytes.clone()
    assert pair.tell(pair.dst, expect, Unbind(KEY)) == [Unbound(KEY)]
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    (landing,) = pair.dst.take_events()
    assert isinstance(landing, Landing)
    assert (landing.ok, landing.reason, landing.entry_id) == (False, "unbound", expect.entry_id)
    assert torch.equal(pair.dst_pool.bytes, before)
    assert pair.dst.bound == 0


@pytest.mark.parametrize("early", [False, True])
def test_only_the_writer_of_an_entry_is_listened_to(hub: Hub, early: bool) -> None:
    """Another peer may guess the number of an entry, before it is known here or after."""
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    stranger = LoopbackBackend("Q/0", hub)
    if not early:
        pair.tell(pair.dst, expect)
    stranger.say(stranger.add_peer(pair.opened.metadata), notification_of(expect.entry_id))
    stranger.poll()
    pair.dst.turn()
    if early:
        pair.tell(pair.dst, expect)
    assert pair.dst.take_events() == ()
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    assert [(landing.entry_id, landing.ok) for landing in pair.dst.take_events()] == [(expect.entry_id, True)]


def test_a_forgotten_entry_is_lost_and_its_notification_may_still_come(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    before = pair.dst_pool.bytes.clone()
    (landing,) = pair.tell(pair.dst, expect, ForgetEntry(LINK, expect.entry_id))
    assert isinstance(landing, Landing)
    assert (landing.entry_id, landing.ok, landing.reason, landing.payload_bytes) == (expect.entry_id, False, "lost", 0)
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    assert pair.dst.take_events() == ()
    assert torch.equal(pair.dst_pool.bytes, before)


@pytest.mark.parametrize("polled", [False, True])
def test_an_entry_that_has_arrived_is_not_forgotten(hub: Hub, polled: bool) -> None:
    """Nor one whose notification is there, though this rank has had no time to look."""
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    pair.tell(pair.dst, expect)
    pair.tell(pair.src, send)
    pair.src.turn()
    if polled:
        pair.dst.turn()
    (landing,) = pair.tell(pair.dst, ForgetEntry(LINK, expect.entry_id))
    assert isinstance(landing, Landing) and landing.ok


def test_sends_are_dropped_only_once_no_write_is_under_way(hub: Hub) -> None:
    pair = Pair(hub)
    writing, _ = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    waiting, _ = pair.piece(Piece(0, 0, 2, 4, 8), (2,), after_plan=9)
    pair.hub.freeze(pair.opened.metadata.decode(), True)
    pair.tell(pair.src, writing, waiting)
    pair.src.turn()
    assert pair.tell(pair.src, DropSends(LINK, KEY)) == []
    assert not pair.src.waits_for_plans, "what was not begun is forgotten"
    pair.hub.freeze(pair.opened.metadata.decode(), False)
    pair.src.turn()
    sent, dropped = pair.src.take_events()
    assert isinstance(sent, PieceSent) and sent.entry_id == writing.entry_id
    assert dropped == SendsDropped(LINK, KEY)


def test_a_piece_that_cannot_be_written_is_reported_with_the_reason(hub: Hub) -> None:
    pair = Pair(hub)
    too_large, _ = pair.piece(Piece(0, 0, 2, 0, 32), tuple(range(8)))
    (failed,) = pair.tell(pair.src, too_large)
    assert isinstance(failed, PieceFailed) and "do not fit a gather buffer of 4096" in failed.reason
    outside, _ = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    outside = msgspec.structs.replace(outside, arena_offset=16 * ENTRY_STRIDE - 8)
    (failed,) = pair.tell(pair.src, outside)
    assert isinstance(failed, PieceFailed) and "outside of an arena of 65536" in failed.reason
    assert pair.tell(pair.src, RemovePeer(LINK)) == [PeerRemoved(LINK, True)]
    to_nobody, _ = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    (failed,) = pair.tell(pair.src, to_nobody)
    assert isinstance(failed, PieceFailed) and failed.reason == "its peer is not known here"


def test_writes_to_a_peer_that_is_removed_fail_and_give_their_buffers_back(hub: Hub) -> None:
    pair = Pair(hub)
    pair.hub.freeze(pair.opened.metadata.decode(), True)
    sends = [pair.piece(Piece(0, 0, 2, 0, 4), (3,))[0] for _ in range(2)]
    pair.tell(pair.src, *sends)
    pair.src.turn()
    assert pair.src.writes_in_flight == 2
    *failed, removed = pair.tell(pair.src, RemovePeer(LINK))
    assert [type(report) for report in failed] == [PieceFailed, PieceFailed]
    assert removed == PeerRemoved(LINK, False), "their bytes may yet land"
    pair.hub.freeze(pair.opened.metadata.decode(), False)
    pair.tell(pair.src, pair.meet())
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    assert pair.move(Piece(0, 0, 2, 0, 4), (3,)).ok
