"""Who comes in at a server: a stream says hello in time, streams are not without number, and a name has one living holder.

Until its hello a stream costs a task, a gRPC call, and at most one message of `wire.services.MAX_FRAME_BYTES`. Knows streams
and names; nothing of leases and links.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from disagg.types.bounded import forget_oldest

HELLO_S = 10.0  # from the opening of a stream to its first message
MAX_WAITING = 64  # streams that have not said hello; the next one ends the oldest: a healthy one says it at once
MAX_STREAMS = 1024  # in all; each costs a task or two and what gRPC keeps of it
MAX_RIVALS = 64  # refused holders of one name that are remembered
RIVAL_SAID_S = 10.0  # at the soonest, from one line about a name's refused holders to the next: they may be made up

T = TypeVar("T")


class Door:
    """Counts the streams of one service."""

    def __init__(self) -> None:
        self.streams = 0
        self._waiting: dict[asyncio.Timeout, None] = {}  # for their hello, the oldest first

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def opened(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """For as long as a stream lives. Ends it with RESOURCE_EXHAUSTED when there are too many."""
        if self.streams >= MAX_STREAMS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.streams} streams are open here; at most {MAX_STREAMS} may be",
            )
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    async def first(self, messages: AsyncIterator[T], context: grpc.aio.ServicerContext[Any, Any]) -> T | None:
        """The first message; None if the other side has said that there will be none. `messages` then goes on with the second."""
        if len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        patience = asyncio.timeout(HELLO_S)
        try:
            async with patience:
                self._waiting[patience] = None
                return await anext(aiter(messages), None)
        except TimeoutError:
            if patience in self._waiting:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello came within {HELLO_S:g} s")
            else:
                why = f"more than {MAX_WAITING} streams have not said hello yet, and this one was the oldest"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            return None
        finally:
            self._waiting.pop(patience, None)


class Rivals:
    """Processes that wanted a name while another one held it, and since when.

    One that restarts under its own name gets in as soon as the stream of the dead one is broken. A second holder must not,
    when the stream of the living one breaks for a moment: the two would end each other's work for ever. They differ in
    that the living one is heard after the other has come.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._said: dict[str, None] = {}  # those of which there was a line in the log
        self._said_s = -math.inf

    def may_take_over(self, process: str, served: bool, heard_s: float) -> bool:
        """served: the holder has a stream that is not known to be broken; heard_s: when it was heard last."""
        since_s = self._since_s.get(process)
        return not served and (since_s is None or heard_s <= since_s)

    def refused(self, process: str, now_s: float) -> bool:
        """Notes a refusal. True if it is worth a line in the log: once for each process, and now and then for all of them."""
        self._since_s.setdefault(process, now_s)
        forget_oldest(self._since_s, MAX_RIVALS)
        if process in self._said or now_s - self._said_s < RIVAL_SAID_S:
            return False
        self._said[process] = None
        forget_oldest(self._said, MAX_RIVALS)
        self._said_s = now_s
        return True
