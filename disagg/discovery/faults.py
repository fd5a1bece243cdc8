"""What is wrong with what discovery finds: said once each, however often it is found again. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MAX_LINES = 20  # said at once
MAX_SHOWN = 100


class Faults:
    """now: by name, of those that are wrong now, MAX_SHOWN at most."""

    def __init__(self) -> None:
        self._all: dict[str, str] = {}
        self.now: Mapping[str, str] = {}

    def found(self, faults: Mapping[str, str]) -> list[str]:
        """Takes all that is wrong, by name. The lines to say: what was not wrong before, or wrong in another way."""
        new = [f"{name}: {fault}" for name, fault in faults.items() if self._all.get(name) != fault]
        self._all = dict(faults)
        self.now = dict(list(faults.items())[:MAX_SHOWN])
        if len(new) <= MAX_LINES:
            return new
        return [*new[: MAX_LINES - 1], f"{len(new) - MAX_LINES + 1} more, which are not listed"]
