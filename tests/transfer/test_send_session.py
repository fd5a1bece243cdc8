"""The sender of one leg: what each layer group sends and when all of it is sent, and what decode may not ask for."""

from __future__ import annotations

import random

import pytest

from disagg.messages.pieces import Piece
from disagg.staging.pieces import Coverage
from disagg.transfer.session import Offer, SendSession
from disagg.transfer.states import SendState
from disagg.types.errors import ProtocolError
from tests.transfer.sessions import (
    FULL,
    LAYERS,
    TOKENS,
    WINDOW,
    WINDOW_START,
    cut,
    entry,
    sender,
    sender_in,
    sender_of_all,
)


def test_a_grant_offers_what_was_scheduled_before_and_later_chunks_follow() -> None:
    session = sender()
    assert session.chunk(0, 4, 7, cut) is None
    assert session.grant((0,), (1,), cut) == Offer(0, (Piece(0, 0, 2, 0, 3), Piece(0, 0, 2, 3, 4)))
    assert session.chunk(4, TOKENS, 8, cut) == Offer(2, (Piece(0, 0, 2, 4, 7), Piece(0, 0, 2, 7, 8)))
    writes = session.assign([entry(9, 2), entry(10, 0)])
    assert [(w.entry.entry_id, w.after_plan) for w in writes] == [(9, 8), (10, 7)]


def test_what_decode_has_already_is_not_offered() -> None:
    session = sender()
    session.chunk(0, 5, 0, cut)
    assert session.grant((4,), (1,), cut) == Offer(0, (Piece(0, 0, 2, 4, 5),))
    everything = sender()
    everything.chunk(0, TOKENS, 0, cut)
    assert everything.grant((TOKENS,), (1,), cut) is None
    assert everything.finish_if_sent()


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ((9, 4, 0), "full from 9 on; 0 to 8"),
        ((0, 3, 0), "window from 3 on; 4 to 8"),
        ((0, 4, 3), "state from 3 on; 0 to 2"),
        ((0, -1, 0), "window from -1 on"),
        ((0, 4), "2 layer groups; there are 3"),
        ((0, 4, 0, 0), "4 layer groups; there are 3"),
    ],
)
def test_a_grant_of_what_cannot_be_had_is_an_error(wants: tuple[int, ...], message: str) -> None:
    session = sender_of_all()
    with pytest.raises(ProtocolError, match=message):
        session.grant(wants, (1, 1, 1), cut)
    assert session.state is SendState.WAITING


def test_an_entry_for_a_piece_that_was_not_offered_is_an_error() -> None:
    session = sender_in(SendState.SENDING)
    with pytest.raises(ProtocolError, match="piece 17"):
        session.assign([entry(0, 17)])
    session.assign([entry(1, 0)])
    with pytest.raises(ProtocolError, match="piece 0"):
        session.assign([entry(2, 0)])


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, 0, 2, 0, 7),
        Piece(1, 0, 1, 3, 5),
        Piece(2, 0, 3, 0, 1),
        Piece(3, 0, 1, 0, 1),
        Piece(0, 0, 3, 0, 1),
    ],
    ids=["not computed", "out of the window", "not the end yet", "no such group", "too many layers"],
)
def test_what_prefill_does_not_have_cannot_be_wanted(piece: Piece) -> None:
    session = sender_of_all()
    session.chunk(0, 6, 0, cut)
    session.grant((0, 4, 0), (1, 1, 1), cut)
    with pytest.raises(ProtocolError, match="is wanted"):
        session.want([piece], cut)
    assert session.state is SendState.SENDING


def test_each_group_sends_what_is_wanted_of_it_and_its_state_comes_last() -> None:
    session = sender_of_all()
    session.chunk(0, 5, 7, cut)
    assert session.grant((2, 4, 0), (1, 1, 1), cut) == Offer(0, (Piece(0, 0, 2, 2, 5), Piece(1, 0, 1, 4, 5)))
    assert session.chunk(5, TOKENS, 8, cut) == Offer(
        2, (Piece(0, 0, 2, 5, 8), Piece(1, 0, 1, 5, 8), Piece(2, 0, 3, 0, 1))
    )
    writes = session.assign(entry(i, i) for i in range(5))
    assert [write.after_plan for write in writes] == [7, 7, 8, 8, 8]


def test_every_rank_slice_of_a_group_must_be_written_and_groups_have_their_own_number() -> None:
    session = sender_of_all()
    session.chunk(0, TOKENS, 0, cut)
    session.grant((5, 5, 0), (1, 2, 1), cut)
    for write in session.assign(entry(i, i) for i in range(3)):
        assert not session.sent(write.entry.entry_id)
    session.assign([entry(3, 1)])  # the window's other slice
    assert session.sent(3)
    with pytest.raises(ProtocolError, match="piece 1"):
        sender_in(SendState.SENDING).assign([entry(0, 1), entry(1, 1)])


def test_a_prefix_that_prefill_had_is_sent_at_once_as_far_as_its_window_goes() -> None:
    session = sender_of_all()
    assert session.hit(6, cut) is None
    session.chunk(6, TOKENS, 3, cut)
    offer = session.grant((0, 4, 0), (1, 1, 1), cut)
    assert offer is not None
    plans = {write.piece: write.after_plan for write in session.assign(entry(i, i) for i in range(len(offer.pieces)))}
    assert plans == {
        Piece(0, 0, 2, 0, 3): -1,
        Piece(0, 0, 2, 3, 6): -1,
        Piece(1, 0, 1, 4, 6): -1,
        Piece(0, 0, 2, 6, 8): 3,
        Piece(1, 0, 1, 6, 8): 3,
        Piece(2, 0, 3, 0, 1): 3,
    }


def test_a_checkpoint_is_offered_when_it_is_final_or_with_the_grant() -> None:
    checkpoint = Piece(2, 0, 3, 1, 2)
    early = sender_of_all()
    early.grant((8, 8, 0), (1, 1, 1), cut)
    early.chunk(0, 4, 0, cut)
    assert early.checkpoint(0, cut) == Offer(0, (checkpoint,))
    late = sender_of_all()
    late.chunk(0, 4, 0, cut)
    assert late.checkpoint(0, cut) is None
    assert late.grant((8, 8, 0), (1, 1, 1), cut) == Offer(0, (checkpoint,))
    there = sender_of_all()
    there.hit(4, cut, checkpoint=True)
    assert there.grant((8, 8, 0), (1, 1, 1), cut) == Offer(0, (checkpoint,))
    unwanted = sender_of_all()
    unwanted.hit(4, cut, checkpoint=True)
    assert unwanted.grant((8, 8, 2), (1, 1, 1), cut) is None


@pytest.mark.parametrize("assigned", [False, True])
def test_all_is_sent_without_a_checkpoint_that_decode_left_lying_and_not_before_one_that_it_took(
    assigned: bool,
) -> None:
    session = sender_of_all()
    session.grant((8, 8, 0), (1, 1, 1), cut)
    session.chunk(0, 4, 0, cut)
    session.checkpoint(0, cut)
    session.chunk(4, TOKENS, 1, cut)
    if assigned:
        session.assign([entry(0, 0)])
    session.assign([entry(1, 1)])
    assert session.sent(1) == (not assigned)
    if assigned:
        assert session.sent(0)


def test_a_leg_of_which_nothing_is_wanted_is_sent_with_its_last_chunk() -> None:
    session = SendSession(TOKENS, (FULL, WINDOW), (0, WINDOW_START))
    session.chunk(0, 4, 0, cut)
    assert session.grant((8, 8), (1, 1), cut) is None
    assert not session.finish_if_sent()
    assert session.chunk(4, TOKENS, 1, cut) is None
    assert session.finish_if_sent()
    assert session.num_pieces == 0


def test_pieces_wanted_again_are_sent_and_reported_again() -> None:
    session = sender_in(SendState.SENT)
    first = session.num_pieces
    assert session.want([Piece(0, 0, 2, 2, 3)], cut) == Offer(first, (Piece(0, 0, 2, 2, 3),))
    (write,) = session.assign([entry(50, first)])
    assert write.after_plan == 0, "the last plan, so that no peer can make us send what is not final"
    assert session.sent(50)
    assert session.state is SendState.SENT


@pytest.mark.parametrize("seed", range(40))
def test_all_is_sent_exactly_when_every_slice_of_every_piece_was_written(seed: int) -> None:
    """Chunks, the grant, entries and completions in any order that is possible."""
    rng = random.Random(seed)
    slices = rng.choice((1, 2))
    session = sender()
    granted = False
    scheduled = 0
    unassigned: list[int] = []
    writing: list[int] = []
    next_entry = 0
    covered = Coverage()
    said = 0
    for _ in range(500):
        act = rng.choice(("chunk", "grant", "assign", "sent"))
        if act == "chunk" and scheduled < TOKENS:
            stop = rng.randint(scheduled + 1, TOKENS)
            offer = session.chunk(scheduled, stop, 0, cut)
            scheduled = stop
        elif act == "grant" and not granted:
            granted = True
            offer = session.grant((0,), (slices,), cut)
        else:
            offer = None
        if offer is not None:
            unassigned += [offer.first_piece_no + i for i in range(len(offer.pieces)) for _ in range(slices)]
        if act == "assign" and unassigned:
            piece_no = unassigned.pop(rng.randrange(len(unassigned)))
            (write,) = session.assign([entry(next_entry, piece_no)])
            covered.add(write.piece)
            writing.append(next_entry)
            next_entry += 1
        if act == "sent" and writing:
            last = session.sent(writing.pop(rng.randrange(len(writing))))
            over = granted and scheduled == TOKENS and not unassigned and not writing
            assert last == over
            said += last
        if said:
            break
    assert said == 1
    assert covered.complete([Piece(0, 0, LAYERS, 0, TOKENS)])
