"""What a server is, what it is asked to become, and what came of that. Pure: knows neither processes nor sockets.

    steady ──ask──> emptying ──nothing left──> trying ──its workers are up──> steady, in the new role
                                                  └── they cannot be ──> going back, in the old one ──> steady

While it goes back it is asked in vain. Whoever is refused is told why (`report.failed`), and so is who asked for what failed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from disagg.messages.legs import RoleChange
from disagg.types.ids import Role

FAILED_CHARS = 1000  # of what routers are told


class Phase(enum.Enum):
    """Of a server's change of role."""

    STEADY = "steady"
    EMPTYING = "emptying"
    TRYING = "trying"
    GOING_BACK = "going back"


class RoleChanges:
    """Of one process. now: what its workers are, or are being brought up as."""

    def __init__(self, started: Role) -> None:
        self.now = started
        self.phase = Phase.STEADY
        self._started = started
        self._becomes: Role | None = None  # while emptying and trying
        self._before = started  # to go back to, while trying
        self._failed = ""
        self._asked = 0

    @property
    def report(self) -> RoleChange:
        """What routers are told."""
        return RoleChange(self._started, self._becomes, self._failed, self._asked)

    @property
    def becomes(self) -> Role | None:
        return self._becomes

    def ask(self, role: Role, why_not: Callable[[], str]) -> bool:
        """Whether it empties from now on. why_not: what speaks against that role here and now, asked only for a new one.

        What it is, or is becoming already, needs nothing. Another role than the one that it is becoming is refused.
        """
        self._asked += 1
        if self._becomes is not None:
            self._failed = "" if role is self._becomes else f"it is becoming {self._becomes.value} now"
            return False
        if self.phase is Phase.GOING_BACK:
            self._failed = f"it is becoming {self.now.value} again now, since it could not be what it was asked to"
            return False
        self._failed = ""
        if role is self.now:
            return False
        if why := why_not():
            self._failed = _cut(f"it cannot be {role.value}: {why}")
            return False
        self.phase, self._becomes = Phase.EMPTYING, role
        return True

    def take(self) -> bool:
        """Its workers have ended. Whether the next ones are of another role, which is `now` then."""
        if self.phase is not Phase.EMPTYING:
            return False
        assert self._becomes is not None
        self.phase, self._before, self.now = Phase.TRYING, self.now, self._becomes
        return True

    def up(self) -> None:
        """Workers of the role `now` are up."""
        if self.phase is Phase.TRYING:
            self._failed = ""
        if self.phase in (Phase.TRYING, Phase.GOING_BACK):
            self.phase, self._becomes = Phase.STEADY, None

    def fail(self, why: str) -> bool:
        """Workers could not come up. Whether the next ones are of the role before, which is `now` then."""
        if self.phase is not Phase.TRYING:
            return False
        self._failed = _cut(f"it could not become {self.now.value}, and is {self._before.value} again: {why}")
        self.phase, self._becomes, self.now = Phase.GOING_BACK, None, self._before
        return True

    def check_integrity(self) -> None:
        assert (self._becomes is not None) == (self.phase in (Phase.EMPTYING, Phase.TRYING))
        assert self.phase is not Phase.EMPTYING or self._becomes is not self.now
        assert self.phase is not Phase.TRYING or self._becomes is self.now
        assert len(self._failed) <= FAILED_CHARS


def _cut(text: str) -> str:
    return text[:FAILED_CHARS]
