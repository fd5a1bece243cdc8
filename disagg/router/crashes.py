"""Whose workers died while a request was with them: one that was there at two such deaths is not tried again. Pure.

    attempt 1   prefill p0 ──────────── its workers die ──────── "WORKER_LOST" comes late: it counts
                decode d0  ── "PEER_LOST" ─> the attempt ends
    attempt 2                                p1, d1 ─────────────────────────────────────

A server's last word may come after another's has ended the attempt. What was owed then is remembered until the attempt after the
next one.
"""

from __future__ import annotations

from disagg.messages.legs import LegEnd, Outcome
from disagg.types.ids import LegKey

POISON = 2  # deaths, of two servers or of one that came up again

Owed = tuple[LegKey, str, str]  # the end of a leg, by the name and the incarnation of the server that owes it


class Crashes:
    """Of one request."""

    def __init__(self) -> None:
        self._dead: set[tuple[str, str]] = set()
        self._owed: set[Owed] = set()

    @property
    def poison(self) -> str:
        """Why it is not tried again; empty if it may be."""
        if len(self._dead) < POISON:
            return ""
        names = ", ".join(sorted(name for name, _ in self._dead))
        return f"the request was present twice when workers died or failed it ({names}); it is not tried again"

    def add(self, name: str, incarnation: str) -> None:
        """Workers died of which the request was."""
        self._dead.add((name, incarnation))

    def begin(self, attempt: int) -> None:
        """What is owed of attempts before the last one is forgotten."""
        self._owed = {owed for owed in self._owed if owed[0].attempt == attempt - 1}

    def owe(self, ends: set[Owed]) -> None:
        """An attempt is over, and these have not been heard."""
        self._owed |= ends

    def late_end(self, server: str, end: LegEnd) -> bool:
        """One of them is heard. Whether it tells of another death."""
        heard = {owed for owed in self._owed if owed[:2] == (end.key, server)}
        return self._heard(heard, died=end.outcome is Outcome.WORKER_LOST)

    def late_loss(self, server: str, incarnation: str, *, died: bool) -> bool:
        """None of them will be heard from this incarnation. Whether that tells of another death."""
        return self._heard({owed for owed in self._owed if owed[1:] == (server, incarnation)}, died=died)

    def _heard(self, heard: set[Owed], *, died: bool) -> bool:
        self._owed -= heard
        before = len(self._dead)
        if died:
            self._dead |= {owed[1:] for owed in heard}
        return len(self._dead) > before
