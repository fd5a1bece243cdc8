"""Link frames that are dropped, repeated and overtaken, in a server's process. See the plan.

Both ends do it to what they send. A stream's greeting passes: without it there is no link to disturb.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from disagg.server import lifecycle, links
from disagg.wire.services import PeerStub
from tests.cluster.wire_faults.plan import Fault, FaultPlan


class _Disturbed:
    """Decides about one frame after the other, and says when each copy of it may go."""

    def __init__(self, plan: FaultPlan, role: str) -> None:
        self._plan = plan
        self._rng = random.Random(f"{plan.seed} frames {role}")
        self._log = plan.log

    def delays(self) -> tuple[float, ...]:
        """In how many seconds to send each copy of the next frame; () to lose it."""
        rates = self._plan.frames
        fault = rates.draw(self._rng)
        if fault is not Fault.NONE:
            self._log.note("frame", fault)
        match fault:
            case Fault.DROP:
                return ()
            case Fault.DUPLICATE:
                return (0.0, 0.0)
            case Fault.DELAY:
                return (self._rng.uniform(0.0, rates.delay_s),)
            case _:
                return (0.0,)


async def _disturb(frames: AsyncGenerator[Any], disturbed: _Disturbed) -> AsyncGenerator[Any]:
    """The frames of an answering stream, disturbed, its greeting excepted. Raises what `frames` raises."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()

    async def pump() -> None:
        try:
            first = True
            async for frame in frames:
                for delay_s in (0.0,) if first else disturbed.delays():
                    if delay_s:
                        loop.call_later(delay_s, ready.put_nowait, (frame, None))
                    else:
                        ready.put_nowait((frame, None))
                first = False
        except Exception as error:  # noqa: BLE001 - handed on to whom it is meant for
            ready.put_nowait((None, error))
        else:
            ready.put_nowait((None, StopAsyncIteration()))

    pumping = asyncio.create_task(pump())
    try:
        while True:
            frame, end = await ready.get()
            if isinstance(end, StopAsyncIteration):
                return
            if end is not None:
                raise end
            yield frame
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        await frames.aclose()


class _DisturbedCall:
    """A dialled stream: what is written to it, after the greeting, is disturbed; what is read is not."""

    def __init__(self, call: Any, disturbed: _Disturbed) -> None:
        self._call = call
        self._disturbed = disturbed
        self._greeted = False
        self._lock = asyncio.Lock()
        self._late: set[asyncio.Task[None]] = set()

    async def write(self, frame: Any) -> None:
        delays, self._greeted = self._disturbed.delays() if self._greeted else (0.0,), True
        for delay_s in delays:
            if delay_s:
                task = asyncio.create_task(self._write_late(frame, delay_s))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            else:
                async with self._lock:
                    await self._call.write(frame)

    async def _write_late(self, frame: Any, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        # The stream may have ended meanwhile: then this frame is lost, like everything else on it.
        with contextlib.suppress(links.grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            async with self._lock:
                await self._call.write(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def install(plan: FaultPlan, role: str) -> None:
    """From now on this process's links are disturbed."""
    disturbed = _Disturbed(plan, role)

    class DisturbedLinks(links.Links):
        async def link(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(_disturb(super().link(requests, context), disturbed)) as frames:
                async for frame in frames:
                    yield frame

    class DisturbedStub(PeerStub):
        def link(self) -> Any:
            return _DisturbedCall(super().link(), disturbed)

    lifecycle.Links = DisturbedLinks  # type: ignore[misc]
    links.PeerStub = DisturbedStub
