"""One leg's transfer, as two state machines without I/O: events in, decisions out.

    prefill side (SendSession)                       decode side (ReceiveSession)

    WAITING  ── grant ──────────> SENDING            WAITING ── announce ──> QUEUED ── bind ──> BINDING
      │  complete                  │ │ every piece      │                      │                  │ every rank bound
      │                            │ │ written          │                      │                  v
      │                            │ v                  │                      │             RECEIVING
      │           revoke, abort    │ SENT               │                      │                  │ covers the plan,
      │                            │ │ complete         │       abandon        │                  v tokens here
      v                            v v                  └──────────┬───────────┴───────────> COMPLETE
    DROPPING ── dropped ──> CLOSED <─┘                             v                              │ unbound
                                                                 LEAVING ── quiet ──> CLOSED <────┘

A transfer is complete when its rectangles cover the plan of every layer group on every rank; there is no counter to
trust. Every event is legal in every state that a late, repeated or reordered message can meet; what no peer could
rightly say is a ProtocolError. Knows pieces and entries; nothing of links, rings, pages or clocks (times are arguments).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.messages.lane import Piece
from disagg.messages.link import Entry, FirstToken
from disagg.staging.pieces import Coverage
from disagg.types.errors import ProtocolError

SplitFn = Callable[[Piece], tuple[Piece, ...]]

MAX_PIECES = 1 << 16  # of one leg; more is refused rather than kept


class SendState(enum.Enum):
    WAITING = "waiting"  # announced, not granted
    SENDING = "sending"
    SENT = "sent"  # every piece has been written; the decode side has yet to say that all landed
    DROPPING = "dropping"  # given up; writes may be under way
    CLOSED = "closed"  # nothing is under way, nothing will be


class SendEvent(enum.Enum):
    GRANT = "grant"
    ALL_SENT = "all sent"
    WANT = "want pieces"
    COMPLETE = "complete"
    GIVE_UP = "give up"
    DROPPED = "dropped"


SEND_NEXT: dict[tuple[SendState, SendEvent], SendState] = {
    (SendState.WAITING, SendEvent.GRANT): SendState.SENDING,
    (SendState.WAITING, SendEvent.COMPLETE): SendState.DROPPING,  # the first token ended it
    (SendState.WAITING, SendEvent.GIVE_UP): SendState.DROPPING,
    (SendState.SENDING, SendEvent.ALL_SENT): SendState.SENT,
    (SendState.SENDING, SendEvent.WANT): SendState.SENDING,
    (SendState.SENDING, SendEvent.COMPLETE): SendState.DROPPING,
    (SendState.SENDING, SendEvent.GIVE_UP): SendState.DROPPING,
    (SendState.SENT, SendEvent.WANT): SendState.SENDING,
    (SendState.SENT, SendEvent.COMPLETE): SendState.CLOSED,
    (SendState.SENT, SendEvent.GIVE_UP): SendState.DROPPING,
    (SendState.DROPPING, SendEvent.DROPPED): SendState.CLOSED,
    (SendState.DROPPING, SendEvent.GRANT): SendState.DROPPING,  # it crossed our withdrawal
    (SendState.DROPPING, SendEvent.WANT): SendState.DROPPING,
    (SendState.DROPPING, SendEvent.COMPLETE): SendState.DROPPING,
    (SendState.DROPPING, SendEvent.GIVE_UP): SendState.DROPPING,
    (SendState.CLOSED, SendEvent.GRANT): SendState.CLOSED,
    (SendState.CLOSED, SendEvent.WANT): SendState.CLOSED,
    (SendState.CLOSED, SendEvent.COMPLETE): SendState.CLOSED,
    (SendState.CLOSED, SendEvent.GIVE_UP): SendState.CLOSED,
    (SendState.CLOSED, SendEvent.DROPPED): SendState.CLOSED,
}


class Offer(Struct, frozen=True):
    """Pieces to offer to the decode side, numbered from first_piece_no on."""

    first_piece_no: int
    pieces: tuple[Piece, ...]


class Write(Struct, frozen=True):
    """A piece to be gathered and written into `entry`, once plan `after_plan` has been computed."""

    entry: Entry
    piece: Piece
    after_plan: int


@dataclass(slots=True)
class _Chunk:
    """KV of tokens [start, stop) is final once plan_no has been computed."""

    start: int
    stop: int
    plan_no: int


@dataclass(slots=True)
class SendSession:
    """Prefill side of one leg. num_tokens: of the whole trunk; num_slices: rank slices of each piece, set by the grant."""

    num_tokens: int
    num_slices: int = 1
    state: SendState = SendState.WAITING
    hit_tokens: int = 0
    _chunks: list[_Chunk] = field(default_factory=list)
    _offered: dict[int, tuple[Piece, int]] = field(default_factory=dict)  # piece_no -> (piece, after_plan)
    _unassigned: dict[int, int] = field(default_factory=dict)  # piece_no -> slices without an entry
    _writing: set[int] = field(default_factory=set)  # entry ids handed out by `assign` and not reported sent
    _next_piece_no: int = 0
    _scheduled: int = 0  # tokens whose chunks have been scheduled

    def _go(self, event: SendEvent) -> SendState:
        following = SEND_NEXT.get((self.state, event))
        if following is None:
            raise ProtocolError(f"'{event.value}' is not allowed while a transfer is {self.state.value}")
        self.state = following
        return following

    def chunk(self, start: int, stop: int, plan_no: int, cut: Cutter) -> Offer | None:
        """A chunk has been scheduled. An offer, if the leg is granted and the chunk holds wanted tokens."""
        assert start == self._scheduled and start < stop <= self.num_tokens
        self._scheduled = stop
        if self.state is SendState.WAITING:
            self._chunks.append(_Chunk(start, stop, plan_no))
            return None
        if self.state is not SendState.SENDING:
            return None
        return self._offer([_Chunk(start, stop, plan_no)], cut)

    def grant(self, hit_tokens: int, num_slices: int, cut: Cutter) -> Offer | None:
        """Pages are bound. An offer of everything scheduled so far."""
        if not 0 <= hit_tokens <= self.num_tokens:
            raise ProtocolError(f"a grant says that {hit_tokens} of {self.num_tokens} tokens are there already")
        if self._go(SendEvent.GRANT) is not SendState.SENDING:
            return None
        self.hit_tokens = hit_tokens
        self.num_slices = num_slices
        chunks, self._chunks = self._chunks, []
        return self._offer(chunks, cut)

    def want(self, pieces: Iterable[Piece], cut: Cutter) -> Offer | None:
        """Rectangles are missing on the decode side although we wrote them: offer them again."""
        wanted = list(pieces)
        for piece in wanted:
            if piece.token_stop > self._scheduled:
                raise ProtocolError(f"{piece} is wanted; only {self._scheduled} tokens have been computed")
        if self._go(SendEvent.WANT) is not SendState.SENDING:
            return None
        return self._number([(piece, -1) for whole in wanted for piece in cut(whole)])

    def _offer(self, chunks: list[_Chunk], cut: Cutter) -> Offer | None:
        pieces: list[tuple[Piece, int]] = []
        for chunk in chunks:
            start = max(chunk.start, self.hit_tokens)
            if start < chunk.stop:
                pieces += [(piece, chunk.plan_no) for piece in cut(None, start, chunk.stop)]
        return self._number(pieces)

    def _number(self, pieces: list[tuple[Piece, int]]) -> Offer | None:
        if not pieces:
            return None
        first = self._next_piece_no
        for piece_no, item in enumerate(pieces, start=first):
            self._offered[piece_no] = item
            self._unassigned[piece_no] = self.num_slices
        self._next_piece_no = first + len(pieces)
        return Offer(first, tuple(piece for piece, _ in pieces))

    def assign(self, entries: Iterable[Entry]) -> tuple[Write, ...]:
        """The decode side said where. The writes to do; none once the leg has been given up."""
        writes = []
        for entry in entries:
            if self.state is not SendState.SENDING:
                continue
            left = self._unassigned.get(entry.piece_no)
            if left is None:
                raise ProtocolError(f"an entry was assigned to piece {entry.piece_no}, which was not offered")
            if left == 1:
                del self._unassigned[entry.piece_no]
            else:
                self._unassigned[entry.piece_no] = left - 1
            piece, after_plan = self._offered[entry.piece_no]
            self._writing.add(entry.entry_id)
            writes.append(Write(entry, piece, after_plan))
        return tuple(writes)

    def sent(self, entry_id: int) -> bool:
        """A write is complete. True when this was the last one of the leg: say SentAll."""
        self._writing.discard(entry_id)
        return self.finish_if_sent()

    def finish_if_sent(self) -> bool:
        """True, once, when everything wanted has been offered, assigned and written."""
        if self.state is not SendState.SENDING or self._scheduled < self.num_tokens:
            return False
        if self._writing or self._unassigned:
            return False
        self._go(SendEvent.ALL_SENT)
        return True

    @property
    def num_pieces(self) -> int:
        return self._next_piece_no

    def complete(self) -> SendState:
        """The decode side needs nothing more. DROPPING: drop what is left; CLOSED: nothing is."""
        return self._go(SendEvent.COMPLETE)

    def give_up(self) -> bool:
        """Abort, revocation or loss. True if sends must now be dropped (False: already being dropped, or closed)."""
        before = self.state
        self._go(SendEvent.GIVE_UP)
        return before is not self.state

    def dropped(self) -> None:
        """The workers say that nothing is under way."""
        self._writing.clear()
        self._go(SendEvent.DROPPED)


class Cutter:
    """Cuts token ranges of every layer group, or one rectangle, into pieces that fit a ring entry."""

    def __init__(self, split: SplitFn, groups: tuple[int, ...]) -> None:
        """split: (piece) -> pieces that fit. groups: layers of each group."""
        self._split = split
        self._groups = groups

    def __call__(self, whole: Piece | None, start: int = 0, stop: int = 0) -> tuple[Piece, ...]:
        if whole is not None:
            return self._split(whole)
        return tuple(
            piece
            for group, layers in enumerate(self._groups)
            for piece in self._split(Piece(group, 0, layers, start, stop))
        )


class ReceiveState(enum.Enum):
    WAITING = "waiting"  # the router's leg is here; prefill has not announced it
    QUEUED = "queued"  # announced; waits for pages, slots and a ring
    BINDING = "binding"  # pages are allocated; not every rank has acknowledged
    RECEIVING = "receiving"  # granted
    COMPLETE = "complete"  # everything is here; ranks are being unbound, and the sequence may run
    LEAVING = "leaving"  # given up; ranks are being unbound, and prefill may still write into the ring
    CLOSED = "closed"


class ReceiveEvent(enum.Enum):
    ANNOUNCE = "announce"
    BIND = "bind"
    ALL_BOUND = "all bound"
    ALL_HERE = "all here"
    ABANDON = "abandon"
    QUIET = "quiet"


RECEIVE_NEXT: dict[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (ReceiveState.WAITING, ReceiveEvent.ANNOUNCE): ReceiveState.QUEUED,
    (ReceiveState.WAITING, ReceiveEvent.ALL_HERE): ReceiveState.COMPLETE,  # the first token ended it
    (ReceiveState.WAITING, ReceiveEvent.ABANDON): ReceiveState.LEAVING,
    (ReceiveState.QUEUED, ReceiveEvent.ANNOUNCE): ReceiveState.QUEUED,
    (ReceiveState.QUEUED, ReceiveEvent.BIND): ReceiveState.BINDING,
    (ReceiveState.QUEUED, ReceiveEvent.ALL_HERE): ReceiveState.COMPLETE,
    (ReceiveState.QUEUED, ReceiveEvent.ABANDON): ReceiveState.LEAVING,
    (ReceiveState.BINDING, ReceiveEvent.ALL_BOUND): ReceiveState.RECEIVING,
    (ReceiveState.BINDING, ReceiveEvent.ALL_HERE): ReceiveState.COMPLETE,
    (ReceiveState.BINDING, ReceiveEvent.ABANDON): ReceiveState.LEAVING,
    (ReceiveState.RECEIVING, ReceiveEvent.ALL_HERE): ReceiveState.COMPLETE,
    (ReceiveState.RECEIVING, ReceiveEvent.ABANDON): ReceiveState.LEAVING,
    (ReceiveState.COMPLETE, ReceiveEvent.ABANDON): ReceiveState.COMPLETE,
    (ReceiveState.COMPLETE, ReceiveEvent.QUIET): ReceiveState.CLOSED,
    (ReceiveState.LEAVING, ReceiveEvent.ABANDON): ReceiveState.LEAVING,
    (ReceiveState.LEAVING, ReceiveEvent.QUIET): ReceiveState.CLOSED,
    (ReceiveState.CLOSED, ReceiveEvent.ABANDON): ReceiveState.CLOSED,
    (ReceiveState.CLOSED, ReceiveEvent.QUIET): ReceiveState.CLOSED,
}


@dataclass(slots=True)
class ReceiveSession:
    """Decode side of one leg. groups: layers of each layer group; slices: head slices of a piece, per decode rank.

    plan: the rectangles that must land on every rank, known from the moment of binding.
    """

    num_tokens: int
    groups: tuple[int, ...]
    slices: tuple[int, ...]
    state: ReceiveState = ReceiveState.WAITING
    hit_tokens: int = 0
    first_tokens: tuple[FirstToken, ...] = ()
    sent_all: bool = False
    peer_quiet: bool = False  # prefill has nothing of this leg under way, and will not have
    wants_sent: int = 0
    _bound: set[int] = field(default_factory=set)
    _unbound: set[int] = field(default_factory=set)
    _pieces: dict[int, Piece] = field(default_factory=dict)
    _landed: list[Coverage] = field(default_factory=list)
    _slices_landed: dict[tuple[int, int], int] = field(default_factory=dict)  # (piece_no, rank) -> slices

    def _go(self, event: ReceiveEvent) -> ReceiveState:
        following = RECEIVE_NEXT.get((self.state, event))
        if following is None:
            raise ProtocolError(f"'{event.value}' is not allowed while a transfer is {self.state.value}")
        self.state = following
        return following

    @property
    def plan(self) -> tuple[Piece, ...]:
        if self.hit_tokens >= self.num_tokens:
            return ()
        return tuple(
            Piece(group, 0, layers, self.hit_tokens, self.num_tokens) for group, layers in enumerate(self.groups)
        )

    def announce(self, num_tokens: int) -> None:
        if num_tokens != self.num_tokens:
            raise ProtocolError(f"prefill announces {num_tokens} tokens where the router sent {self.num_tokens}")
        if self.state in (ReceiveState.WAITING, ReceiveState.QUEUED):
            self._go(ReceiveEvent.ANNOUNCE)

    def bind(self, hit_tokens: int) -> None:
        """Pages are allocated; ranks are asked to bind them."""
        self.hit_tokens = hit_tokens
        self._landed = [Coverage() for _ in self.slices]
        self._go(ReceiveEvent.BIND)

    def bound(self, rank: int) -> bool:
        """A rank has acknowledged. True when it was the last one: send the grant."""
        self._bound.add(rank)
        if self.state is not ReceiveState.BINDING or len(self._bound) < len(self.slices):
            return False
        self._go(ReceiveEvent.ALL_BOUND)
        return True

    def offer(self, first_piece_no: int, pieces: tuple[Piece, ...]) -> tuple[tuple[int, Piece], ...]:
        """Prefill will write these. The ones to assign entries to: none once the leg is complete or given up."""
        if self.state is not ReceiveState.RECEIVING:
            if self.state in (ReceiveState.WAITING, ReceiveState.QUEUED, ReceiveState.BINDING):
                raise ProtocolError(
                    f"pieces were offered while the transfer is {self.state.value}: nothing was granted"
                )
            return ()
        numbered = tuple(enumerate(pieces, start=first_piece_no))
        for piece_no, piece in numbered:
            if not 0 <= piece_no < MAX_PIECES or piece_no in self._pieces:
                raise ProtocolError(f"piece number {piece_no} was offered twice, or is not below {MAX_PIECES}")
            if (
                piece.group >= len(self.groups)
                or piece.layer_stop > self.groups[piece.group]
                or piece.token_stop > self.num_tokens
                or piece.token_start < self.hit_tokens
            ):
                raise ProtocolError(f"{piece} was offered; it is not within what was granted")
        self._pieces.update(numbered)
        self.sent_all = False
        return numbered

    def landed(self, piece_no: int, rank: int) -> None:
        """One rank slice of a piece has been scattered on `rank`."""
        if self.state is not ReceiveState.RECEIVING:
            return
        slices = self._slices_landed.get((piece_no, rank), 0) + 1
        self._slices_landed[piece_no, rank] = slices
        if slices == self.slices[rank]:
            self._landed[rank].add(self._pieces[piece_no])

    @property
    def covered(self) -> bool:
        """Every rectangle of the plan has landed on every rank."""
        return self.state is ReceiveState.RECEIVING and all(c.complete(self.plan) for c in self._landed)

    def missing(self) -> tuple[Piece, ...]:
        """Rectangles that some rank lacks."""
        if self.state is not ReceiveState.RECEIVING:
            return ()
        return tuple(dict.fromkeys(piece for c in self._landed for piece in c.missing(self.plan)))

    def try_complete(self) -> bool:
        """True, once, when the sequence can join the running batch, or has ended with its first tokens."""
        if not self.first_tokens or not self.open:
            return False
        if not self.covered and not all(token.finish for token in self.first_tokens):
            return False
        self._go(ReceiveEvent.ALL_HERE)
        return True

    def abandon(self) -> bool:
        """Abort, failure or loss. True if the transfer was open: revoke it and unbind."""
        before = self.state
        self._go(ReceiveEvent.ABANDON)
        return self.state is not before

    @property
    def open(self) -> bool:
        """Not complete and not given up."""
        return self.state not in (ReceiveState.COMPLETE, ReceiveState.LEAVING, ReceiveState.CLOSED)

    @property
    def ever_bound(self) -> bool:
        """Ranks were asked to bind, so they must acknowledge the unbinding before the pages go anywhere."""
        return bool(self._landed)

    def unbound(self, rank: int) -> None:
        """A rank has acknowledged the unbinding."""
        self._unbound.add(rank)

    @property
    def all_unbound(self) -> bool:
        """Every rank has let go of the pages, or none ever had them: they are the engine's alone."""
        return not self.ever_bound or len(self._unbound) == len(self.slices)

    def quiet(self) -> None:
        """Ranks are unbound and nothing is under way: the end."""
        self._go(ReceiveEvent.QUIET)
