"""The receiver of one leg: what it wants of each layer group, when it is complete and lets go, and what prefill may not offer."""

from __future__ import annotations

import random

import pytest

from disagg.messages.link import FirstToken
from disagg.messages.pieces import Piece
from disagg.staging.pieces import Coverage
from disagg.transfer.session import ReceiveSession
from disagg.transfer.states import ReceiveState
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason
from tests.transfer.sessions import FULL, GROUPS, LAYERS, TOKENS, WINDOW, WINDOW_START, cut, receiver_in


def test_a_grant_waits_for_every_rank_and_is_said_once() -> None:
    session = ReceiveSession(TOKENS, (FULL,), ((1, 1),))
    session.announce(TOKENS)
    session.bind((0,))
    assert not session.bound(1)
    assert not session.bound(1), "the same rank again is not another"
    assert session.bound(0)
    assert not session.bound(0)


def test_an_announcement_of_another_length_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="7 tokens where the router sent 8"):
        ReceiveSession(TOKENS, (FULL,), ((1,),)).announce(7)


def receiver_of_all(wants: tuple[int, ...], checkpoint: bool = False) -> ReceiveSession:
    """Granted; on two ranks."""
    session = ReceiveSession(TOKENS, GROUPS, ((1, 1), (1, 1), (1, 1)))
    session.announce(TOKENS)
    session.bind(wants, checkpoint=checkpoint)
    session.bound(0)
    assert session.bound(1)
    return session


@pytest.mark.parametrize(
    "piece",
    [
        Piece(3, 0, 1, 0, 1),
        Piece(0, 0, 3, 2, 3),
        Piece(0, 0, 1, 2, 9),
        Piece(0, 0, 1, 1, 3),
        Piece(1, 0, 1, 3, 5),
        Piece(2, 0, 1, 1, 3),
    ],
    ids=["no such group", "too many layers", "beyond the end", "before the hit", "out of the window", "a third state"],
)
def test_a_piece_outside_of_the_grant_is_an_error(piece: Piece) -> None:
    session = receiver_of_all((2, WINDOW_START, 0), checkpoint=True)
    with pytest.raises(ProtocolError, match="not within what was granted"):
        session.offer(0, (piece,))


def test_the_plan_is_what_is_wanted_of_each_group_and_the_last_state() -> None:
    assert receiver_of_all((2, WINDOW_START, 0), checkpoint=True).due == (
        Piece(0, 0, 2, 2, 8),
        Piece(1, 0, 1, 4, 8),
        Piece(2, 0, 3, 0, 1),
    )
    assert receiver_of_all((8, 8, 0)).due == (Piece(2, 0, 3, 0, 1),)


def test_a_leg_of_which_nothing_is_wanted_is_covered_as_soon_as_it_is_bound() -> None:
    session = ReceiveSession(TOKENS, (FULL, WINDOW), ((1,), (1,)))
    session.announce(TOKENS)
    session.first_tokens = (FirstToken(0, 5, None, None),)
    session.bind((8, 8))
    assert not session.try_complete()
    assert session.bound(0)
    assert session.try_complete()


def test_a_checkpoint_is_taken_if_its_page_is_bound_and_never_waited_for() -> None:
    checkpoint, last = Piece(2, 0, 3, 1, 2), Piece(2, 0, 3, 0, 1)
    taking, leaving = receiver_of_all((8, 8, 0), checkpoint=True), receiver_of_all((8, 8, 0))
    assert taking.offer(0, (checkpoint, last)) == ((0, checkpoint), (1, last))
    assert leaving.offer(0, (checkpoint, last)) == ((1, last),)
    with pytest.raises(ProtocolError, match="offered twice"):
        leaving.offer(0, (last,))
    for session in (taking, leaving):
        assert session.missing() == (last,)
        for rank in range(2):
            session.landed(1, rank)
        assert session.covered
    taking.landed(0, 0)
    assert taking.landed_whole(2, 2, 0, 2) == ((0, 1),)
    taking.landed(0, 1)
    assert taking.landed_whole(2, 2, 0, 2) == ((0, 2),)
    assert leaving.landed_whole(2, 2, 0, 2) == ((0, 1),)


def test_what_two_ranks_lack_is_asked_for_once_and_may_then_be_offered_again() -> None:
    session = receiver_of_all((0, 8, 1))
    session.offer(0, (Piece(0, 0, 2, 0, 3), Piece(0, 0, 2, 3, 6), Piece(0, 0, 2, 6, 8)))
    session.landed(0, 0)
    session.landed(2, 1)
    with pytest.raises(ProtocolError, match="22 cells were offered where 19 were granted"):
        session.offer(3, (Piece(0, 0, 2, 0, 3),))
    assert session.ask_again() == (Piece(0, 0, 2, 0, 8),), "rank 0 lacks 3 to 8, rank 1 lacks 0 to 6"
    assert session.offer(3, (Piece(0, 0, 2, 0, 8),)) == ((3, Piece(0, 0, 2, 0, 8)),)


def test_only_pages_that_are_whole_on_every_rank_in_every_layer_can_be_published_also_of_a_broken_transfer() -> None:
    session = receiver_of_all((2, WINDOW_START, 0))
    assert session.landed_whole(0, 2, 0, TOKENS) == ()
    session.offer(0, (Piece(0, 0, 1, 2, 8), Piece(0, 1, 2, 2, 5), Piece(0, 1, 2, 5, 8), Piece(1, 0, 1, 4, 7)))
    for piece_no in (0, 1, 3):
        session.landed(piece_no, 0)
        session.landed(piece_no, 1)
    assert session.landed_whole(0, 2, 0, TOKENS) == ((1, 2),), "token 5 is missing in layer 1"
    session.landed(2, 0)
    assert session.landed_whole(0, 2, 0, TOKENS) == ((1, 2),), "rank 1 lacks it still"
    session.abandon()
    session.landed(2, 1)
    assert session.landed_whole(0, 2, 0, TOKENS) == ((1, 2),), "what comes after the end counts no more"
    assert session.landed_whole(1, 2, 0, TOKENS) == ((2, 3),)
    assert session.landed_whole(0, 2, 4, TOKENS) == ()
    assert session.landed_whole(2, 2, 0, 2) == ()
    assert session.landed_whole(0, 2, 5, 5) == ()
    assert receiver_in(ReceiveState.QUEUED).landed_whole(0, 2, 0, TOKENS) == (), "nothing was ever bound"


@pytest.mark.parametrize("state", [ReceiveState.WAITING, ReceiveState.QUEUED, ReceiveState.BINDING])
def test_pieces_before_the_grant_are_an_error(state: ReceiveState) -> None:
    with pytest.raises(ProtocolError, match="nothing was granted"):
        receiver_in(state).offer(0, (Piece(0, 0, 1, 0, 1),))


@pytest.mark.parametrize("state", [ReceiveState.COMPLETE, ReceiveState.LEAVING, ReceiveState.CLOSED])
def test_pieces_after_the_end_get_no_entry(state: ReceiveState) -> None:
    assert receiver_in(state).offer(0, (Piece(0, 0, 1, 0, 1),)) == ()


def test_a_piece_number_offered_twice_is_an_error() -> None:
    session = receiver_in(ReceiveState.RECEIVING)
    session.offer(0, (Piece(0, 0, 1, 0, 1),))
    with pytest.raises(ProtocolError, match="offered twice"):
        session.offer(0, (Piece(0, 0, 1, 1, 2),))


@pytest.mark.parametrize("seed", range(40))
def test_a_transfer_is_complete_exactly_when_all_landed_on_all_ranks_and_tokens_are_here(seed: int) -> None:
    """Slices land in any order, some pieces are lost and wanted again, some land although they were thought lost."""
    rng = random.Random(seed)
    slices = (rng.choice((1, 2)), rng.choice((1, 2)))
    session = ReceiveSession(TOKENS, (FULL,), (slices,))
    session.announce(TOKENS)
    session.bind((0,))
    session.bound(0)
    session.bound(1)
    flying: list[tuple[int, int]] = []  # (piece_no, rank), one for each slice
    lost: list[tuple[int, int]] = []
    next_no = 0

    def offer(pieces: tuple[Piece, ...]) -> None:
        nonlocal next_no
        for piece_no, _ in session.offer(next_no, pieces):
            flying.extend((piece_no, rank) for rank in range(2) for _ in range(slices[rank]))
        next_no += len(pieces)

    offer(cut(Piece(0, 0, LAYERS, 0, 5)))
    offer(cut(Piece(0, 0, LAYERS, 5, TOKENS)))
    token_at = rng.randrange(30)
    landed: dict[tuple[int, int], int] = {}
    coverage = (Coverage(), Coverage())
    for step in range(500):
        if step == token_at:
            session.first_tokens = (FirstToken(0, 5, None, None),)
        elif flying:
            slice_ = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.2:
                lost.append(slice_)
            else:
                session.landed(*slice_)
                landed[slice_] = landed.get(slice_, 0) + 1
                if landed[slice_] == slices[slice_[1]]:
                    coverage[slice_[1]].add(session._pieces[slice_[0]])
        elif step > token_at:
            missing = session.ask_again()
            assert missing, "everything landed and it was not noticed"
            offer(tuple(piece for whole in missing for piece in cut(whole)))
            flying.extend(lost[:1])  # it comes after all
            del lost[:1]
        everything = all(c.complete([Piece(0, 0, LAYERS, 0, TOKENS)]) for c in coverage)
        assert session.covered == everything
        if session.try_complete():
            assert everything
            assert step >= token_at
            break
    assert session.state is ReceiveState.COMPLETE
    for slice_ in flying:
        session.landed(*slice_)  # late: nothing
    assert not session.try_complete()


@pytest.mark.parametrize(
    "state", [ReceiveState.WAITING, ReceiveState.QUEUED, ReceiveState.BINDING, ReceiveState.RECEIVING]
)
def test_first_tokens_that_end_every_choice_need_no_kv(state: ReceiveState) -> None:
    session = receiver_in(state)
    session.first_tokens = (FirstToken(0, 5, None, FinishReason.STOP), FirstToken(1, 5, None, None))
    assert not session.try_complete(), "one choice goes on"
    session.first_tokens = (FirstToken(0, 5, None, FinishReason.STOP), FirstToken(1, 5, None, FinishReason.LENGTH))
    assert session.try_complete()


def test_pages_are_free_only_when_every_rank_has_let_go() -> None:
    session = ReceiveSession(TOKENS, (FULL,), ((1, 1),))
    assert session.all_unbound, "no rank ever had them"
    session.announce(TOKENS)
    session.bind((0,))
    session.abandon()
    session.unbound(0)
    session.unbound(0)
    assert not session.all_unbound
    session.unbound(1)
    assert session.all_unbound


def test_a_late_acknowledgement_of_the_binding_grants_nothing() -> None:
    session = receiver_in(ReceiveState.BINDING)
    session.abandon()
    assert not session.bound(0)
    assert session.state is ReceiveState.LEAVING
