"""What came to a set and what left it since somebody last asked. Pure.

What came and went, or went and came, is no news. So there is never more of it than keys that are in the set now, or were when
it was last asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Changes(Generic[K]):
    """`came` and `left` are told of what was not there before, or was."""

    def __init__(self) -> None:
        self._news: dict[K, bool] = {}  # whether it is there now

    def came(self, key: K) -> None:
        if self._news.pop(key, True):
            self._news[key] = True

    def left(self, key: K) -> None:
        if not self._news.pop(key, False):
            self._news[key] = False

    def take(self) -> tuple[list[K], list[K]]:
        """(what came, what left) since the last call, each in order."""
        news, self._news = self._news, {}
        return [key for key, there in news.items() if there], [key for key, there in news.items() if not there]
