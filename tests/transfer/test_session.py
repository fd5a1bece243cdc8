"""One leg's transfer: every row of both tables, what each layer group sends, and what no peer may say.

The two halves together, under lost, repeated and reordered events: test_session_pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.link import Entry, FirstToken
from disagg.messages.pieces import Piece
from disagg.staging.pieces import Coverage
from disagg.transfer.session import Offer, ReceiveSession, SendSession
from disagg.transfer.states import RECEIVE_NEXT, SEND_NEXT, ReceiveEvent, ReceiveState, SendEvent, SendState
from disagg.types.errors import ProtocolError
from disagg.types.ids import FinishReason

TOKENS, LAYERS = 8, 2
FULL = LayerGroup("full", (0, 1), 1, 1, "uint8")
WINDOW = LayerGroup("window", (2,), 1, 1, "uint8", GroupKind.WINDOW, window=3)
STATE = LayerGroup.of_states("state", (3, 4, 5), (StatePart("ssm", (4,), "float32"),))
GROUPS = (FULL, WINDOW, STATE)
WINDOW_START = 4  # of 8 tokens in pages of 2: a new token sees itself and tokens 6, 7


def cut(piece: Piece) -> tuple[Piece, ...]:
    """Pieces of at most three tokens."""
    return tuple(
        Piece(piece.group, piece.layer_start, piece.layer_stop, start, min(start + 3, piece.token_stop))
        for start in range(piece.token_start, piece.token_stop, 3)
    )


def sender() -> SendSession:
    """Of one group."""
    return SendSession(TOKENS, (FULL,), (0,))


def sender_of_all() -> SendSession:
    return SendSession(TOKENS, GROUPS, (0, WINDOW_START, 0))


def entry(entry_id: int, piece_no: int) -> Entry:
    return Entry(entry_id, piece_no, 0, 0, 0, 1, entry_id * 16, 16)


# ---- the tables


def sender_in(state: SendState) -> SendSession:
    """A session brought into a state by events alone."""
    session = sender()
    session.chunk(0, TOKENS, 0, cut)
    if state is SendState.WAITING:
        return session
    offer = session.grant((0,), (1,), cut)
    assert offer is not None
    if state in (SendState.SENT, SendState.CLOSED):
        for write in session.assign(entry(i, i) for i in range(len(offer.pieces))):
            session.sent(write.entry.entry_id)
    if state is SendState.CLOSED:
        session.complete()
    if state is SendState.DROPPING:
        session.give_up()
    assert session.state is state
    return session


SEND_CALLS: dict[SendEvent, Callable[[SendSession], object]] = {
    SendEvent.GRANT: lambda s: s.grant((0,), (1,), cut),
    SendEvent.WANT: lambda s: s.want([Piece(0, 0, LAYERS, 0, 1)], cut),
    SendEvent.COMPLETE: lambda s: s.complete(),
    SendEvent.GIVE_UP: lambda s: s.give_up(),
    SendEvent.DROPPED: lambda s: s.dropped(),
    SendEvent.ALL_SENT: lambda s: s._go(SendEvent.ALL_SENT),
}


@pytest.mark.parametrize("state", SendState)
@pytest.mark.parametrize("event", SendEvent)
def test_every_event_of_the_sender_has_a_row_or_an_error_that_names_both(state: SendState, event: SendEvent) -> None:
    session = sender_in(state)
    following = SEND_NEXT.get((state, event))
    if following is None:
        with pytest.raises(ProtocolError, match=f"'{event.value}'.*{state.value}"):
            SEND_CALLS[event](session)
        assert session.state is state, "an error changes nothing"
    else:
        SEND_CALLS[event](session)
        assert session.state is following


def receiver_in(state: ReceiveState) -> ReceiveSession:
    session = ReceiveSession(TOKENS, (FULL,), ((1,),))
    if state is ReceiveState.WAITING:
        return session
    session.announce(TOKENS)
    if state is ReceiveState.QUEUED:
        return session
    session.bind((0,))
    if state is ReceiveState.BINDING:
        return session
    session.bound(0)
    if state is ReceiveState.COMPLETE:
        session.offer(0, (Piece(0, 0, LAYERS, 0, TOKENS),))
        session.landed(0, 0)
        session.first_tokens = (FirstToken(0, 5, None, None),)
        assert session.try_complete()
    elif state is not ReceiveState.RECEIVING:
        session.abandon()
    if state is ReceiveState.CLOSED:
        session.quiet()
    assert session.state is state
    return session


RECEIVE_CALLS: dict[ReceiveEvent, Callable[[ReceiveSession], object]] = {
    ReceiveEvent.ANNOUNCE: lambda s: s._go(ReceiveEvent.ANNOUNCE),
    ReceiveEvent.BIND: lambda s: s.bind((0,)),
    ReceiveEvent.ALL_BOUND: lambda s: s._go(ReceiveEvent.ALL_BOUND),
    ReceiveEvent.ALL_HERE: lambda s: s._go(ReceiveEvent.ALL_HERE),
    ReceiveEvent.ABANDON: lambda s: s.abandon(),
    ReceiveEvent.QUIET: lambda s: s.quiet(),
}


@pytest.mark.parametrize("state", ReceiveState)
@pytest.mark.parametrize("event", ReceiveEvent)
def test_every_event_of_the_receiver_has_a_row_or_an_error_that_names_both(
    state: ReceiveState, event: ReceiveEvent
) -> None:
    session = receiver_in(state)
    following = RECEIVE_NEXT.get((state, event))
    if following is None:
        with pytest.raises(ProtocolError, match=f"'{event.value}'.*{state.value}"):
            RECEIVE_CALLS[event](session)
        assert session.state is state
    else:
        RECEIVE_CALLS[event](session)
        assert session.state is following


def test_every_state_can_be_reached_and_only_closed_is_an_end() -> None:
    for table, start, closed in (
        (SEND_NEXT, SendState.WAITING, SendState.CLOSED),
        (RECEIVE_NEXT, ReceiveState.WAITING, ReceiveState.CLOSED),
    ):
        reached = {start}
        for _ in range(len(table)):
            reached |= {after for (before, _), after in table.items() if before in reached}
        assert reached == set(type(start))
        for state in type(start):
            leaves = {after for (before, _), after in table.items() if before is state} - {state}
            assert bool(leaves) == (state is not closed)


# ---- the sender


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


# ---- the receiver


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
