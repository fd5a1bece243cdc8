"""Both sessions of one leg for tests, brought into each of their states by events alone."""

from __future__ import annotations

from disagg.messages.layout import GroupKind, LayerGroup, StatePart
from disagg.messages.link import Entry, FirstToken
from disagg.messages.pieces import Piece
from disagg.transfer.session import ReceiveSession, SendSession
from disagg.transfer.states import ReceiveState, SendState

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
