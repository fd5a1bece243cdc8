"""What one client has yet to read. The servers' streams never wait for it: pending deltas merge per choice, up to a limit.

What comes while everything before it has been taken may be taken at once (`Taker`), without waking the reader's task.

A client that lets more than `most_bytes` wait, or who fills the router's memory, loses its request: the alternative is
that everybody does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from disagg.config.sizes import format_size
from disagg.router.budget import Held
from disagg.router.choice_text import merged
from disagg.router.requests import ChoiceDelta, Finished, Started, Update
from disagg.types.errors import DisaggError, Overloaded

CHUNK_BYTES = 512 << 10  # of what is merged for one write: 10 ms to format
RETRY_AFTER_S = 1.0
Taker = Callable[[ChoiceDelta], bool]  # on the event loop, must not block; whether it has taken it
_DELTA_BYTES, _TOKEN_BYTES, _ROW_BYTES, _ENTRY_BYTES = 300, 40, 100, 250  # as Python has them


class Mailbox:
    """One writer (the router), one reader (the request's face)."""

    def __init__(self, held: Held, most_bytes: int, taker: Taker | None = None) -> None:
        """taker: of a reader that takes deltas at once, if it can."""
        self.overfull: DisaggError | None = None  # why the request must end
        self._held = held
        self._most_bytes = most_bytes
        self._started: Started | None = None
        self._deltas: dict[int, deque[tuple[ChoiceDelta, int]]] = {}
        self._end: Finished | DisaggError | None = None
        self._filled = asyncio.Event()
        self._taker = taker
        self._drained = False  # the reader has taken all, and waits

    def put(self, update: Started | ChoiceDelta | Finished | DisaggError) -> None:
        match update:
            case Started():
                self._started = update
            case ChoiceDelta():
                if self._drained and self._taker is not None and self._taker(update):
                    return
                self._keep(update)
            case _:
                self._end = update
        self._drained = False
        self._filled.set()

    def close(self) -> None:
        """Nobody reads any more."""
        self._deltas.clear()
        self._held.release()

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Everything until the end; raises the error, after what came before it, if that is the end."""
        while True:
            self._drained = True
            try:
                await self._filled.wait()
            finally:
                self._drained = False
            self._filled.clear()
            started, self._started = self._started, None
            if started is not None:
                yield started
            while self._deltas:
                for choice in tuple(self._deltas):
                    if choice in self._deltas:
                        yield self._take(choice)
            if isinstance(self._end, Finished):
                yield self._end
                return
            if self._end is not None:
                raise self._end

    def _keep(self, delta: ChoiceDelta) -> None:
        if self.overfull is not None:
            return
        cost = _cost(delta)
        try:
            if self._held.bytes + cost > self._most_bytes:
                raise Overloaded(
                    f"{format_size(self._held.bytes)} of the answer wait for the client to read them; "
                    f"router.answer_bytes = {format_size(self._most_bytes)}",
                    RETRY_AFTER_S,
                )
            self._held.add(cost)
        except Overloaded as error:
            self.overfull = error
            self.close()
        else:
            self._deltas.setdefault(delta.choice, deque()).append((delta, cost))

    def _take(self, choice: int) -> ChoiceDelta:
        """What waits of a choice, merged, but no more than is formatted at once."""
        waiting = self._deltas[choice]
        deltas: list[ChoiceDelta] = []
        total = 0
        while waiting and (not deltas or total + waiting[0][1] <= CHUNK_BYTES):
            delta, cost = waiting.popleft()
            deltas.append(delta)
            total += cost
        if not waiting:
            del self._deltas[choice]
        self._held.give(total)
        return merged(deltas)


def _cost(delta: ChoiceDelta) -> int:
    """Bytes of memory, about. All rows of an answer have as many entries as were asked for."""
    cost = _DELTA_BYTES + 4 * len(delta.text) + _TOKEN_BYTES * len(delta.token_ids)
    if delta.logprobs:
        cost += len(delta.logprobs) * (_ROW_BYTES + _ENTRY_BYTES * (1 + len(delta.logprobs[0].top)))
    return cost
