"""A `StreamState` on an event loop: waits until there is something to write, and hands on what is read.

Its owner makes connections, turns frames into messages of its wire, and decides what a broken connection or a verdict means:

    connection = stream.connect(greeting.last_received)
    listener = asyncio.create_task(stream.listen(connection, incoming, frame_of, on_message))
    async for frame in stream.frames(connection):           ends when the connection or the stream does
        await write(frame)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from disagg.messages.channel import Frame
from disagg.streams.state import Outbox, StreamState

S = TypeVar("S")
R = TypeVar("R")
M = TypeVar("M")


class ResumableStream(Generic[S, R]):
    """One end, with what wakes its writer. Everything runs on one loop; nothing blocks it."""

    def __init__(
        self, outbox: Outbox[S], *, heartbeat_s: float, max_kept: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state: StreamState[S, R] = StreamState(outbox, heartbeat_s, max_kept, clock())
        self._clock = clock
        self._wake = asyncio.Event()

    def put(self, message: S) -> None:
        """Queue a message; `flush` lets all that is queued go."""
        self.state.put(message)

    def flush(self) -> None:
        if self.state.flush():
            self._wake.set()

    def settle(self) -> None:
        """See StreamState."""
        self.state.settle()
        self._wake.set()

    def wake(self) -> None:
        """Whoever writes has something of its own to say: see `turns`."""
        self._wake.set()

    def connect(self, last_received: int) -> int:
        """See StreamState. Whoever writes on an older connection ends."""
        self._wake.set()
        return self.state.connect(last_received, self._clock())

    def disconnect(self, connection: int) -> None:
        self.state.disconnect(connection)
        self._wake.set()

    def end(self) -> None:
        self.state.end()
        self._wake.set()

    def hear(self, frame: Frame[R]) -> tuple[R, ...]:
        """See StreamState."""
        before_s = self.state.due_s
        messages = self.state.hear(frame, self._clock())
        if self.state.due_s < before_s:
            self._wake.set()  # it has to be acknowledged before the writer would have looked again
        return messages

    async def listen(
        self,
        connection: int,
        incoming: AsyncIterator[M],
        frame_of: Callable[[M], Frame[R]],
        on_message: Callable[[R], None],
    ) -> None:
        """Hands on what comes, until the connection is over or another one serves. Raises what `incoming` and frame_of do."""
        try:
            async for message in incoming:
                if not self.state.serves(connection):
                    return
                for each in self.hear(frame_of(message)):
                    if self.state.ended:  # by what came before it
                        return
                    on_message(each)
        finally:
            self.disconnect(connection)

    async def frames(self, connection: int) -> AsyncIterator[Frame[S]]:
        """What to write on this connection, each when it is due."""
        async for frame in self.turns(connection, lambda: math.inf):
            if frame is not None:
                yield frame

    async def turns(self, connection: int, also_due_s: Callable[[], float]) -> AsyncIterator[Frame[S] | None]:
        """As `frames`, for a writer that has something of its own to say: None when only that is due.

        also_due_s: when it is. Asked again after each frame, and after `wake`.
        """
        while self.state.serves(connection):
            self._wake.clear()
            now_s, own_s = self._clock(), also_due_s()
            frame = self.state.next_frame(now_s)
            if frame is not None or own_s <= now_s:
                yield frame
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(self.state.due_s, own_s) - now_s)):
                    await self._wake.wait()
