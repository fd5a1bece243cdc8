"""The transfer drivers of a prefill and a decode rank, joined by the loopback backend: what lands where, and what never does."""

from __future__ import annotations

import itertools

import pytest
import torch

from disagg.messages.control import OpenTransfer
from disagg.messages.lane import (
    AddPeer,
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    Landing,
    LaneReport,
    LaneRequest,
    PeerAdded,
    PeerRemoved,
    Piece,
    PieceFailed,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    Unbind,
    Unbound,
)
from disagg.messages.layout import GroupKind, GroupPages, LayerGroup, StatePart
from disagg.models.pool import Pool
from disagg.staging.pieces import group_payload_bytes, group_piece_bytes
from disagg.types.errors import ProtocolError
from disagg.types.ids import LegKey
from disagg.worker import transfer_driver
from disagg.worker.transfer_driver import TransferDriver
from tests.transfer_backends.loopback import Hub, LoopbackBackend

PAGE_TOKENS = 4
FULL = LayerGroup("full", (0, 2), 2, 8, "float32")
WINDOW = LayerGroup("window", (1, 3), 2, 8, "float32", GroupKind.WINDOW, window=6)
FLOAT_STATE = LayerGroup.of_states("state", (4,), (StatePart("ssm", (3, 5), "float32"),))
MIXED_STATE = LayerGroup.of_states(
    "state", (4,), (StatePart("conv", (3,), "bfloat16"), StatePart("ssm", (9,), "float32"))
)
GROUPS = (FULL, WINDOW, MIXED_STATE)
NUM_LARGE, LARGE_BYTES = 40, 2048
STRIDES = (1024, 2048, 128)  # pages of 1024, 1024 and 64 bytes: the window's and the states' are farther apart
LINK = 7
KEY = LegKey("request-1", 0, 0)
ENTRY_STRIDE = 4096


class Pair:
    """A prefill and a decode driver whose agents know each other, and pools of random bytes."""

    def __init__(self, hub: Hub, groups: tuple[LayerGroup, ...] = GROUPS, gather_bytes: int = ENTRY_STRIDE) -> None:
        self.hub = hub
        self.groups = groups
        self.src_pool, self.dst_pool = (
            Pool.create(groups, NUM_LARGE, LARGE_BYTES, STRIDES[: len(groups)], PAGE_TOKENS, "cpu") for _ in range(2)
        )
        generator = torch.Generator().manual_seed(3)
        for pool in (self.src_pool, self.dst_pool):
            pool.bytes.copy_(torch.randint(0, 256, pool.bytes.shape, dtype=torch.uint8, generator=generator))
        self.src = TransferDriver(0, OpenTransfer("loopback", "P", 0, gather_bytes, 2, "", ""), self.src_pool)
        self.dst = TransferDriver(0, OpenTransfer("loopback", "D", 16 * ENTRY_STRIDE, 0, 0, "", ""), self.dst_pool)
        self.opened = self.dst.opened(pid=1)
        self.entry_ids = itertools.count()
        assert self.tell(self.src, self.meet()) == [PeerAdded(LINK, 0, "", pytest.approx(0, abs=60))]

    def meet(self) -> AddPeer:
        return AddPeer(LINK, 0, self.opened.metadata, self.opened.arena_address, self.opened.arena_device)

    def tell(self, driver: TransferDriver, *requests: LaneRequest) -> list[LaneReport]:
        for request in requests:
            driver.handle(request)
        return list(driver.take_reports())

    def bind(self, *tables: GroupPages) -> None:
        assert self.tell(self.dst, Bind(KEY, tables)) == [Bound(KEY)]

    def piece(
        self, piece: Piece, pages: tuple[int, ...], after_plan: int = -1, of: Piece | None = None
    ) -> tuple[SendPiece, ExpectPiece]:
        """Both sides' view of one entry; `of`: what the decode side takes it for, if not for what it is."""
        group = self.groups[piece.group]
        entry_id = next(self.entry_ids)
        offset, nbytes = entry_id % 16 * ENTRY_STRIDE, group_piece_bytes(piece, group.kv_heads, group)
        send = SendPiece(
            *(LINK, entry_id, KEY, piece, pages, "P", "D", 0, 0, 0, group.kv_heads, offset, nbytes), after_plan
        )
        return send, ExpectPiece(LINK, entry_id, KEY, of or piece, "P", "D", 0, 0, 0, group.kv_heads, offset, nbytes)

    def move(self, piece: Piece, pages: tuple[int, ...], of: Piece | None = None) -> Landing:
        """Write one piece and let it land."""
        send, expect = self.piece(piece, pages, of=of)
        self.tell(self.dst, expect)
        self.tell(self.src, send)
        self.src.turn()
        assert [type(report) for report in self.src.take_reports()] == [PieceSent]
        self.dst.turn()
        (landing,) = self.dst.take_reports()
        assert isinstance(landing, Landing)
        return landing

    def rows(self, pool: Pool, group: int, pages: tuple[int, ...]) -> torch.Tensor:
        """[layers, planes, heads, tokens of these pages, row bytes], or [states, bytes]."""
        view = pool.views[group].bytes[torch.tensor(pages)]
        shape = self.groups[group]
        if shape.is_state:
            return view
        dims = (len(pages), len(shape.layers), 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim * shape.dtype_bytes)
        return view.reshape(dims).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Joins the agents of every driver made in the test."""
    hub = Hub()
    monkeypatch.setattr(transfer_driver, "create", lambda backend, *, name, **options: LoopbackBackend(name, hub))
    return hub


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
    with pytest.raises(ProtocolError, match="page positions"):
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
    assert pair.dst.take_reports() == ()
    (landing,) = pair.tell(pair.dst, expect)
    assert isinstance(landing, Landing) and landing.ok
    assert torch.equal(pair.rows(pair.dst_pool, 2, (400,)), pair.rows(pair.src_pool, 2, (77,)))


def test_a_piece_is_gathered_only_after_the_plan_that_makes_it_final(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,), after_plan=5)
    pair.tell(pair.dst, expect)
    pair.src.computed_plan = 4
    assert pair.tell(pair.src, send) == []
    pair.src.turn()
    assert pair.src.waits_for_plans and pair.src.writes_in_flight == 0
    pair.src_pool.attention(0).kv[3] = 1.5  # what plan 5 writes
    pair.src.computed_plan = 5
    pair.src.turn()
    pair.dst.turn()
    assert [type(report) for report in pair.dst.take_reports()] == [Landing]
    assert bool((pair.dst_pool.attention(0).kv[9] == 1.5).all())


def test_what_arrives_after_the_unbinding_writes_nothing(hub: Hub) -> None:
    pair = Pair(hub)
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    before = pair.dst_pool.bytes.clone()
    assert pair.tell(pair.dst, expect, Unbind(KEY)) == [Unbound(KEY)]
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    (landing,) = pair.dst.take_reports()
    assert isinstance(landing, Landing)
    assert (landing.ok, landing.reason, landing.entry_id) == (False, "unbound", expect.entry_id)
    assert torch.equal(pair.dst_pool.bytes, before)
    assert pair.dst.bound == 0


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
    sent, dropped = pair.src.take_reports()
    assert isinstance(sent, PieceSent) and sent.entry_id == writing.entry_id
    assert dropped == SendsDropped(LINK, KEY)


def test_a_piece_that_cannot_be_written_is_reported_with_the_reason(hub: Hub) -> None:
    pair = Pair(hub, gather_bytes=64)
    too_large, _ = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    pair.tell(pair.src, too_large)
    pair.src.turn()
    (failed,) = pair.src.take_reports()
    assert isinstance(failed, PieceFailed) and "do not fit a gather buffer of 64" in failed.reason
    assert pair.tell(pair.src, RemovePeer(LINK)) == [PeerRemoved(LINK)]
    to_nobody, _ = pair.piece(Piece(0, 0, 2, 0, 4), (3,))
    pair.tell(pair.src, to_nobody)
    pair.src.turn()
    (failed,) = pair.src.take_reports()
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
    assert removed == PeerRemoved(LINK)
    pair.hub.freeze(pair.opened.metadata.decode(), False)
    pair.tell(pair.src, pair.meet())
    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    assert pair.move(Piece(0, 0, 2, 0, 4), (3,)).ok
