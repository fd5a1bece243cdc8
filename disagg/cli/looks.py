"""How commands wait for what a router does: they look until it is done or their --timeout is over, which nothing outlasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from disagg.cli.answers import ClusterStatus, cluster_status
from disagg.cli.asking import EXCHANGE_S, Allowed, ask
from disagg.types.errors import DeadlineExceeded

LOOK_S: Final = 0.5

T = TypeVar("T")


class Patience:
    """What is left of a command's --timeout, in seconds."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.timeout_s = timeout_s
        self._clock, self._sleep = clock, sleep
        self._until_s = clock() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - self._clock())

    def asking(self, question: Callable[[float], T]) -> T:
        """question: is given how many seconds it may take. Raises DeadlineExceeded, and says so where the time is over."""
        try:
            return question(min(EXCHANGE_S, self.left_s))
        except DeadlineExceeded as error:
            if self.left_s > 0:
                raise
            raise DeadlineExceeded(f"{error}; --timeout is {self.timeout_s:g} s") from error

    def looks(self, look: Callable[[float], ClusterStatus], goes_on: str) -> Iterator[ClusterStatus]:
        """What `look` sees, every LOOK_S, until the time is over. look: is given how many seconds it may take. One that the
        end of the time cuts short is none.

        goes_on: what happens whether anybody looks or not, for DeadlineExceeded, which is raised where nothing was seen at all.
        """
        seen = False
        while self.left_s > 0:
            try:
                status = self.asking(look)
            except DeadlineExceeded as error:
                if seen and self.left_s <= 0:
                    return
                raise DeadlineExceeded(f"{goes_on} all the same, as far as is known: {error}") from error
            seen = True
            yield status
            self._sleep(min(LOOK_S, self.left_s))


def look_at(base_url: str) -> Callable[[float], ClusterStatus]:
    """For `Patience.looks`. What it gives raises DisaggError."""
    return lambda within_s: cluster_status(ask(base_url, "/status", allowed=Allowed(within_s)))
