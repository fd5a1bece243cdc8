"""Peer.Link (`disagg.v1.Peer`): the messages of two engines to protobuf and back. Pure; knows nothing of streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from disagg.messages.channel import Frame
from disagg.messages.link import (
    Announce,
    AskWritten,
    AssignEntries,
    CloseRing,
    Complete,
    Drained,
    Entry,
    FirstToken,
    FirstTokens,
    Grant,
    LinkHello,
    LinkMessage,
    OfferPieces,
    OpenRing,
    QuietLinks,
    RankInfo,
    Revoke,
    RingClosed,
    SentAll,
    WantPieces,
    Watermarks,
    Withdraw,
    Written,
)
from disagg.messages.pieces import Piece
from disagg.wire import pb
from disagg.wire.fields import (
    FINISH_TO_PROTO,
    Fill,
    Read,
    fill_frame,
    fill_key,
    fill_logprobs,
    read_finish,
    read_key,
    read_logprobs,
    read_opening,
    read_pod,
    refuse,
)
from disagg.wire.versions import fill_version, read_version

MAX_RANKS = 256  # of one server; each costs its peers a transfer agent and a process to watch
MAX_METADATA_BYTES = 1 << 20  # of one rank's transfer agent; some hundred are usual
MAX_ADDRESS = 1 << 62  # an offset in the arena can be added to it within 64 bits


class LinkGreeting(Struct, frozen=True):
    """First message each way. last_received: highest frame number taken on this link generation; 0 on a new one.

    expected_incarnation: of the other side, as far as the sender knows it; another one refuses.
    """

    hello: LinkHello
    last_received: int
    expected_incarnation: str = ""


def link_greeting_to_proto(greeting: LinkGreeting) -> pb.peer.LinkFrame:
    out = pb.peer.LinkFrame()
    hello = greeting.hello
    out.hello.name = hello.name
    out.hello.generation = hello.generation
    out.hello.incarnation = hello.incarnation
    out.hello.fingerprint = hello.fingerprint
    out.hello.tp = hello.tp
    out.hello.host_id = hello.host_id
    for rank in hello.ranks:
        out.hello.ranks.add(
            rank=rank.rank,
            pid=rank.pid,
            pid_started=rank.pid_started,
            metadata=rank.metadata,
            arena_address=rank.arena_address,
            arena_device=rank.arena_device,
            arena_bytes=rank.arena_bytes,
        )
    out.hello.last_received = greeting.last_received
    out.hello.expected_incarnation = greeting.expected_incarnation
    out.hello.server_id = hello.server_id
    out.hello.pod = hello.pod
    fill_version(out.hello.version, hello.version)
    return out


def link_frame_to_proto(frame: Frame[LinkMessage]) -> pb.peer.LinkFrame:
    out = pb.peer.LinkFrame()
    fill_frame(out, frame, _FILL)
    return out


def link_frame_from_proto(message: pb.peer.LinkFrame) -> LinkGreeting | Frame[LinkMessage]:
    """Raises ProtocolError. Which side may say what is the session's business, not ours."""
    names = ("name", "generation", "incarnation")
    also = ("fingerprint", "host_id", "server_id", "expected_incarnation")
    if (frame := read_opening(message, _READ, names, also)) is not None:
        return frame
    hello = message.hello
    if not 0 < hello.tp <= MAX_RANKS or [rank.rank for rank in hello.ranks] != list(range(hello.tp)):
        refuse(hello, "ranks", f"are not ranks 0 to {hello.tp - 1} of tp {hello.tp}, which may be 1 to {MAX_RANKS}")
    if any(rank.arena_address > MAX_ADDRESS for rank in hello.ranks):
        refuse(hello, "ranks.arena_address", f"is beyond {MAX_ADDRESS:#x}")
    if any(len(rank.metadata) > MAX_METADATA_BYTES for rank in hello.ranks):
        refuse(hello, "ranks.metadata", f"has more than {MAX_METADATA_BYTES} bytes")
    return LinkGreeting(
        hello=LinkHello(
            name=hello.name,
            generation=hello.generation,
            incarnation=hello.incarnation,
            fingerprint=hello.fingerprint,
            tp=hello.tp,
            host_id=hello.host_id,
            ranks=tuple(
                RankInfo(
                    rank=rank.rank,
                    pid=rank.pid,
                    pid_started=rank.pid_started,
                    metadata=rank.metadata,
                    arena_address=rank.arena_address,
                    arena_device=rank.arena_device,
                    arena_bytes=rank.arena_bytes,
                )
                for rank in hello.ranks
            ),
            server_id=hello.server_id,
            pod=read_pod(hello, hello.pod),
            version=read_version(hello),
        ),
        last_received=hello.last_received,
        expected_incarnation=hello.expected_incarnation,
    )


# ---- messages about a leg


def _fill_announce(out: pb.peer.Announce, message: Announce) -> None:
    fill_key(out.key, message.key)
    out.num_tokens = message.num_tokens


def _read_announce(message: pb.peer.Announce) -> Announce:
    return Announce(key=read_key(message), num_tokens=message.num_tokens)


def _fill_grant(out: pb.peer.Grant, message: Grant) -> None:
    fill_key(out.key, message.key)
    out.wants.extend(message.wants)
    out.choices = message.choices


def _read_grant(message: pb.peer.Grant) -> Grant:
    key = read_key(message)
    if not message.wants:
        refuse(message, "wants", "is empty; every layer group has an entry")
    return Grant(key=key, wants=tuple(message.wants), choices=message.choices)


def _fill_pieces(out: Any, pieces: Iterable[Piece]) -> None:
    """out: a repeated field of Piece."""
    for piece in pieces:
        added = out.add()
        added.group = piece.group
        added.layer_start = piece.layer_start
        added.layer_stop = piece.layer_stop
        added.token_start = piece.token_start
        added.token_stop = piece.token_stop


def _read_pieces(pieces: Iterable[pb.peer.Piece]) -> tuple[Piece, ...]:
    result = []
    for piece in pieces:
        if piece.layer_start >= piece.layer_stop:
            refuse(piece, "layer_stop", f"is {piece.layer_stop}; it must be above layer_start {piece.layer_start}")
        if piece.token_start >= piece.token_stop:
            refuse(piece, "token_stop", f"is {piece.token_stop}; it must be above token_start {piece.token_start}")
        result.append(
            Piece(piece.group, piece.layer_start, piece.layer_stop, piece.token_start, piece.token_stop),
        )
    return tuple(result)


def _fill_offer_pieces(out: pb.peer.OfferPieces, message: OfferPieces) -> None:
    fill_key(out.key, message.key)
    out.first_piece_no = message.first_piece_no
    _fill_pieces(out.pieces, message.pieces)


def _read_offer_pieces(message: pb.peer.OfferPieces) -> OfferPieces:
    return OfferPieces(
        key=read_key(message), first_piece_no=message.first_piece_no, pieces=_read_pieces(message.pieces)
    )


def _fill_want_pieces(out: pb.peer.WantPieces, message: WantPieces) -> None:
    fill_key(out.key, message.key)
    _fill_pieces(out.pieces, message.pieces)


def _read_want_pieces(message: pb.peer.WantPieces) -> WantPieces:
    return WantPieces(key=read_key(message), pieces=_read_pieces(message.pieces))


def _fill_assign_entries(out: pb.peer.AssignEntries, message: AssignEntries) -> None:
    fill_key(out.key, message.key)
    out.ring_no = message.ring_no
    for entry in message.entries:
        added = out.entries.add()
        added.entry_id = entry.entry_id
        added.piece_no = entry.piece_no
        added.src_rank = entry.src_rank
        added.dst_rank = entry.dst_rank
        added.src_head_start = entry.src_head_start
        added.heads = entry.heads
        added.ring_byte = entry.ring_byte
        added.nbytes = entry.nbytes


def _read_assign_entries(message: pb.peer.AssignEntries) -> AssignEntries:
    return AssignEntries(
        key=read_key(message),
        ring_no=message.ring_no,
        entries=tuple(
            Entry(
                entry_id=entry.entry_id,
                piece_no=entry.piece_no,
                src_rank=entry.src_rank,
                dst_rank=entry.dst_rank,
                src_head_start=entry.src_head_start,
                heads=entry.heads,
                ring_byte=entry.ring_byte,
                nbytes=entry.nbytes,
            )
            for entry in message.entries
        ),
    )


def _fill_first_tokens(out: pb.peer.FirstTokens, message: FirstTokens) -> None:
    fill_key(out.key, message.key)
    for token in message.tokens:
        added = out.tokens.add()
        added.choice = token.choice
        added.token_id = token.token_id
        if token.logprobs is not None:
            fill_logprobs(added.logprobs, (token.logprobs,))
        if token.finish is not None:
            added.finish = FINISH_TO_PROTO[token.finish]


def _read_first_tokens(message: pb.peer.FirstTokens) -> FirstTokens:
    return FirstTokens(
        key=read_key(message),
        tokens=tuple(
            FirstToken(
                choice=token.choice,
                token_id=token.token_id,
                logprobs=read_logprobs(token.logprobs, 1)[0] if token.HasField("logprobs") else None,
                finish=read_finish(token),
            )
            for token in message.tokens
        ),
    )


def _fill_sent_all(out: pb.peer.SentAll, message: SentAll) -> None:
    fill_key(out.key, message.key)
    out.num_pieces = message.num_pieces


def _read_sent_all(message: pb.peer.SentAll) -> SentAll:
    return SentAll(key=read_key(message), num_pieces=message.num_pieces)


def _fill_key_only(out: Any, message: Complete | Drained) -> None:
    fill_key(out.key, message.key)


def _read_complete(message: pb.peer.Complete) -> Complete:
    return Complete(key=read_key(message))


def _read_drained(message: pb.peer.Drained) -> Drained:
    return Drained(key=read_key(message))


def _fill_key_reason(out: Any, message: Revoke | Withdraw) -> None:
    fill_key(out.key, message.key)
    out.reason = message.reason
    out.aborted = message.aborted


def _read_revoke(message: pb.peer.Revoke) -> Revoke:
    return Revoke(key=read_key(message), reason=message.reason, aborted=message.aborted)


def _read_withdraw(message: pb.peer.Withdraw) -> Withdraw:
    return Withdraw(key=read_key(message), reason=message.reason, aborted=message.aborted)


# ---- messages about a ring


def _fill_open_ring(out: pb.peer.OpenRing, message: OpenRing) -> None:
    out.ring_no = message.ring_no
    out.dst_rank = message.dst_rank
    out.segment_bytes = message.segment_bytes
    out.segment_offsets.extend(message.segment_offsets)


def _read_open_ring(message: pb.peer.OpenRing) -> OpenRing:
    if not message.segment_bytes:
        refuse(message, "segment_bytes", "is 0")
    return OpenRing(
        ring_no=message.ring_no,
        dst_rank=message.dst_rank,
        segment_bytes=message.segment_bytes,
        segment_offsets=tuple(message.segment_offsets),
    )


def _fill_ring_only(out: Any, message: CloseRing | RingClosed) -> None:
    out.ring_no = message.ring_no


def _read_close_ring(message: pb.peer.CloseRing) -> CloseRing:
    return CloseRing(ring_no=message.ring_no)


def _read_ring_closed(message: pb.peer.RingClosed) -> RingClosed:
    return RingClosed(ring_no=message.ring_no)


def _fill_watermarks(out: pb.peer.Watermarks, message: Watermarks) -> None:
    out.ring_no = message.ring_no
    out.ring_bytes.extend(message.ring_bytes)


def _read_watermarks(message: pb.peer.Watermarks) -> Watermarks:
    return Watermarks(ring_no=message.ring_no, ring_bytes=tuple(message.ring_bytes))


def _fill_entry_ids(out: Any, message: AskWritten | Written) -> None:
    out.ring_no = message.ring_no
    out.entry_ids.extend(message.entry_ids)


def _read_ask_written(message: pb.peer.AskWritten) -> AskWritten:
    return AskWritten(ring_no=message.ring_no, entry_ids=tuple(message.entry_ids))


def _read_written(message: pb.peer.Written) -> Written:
    return Written(ring_no=message.ring_no, entry_ids=tuple(message.entry_ids))


# ---- messages about other links


def _fill_quiet_links(out: pb.peer.QuietLinks, message: QuietLinks) -> None:
    out.generations.extend(message.generations)


def _read_quiet_links(message: pb.peer.QuietLinks) -> QuietLinks:
    return QuietLinks(generations=tuple(message.generations))


_FILL: Mapping[type, tuple[str, Fill]] = {
    Announce: ("announce", _fill_announce),
    OpenRing: ("open_ring", _fill_open_ring),
    CloseRing: ("close_ring", _fill_ring_only),
    RingClosed: ("ring_closed", _fill_ring_only),
    Grant: ("grant", _fill_grant),
    OfferPieces: ("offer_pieces", _fill_offer_pieces),
    AssignEntries: ("assign_entries", _fill_assign_entries),
    Watermarks: ("watermarks", _fill_watermarks),
    FirstTokens: ("first_tokens", _fill_first_tokens),
    SentAll: ("sent_all", _fill_sent_all),
    Complete: ("complete", _fill_key_only),
    Revoke: ("revoke", _fill_key_reason),
    Withdraw: ("withdraw", _fill_key_reason),
    Drained: ("drained", _fill_key_only),
    WantPieces: ("want_pieces", _fill_want_pieces),
    AskWritten: ("ask_written", _fill_entry_ids),
    Written: ("written", _fill_entry_ids),
    QuietLinks: ("quiet_links", _fill_quiet_links),
}
_READ: Mapping[str, Read[LinkMessage]] = {
    "announce": _read_announce,
    "open_ring": _read_open_ring,
    "close_ring": _read_close_ring,
    "ring_closed": _read_ring_closed,
    "grant": _read_grant,
    "offer_pieces": _read_offer_pieces,
    "assign_entries": _read_assign_entries,
    "watermarks": _read_watermarks,
    "first_tokens": _read_first_tokens,
    "sent_all": _read_sent_all,
    "complete": _read_complete,
    "revoke": _read_revoke,
    "withdraw": _read_withdraw,
    "drained": _read_drained,
    "want_pieces": _read_want_pieces,
    "ask_written": _read_ask_written,
    "written": _read_written,
    "quiet_links": _read_quiet_links,
}
