"""Who gets a gather buffer. Pure: peers are keys, buffers are numbers, time is an argument.

A write to a frozen peer keeps its buffer for as long as the peer is frozen, because nothing less than the backend's word
says that the buffer is read no more. So that such a peer holds up nobody else,

- a peer holds at most half of the buffers while there are others,
- the last free buffer goes only to a peer that has none, or has just given one back, and
- a peer that has held one for `overdue_s` gets no more until that one is back.
"""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

OVERDUE_S = 1.0  # far longer than a gather and a write take


class _Held(Struct, frozen=True):
    peer: Hashable
    since_s: float


class GatherBuffers:
    """Buffers 0 to `count` - 1: each is free, or held by one peer."""

    def __init__(self, count: int, overdue_s: float = OVERDUE_S) -> None:
        self.count = count
        self._overdue_s = overdue_s
        self._free = list(range(count))
        self._held: dict[int, _Held] = {}  # by buffer, in the order in which they were taken
        self._gave_back_s: dict[Hashable, float] = {}  # by peer

    def held(self, peer: Hashable) -> int:
        """How many buffers a peer holds."""
        return sum(each.peer == peer for each in self._held.values())

    def overdue(self, peer: Hashable, now_s: float) -> bool:
        """Whether a peer has held a buffer for so long that it may be frozen."""
        oldest = next((each.since_s for each in self._held.values() if each.peer == peer), now_s)
        return now_s - oldest >= self._overdue_s

    def may_take(self, peer: Hashable, num_peers: int, now_s: float) -> bool:
        """num_peers: how many could ask for buffers, this one among them."""
        held = self.held(peer)
        if not self._free or self.overdue(peer, now_s):
            return False
        if num_peers == 1 or held == 0:
            return True
        if held >= self.count // 2:
            return False
        return len(self._free) > 1 or now_s - self._gave_back_s.get(peer, -self._overdue_s) < self._overdue_s

    def take(self, peer: Hashable, now_s: float) -> int:
        """A free buffer, which there must be."""
        buffer = self._free.pop()
        self._held[buffer] = _Held(peer, now_s)
        return buffer

    def give_back(self, buffer: int, now_s: float) -> None:
        """Nothing reads the buffer any more."""
        self._gave_back_s[self._held.pop(buffer).peer] = now_s
        self._free.append(buffer)

    def forget(self, peer: Hashable) -> None:
        """The peer will ask for no buffer any more. What it holds it holds until it is given back."""
        self._gave_back_s.pop(peer, None)

    def check_integrity(self) -> None:
        """What must hold between any two calls."""
        assert sorted([*self._free, *self._held]) == list(range(self.count)), "a buffer is lost, or held twice"
