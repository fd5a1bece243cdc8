"""Links and legs of the staging machine: both ends of each, and the writes that are under way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from disagg.messages import link as m
from disagg.messages.layout import LayerGroup
from disagg.messages.pieces import Piece
from disagg.staging.pieces import split_group_piece
from disagg.staging.ring import RingWriterView
from disagg.transfer.session import ReceiveSession, SendSession, Write
from disagg.types.ids import LegKey

RANKS, SEGMENT, SEGMENTS, LINK_SEGMENTS = 2, 128, 8, 2
GROUP = LayerGroup("full", (0, 1), 1, 2, "uint8")  # 8 bytes a token
PAGE_TOKENS = 4
PEERS = ("a", "b", "c", "d", "e")


def cut(piece: Piece) -> tuple[Piece, ...]:
    return split_group_piece(piece, 1, GROUP, SEGMENT, PAGE_TOKENS)


@dataclass(repr=False)
class Leg:
    key: LegKey
    send: SendSession
    receive: ReceiveSession
    ranks_unbound: bool = False
    scheduled: int = 0

    def __repr__(self) -> str:
        return f"{self.key}: {self.send.state.value}, {self.receive.state.value}"


@dataclass
class Flight:
    """A write that prefill has begun. at: first arena byte; half: the first one has gone."""

    link: Link
    leg: Leg
    entry: m.Entry
    ring_no: int
    at: int
    half: bool = False


@dataclass(repr=False)
class Link:
    """Both ends. What a lost link's prefill had begun, it goes on with until it is gone."""

    number: int
    peer: str
    up: bool = True
    gone: bool = False
    legs: dict[LegKey, Leg] = field(default_factory=dict)
    to_prefill: deque[m.LinkMessage] = field(default_factory=deque)
    to_decode: deque[m.LinkMessage] = field(default_factory=deque)
    # prefill's side
    ring_no: int = -1
    offsets: tuple[int, ...] = ()
    views: list[RingWriterView] = field(default_factory=list)
    pending: list[deque[tuple[Leg, Write]]] = field(default_factory=list)
    closing: bool = False

    def __repr__(self) -> str:
        return f"link {self.number} to {self.peer}"
