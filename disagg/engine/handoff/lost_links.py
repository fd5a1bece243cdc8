"""Links to decode servers that were lost: when nothing of them is under way any more, and when their peers may know it."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.handoff.send_link import SendLink
from disagg.messages import link as m
from disagg.messages.legs import PeerRef
from disagg.types.bounded import forget_oldest

MAX_QUIET = 1024  # generations of lost links that are remembered


Peer = tuple[str, str]  # name, incarnation


def peer_of(peer: m.LinkHello | PeerRef) -> Peer:
    """Who is at the other end of a link, or of a leg."""
    return peer.name, peer.incarnation


@dataclass(slots=True)
class _LostLink:
    hello: m.LinkHello
    ranks: set[int]  # that have yet to say PeerRemoved
    clean: bool = True  # no write has failed, so far as ranks have said


class LostLinks:
    """Links that were lost, until no rank has anything of them under way; and those of which nothing can come any more.

    Of a write that failed some bytes may be on their way (in a socket's buffers, say) for longer than anybody can tell: of a
    link with one, nothing is ever known.
    """

    def __init__(self, tp: int) -> None:
        self._tp = tp
        self._lost: dict[int, _LostLink] = {}
        self._quiet: dict[str, Peer] = {}  # generations of lost links -> peer_of; the oldest first

    def __contains__(self, number: int | None) -> bool:
        """Something of it may be under way."""
        return number in self._lost

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, link: SendLink) -> None:
        self._lost[link.number] = _LostLink(link.hello, set(range(self._tp)))

    def removed(self, number: int, rank: int, clean: bool) -> m.LinkHello | None:
        """A rank has nothing of it under way. Who was at the other end, once that is true of every rank."""
        lost = self._lost.get(number)
        if lost is None:
            return None
        lost.ranks.discard(rank)
        lost.clean &= clean
        if lost.ranks:
            return None
        del self._lost[number]
        if lost.clean:
            self._quiet[lost.hello.generation] = peer_of(lost.hello)
            forget_oldest(self._quiet, MAX_QUIET)
        return lost.hello

    def quiet(self, hello: m.LinkHello) -> tuple[str, ...]:
        """Generations of links with this peer of which nothing can come any more."""
        return tuple(generation for generation, peer in self._quiet.items() if peer == peer_of(hello))

    def is_quiet(self, hello: m.LinkHello) -> bool:
        return hello.generation in self._quiet

    def describe(self) -> dict[int, list[int]]:
        """By link, the ranks that have yet to say that they have removed it."""
        return {number: sorted(lost.ranks) for number, lost in self._lost.items()}
