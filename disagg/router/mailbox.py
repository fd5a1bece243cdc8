"""What one client has yet to read. The servers' streams never wait for it: pending deltas merge per choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from disagg.router.choice_text import merged
from disagg.router.requests import ChoiceDelta, Finished, Started, Update
from disagg.types.errors import DisaggError


class Mailbox:
    """One writer (the router), one reader (the request's face)."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._deltas: dict[int, list[ChoiceDelta]] = {}
        self._end: Finished | DisaggError | None = None
        self._filled = asyncio.Event()

    def put(self, update: Started | ChoiceDelta | Finished | DisaggError) -> None:
        match update:
            case Started():
                self._started = update
            case ChoiceDelta():
                self._deltas.setdefault(update.choice, []).append(update)
            case _:
                self._end = update
        self._filled.set()

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Everything until the end; raises the error, after what came before it, if that is the end."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            started, self._started = self._started, None
            deltas, self._deltas = self._deltas, {}
            end = self._end
            if started is not None:
                yield started
            for of_choice in deltas.values():
                yield merged(of_choice)
            if self._deltas:  # more came while the client was reading
                self._filled.set()
            elif isinstance(end, Finished):
                yield end
                return
            elif end is not None:
                raise end
