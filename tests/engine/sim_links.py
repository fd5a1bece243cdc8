"""Links between the servers of the simulated world: dialled, greeted, and lost at either end at its own time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.messages.legs import PeerRef
from tests.engine.sim_server import Server, Worker


@dataclass
class Ends:
    """One end of a link. number: this server's number for it."""

    server: Server
    incarnation: str
    number: int
    queue: deque[Any] = field(default_factory=deque)  # on its way to this end
    established: bool = False
    up: bool = True


@dataclass
class SimLink:
    prefill: Ends
    decode: Ends
    ever_down: bool = False

    def other(self, end: Ends) -> Ends:
        return self.decode if end is self.prefill else self.prefill


class Network:
    """dials: who asked for a link, in which incarnation, to whom; nobody has answered yet."""

    def __init__(self, servers: Callable[[], Sequence[Server]]) -> None:
        self._servers = servers
        self.links: list[SimLink] = []
        self.dials: list[tuple[Server, str, PeerRef]] = []
        self._numbers = itertools.count()

    def worker_behind(self, server: Server, number: int, rank: int) -> Worker | None:
        for link in self.links:
            if link.prefill.server is server and link.prefill.number == number:
                peer = link.decode
                if peer.server.facts.incarnation == peer.incarnation:
                    return peer.server.workers[rank]
        return None

    def _end(self, server: Server, number: int) -> tuple[SimLink, Ends] | None:
        for link in self.links:
            for end in (link.prefill, link.decode):
                same = end.server is server and end.incarnation == server.facts.incarnation
                if same and end.number == number and end.up and end.established:
                    return link, end
        return None

    def send(self, server: Server, number: int, message: Any) -> None:
        found = self._end(server, number)
        if found is not None and found[0].other(found[1]).up:
            found[0].other(found[1]).queue.append(message)

    def dial(self, server: Server, peer: PeerRef) -> None:
        for link in self.links:
            if link.decode.server is server and link.decode.up and link.prefill.incarnation == peer.incarnation:
                return
        dialled = (server, server.facts.incarnation, peer)
        if dialled not in self.dials:
            self.dials.append(dialled)

    def answer(self, dialled: tuple[Server, str, PeerRef]) -> None:
        """Prefill answers a dial: its end is up now, decode's when the greeting arrives."""
        self.dials.remove(dialled)
        decode, incarnation, peer = dialled
        if decode.facts.incarnation != incarnation:
            return
        prefill = next(server for server in self._servers() if server.name == peer.name)
        if prefill.facts.incarnation != peer.incarnation:
            decode.hear(lambda dispatch: dispatch.dial_failed(peer, "it has restarted"))
            return
        for other in self.links:  # it dials one link per incarnation: what it had before, it has given up
            mine = other.prefill.server is prefill and other.prefill.incarnation == peer.incarnation
            if mine and other.prefill.up and other.decode.server is decode:
                self.lose_end(other, other.prefill, "dialled anew")
        link = SimLink(
            Ends(prefill, peer.incarnation, next(self._numbers), established=True),
            Ends(decode, incarnation, next(self._numbers)),
        )
        self.links.append(link)
        hello = decode.hello(str(link.decode.number))
        prefill.hear(lambda dispatch: dispatch.link_up(link.prefill.number, hello, dialled=False))

    def greeted(self, link: SimLink) -> None:
        end = link.decode
        end.established = True
        hello = link.prefill.server.hello(str(end.number))
        if hello.incarnation != link.prefill.incarnation:
            end.up = False
            ref = PeerRef(link.prefill.server.name, "", link.prefill.incarnation)
            end.server.hear(lambda dispatch: dispatch.dial_failed(ref, "it has restarted"))
            return
        for other in self.links:  # as Links._establish: a server starts workers only after its old ones have exited
            stale = other.prefill.server.name == hello.name and other.prefill.incarnation != hello.incarnation
            if other.decode.server is end.server and not other.decode.up and stale:
                end.server.dispatch.link_gone(other.decode.number)
        end.server.hear(lambda dispatch: dispatch.link_up(end.number, hello, dialled=True))

    def lose(self, server: Server, number: int, reason: str) -> None:
        found = self._end(server, number)
        if found is not None:
            self.lose_end(*found, reason)

    def lose_end(self, link: SimLink, end: Ends, reason: str) -> None:
        end.up = False
        end.queue.clear()
        server = end.server
        if server.facts.incarnation != end.incarnation:
            return
        if not end.established:
            ref = PeerRef(link.prefill.server.name, "", link.prefill.incarnation)
            server.hear(lambda dispatch: dispatch.dial_failed(ref, reason))
        else:
            gone = link.prefill.server.facts.incarnation != link.prefill.incarnation
            server.hear(lambda dispatch: dispatch.link_down(end.number, gone, reason))

    def workers_ended(self, server: Server) -> None:
        """Its ends of all links went with them, and nothing was said."""
        for link in self.links:
            for end in (link.prefill, link.decode):
                if end.server is server and end.incarnation == server.facts.incarnation:
                    end.up = False
                    end.queue.clear()

    def workers_are_gone(self, incarnation: str) -> None:
        """Those who lost a link before learn that the workers at its other end have exited."""
        for link in self.links:
            if link.prefill.incarnation == incarnation and link.decode.established and not link.decode.up:
                decode = link.decode.server
                if decode.facts.incarnation == link.decode.incarnation:
                    decode.dispatch.link_gone(link.decode.number)

    def forget_dead(self) -> None:
        """But for dead links whose prefill workers live: decode will want to know when they are gone."""
        self.links = [x for x in self.links if x.prefill.up or x.decode.up or self._remembered(x)]

    def _remembered(self, link: SimLink) -> bool:
        alive = link.prefill.server.facts.incarnation == link.prefill.incarnation
        return alive and link.decode.server.facts.incarnation == link.decode.incarnation
