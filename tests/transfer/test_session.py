"""One leg's transfer: every row of both tables, and no other.

What the halves do: test_send_session, test_receive_session. Both together, under lost, repeated and reordered events:
test_session_pair.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.messages.pieces import Piece
from disagg.transfer.session import ReceiveSession, SendSession
from disagg.transfer.states import RECEIVE_NEXT, SEND_NEXT, ReceiveEvent, ReceiveState, SendEvent, SendState
from disagg.types.errors import ProtocolError
from tests.transfer.sessions import LAYERS, cut, receiver_in, sender_in

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
