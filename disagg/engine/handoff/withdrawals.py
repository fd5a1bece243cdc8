"""Legs that prefill gave up and of which decode has yet to know: where it has not dialled, or its router has not told it yet.

Without this memory decode would wait for what never comes, and the router for decode's verdict. Pure, and bounded: the oldest are
forgotten first.
"""

from __future__ import annotations

from disagg.engine.handoff.lost_links import Peer
from disagg.messages.link import Withdraw
from disagg.types.bounded import forget_oldest
from disagg.types.ids import LegKey

MOST_WITHDRAWALS = 4096


class Withdrawals:
    """By leg. peer: whom it is to be told, or who told it."""

    def __init__(self) -> None:
        self._legs: dict[LegKey, tuple[Peer, Withdraw]] = {}  # oldest first

    def note(self, peer: Peer, withdraw: Withdraw) -> None:
        self._legs[withdraw.key] = (peer, withdraw)
        forget_oldest(self._legs, MOST_WITHDRAWALS)

    def take(self, key: LegKey, peer: Peer) -> Withdraw | None:
        """That of this leg."""
        known = self._legs.pop(key, None)
        return known[1] if known is not None and known[0] == peer else None

    def take_all(self, peer: Peer) -> list[Withdraw]:
        """Those that this peer is to be told. What another incarnation of it was to be told is forgotten."""
        of_name = [(key, of, withdraw) for key, (of, withdraw) in self._legs.items() if of[0] == peer[0]]
        for key, *_ in of_name:
            del self._legs[key]
        return [withdraw for _, of, withdraw in of_name if of == peer]
