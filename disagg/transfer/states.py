"""What the two halves of a transfer go through; `transfer/session` says what happens on the way.

    prefill side (SendSession)                       decode side (ReceiveSession)

    WAITING  ── grant ──────────> SENDING            WAITING ── announce ──> QUEUED ── bind ──> BINDING
      │  complete                  │ │ every piece      │                      │                  │ every rank bound
      │                            │ │ written          │                      │                  v
      │                            │ v                  │                      │             RECEIVING
      │           revoke, abort    │ SENT               │                      │                  │ covers what is due,
      │                            │ │ complete         │       abandon        │                  v tokens here
      v                            v v                  └──────────┬───────────┴───────────> COMPLETE
    DROPPING ── dropped ──> CLOSED <─┘                             v                              │ unbound
                                                                 LEAVING ── quiet ──> CLOSED <────┘

Every event is legal in every state that a late, repeated or reordered message can meet. An event without a row is a
ProtocolError.
"""

from __future__ import annotations

import enum


class SendState(enum.Enum):
    """Of the prefill side of a transfer."""

    WAITING = "waiting"  # announced, not granted
    SENDING = "sending"
    SENT = "sent"  # every piece has been written; the decode side has yet to say that all landed
    DROPPING = "dropping"  # given up; writes may be under way
    CLOSED = "closed"  # nothing is under way, nothing will be


class SendEvent(enum.Enum):
    """What can happen to it."""

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


class ReceiveState(enum.Enum):
    """Of the decode side of a transfer."""

    WAITING = "waiting"  # the router's leg is here; prefill has not announced it
    QUEUED = "queued"  # announced; waits for pages, slots and a ring
    BINDING = "binding"  # pages are allocated; not every rank has acknowledged
    RECEIVING = "receiving"  # granted
    COMPLETE = "complete"  # everything is here; ranks are being unbound, and the sequence may run
    LEAVING = "leaving"  # given up; ranks are being unbound, and prefill may still write into the ring
    CLOSED = "closed"


class ReceiveEvent(enum.Enum):
    """What can happen to it."""

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
