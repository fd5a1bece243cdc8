"""Servers that say whatever their messages can hold, and what an engine may come to hold for them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from msgspec import Struct
from msgspec.structs import replace

from disagg.engine.handoff.sending import first_held
from disagg.engine.instructions import Instruction
from disagg.messages import link as m
from disagg.messages.channel import Frame
from disagg.messages.legs import StartLeg
from disagg.messages.pieces import Piece
from disagg.messages.plan import TokenLogprobs
from disagg.messages.transfer import (
    Bind,
    Bound,
    DropSends,
    ExpectPiece,
    Landing,
    PeerRemoved,
    PieceSent,
    RemovePeer,
    SendPiece,
    SendsDropped,
    Unbind,
    Unbound,
)
from disagg.staging.pieces import group_piece_bytes
from disagg.transfer.session import MAX_PIECES
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason, LegKey
from disagg.wire.peer import link_frame_from_proto, link_frame_to_proto
from tests.engine.lone_engine import (
    D_REF,
    FULL,
    LINK,
    P_REF,
    STATE,
    WINDOW,
    Decode,
    Lone,
    Prefill,
    facts,
    hello,
    start,
    to_link,
    to_transfer,
)

FACTS = facts(FULL, WINDOW, STATE, num_large=24)
SEGMENT = FACTS.transfer.segment_bytes
MANY = 3000
NUMBERS = (0, 1, 2, 3, 7, 16, 4096, 4097, 2**16, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1)
KEYS = tuple(LegKey(name, 0, 0) for name in ("a", "b", "c", "nobody"))
BYTES_PER_ITEM, BYTES_PER_MESSAGE = 4000, 400_000


# ---- mutations


def items(value: object) -> int:
    """Values in a message, however deep."""
    if isinstance(value, Struct):
        return sum(items(getattr(value, name)) for name in value.__struct_fields__)
    return sum(map(items, value)) if isinstance(value, tuple) else 1


def mutated(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one thing wrong: a number, a key, a list that is too long, too short, or has its items twice."""
    match value:
        case LegKey():
            return draw(st.sampled_from(KEYS))
        case Struct():
            lists = [name for name in value.__struct_fields__ if isinstance(getattr(value, name), tuple)]
            name = draw(st.sampled_from([*value.__struct_fields__, *lists * 4]))
            return replace(value, **{name: mutated(draw, getattr(value, name))})
        case bool() | None | str():
            return value
        case int():
            near = st.integers(-2, 2).map(lambda step: max(0, value + step))
            return draw(st.sampled_from(NUMBERS) | near)
        case tuple():
            how = draw(st.sampled_from((*["item"] * 9, "none", "twice", "many")))
            if not value or how == "none":
                return ()
            if how == "twice":
                return value * 2
            if how == "many":
                return value * (MANY // len(value))
            index = draw(st.integers(0, len(value) - 1))
            return (*value[:index], mutated(draw, value[index]), *value[index + 1 :])
    return value


@st.composite
def hostile(draw: st.DrawFn, legal: m.LinkMessage) -> m.LinkMessage | None:
    """What arrives of `legal` with up to two things wrong; None if no message on the wire can say so."""
    message = legal
    try:
        for _ in range(draw(st.sampled_from((0, 0, 1, 1, 1, 2)))):
            message = mutated(draw, message)
        frame = link_frame_from_proto(link_frame_to_proto(Frame(1, 0, (message,))))
    except (ValueError, ProtocolError):  # out of the field's range; refused where it is read
        return None
    assert isinstance(frame, Frame)
    return frame.messages[0]


# ---- what an engine may come to hold


def lists_first(messages: list[m.LinkMessage]) -> st.SearchStrategy[m.LinkMessage]:
    """One of these; most often one in which most can be wrong."""
    rich = [each for each in messages if isinstance(each, m.AssignEntries | m.OfferPieces | m.FirstTokens)]
    return st.sampled_from(messages) | st.sampled_from(rich or messages)


def footprint(value: object, seen: set[int] | None = None) -> int:
    """Items in everything that is reachable from an engine and may grow."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | bytes | int | float | None):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(footprint(v, seen) for v in value.values())
    if isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        return len(value) + sum(footprint(v, seen) for v in value)  # type: ignore[arg-type]
    module = type(value).__module__
    if not module.startswith("disagg.") or module.startswith("disagg.memory"):
        return 0
    names = getattr(value, "__struct_fields__", None) or getattr(type(value), "__slots__", None) or vars(value)
    return sum(footprint(getattr(value, name, None), seen) for name in names)


def within_bounds(lone: Lone, message: m.LinkMessage, apply: Callable[[], list[Instruction]]) -> list[Instruction]:
    """Applies a message. What is allocated meanwhile is in proportion to what came."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        return apply()
    finally:
        grown = tracemalloc.get_traced_memory()[1] - before
        allowed = BYTES_PER_MESSAGE + BYTES_PER_ITEM * items(message)
        assert grown <= allowed, f"{type(message).__name__} of {items(message)} items cost {grown} bytes"
        lone.engine.check_integrity()


# ---- a hostile decode server


def heard(peer: HostileDecode | HostilePrefill, lone: Prefill | Decode, message: m.LinkMessage) -> bool:
    """The engine under test does what a peer's message asks for, and the peer hears of it. False: it was refused."""
    try:
        out = within_bounds(lone, message, lambda: lone.link(message))
    except ProtocolError:
        return False
    peer.said(message)
    peer.do(out)
    return True


class HostileDecode:
    """A prefill engine with legs in every phase, a worker that obeys, and what a decode server could rightly say now."""

    def __init__(self) -> None:
        self.prefill = Prefill(FACTS)
        self.legs = [start(name, tokens=20, first_token=i * 100 + 1) for i, name in enumerate("abc")]
        self.offers: dict[LegKey, list[tuple[int, Piece]]] = {}
        self.under_way: set[int] = set()
        self.entry_id = self.ring_byte = 0
        self.do(self.prefill.link(m.OpenRing(0, 0, SEGMENT, (0, SEGMENT))))
        for leg in self.legs:
            self.do(self.prefill.start(leg))
        self.do(self.prefill.link(m.Grant(self.legs[0].key, self.wants(self.legs[0]))))

    def wants(self, leg: StartLeg) -> tuple[int, ...]:
        return first_held(FACTS.model.groups, FACTS.memory.page_tokens, leg)

    def do(self, out: list[Instruction]) -> None:
        """Workers obey, and check that they can."""
        engine = self.prefill.engine
        while out:
            for message in to_link(out):
                if isinstance(message, m.OfferPieces):
                    numbered = enumerate(message.pieces, start=message.first_piece_no)
                    self.offers.setdefault(message.key, []).extend(numbered)
            reports: list[Any] = []
            for request in to_transfer(out):
                if isinstance(request, SendPiece):
                    self.check(request)
                    reports.append(PieceSent(LINK, request.entry_id, request.slice.key, request.nbytes, 0.0, 0.0))
                elif isinstance(request, DropSends):
                    reports.append(SendsDropped(LINK, request.key))
                elif isinstance(request, RemovePeer):
                    reports.append(PeerRemoved(LINK, True))
            out = [each for report in reports for each in self.prefill.event(report)]
            assert footprint(engine) < 5000, "it keeps what a peer made up"

    def check(self, send: SendPiece) -> None:
        """What the transfer thread asserts, and what its agent needs."""
        piece, part = send.slice.piece, send.slice.head_slice
        group = FACTS.model.groups[piece.group]
        assert part.src_head_start + part.heads <= group.kv_heads and part.heads > 0
        assert piece.layer_stop <= len(group.layers)
        assert send.nbytes == group_piece_bytes(piece, part.heads, group) <= FACTS.transfer.gather_bytes
        assert send.arena_offset % 16 == 0 and send.arena_offset + send.nbytes < 2**62
        rows = group.rows_per_page(FACTS.memory.page_tokens)
        assert len(send.pages) == -(-piece.token_stop // rows) - piece.token_start // rows
        assert part.src_rank == 0 and send.entry_id not in self.under_way
        self.under_way.add(send.entry_id)

    def legal(self) -> list[m.LinkMessage]:
        out: list[m.LinkMessage] = [
            m.OpenRing(0, 0, SEGMENT, (0, SEGMENT)),
            m.OpenRing(1, 0, SEGMENT, (0,)),
            m.CloseRing(0),
            m.Watermarks(0, (self.ring_byte,)),
            m.WantPieces(self.legs[0].key, (Piece(0, 0, 2, 4, 8),)),
            m.WantPieces(self.legs[0].key, (Piece(0, 0, 1, 0, 20), Piece(1, 0, 2, 16, 20), Piece(2, 0, 1, 0, 1))),
            *(m.Grant(leg.key, self.wants(leg)) for leg in self.legs),
            *(m.Complete(leg.key) for leg in self.legs),
            *(m.Revoke(leg.key, "no") for leg in self.legs),
        ]
        for key, offered in self.offers.items():
            entries = []
            ring_byte = self.ring_byte
            for number, (piece_no, piece) in enumerate(offered[:4]):
                group = FACTS.model.groups[piece.group]
                nbytes = group_piece_bytes(piece, group.kv_heads, group)
                if ring_byte % SEGMENT + nbytes > SEGMENT:
                    ring_byte += SEGMENT - ring_byte % SEGMENT
                entries.append(m.Entry(self.entry_id + number, piece_no, 0, 0, 0, group.kv_heads, ring_byte, nbytes))
                ring_byte += -(-nbytes // 16) * 16
            if entries:
                out.append(m.AssignEntries(key, 0, tuple(entries)))
        return out

    def said(self, message: m.LinkMessage) -> None:
        """It was taken."""
        if isinstance(message, m.AssignEntries):
            for entry in message.entries:
                self.entry_id = max(self.entry_id, entry.entry_id + 1)
                self.ring_byte = max(self.ring_byte, -(-(entry.ring_byte + entry.nbytes) // 16) * 16)
                self.offers[message.key] = [o for o in self.offers.get(message.key, []) if o[0] != entry.piece_no]

    def the_rest_goes_on(self) -> None:
        """The link is dropped; legs end, nothing is held, and another decode server is served as ever."""
        self.do(self.prefill.lose_link("it broke the protocol"))
        self.prefill.compute_all()
        for leg in self.legs:
            self.do(self.prefill.abort(leg))
        self.prefill.compute_all()
        assert self.prefill.engine.idle and self.prefill.used == 0
        self.prefill.do(self.prefill.link_up(hello(D_REF)))
        self.prefill.through(start("after", tokens=20, first_token=500))


# ---- a hostile prefill server


class HostilePrefill:
    """A decode engine with legs in every phase, a worker that obeys, and what a prefill server could rightly say now."""

    def __init__(self) -> None:
        self.decode = Decode(FACTS)
        self.legs = [start(name, tokens=12, peer=P_REF, first_token=i * 100 + 1) for i, name in enumerate("abc")]
        self.grants: dict[LegKey, m.Grant] = {}
        self.piece_no = 0
        self.flying: list[ExpectPiece] = []
        for leg in self.legs[:2]:
            self.do(self.decode.start(leg))
        self.do(self.decode.link(m.Announce(self.legs[0].key, 12)))

    def do(self, out: list[Instruction]) -> None:
        while out:
            for message in to_link(out):
                if isinstance(message, m.Grant):
                    self.grants[message.key] = message
            reports: list[Any] = []
            for request in to_transfer(out):
                match request:
                    case Bind():
                        reports.append(Bound(request.key))
                    case Unbind():
                        reports.append(Unbound(request.key))
                    case ExpectPiece():
                        self.check(request)
                        self.flying.append(request)
            out = [each for report in reports for each in self.decode.event(report)]
            assert footprint(self.decode.engine) < 5000, "it keeps what a peer made up"

    def check(self, expect: ExpectPiece) -> None:
        piece, part = expect.slice.piece, expect.slice.head_slice
        group = FACTS.model.groups[piece.group]
        assert part.dst_head_start + part.heads <= group.kv_heads
        assert piece.layer_stop <= len(group.layers)
        assert expect.nbytes == group_piece_bytes(piece, part.heads, group)
        assert 0 <= expect.arena_offset <= FACTS.transfer.arena_bytes - expect.nbytes

    def land(self) -> None:
        expect = self.flying.pop(0)
        self.do(self.decode.event(Landing(LINK, expect.entry_id, expect.slice.key, True, "", 1, 0.0, 0.0)))

    def legal(self) -> list[m.LinkMessage]:
        keys = [leg.key for leg in self.legs]
        row = TokenLogprobs(-1.0, ((1, -1.0), (2, -2.0)))
        out: list[m.LinkMessage] = [
            m.RingClosed(0),
            *(m.Announce(key, 12) for key in keys),
            *(m.FirstTokens(key, (m.FirstToken(0, 9, row, None),)) for key in keys),
            m.FirstTokens(keys[0], (m.FirstToken(0, 0, None, FinishReason.STOP),)),
            *(m.SentAll(key, 3) for key in keys[:2]),
            m.Withdraw(keys[1], "no"),
            m.Drained(keys[1]),
        ]
        for key, grant in self.grants.items():
            stops = (12, 12, 1)
            wanted = [
                Piece(g, 0, len(group.layers), want, stop)
                for g, (group, want, stop) in enumerate(zip(FACTS.model.groups, grant.wants, stops, strict=True))
                if want < stop
            ]
            if wanted:
                out.append(m.OfferPieces(key, self.piece_no, tuple(wanted)))
        return out

    def said(self, message: m.LinkMessage) -> None:
        if isinstance(message, m.OfferPieces):
            self.piece_no = min(MAX_PIECES, max(self.piece_no, message.first_piece_no + len(message.pieces)))

    def the_rest_goes_on(self) -> None:
        decode = self.decode
        self.do(decode.lose_link("it broke the protocol", gone=True))
        for leg in self.legs:
            self.do(decode.abort(leg))
        decode.compute_all()
        assert decode.engine.idle and decode.used == 0
        decode.do(decode.link_up(hello(P_REF)))
        decode.through(start("after", tokens=12, peer=P_REF, first_token=500))
