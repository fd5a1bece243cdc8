"""All connections of one HTTP server: who waits for what, who has waited for too long, and who makes room for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.types.errors import DisaggError

BODIES_BYTES = 64 << 20  # of unfinished bodies, of all connections: beyond it, the slowest is refused
LINGER_S = 5.0  # for a client to read a refusal while it still sends
SPARE_CONNECTIONS = 256  # above the limit, for as long as it takes to tell them so


class Bounds(Struct, frozen=True, kw_only=True):
    """What clients may take. The settings of the same names say what each is."""

    max_connections: int = 2048
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    stall_s: float = 60.0


class Phase(Enum):
    """What a connection waits for, in the order in which they make room for others."""

    IDLE = "idle"  # the next request
    HEAD = "head"  # the rest of a head, or the first byte of a new connection
    BODY = "body"  # the rest of a body
    ANSWER = "answer"  # us
    SURPLUS = "surplus"  # the rest of a request that is answered already
    LEAVING = "leaving"  # the client to read a refusal


ROOM = (Phase.IDLE, Phase.HEAD, Phase.BODY)


def overdue(phase: Phase, age_s: float, bounds: Bounds) -> bool:
    """Whether a connection has been in its phase for too long."""
    match phase:
        case Phase.IDLE:
            return age_s > bounds.idle_s
        case Phase.HEAD:
            return age_s > bounds.head_s
        case Phase.BODY:
            return age_s > bounds.body_s
        case Phase.SURPLUS | Phase.LEAVING:
            return age_s > LINGER_S
        case Phase.ANSWER:
            return False


class HttpMetrics:
    """Connections of the HTTP face."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("disagg_router_http_connections", "Open HTTP connections", registry=registry)
        self.ended = Counter(
            "disagg_router_http_ended", "Connections that the router ended, by why", ["reason"], registry=registry
        )


class Member(Protocol):
    """A connection, as the crowd sees it. since_s: when it entered its phase."""

    since_s: float

    def time_out(self) -> None: ...

    def check_reader(self, now_s: float) -> None: ...

    def give_way(self) -> None: ...

    def hurry(self) -> None: ...

    def cut(self) -> None: ...


class Crowd:
    """All connections of one HTTP server."""

    def __init__(self, bounds: Bounds, metrics: HttpMetrics, note_refused: Callable[[DisaggError], None]) -> None:
        """note_refused: told of requests to the API that are refused before any app sees them."""
        self.bounds = bounds
        self.metrics = metrics
        self.note_refused = note_refused
        self.body_bytes = 0
        self._by_phase: dict[Phase, dict[Member, None]] = {phase: {} for phase in Phase}  # longest in it first
        metrics.connections.set_function(self.__len__)

    def __len__(self) -> int:
        return sum(map(len, self._by_phase.values()))

    def move(self, connection: Member, old: Phase | None, new: Phase | None) -> None:
        if old is not None:
            self._by_phase[old].pop(connection, None)
        if new is not None:
            self._by_phase[new][connection] = None

    def make_room(self) -> bool:
        """Makes room for one more connection, by closing one that waits for its client. False: all are being served."""
        if len(self) < self.bounds.max_connections:
            return True
        for phase in ROOM:
            for connection in self._by_phase[phase]:
                connection.give_way()
                return True
        return False

    @property
    def full(self) -> bool:
        return len(self) >= self.bounds.max_connections + SPARE_CONNECTIONS

    def count_body(self, num_bytes: int) -> None:
        """Bytes of bodies that came (or, if negative, went on to the app). Beyond the limit, the slowest is refused."""
        self.body_bytes += num_bytes
        while self.body_bytes > BODIES_BYTES and self._by_phase[Phase.BODY]:
            next(iter(self._by_phase[Phase.BODY])).give_way()

    def sweep(self, now_s: float) -> None:
        """Ends what has waited for too long. About a microsecond per connection."""
        for phase, connections in self._by_phase.items():
            for connection in tuple(connections):
                if overdue(phase, now_s - connection.since_s, self.bounds):
                    connection.time_out()
                else:
                    connection.check_reader(now_s)

    async def sweep_always(self) -> None:
        bounds = self.bounds
        shortest_s = min(bounds.head_s, bounds.body_s, bounds.idle_s, bounds.stall_s, LINGER_S)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, shortest_s / 4))
            self.sweep(loop.time())

    def hurry(self) -> None:
        for connections in self._by_phase.values():
            for connection in tuple(connections):
                connection.hurry()

    def cut(self) -> None:
        for connections in self._by_phase.values():
            for connection in tuple(connections):
                connection.cut()
