"""Circuit breakers: which servers fail what they are sent, by kind of work. Pure; time is an argument.

    closed ──MIN_FAILURES in WINDOW_S, and half of all that ended──> open ──OPEN_S, doubled each time──> half-open
       ^                                                               ^                                   │
       └──────────────── it succeeded ── probe: one attempt is let through <───────────────────────────────┘
                                         it failed, or said nothing for PROBE_S: open again

Only what is a server's doing counts, never what its clients ask for. Where two servers took part and either may be to blame
(a broken link, KV that did not match; `blame` says where it is known who is), it counts against both: whoever is ill fails with
everybody, and the others only with it, so that half of what they do still succeeds. Workers that die fail once, however many legs
they had.

An open circuit is a wish, as all of `placement`: nothing is sent there while there is another server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from disagg.messages.legs import Outcome
from disagg.router.view import NO_CIRCUITS, Circuit, Pair, Work
from disagg.types.bounded import forget_oldest

WINDOW_S = 60.0
MIN_FAILURES = 3
FAILED_SHARE = 0.5  # of what ended in the window
MAX_ENDS = 128  # that are remembered of each
OPEN_S, MAX_OPEN_S = 5.0, 60.0
PROBE_S = 30.0  # until an attempt that has not ended is no answer, and another may be tried
MAX_CIRCUITS = 4096  # servers with names that come and go

_BY_EITHER = frozenset({Outcome.PEER_LOST, Outcome.BAD_TRANSFER})
DECODES_CAUSES = frozenset({"no_verdict", "contradiction", "incomplete"})  # of replays, which no leg's end says


def verdicts(pair: Pair, server: str, outcome: Outcome) -> Iterator[tuple[str, Work, bool]]:
    """What a leg's end on one server of its pair says: of whom, of which work, and whether it succeeded."""
    if server not in pair.servers:
        return
    parts = [(pair.prefill.name, Work.PREFILL), (pair.decode.name, Work.DECODE)]
    if outcome in (Outcome.DONE, Outcome.WORKER_LOST):
        done = outcome is Outcome.DONE
        parts = [part for part in parts if part[0] == server]
    elif outcome in _BY_EITHER and server == pair.decode.name:  # what prefill says of a link, decode says too
        done = False
    else:
        return
    for name, work in parts:
        if not (pair.moves and work is Work.PREFILL):  # it drains, and is sent nothing anyway
            yield name, work, done


class _Breaker:
    """Of one server's one kind of work."""

    __slots__ = ("_ends", "_open_s", "_opened", "_probes")

    def __init__(self) -> None:
        self._ends: deque[tuple[float, bool]] = deque(maxlen=MAX_ENDS)
        self._opened = 0  # how many times since it was last closed; 0: it is
        self._open_s = 0.0  # until when it is
        self._probes = False

    @property
    def closed(self) -> bool:
        return not self._opened

    def state(self, now_s: float) -> Circuit:
        if not self._opened:
            return Circuit.CLOSED
        return Circuit.OPEN if now_s < self._open_s else Circuit.HALF_OPEN

    def sent(self, now_s: float) -> None:
        if self.state(now_s) is Circuit.HALF_OPEN:
            self._probes, self._open_s = True, now_s + PROBE_S

    def ended(self, done: bool, now_s: float) -> None:
        if self._opened:
            if not (self._probes or now_s >= self._open_s):
                return  # it was sent before the circuit opened
            if done:
                self._opened, self._probes = 0, False
                self._ends.clear()
            else:
                self._open(now_s)
            return
        self._ends.append((now_s, done))
        lately = [each for at_s, each in self._ends if now_s - at_s < WINDOW_S]
        failures = lately.count(False)
        if not done and failures >= MIN_FAILURES and failures >= FAILED_SHARE * len(lately):
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._open_s = now_s + min(MAX_OPEN_S, OPEN_S * 2.0 ** min(10, self._opened))
        self._opened += 1
        self._probes = False


class Circuits:
    """Of all servers of one router."""

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, Work], _Breaker] = {}
        self._ill: set[str] = set()  # servers with one that is not closed
        self._lost: dict[tuple[str, Work], str] = {}  # the last incarnation whose loss counted

    def ended(self, server: str, work: Work, done: bool, now_s: float) -> Circuit | None:
        """An attempt's part there has. OPEN or CLOSED if it is that from now on, and was not before."""
        key = (server, work)
        breaker = self._breakers.pop(key, None) or _Breaker()
        self._breakers[key] = breaker
        forget_oldest(self._breakers, MAX_CIRCUITS)
        closed = breaker.closed
        breaker.ended(done, now_s)
        if breaker.closed == closed:
            return None
        self._ill.add(server)
        return Circuit.CLOSED if breaker.closed else Circuit.OPEN

    def lost(self, server: str, incarnation: str, work: Work, now_s: float) -> Circuit | None:
        """Its workers died; each incarnation counts once. As `ended`."""
        if self._lost.get((server, work)) == incarnation:
            return None
        self._lost[server, work] = incarnation
        forget_oldest(self._lost, MAX_CIRCUITS)
        return self.ended(server, work, False, now_s)

    def sent(self, server: str, work: Work, now_s: float) -> None:
        """An attempt begins there: a probe, if the circuit is half-open."""
        breaker = self._breakers.get((server, work))
        if breaker is not None:
            breaker.sent(now_s)

    def answers(self, server: str, work: Work, now_s: float) -> Circuit | None:
        """The first token of an attempt there has come: no success of its own, but the whole answer is not waited for where one
        decides. CLOSED if it is that from now on, and was not before."""
        breaker = self._breakers.get((server, work)) if server in self._ill else None
        return None if breaker is None or breaker.closed else self.ended(server, work, True, now_s)

    def of(self, server: str, now_s: float) -> Mapping[Work, Circuit]:
        """Those that are not closed."""
        if server not in self._ill:
            return NO_CIRCUITS
        found = {work: self._breakers.get((server, work)) for work in Work}
        states = {work: each.state(now_s) for work, each in found.items() if each is not None and not each.closed}
        if not states:
            self._ill.discard(server)
        return states or NO_CIRCUITS

    def forget(self, server: str) -> None:
        """It has left."""
        self._ill.discard(server)
        for work in Work:
            self._breakers.pop((server, work), None)
            self._lost.pop((server, work), None)
