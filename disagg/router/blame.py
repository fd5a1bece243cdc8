"""Who is to blame for an attempt that failed, of the two servers that it ran on. Pure; time is an argument.

    a server's own end (its workers died, it drained, gave back, is gone or going)  ──> that is the cause: the other is blameless
    decode says that its peer is lost  ──┬─ prefill's own end is known, or becomes known in SUSPECT_S ──> nobody
                                         └─ neither has ended by then ──> either may be ill: both
    decode gave no verdict ──> decode, unless an end of prefill's own explains it

Whose workers died is charged by what it says of itself, or by its loss (`Circuits.lost`); an intended end is charged to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from disagg.messages.legs import Outcome, PeerRef
from disagg.router.circuits import DECODES_CAUSES, verdicts
from disagg.router.view import Pair, Work
from disagg.types.bounded import forget_oldest

SUSPECT_S = 1.0  # in which a router learns of a process that is gone, since its address refuses
MAX_ATTEMPTS = 4096  # that are remembered
NO_VERDICT = "no_verdict"
_OWN_ENDS = frozenset({Outcome.WORKER_LOST, Outcome.DRAINED, Outcome.GIVEN_BACK})

Attempt = tuple[str, int]  # of a request, by its id


class Charge(Struct, frozen=True):
    """Of a server, by name. done: it did what it was asked. lost: the incarnation whose workers died, if that is what it is."""

    server: str
    work: Work
    done: bool
    lost: str = ""


class Suspect(Struct, frozen=True):
    """A pair of which one may be ill, unless the end of one is heard of by then."""

    until_s: float
    pair: Pair


class Blame:
    """Of one router. ends: whether this incarnation of a server is known to be gone, or to be going."""

    def __init__(self, ends: Callable[[PeerRef], bool]) -> None:
        self._ends = ends
        self._ended: dict[Attempt, None] = {}  # one server of which has ended by itself, oldest first
        self._suspects: dict[Attempt, Suspect] = {}  # oldest first

    def leg_ended(self, attempt: Attempt, pair: Pair, server: str, outcome: Outcome, now_s: float) -> Iterator[Charge]:
        if outcome in _OWN_ENDS and server in pair.servers:
            self._suspects.pop(attempt, None)
            self._ended[attempt] = None
            forget_oldest(self._ended, MAX_ATTEMPTS)
        by_itself = outcome in (Outcome.DONE, Outcome.WORKER_LOST)
        if not by_itself and self._explained(attempt, pair):
            return
        if outcome is Outcome.PEER_LOST and server == pair.decode.name:
            self._suspects.setdefault(attempt, Suspect(now_s + SUSPECT_S, pair))
            forget_oldest(self._suspects, MAX_ATTEMPTS)
            return
        for name, work, done in verdicts(pair, server, outcome):
            ref = pair.decode if work is Work.DECODE else pair.prefill
            yield Charge(name, work, done, ref.incarnation if outcome is Outcome.WORKER_LOST else "")

    def replayed(self, attempt: Attempt, pair: Pair, cause: str) -> Iterator[Charge]:
        """For a cause that no leg's end says."""
        if cause in DECODES_CAUSES and not (cause == NO_VERDICT and self._explained(attempt, pair)):
            yield Charge(pair.decode.name, Work.DECODE, False)

    def due(self, now_s: float) -> Iterator[Charge]:
        """Suspects whose time is over."""
        while self._suspects:
            attempt, suspect = next(iter(self._suspects.items()))
            if now_s < suspect.until_s:
                return
            del self._suspects[attempt]
            if not self._explained(attempt, suspect.pair):
                for name, work, done in verdicts(suspect.pair, suspect.pair.decode.name, Outcome.PEER_LOST):
                    yield Charge(name, work, done)

    def _explained(self, attempt: Attempt, pair: Pair) -> bool:
        return attempt in self._ended or any(self._ends(ref) for ref in (pair.prefill, pair.decode))
