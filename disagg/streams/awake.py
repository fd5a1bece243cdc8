"""Whether this process may call others silent. Pure: time is an argument."""

from __future__ import annotations

STILL_S = 1.0  # a look that comes so long after the one before, of some ten in a second: the process stood still
READ_S = 2.0  # for what came meanwhile to be read


class Awake:
    """Of one who looks for silence again and again, from now_s on.

    A process that stood still (it was stopped, or its machine was) finds that nothing was heard of anybody for as long, though
    what they said lies in its sockets. So it first takes time to read.
    """

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._woke_s = float("-inf")

    def look(self, now_s: float) -> bool:
        """To be called at each look. Whether silence is the other's."""
        if now_s - self._looked_s > STILL_S:
            self._woke_s = now_s
        self._looked_s = now_s
        return now_s - self._woke_s >= READ_S
