"""What a prefill and a decode engine say to each other over Peer.Link. `wire/` turns these into protobuf and back.

The decode engine dials. Messages are numbered and acknowledged by a `ReliableChannel`: exactly once, in order, also across
a reconnect of the same link generation.

    P -> D   Announce ........ the first chunk of a leg is scheduled
    D -> P   OpenRing ........ segments of each decode rank's arena, once per active link
    D -> P   Grant ........... pages are bound on every rank; these positions of each group are wanted
    P -> D   OfferPieces ..... a chunk is scheduled; these rectangles will come
    D -> P   AssignEntries ... where each rank slice of each piece goes
    P        (one-sided writes, each with a notification)
    D -> P   Watermarks ...... how far each ring is free again
    D -> P   AskWritten ...... nothing was heard of these entries: answered by Written
    P -> D   FirstTokens ..... token 0 of every choice
    P -> D   SentAll ......... every piece has been written
    D -> P   Complete ........ every rectangle has landed: P may free
    any      Withdraw / Revoke, answered by Drained when nothing of the leg is under way
    D -> P   CloseRing ....... the link is idle: answered by RingClosed, then the segments go back to the arena
    P -> D   QuietLinks ...... of these links, lost before, nothing is under way any more
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.pieces import Piece
from disagg.messages.plan import TokenLogprobs
from disagg.types.ids import FinishReason, LegKey
from disagg.types.protocol import BEFORE_NUMBERS, Version


class RankInfo(Struct, frozen=True):
    """One worker rank: its transfer agent, its arena, and its process (for knowing when it is gone)."""

    rank: int
    pid: int
    pid_started: int  # start time of the process in clock ticks since boot; tells a reused pid apart
    metadata: bytes
    arena_address: int
    arena_device: int
    arena_bytes: int  # 0 without an arena


class LinkHello(Struct, frozen=True):
    """First message each way."""

    name: str
    generation: str  # drawn by the decode side, new for every link
    incarnation: str
    fingerprint: str
    tp: int
    host_id: str  # equal on one host
    ranks: tuple[RankInfo, ...]  # 0 to tp - 1, in order
    server_id: str = ""  # new for every server process; empty from one that is too old to say
    # NAMESPACE/NAME/UID of the Kubernetes pod that it and its workers run in; empty where that is not known.
    pod: str = ""
    version: Version = BEFORE_NUMBERS  # what the server's process speaks


class Announce(Struct, frozen=True):
    """P has scheduled the first chunk of this leg; it has num_tokens tokens in all."""

    key: LegKey
    num_tokens: int


class OpenRing(Struct, frozen=True):
    """Segments leased to this link in one decode rank's arena: byte offsets, each segment_bytes long. ring_no: from 0."""

    ring_no: int
    dst_rank: int
    segment_bytes: int
    segment_offsets: tuple[int, ...]


class CloseRing(Struct, frozen=True):
    """Give the ring back: write nothing more into it, and answer RingClosed once nothing is under way."""

    ring_no: int


class RingClosed(Struct, frozen=True):
    """Nothing of this ring is under way from P: its segments can be another link's."""

    ring_no: int


class Grant(Struct, frozen=True):
    """Pages for the whole leg are bound on every decode rank.

    wants: per layer group, the first position that is wanted, all after it being wanted too: a token, or (in a state
    group) 0. What comes before is in the decode side's prefix cache, or out of the group's window. choices: how many of the
    leg's choices, the first ones, begin to answer as soon as the KV is there: their first tokens may be told; 0 for all.
    """

    key: LegKey
    wants: tuple[int, ...]
    choices: int = 0


class OfferPieces(Struct, frozen=True):
    """Pieces that will be written; numbered by P within the leg from first_piece_no on."""

    key: LegKey
    first_piece_no: int
    pieces: tuple[Piece, ...]


class Entry(Struct, frozen=True, array_like=True):
    """A ring entry for one rank slice of one piece. ring_byte: where it begins, a count that only grows (see staging/ring).

    entry_id: unique on this link, rising from message to message, and what the notification carries.
    """

    entry_id: int
    piece_no: int
    src_rank: int
    dst_rank: int
    src_head_start: int
    heads: int
    ring_byte: int
    nbytes: int


class AssignEntries(Struct, frozen=True):
    """Where offered pieces go: entries of one ring, in the order in which they were made."""

    key: LegKey
    ring_no: int
    entries: tuple[Entry, ...]


class Watermarks(Struct, frozen=True):
    """Everything before these ring bytes is free, per decode rank."""

    ring_no: int
    ring_bytes: tuple[int, ...]


class AskWritten(Struct, frozen=True):
    """The ring is full, and nothing was heard of these entries for some time."""

    ring_no: int
    entry_ids: tuple[int, ...]


class Written(Struct, frozen=True):
    """Those of the entries asked about of which nothing is under way, and nothing will come. The others will be written."""

    ring_no: int
    entry_ids: tuple[int, ...]


class QuietLinks(Struct, frozen=True):
    """Of these links between the two incarnations, which were lost, every write was complete, and nothing more will come."""

    generations: tuple[str, ...]


class FirstToken(Struct, frozen=True, array_like=True):
    """Of one choice. finish: why the choice ends with it, or None where it goes on."""

    choice: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


class FirstTokens(Struct, frozen=True):
    """Token 0 of every choice of the leg (in output order: the first this attempt produces)."""

    key: LegKey
    tokens: tuple[FirstToken, ...]


class SentAll(Struct, frozen=True):
    """Every offered piece has been written. num_pieces: how many the leg had."""

    key: LegKey
    num_pieces: int


class Complete(Struct, frozen=True):
    """Every rectangle landed on every rank, or nothing is needed (the first token ended it): P frees the leg."""

    key: LegKey


class Revoke(Struct, frozen=True):
    """D gives the leg up (aborted, failed, unknown). P drops its sends and answers Drained."""

    key: LegKey
    reason: str
    aborted: bool = False  # the request is not wanted any more: nothing is wrong with D or the link


class Withdraw(Struct, frozen=True):
    """P gives the leg up. Sent after its sends are dropped: nothing of it is under way any more."""

    key: LegKey
    reason: str
    aborted: bool = False  # as in Revoke


class Drained(Struct, frozen=True):
    """Nothing of this leg is under way from P, and nothing will come."""

    key: LegKey


class WantPieces(Struct, frozen=True):
    """After SentAll, rectangles are missing: write them again."""

    key: LegKey
    pieces: tuple[Piece, ...]


ToPrefill = OpenRing | CloseRing | Grant | AssignEntries | Watermarks | AskWritten | Complete | Revoke | WantPieces
ToDecode = Announce | OfferPieces | FirstTokens | SentAll | Written | Withdraw | Drained | RingClosed | QuietLinks
LinkMessage = ToPrefill | ToDecode
