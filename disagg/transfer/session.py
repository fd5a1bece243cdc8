"""One leg's transfer, as two state machines without I/O: events in, decisions out. `transfer/states` draws them.

A transfer is complete when its rectangles cover what is due of every layer group on every rank; there is no counter to
trust. What is due, per group, is what decode wants of it:

    full       tokens ░░░░░░░░████████████  decode's prefix cache has the first ones
    window     tokens ░░░░░░░░░░░░░░██████  what is out of the window is needed no more, and prefill may have let go of it
    states     0: after the last token      1: the last checkpoint before it, a gift: taken when it comes, never waited for

Every event is legal in every state that a late, repeated or reordered message can meet; what no peer could
rightly say is a ProtocolError. Knows pieces and entries; nothing of links, rings, pages or clocks (times are arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.messages.layout import LayerGroup
from disagg.messages.link import Entry, FirstToken
from disagg.messages.pieces import Piece
from disagg.staging.pieces import Coverage
from disagg.transfer.states import RECEIVE_NEXT, SEND_NEXT, ReceiveEvent, ReceiveState, SendEvent, SendState
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ProtocolError

Cut = Callable[[Piece], tuple[Piece, ...]]  # a rectangle into pieces that fit a ring entry

MAX_PIECES = 1 << 16  # of one leg; more is refused rather than kept
MAX_WANTS = 3  # how often what is missing is asked for; each time it is cut and written anew

FINAL_STATE = 0  # positions of a state group
CHECKPOINT = 1
NUM_STATES = 2


def _positions(group: LayerGroup, num_tokens: int) -> int:
    return NUM_STATES if group.is_state else num_tokens


def _num_cells(pieces: Iterable[Piece]) -> int:
    return sum(piece.layers * piece.tokens for piece in pieces)


def _is_gift(group: LayerGroup, piece: Piece) -> bool:
    return group.is_state and piece.token_start >= CHECKPOINT


class Offer(Struct, frozen=True):
    """Pieces to offer to the decode side, numbered from first_piece_no on."""

    first_piece_no: int
    pieces: tuple[Piece, ...]


class Write(Struct, frozen=True):
    """A piece to be gathered and written into `entry`, once plan `after_plan` has computed its layers."""

    entry: Entry
    piece: Piece
    after_plan: int


@dataclass(slots=True)
class SendSession:
    """Prefill side of one leg. num_tokens: of the whole prefix.

    first_held: per layer group, the first position that pages still hold when prefill ends; not 0 in window groups only.
    num_slices: rank slices of each piece, per group; wants: per group the first position to send; both set by the grant.
    """

    num_tokens: int
    groups: tuple[LayerGroup, ...]
    first_held: tuple[int, ...]
    num_slices: tuple[int, ...] = ()
    wants: tuple[int, ...] = ()
    state: SendState = SendState.WAITING
    _ungranted: list[tuple[Piece, int]] = field(default_factory=list)  # (rectangle, plan that makes it final)
    _offered: dict[int, tuple[Piece, int]] = field(default_factory=dict)  # piece_no -> (piece, after_plan)
    _unassigned: dict[int, int] = field(default_factory=dict)  # piece_no -> slices without an entry
    _writing: set[int] = field(default_factory=set)  # entry ids handed out by `assign` and not reported sent
    _next_piece_no: int = 0
    _scheduled: int = 0  # tokens whose chunks have been scheduled, or that were here already
    _last_plan: int = -1  # of the last chunk
    _checkpoint: bool = False  # position CHECKPOINT of the state groups is final, or will be
    _wants: int = 0  # how often pieces were wanted again
    too_many: bool = False  # pieces: something was not offered, so the transfer cannot end well

    def __post_init__(self) -> None:
        assert len(self.first_held) == len(self.groups)
        self.wants = self.first_held

    def _go(self, event: SendEvent) -> SendState:
        following = SEND_NEXT.get((self.state, event))
        if following is None:
            raise ProtocolError(f"'{event.value}' is not allowed while a transfer is {self.state.value}")
        self.state = following
        return following

    def hit(self, tokens: int, cut: Cut, *, checkpoint: bool = False) -> Offer | None:
        """Before the first chunk: prefill's own prefix cache holds tokens [0, tokens). An offer as in `chunk`.

        checkpoint: the state after these tokens is the leg's last checkpoint.
        """
        assert self._scheduled == 0 and 0 < tokens < self.num_tokens
        self._scheduled = tokens
        self._checkpoint = checkpoint
        return self._final(self._tokens(0, tokens) + (self._states(CHECKPOINT) if checkpoint else []), -1, cut)

    def chunk(self, start: int, stop: int, plan_no: int, cut: Cut) -> Offer | None:
        """A chunk has been scheduled. An offer, if the leg is granted and the chunk gives anything that is wanted."""
        assert start == self._scheduled and start < stop <= self.num_tokens
        self._scheduled = stop
        self._last_plan = plan_no
        last = self._states(FINAL_STATE) if stop == self.num_tokens else []
        return self._final(self._tokens(start, stop) + last, plan_no, cut)

    def checkpoint(self, plan_no: int, cut: Cut) -> Offer | None:
        """The state at the leg's last checkpoint will be final with plan_no, and is kept. An offer as in `chunk`."""
        assert not self._checkpoint, "a leg has one last checkpoint"
        self._checkpoint = True
        return self._final(self._states(CHECKPOINT), plan_no, cut)

    def grant(self, wants: tuple[int, ...], num_slices: tuple[int, ...], cut: Cut) -> Offer | None:
        """Pages are bound; `wants` as in link.Grant. An offer of everything wanted that has been scheduled so far."""
        if len(wants) != len(self.groups):
            raise ProtocolError(f"a grant wants {len(wants)} layer groups; there are {len(self.groups)}")
        for group, first_held, want in zip(self.groups, self.first_held, wants, strict=True):
            if not first_held <= want <= _positions(group, self.num_tokens):
                stop = _positions(group, self.num_tokens)
                raise ProtocolError(f"a grant wants {group.name} from {want} on; {first_held} to {stop} can be had")
        if self._go(SendEvent.GRANT) is not SendState.SENDING:
            return None
        assert len(num_slices) == len(self.groups)
        self.wants, self.num_slices = wants, num_slices
        rectangles, self._ungranted = self._ungranted, []
        return self._offer(rectangles, cut)

    def want(self, pieces: Iterable[Piece], cut: Cut) -> Offer | None:
        """Rectangles are missing on the decode side although we wrote them: offer them again."""
        wanted = list(pieces)
        for piece in wanted:
            if piece.group >= len(self.groups) or piece.layer_stop > len(self.groups[piece.group].layers):
                raise ProtocolError(f"{piece} is wanted; there is no such group, or it has fewer layers")
            if piece.token_start < self.wants[piece.group] or piece.token_stop > self._available(piece.group):
                raise ProtocolError(
                    f"{piece} is wanted; {self.wants[piece.group]} to {self._available(piece.group)} can be had"
                )
        if (
            self._wants == MAX_WANTS
            or _num_cells(wanted) > self._num_cells()
            or self._next_piece_no + len(wanted) > MAX_PIECES
        ):
            raise ProtocolError(f"pieces are wanted again: more than all of them, or more than {MAX_WANTS} times")
        if self._go(SendEvent.WANT) is not SendState.SENDING:
            return None
        self._wants += 1
        return self._offer([(piece, self._last_plan) for piece in wanted], cut)

    def _num_cells(self) -> int:
        """Cells (layer x position) that can be had in all."""
        groups = enumerate(self.groups)
        return sum(len(group.layers) * (self._available(number) - self.wants[number]) for number, group in groups)

    def _available(self, group: int) -> int:
        """Where the positions end that are final, or will be with a plan that has been sent."""
        if not self.groups[group].is_state:
            return self._scheduled
        if self._scheduled < self.num_tokens:
            return 0
        return NUM_STATES if self._checkpoint else CHECKPOINT

    def _tokens(self, start: int, stop: int) -> list[Piece]:
        """Tokens [start, stop) of every group that has tokens."""
        return [
            Piece(number, 0, len(group.layers), start, stop)
            for number, group in enumerate(self.groups)
            if not group.is_state
        ]

    def _states(self, position: int) -> list[Piece]:
        """One state of every state group."""
        return [
            Piece(number, 0, len(group.layers), position, position + 1)
            for number, group in enumerate(self.groups)
            if group.is_state
        ]

    def _final(self, rectangles: list[Piece], plan_no: int, cut: Cut) -> Offer | None:
        """These will be final once plan_no has been computed: offered now, or with the grant."""
        if self.state is SendState.WAITING:
            self._ungranted += [(rectangle, plan_no) for rectangle in rectangles]
        elif self.state is SendState.SENDING:
            return self._offer([(rectangle, plan_no) for rectangle in rectangles], cut)
        return None

    def _offer(self, rectangles: list[tuple[Piece, int]], cut: Cut) -> Offer | None:
        """What of these is wanted, cut into pieces and numbered."""
        first = self._next_piece_no
        pieces: list[tuple[Piece, int]] = []
        for whole, after_plan in rectangles:
            start = max(whole.token_start, self.wants[whole.group])
            if start < whole.token_stop:
                wanted = Piece(whole.group, whole.layer_start, whole.layer_stop, start, whole.token_stop)
                pieces += [(piece, after_plan) for piece in cut(wanted)]
        if first + len(pieces) > MAX_PIECES:
            self.too_many = True
        if self.too_many or not pieces:
            return None
        for number, (piece, after_plan) in enumerate(pieces, start=first):
            self._offered[number] = (piece, after_plan)
            self._unassigned[number] = self.num_slices[piece.group]
        self._next_piece_no += len(pieces)
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
        """True, once, when everything wanted has been offered, assigned and written. Decode may leave gifts lying."""
        if self.state is not SendState.SENDING or self._scheduled < self.num_tokens or self._writing or self.too_many:
            return False
        unassigned = (self._offered[piece_no][0] for piece_no in self._unassigned)
        if any(not _is_gift(self.groups[piece.group], piece) for piece in unassigned):
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


@dataclass(slots=True)
class ReceiveSession:
    """Decode side of one leg. slices: head slices of a piece, by layer group and then decode rank.

    due: the rectangles that must land on every rank, known from the moment of binding.
    """

    num_tokens: int
    groups: tuple[LayerGroup, ...]
    slices: tuple[tuple[int, ...], ...]
    state: ReceiveState = ReceiveState.WAITING
    wants: tuple[int, ...] = ()
    due: tuple[Piece, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()
    sent_all: bool = False
    peer_quiet: bool = False  # prefill has nothing of this leg under way, and will not have
    wants_sent: int = 0
    _takes_checkpoint: bool = False
    _bound: set[int] = field(default_factory=set)
    _unbound: set[int] = field(default_factory=set)
    _pieces: dict[int, Piece] = field(default_factory=dict)
    _landed: list[Coverage] = field(default_factory=list)  # by rank; empty until ranks are asked to bind
    _slices_landed: dict[tuple[int, int], int] = field(default_factory=dict)  # (piece_no, rank) -> slices
    _cells_offered: int = 0

    def _go(self, event: ReceiveEvent) -> ReceiveState:
        following = RECEIVE_NEXT.get((self.state, event))
        if following is None:
            raise ProtocolError(f"'{event.value}' is not allowed while a transfer is {self.state.value}")
        self.state = following
        return following

    def announce(self, num_tokens: int) -> None:
        if num_tokens != self.num_tokens:
            raise ProtocolError(f"prefill announces {num_tokens} tokens where the router sent {self.num_tokens}")
        if self.state in (ReceiveState.WAITING, ReceiveState.QUEUED):
            self._go(ReceiveEvent.ANNOUNCE)

    def bind(self, wants: tuple[int, ...], *, checkpoint: bool = False) -> None:
        """Pages are allocated; ranks are asked to bind them. wants: as in link.Grant.

        checkpoint: of the state groups, pages for the last checkpoint are bound too.
        """
        assert len(wants) == len(self.groups) == len(self.slices)
        self._go(ReceiveEvent.BIND)
        self.wants = wants
        self._takes_checkpoint = checkpoint
        self._landed = [Coverage() for _ in self.slices[0]]
        stops = [CHECKPOINT if group.is_state else self.num_tokens for group in self.groups]
        self.due = tuple(
            Piece(number, 0, len(group.layers), want, stop)
            for number, (group, want, stop) in enumerate(zip(self.groups, wants, stops, strict=True))
            if want < stop
        )

    def bound(self, rank: int) -> bool:
        """A rank has acknowledged. True when it was the last one: send the grant."""
        self._bound.add(rank)
        if self.state is not ReceiveState.BINDING or len(self._bound) < len(self._landed):
            return False
        self._go(ReceiveEvent.ALL_BOUND)
        return True

    def offer(self, first_piece_no: int, pieces: tuple[Piece, ...]) -> tuple[tuple[int, Piece], ...]:
        """Prefill will write these. The ones to assign entries to: none once the leg is complete or given up.

        A checkpoint for which no page is bound is left lying.
        """
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
                or piece.layer_stop > len(self.groups[piece.group].layers)
                or piece.token_stop > _positions(self.groups[piece.group], self.num_tokens)
                or piece.token_start < self.wants[piece.group]
            ):
                raise ProtocolError(f"{piece} was offered; it is not within what was granted")
        cells = self._cells_offered + _num_cells(pieces)
        if cells > (1 + self.wants_sent) * self._cells_granted:
            raise ProtocolError(f"pieces of {cells} cells were offered where {self._cells_granted} were granted")
        self._cells_offered = cells
        self._pieces.update(numbered)
        self.sent_all = False
        return tuple(
            (piece_no, piece)
            for piece_no, piece in numbered
            if self._takes_checkpoint or not _is_gift(self.groups[piece.group], piece)
        )

    def landed(self, piece_no: int, rank: int) -> None:
        """One rank slice of a piece has been scattered on `rank`."""
        if self.state is not ReceiveState.RECEIVING:
            return
        piece = self._pieces[piece_no]
        slices = self._slices_landed.get((piece_no, rank), 0) + 1
        self._slices_landed[piece_no, rank] = slices
        if slices == self.slices[piece.group][rank]:
            self._landed[rank].add(piece)

    @property
    def _cells_granted(self) -> int:
        """Cells (layer x position) that are due and of the gifts."""
        return _num_cells(self.due) + sum(len(group.layers) for group in self.groups if group.is_state)

    def ask_again(self) -> tuple[Piece, ...]:
        """All was sent and not all came: the rectangles that some rank lacks, to be wanted of prefill."""
        self.wants_sent += 1
        self.sent_all = False
        return self.missing()

    @property
    def covered(self) -> bool:
        """Every rectangle that is due has landed on every rank."""
        return self.state is ReceiveState.RECEIVING and all(c.complete(self.due) for c in self._landed)

    def missing(self) -> tuple[Piece, ...]:
        """Rectangles that some rank lacks, apart from each other."""
        if self.state is not ReceiveState.RECEIVING:
            return ()
        lacking, everywhere = Coverage(), Coverage()
        for landed in self._landed:
            for piece in landed.missing(self.due):
                lacking.add(piece)
        for piece in lacking.missing(self.due):
            everywhere.add(piece)
        return everywhere.missing(self.due)

    def landed_whole(self, group: int, page_tokens: int, first: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Which whole pages of positions [first, stop) have landed on every rank, in every layer of the group.

        Ranges [first page, stop page), in order and apart from each other. Also of a transfer that was given up: what had
        landed by then is right. A page of a state group is one position.
        """
        if not self._landed or first >= stop:
            return ()
        rows = self.groups[group].rows_per_page(page_tokens)
        whole = Piece(group, 0, len(self.groups[group].layers), first, stop)
        holes = sorted((hole.token_start, hole.token_stop) for c in self._landed for hole in c.missing([whole]))
        ranges = []
        position = first  # every hole so far ends here or before
        for hole_start, hole_stop in (*holes, (stop, stop)):
            first_page, stop_page = ceil_div(position, rows), hole_start // rows
            if first_page < stop_page:
                ranges.append((first_page, stop_page))
            position = max(position, hole_stop)
        return tuple(ranges)

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
        return len(self._unbound) == len(self._landed)

    def quiet(self) -> None:
        """Ranks are unbound and nothing is under way: the end."""
        self._go(ReceiveEvent.QUIET)
