"""Commands to a worker's transfer thread, and its events: sequenced both ways, apart from the step plans, and its heartbeat.

The engine decides; the thread binds, writes, scatters and reports. Every message is numbered by its `CommandFrame`; a gap
ends the workers. Knows keys, pieces and offsets; nothing of requests' text or of gRPC.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from disagg.messages.layout import GroupPages
from disagg.messages.pieces import RankSlice
from disagg.messages.tiers import TierCommand, TierEvent
from disagg.types.ids import LegKey


class AddPeer(Struct, frozen=True, tag="add_peer"):
    """Introduce the agent of one rank of the server at the other end of `link`, and do the wire-up now.

    Nothing is written outside of the arena's bytes (0 for ranks that only write to us).
    """

    link: int
    peer_rank: int
    metadata: bytes
    arena_address: int
    arena_device: int
    arena_bytes: int


class RemovePeer(Struct, frozen=True, tag="remove_peer"):
    """Forget every rank behind `link`; writes under way to it are released and reported as failed."""

    link: int


class SendPiece(Struct, frozen=True, tag="send_piece"):
    """Gather a slice and write it into the peer's arena, once plan `after_plan` has computed its layers (-1: at once)."""

    link: int
    entry_id: int  # of the ring entry on this link
    slice: RankSlice
    pages: tuple[int, ...]  # those that hold the piece's tokens, rounded out to pages
    arena_offset: int  # in the peer's arena
    nbytes: int  # payload and trailer
    after_plan: int


class DropSends(Struct, frozen=True, tag="drop_sends"):
    """Send nothing more of this leg; answer SendsDropped when no write of it is under way any more."""

    link: int
    key: LegKey


class Bind(Struct, frozen=True, tag="bind"):
    """Pieces of this leg will be scattered into these pages, which are its alone. tables: one per layer group."""

    key: LegKey
    tables: tuple[GroupPages, ...]


class ExpectPiece(Struct, frozen=True, tag="expect_piece"):
    """A ring entry has been assigned: what its notification will mean."""

    link: int
    entry_id: int
    slice: RankSlice
    arena_offset: int
    nbytes: int


class ForgetEntry(Struct, frozen=True, tag="forget_entry"):
    """Nothing will write to this entry any more, and its notification does not come: wait for it no longer.

    Answered by a Landing that says "lost"; not at all if the entry has landed, or is about to.
    """

    link: int
    entry_id: int


class Unbind(Struct, frozen=True, tag="unbind"):
    """Scatter nothing more into this leg's pages; answered by Unbound, after which they may be reused.

    blank: what has landed is not trusted, though it is what was sent, and must not stay: it may be no numbers, which attention
    must not read even with weight zero.
    """

    key: LegKey
    blank: bool = False


class PeerAdded(Struct, frozen=True, tag="peer_added"):
    """The rank has met this rank of the peer, or cannot."""

    link: int
    peer_rank: int
    error: str  # empty: it works


class PeerWired(Struct, frozen=True, tag="peer_wired"):
    """The first bytes have landed at this rank of the peer. ways: as in transfer/backends/base.Wired. For operators."""

    link: int
    peer_rank: int
    ways: tuple[str, ...]


class PeerRemoved(Struct, frozen=True, tag="peer_removed"):
    """Nothing of this link is under way here. clean: every write was complete, so nothing of one that failed may yet land."""

    link: int
    clean: bool


class PieceSent(Struct, frozen=True, tag="piece_sent"):
    """The write is complete: the staging buffer is free again, and the notification follows the data."""

    link: int
    entry_id: int
    key: LegKey
    nbytes: int
    gather_s: float
    wire_s: float


class PieceFailed(Struct, frozen=True, tag="piece_failed"):
    """The write cannot complete (peer gone). Nothing of it is under way any more."""

    link: int
    entry_id: int
    key: LegKey
    reason: str


class SendsDropped(Struct, frozen=True, tag="sends_dropped"):
    """Nothing of this leg is under way to the link from this rank, and nothing will be."""

    link: int
    key: LegKey


class Bound(Struct, frozen=True, tag="bound"):
    """The rank knows the leg's pages: pieces may land."""

    key: LegKey


class Unbound(Struct, frozen=True, tag="unbound"):
    """The rank writes nothing more to the leg's pages."""

    key: LegKey


class Landing(Struct, frozen=True, tag="landing"):
    """A piece was handled. ok: checksum right and rows scattered; else the pool has nothing of it that anybody may read.

    reason: "" | "checksum" | "unbound" (the leg was unbound before it came; dropped) | "lost" (forgotten; see ForgetEntry).
    """

    link: int
    entry_id: int
    key: LegKey
    ok: bool
    reason: str
    payload_bytes: int
    scatter_s: float
    landed_unix_s: float


class Beat(Struct, frozen=True, tag="beat"):
    """The transfer thread lives. plan_no: the last plan computed; busy_s: how long the present one has run (0: idle).

    longest_turn_s: the longest time of late for which the thread looked at nothing new.
    """

    plan_no: int
    busy_s: float
    bound: int
    writes_in_flight: int
    longest_turn_s: float = 0.0


TransferCommand = AddPeer | RemovePeer | SendPiece | DropSends | Bind | ExpectPiece | ForgetEntry | Unbind
TransferEvent = (
    PeerAdded | PeerWired | PeerRemoved | PieceSent | PieceFailed | SendsDropped | Bound | Unbound | Landing | Beat
)


class CommandFrame(Struct, frozen=True, array_like=True):
    """Messages to one rank, in order; number: of the frame, from 0, without gaps."""

    number: int
    messages: tuple[TransferCommand | TierCommand, ...]


class EventFrame(Struct, frozen=True, array_like=True):
    """Reports of one rank, in order; number: of the frame, from 0, without gaps."""

    rank: int
    number: int
    messages: tuple[TransferEvent | TierEvent, ...]


encode_commands = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(CommandFrame).decode
encode_events = msgspec.msgpack.Encoder().encode
decode_events = msgspec.msgpack.Decoder(EventFrame).decode
