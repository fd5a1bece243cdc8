"""A stream on a loop: its writer waits until something is due, and ends when its connection does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from disagg.messages.channel import Frame
from disagg.streams.state import Queue
from disagg.streams.stream import ResumableStream
from disagg.types.errors import ProtocolError

pytestmark = pytest.mark.timeout(60)


class Wire:
    """A connection in memory: what one side writes, the other reads, until it is cut."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[Frame[int] | None] = asyncio.Queue()

    def write(self, frame: Frame[int]) -> None:
        self._frames.put_nowait(frame)

    def cut(self) -> None:
        self._frames.put_nowait(None)

    async def read(self) -> AsyncIterator[Frame[int]]:
        while (frame := await self._frames.get()) is not None:
            yield frame


def new_stream(heartbeat_s: float = 0.05) -> ResumableStream[int, int]:
    return ResumableStream(Queue(frame_size=3), heartbeat_s=heartbeat_s, max_kept=1000)


class Pair:
    """Two streams, and the tasks that carry one connection between them."""

    def __init__(self, heartbeat_s: float = 0.05) -> None:
        self.ends = [new_stream(heartbeat_s), new_stream(heartbeat_s)]
        self.heard: list[list[int]] = [[], []]
        self.wires: list[Wire] = []
        self.tasks: list[asyncio.Task[None]] = []

    def connect(self) -> None:
        self.wires = [Wire(), Wire()]  # towards each side
        for side in range(2):
            connection = self.ends[side].connect(self.ends[1 - side].state.received)
            self.tasks.append(asyncio.create_task(self._listen(side, connection)))
            self.tasks.append(asyncio.create_task(self._speak(side, connection, self.wires[1 - side])))

    async def _listen(self, side: int, connection: int) -> None:
        incoming = self.wires[side].read()
        await self.ends[side].listen(connection, incoming, lambda frame: frame, self.heard[side].append)

    async def _speak(self, side: int, connection: int, wire: Wire) -> None:
        async for frame in self.ends[side].frames(connection):
            wire.write(frame)

    def cut(self) -> None:
        for wire in self.wires:
            wire.cut()

    async def ended(self) -> None:
        """Every task of every connection, by itself."""
        tasks, self.tasks = self.tasks, []
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_everything_arrives_over_connections_that_break() -> None:
    pair = Pair()
    said: list[list[int]] = [[], []]
    for round_ in range(6):
        pair.connect()
        for side in range(2):
            for number in range(7):
                pair.ends[side].put(100 * round_ + number)
                said[1 - side].append(100 * round_ + number)
            pair.ends[side].flush()
            await asyncio.sleep(0)
        if round_ < 5:
            pair.cut()
            await pair.ended()
    await until(lambda: pair.heard == said)
    await until(lambda: all(end.state.idle for end in pair.ends))
    for end in pair.ends:
        end.end()
    pair.cut()
    await pair.ended()


async def test_a_newer_connection_ends_the_writer_of_an_older_one() -> None:
    stream = new_stream(heartbeat_s=3600.0)
    old = stream.connect(0)
    writer = asyncio.create_task(_drain(stream, old))
    await asyncio.sleep(0)
    stream.connect(0)
    async with asyncio.timeout(30):
        await writer


async def _drain(stream: ResumableStream[int, int], connection: int) -> None:
    async for _ in stream.frames(connection):
        pass


async def test_what_comes_in_is_acknowledged_though_the_next_beat_is_far() -> None:
    pair = Pair(heartbeat_s=3600.0)
    pair.connect()
    await asyncio.sleep(0.01)  # both writers wait
    pair.ends[0].put(1)
    pair.ends[0].flush()
    await until(lambda: pair.ends[0].state.idle)
    for end in pair.ends:
        end.end()
    pair.cut()
    await pair.ended()


async def test_a_frame_that_makes_no_sense_ends_the_connection_and_says_why() -> None:
    stream = new_stream()
    connection = stream.connect(0)
    wire = Wire()
    wire.write(Frame(1, 0, (1,)))

    def no_frame(frame: Frame[int]) -> Frame[int]:
        raise ProtocolError("what is that?")

    with pytest.raises(ProtocolError, match="what is that"):
        await stream.listen(connection, wire.read(), no_frame, lambda message: None)
    assert not stream.state.served


async def test_nothing_is_handed_on_after_a_message_that_ended_the_stream() -> None:
    stream = new_stream()
    connection = stream.connect(0)
    wire = Wire()
    wire.write(Frame(1, 0, (1, 2, 3)))
    heard: list[int] = []

    def hear(message: int) -> None:
        heard.append(message)
        stream.end()

    await stream.listen(connection, wire.read(), lambda frame: frame, hear)
    assert heard == [1]


async def test_a_writer_can_say_what_is_its_own() -> None:
    stream = new_stream(heartbeat_s=3600.0)
    connection = stream.connect(0)
    own_s = math.inf
    async with aclosing(stream.turns(connection, lambda: own_s)) as turns:  # type: ignore[type-var]
        waiting = asyncio.ensure_future(anext(turns))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        own_s = 0.0
        stream.wake()
        async with asyncio.timeout(30):
            assert await waiting is None
        stream.put(1)
        stream.flush()
        assert await anext(turns) == Frame(1, 0, (1,))
