"""A prefill and a decode transfer driver, joined by the loopback backend, for the tests of this directory."""

from __future__ import annotations

import itertools

import torch
from msgspec.structs import replace

from disagg.messages.control import OpenTransfer
from disagg.messages.layout import GroupKind, GroupPages, LayerGroup, StatePart
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import (
    AddPeer,
    Bind,
    Bound,
    ExpectPiece,
    Landing,
    PeerAdded,
    PeerWired,
    PieceSent,
    SendPiece,
    TransferCommand,
    TransferEvent,
)
from disagg.models.pool import Pool
from disagg.staging.pieces import group_piece_bytes
from disagg.types.ids import LegKey
from disagg.worker.transfer_driver import TransferDriver
from tests.transfer_backends.loopback import Hub

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

    def __init__(self, hub: Hub, groups: tuple[LayerGroup, ...] = GROUPS, buffers: int = 2) -> None:
        self.hub = hub
        self.groups = groups
        self.src_pool, self.dst_pool = (
            Pool.create(groups, NUM_LARGE, LARGE_BYTES, STRIDES[: len(groups)], PAGE_TOKENS, "cpu") for _ in range(2)
        )
        generator = torch.Generator().manual_seed(3)
        for pool in (self.src_pool, self.dst_pool):
            pool.bytes.copy_(torch.randint(0, 256, pool.bytes.shape, dtype=torch.uint8, generator=generator))
        self.src = TransferDriver(0, OpenTransfer("loopback", "P", 0, ENTRY_STRIDE, buffers, "", ""), self.src_pool)
        self.dst = TransferDriver(0, OpenTransfer("loopback", "D", 16 * ENTRY_STRIDE, 0, 0, "", ""), self.dst_pool)
        self.opened = self.dst.opened(pid=1)
        self.entry_ids = itertools.count()
        assert self.tell(self.src, self.meet()) == [PeerAdded(LINK, 0, "")]
        self.src.turn()
        assert self.src.take_events() == (PeerWired(LINK, 0, ("loopback",)),)

    def meet(self) -> AddPeer:
        opened = self.opened
        return AddPeer(LINK, 0, opened.metadata, opened.arena_address, opened.arena_device, opened.arena_bytes)

    def tell(self, driver: TransferDriver, *requests: TransferCommand) -> list[TransferEvent]:
        for request in requests:
            driver.handle(request)
        return list(driver.take_events())

    def bind(self, *tables: GroupPages) -> None:
        assert self.tell(self.dst, Bind(KEY, tables)) == [Bound(KEY)]

    def piece(
        self, piece: Piece, pages: tuple[int, ...], after_plan: int = -1, of: Piece | None = None
    ) -> tuple[SendPiece, ExpectPiece]:
        """Both sides' view of one entry; `of`: what the decode side takes it for, if not for what it is."""
        group = self.groups[piece.group]
        entry_id = next(self.entry_ids)
        offset, nbytes = entry_id % 16 * ENTRY_STRIDE, group_piece_bytes(piece, group.kv_heads, group)
        sent = RankSlice(KEY, piece, HeadSlice(0, 0, 0, 0, group.kv_heads), "P", "D")
        expected = replace(sent, piece=of or piece)
        send = SendPiece(LINK, entry_id, sent, pages, offset, nbytes, after_plan)
        return send, ExpectPiece(LINK, entry_id, expected, offset, nbytes)

    def move(self, piece: Piece, pages: tuple[int, ...], of: Piece | None = None) -> Landing:
        """Write one piece and let it land."""
        send, expect = self.piece(piece, pages, of=of)
        self.tell(self.dst, expect)
        self.tell(self.src, send)
        self.src.turn()
        assert [type(report) for report in self.src.take_events() if not isinstance(report, PeerWired)] == [PieceSent]
        self.dst.turn()
        (landing,) = self.dst.take_events()
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
