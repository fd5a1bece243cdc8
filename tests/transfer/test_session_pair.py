"""Both halves of a leg's transfer against a model of what each side's memory holds, whatever is late, lost or repeated.

Messages of the link come once and in order; writes and their notifications come in any order, or are lost. In the model
every cell (group, layer, position) of prefill has the plan that makes it final, and decode's ranks have the cells that
landed on them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.link import Entry, FirstToken
from disagg.messages.pieces import Piece
from disagg.transfer.session import MAX_WANTS, Offer, ReceiveSession, SendSession, Write
from disagg.transfer.states import ReceiveState, SendState

PAGE, CHUNK = 2, 4  # checkpoints at multiples of CHUNK
WINDOW = 5
GROUPS = (
    LayerGroup("full", (0, 1, 4), 1, 1, "uint8"),
    LayerGroup("window", (2, 3), 1, 1, "uint8", GroupKind.WINDOW, window=WINDOW),
    LayerGroup.of_states("state", (5, 6), (StatePart("ssm", (4,), "float32"),)),
)
FINAL, CHECKPOINT = 0, 1  # positions of the last group
STEPS = 60  # with faults; from then on things go well

Cell = tuple[int, int, int]


def cells(piece: Piece) -> Iterator[Cell]:
    for layer in range(piece.layer_start, piece.layer_stop):
        for position in range(piece.token_start, piece.token_stop):
            yield piece.group, layer, position


def cut(piece: Piece) -> tuple[Piece, ...]:
    """At most four positions of at most two layers."""
    return tuple(
        Piece(piece.group, layer, min(layer + 2, piece.layer_stop), start, min(start + 4, piece.token_stop))
        for layer in range(piece.layer_start, piece.layer_stop, 2)
        for start in range(piece.token_start, piece.token_stop, 4)
    )


class Transfer:
    """One leg on both sides, and the link and the wire between them. `steps` are what can happen next."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.calm = False
        self.num_tokens = n = data.draw(st.integers(1, 13))
        self.last_checkpoint = (n - 1) // CHUNK * CHUNK
        window_start = max(0, n // PAGE * PAGE - (WINDOW - 1)) // PAGE * PAGE
        self.ranks = data.draw(st.integers(1, 2))
        self.slices = tuple(tuple(data.draw(st.integers(1, 2)) for _ in range(self.ranks)) for _ in GROUPS)
        hit = data.draw(st.integers(0, n // PAGE)) * PAGE  # in decode's prefix cache
        self.wants = (hit, max(hit, window_start), 1 if hit == n else 0)
        self.takes_checkpoint = data.draw(st.booleans())
        self.aborted_after = data.draw(st.sampled_from([None, None, None, 0, 2, 6]))  # so many landings
        self.sender = SendSession(n, GROUPS, (0, window_start, 0))
        self.receiver = ReceiveSession(n, GROUPS, self.slices)
        self.receiver.announce(n)
        # Prefill's pages: the plan after which a cell is right. What is out of the window in the end may be gone.
        self.final: dict[Cell, int] = {}
        self.held = (0, window_start, 0)
        self.scheduled = 0
        self.plans = self.computed = -1
        self.to_decode: deque[Offer | str] = deque()
        self.to_prefill: deque[str | list[Entry] | list[Piece]] = deque()
        self.pieces: dict[int, Piece] = {}  # by number, as offered
        self.entries: list[tuple[int, int]] = []  # (piece number, rank) of each
        self.writes: list[Write] = []  # handed out, not executed
        self.written: dict[tuple[int, int], int] = {}  # (piece number, rank) -> slices
        self.flying: list[int] = []  # entries whose notification is under way
        self.landed: dict[tuple[int, int], int] = {}
        self.here: list[set[Cell]] = [set() for _ in range(self.ranks)]
        prefill_hit = data.draw(st.integers(0, self.last_checkpoint // CHUNK)) * CHUNK
        if prefill_hit:
            self.scheduled = prefill_hit
            checkpoint = prefill_hit == self.last_checkpoint and data.draw(st.booleans())
            self._becomes_final(0, prefill_hit, -1, checkpoint)
            self._tell_decode(self.sender.hit(prefill_hit, cut, checkpoint=checkpoint))

    def steps(self) -> list[Callable[[], None]]:
        """What can happen now; the last ones only when patience ends."""
        state = self.receiver.state
        possible: list[tuple[bool, Callable[[], None]]] = [
            (state is ReceiveState.QUEUED, self.allocate),
            (state is ReceiveState.BINDING, self.bound),
            (bool(self.to_prefill), self.prefill_hears),
            (bool(self.to_decode), self.decode_hears),
            (self.scheduled < self.num_tokens, self.chunk),
            (self.computed < self.plans, self.compute),
            (any(write.after_plan <= self.computed for write in self.writes), self.write),
            (bool(self.flying), self.land),
            (
                not self.receiver.first_tokens and self.scheduled == self.num_tokens and self.computed == self.plans,
                self.first_tokens,
            ),
            (self.receiver.sent_all and bool(self.receiver.missing()), self.ask_again),
            (not self.calm and self.receiver.open and self._aborts(), self.abort),
        ]
        return [step for can_be, step in possible if can_be]

    def _pick(self, count: int) -> int:
        return 0 if self.calm else self._data.draw(st.integers(0, count - 1))

    # ---- prefill

    def chunk(self) -> None:
        """As with models that have states: it ends the prompt, or at a checkpoint."""
        start = self.scheduled
        self.scheduled = stop = min((start // CHUNK + 1 + self._pick(2)) * CHUNK, self.num_tokens)
        self.plans += 1
        checkpoint = stop == self.last_checkpoint and self._pick(3) < 2
        self._becomes_final(start, stop, self.plans, checkpoint)
        self._tell_decode(self.sender.chunk(start, stop, self.plans, cut))
        if checkpoint:
            self._tell_decode(self.sender.checkpoint(self.plans, cut))
        self._all_sent(self.sender.finish_if_sent())

    def _becomes_final(self, start: int, stop: int, plan: int, checkpoint: bool) -> None:
        for number, group in enumerate(GROUPS):
            positions = set(range(max(start, self.held[number]), stop))
            if group.is_state:
                positions = {FINAL} if stop == self.num_tokens else set()
                positions |= {CHECKPOINT} if checkpoint else set()
            for layer in range(len(group.layers)):
                self.final.update({(number, layer, position): plan for position in positions})

    def _tell_decode(self, offer: Offer | None) -> None:
        if offer is not None:
            self.to_decode.append(offer)

    def _all_sent(self, last: bool) -> None:
        if last:
            self.to_decode.append("sent all")

    def compute(self) -> None:
        self.computed += 1

    def write(self) -> None:
        ready = [write for write in self.writes if write.after_plan <= self.computed]
        write = ready[self._pick(len(ready))]
        self.writes.remove(write)
        piece_no, rank = self.entries[write.entry.entry_id]
        assert write.piece == self.pieces[piece_no]
        for cell in cells(write.piece):
            assert self.final.get(cell, self.computed + 1) <= self.computed, f"{cell} was sent and is not right"
        self.written[piece_no, rank] = self.written.get((piece_no, rank), 0) + 1
        if self._pick(8) < 7:
            self.flying.append(write.entry.entry_id)
        self._all_sent(self.sender.sent(write.entry.entry_id))

    def prefill_hears(self) -> None:
        match self.to_prefill.popleft():
            case "grant":
                num_slices = tuple(sum(counts) for counts in self.slices)
                self._tell_decode(self.sender.grant(self.wants, num_slices, cut))
                self._all_sent(self.sender.finish_if_sent())
            case [Entry(), *_] as entries:
                self.writes += self.sender.assign(entries)
            case [Piece(), *_] as missing:
                self._tell_decode(self.sender.want(missing, cut))
            case "complete":
                if self.sender.complete() is SendState.DROPPING:
                    self._drop()
            case "revoke":
                if self.sender.give_up():
                    self._drop()

    def _drop(self) -> None:
        self.writes.clear()
        self.sender.dropped()

    # ---- decode

    def allocate(self) -> None:
        self.receiver.bind(self.wants, checkpoint=self.takes_checkpoint)
        self.ranks_to_bind = list(range(self.ranks))

    def bound(self) -> None:
        if self.receiver.bound(self.ranks_to_bind.pop(self._pick(len(self.ranks_to_bind)))):
            self.to_prefill.append("grant")
            self._try_complete()

    def decode_hears(self) -> None:
        message = self.to_decode.popleft()
        if isinstance(message, str):
            self.receiver.sent_all = True
            return
        for piece_no, piece in enumerate(message.pieces, start=message.first_piece_no):
            assert piece_no not in self.pieces
            self.pieces[piece_no] = piece
        entries = []
        for piece_no, piece in self.receiver.offer(message.first_piece_no, message.pieces):
            assert self.takes_checkpoint or (piece.group, piece.token_start) != (2, CHECKPOINT)
            for rank in range(self.ranks):
                for _ in range(self.slices[piece.group][rank]):
                    entries.append(Entry(len(self.entries), piece_no, 0, rank, 0, 1, 0, 16))
                    self.entries.append((piece_no, rank))
        if entries:
            self.to_prefill.append(entries)

    def land(self) -> None:
        piece_no, rank = self.entries[self.flying.pop(self._pick(len(self.flying)))]
        if self.receiver.state is ReceiveState.RECEIVING:
            self.landed[piece_no, rank] = self.landed.get((piece_no, rank), 0) + 1
            if self.landed[piece_no, rank] == self.slices[self.pieces[piece_no].group][rank]:
                self.here[rank] |= set(cells(self.pieces[piece_no]))
        self.receiver.landed(piece_no, rank)
        self._try_complete()

    def ask_again(self) -> None:
        """Perhaps too early: what is under way may land after all, besides what is sent again. At last it is given up."""
        if self.receiver.wants_sent == MAX_WANTS:
            self.abort()
        else:
            self.to_prefill.append(list(self.receiver.ask_again()))

    def first_tokens(self) -> None:
        self.receiver.first_tokens = (FirstToken(0, 5, None, None),)
        self._try_complete()

    def _try_complete(self) -> None:
        if self.receiver.try_complete():
            self.to_prefill.append("complete")

    def _aborts(self) -> bool:
        return self.aborted_after is not None and sum(self.landed.values()) >= self.aborted_after

    def abort(self) -> None:
        assert self.receiver.abandon()
        self.to_prefill.append("revoke")

    # ---- what always holds

    def due(self) -> set[Cell]:
        stops = (self.num_tokens, self.num_tokens, CHECKPOINT)
        return {
            (number, layer, position)
            for number, group in enumerate(GROUPS)
            for layer in range(len(group.layers))
            for position in range(self.wants[number], stops[number])
        }

    def check(self) -> None:
        due, everywhere = self.due(), set.intersection(*self.here)
        if self.receiver.state is ReceiveState.RECEIVING:
            assert self.receiver.covered == (due <= everywhere)
            assert {cell for piece in self.receiver.missing() for cell in cells(piece)} == due - everywhere
        if self.receiver.state is ReceiveState.COMPLETE:
            assert due <= everywhere
        if self.sender.state is SendState.SENT:
            assert not self.writes
            for rank in range(self.ranks):
                whole = [no for no, r in self.written if r == rank and self._is_whole(no, rank)]
                assert due <= {cell for no in whole for cell in cells(self.pieces[no])}, "said to be sent, was not"
        for number, group in enumerate(GROUPS):
            self._check_publishable(number, 2 if group.is_state else self.num_tokens, everywhere)

    def _is_whole(self, piece_no: int, rank: int) -> bool:
        return self.written[piece_no, rank] == self.slices[self.pieces[piece_no].group][rank]

    def _check_publishable(self, number: int, stop: int, everywhere: set[Cell]) -> None:
        rows = GROUPS[number].rows_per_page(PAGE)
        ranges = self.receiver.landed_whole(number, PAGE, 0, stop)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "ranges touch or are out of order"
        assert {page for first, last in ranges for page in range(first, last)} == {
            page
            for page in range(stop // rows)
            if everywhere
            >= {
                (number, layer, position)
                for layer in range(len(GROUPS[number].layers))
                for position in range(page * rows, (page + 1) * rows)
            }
        }


@pytest.mark.parametrize(
    "examples", [pytest.param(60, marks=pytest.mark.short), pytest.param(300, marks=pytest.mark.long)]
)
def test_whatever_happens_only_right_cells_are_sent_and_every_leg_comes_to_an_end(examples: int) -> None:
    limits = settings(
        max_examples=examples, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    limits(given(st.data())(_transfer))()


def _transfer(data: st.DataObject) -> None:
    transfer = Transfer(data)
    for count in range(500):
        steps = transfer.steps()
        if not steps:
            break
        if count == STEPS:
            transfer.calm = True
        steps[transfer._pick(len(steps))]()
        transfer.check()
    assert transfer.receiver.state in (ReceiveState.COMPLETE, ReceiveState.LEAVING), "nothing can happen any more"
    assert transfer.sender.state is SendState.CLOSED
