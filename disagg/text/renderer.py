"""Renders chats for a router, in a process that the router can kill (`render_process`). Owns that process.

    render() ──┐                  one task, tenants in turns                 socket
    render() ──┼── waiting: chats of tenants ────> _serve ── Ask ──> render_process, at most 256 MiB
    render() ──┘                                     └─ nothing after deadline_s: kill -9, and a new one

One chat is rendered at a time, so a tenant waits for one of each other's before its own. A process that has crashed, been killed,
or taken its memory costs the chat that it was rendering, no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from typing import Self

import msgspec
from msgspec import Raw, Struct

from disagg.scheduler.fairness import FairQueue
from disagg.telemetry.process import ended_from_outside
from disagg.text.chat import RENDER_S, TemplateSource
from disagg.text.render_messages import HEADER, Ask, Reply, frame, most_reply_bytes, unpacked
from disagg.text.render_process import SPARE_BYTES
from disagg.types.errors import ConfigError, DeadlineExceeded, DisaggError, InvalidRequest, Overloaded, Unavailable

PROGRAM = "disagg.text.render_process"
START_S = 30.0  # for Python to start and the template to be compiled; mostly 0.1 s
WARN_EVERY_S = 10.0
RETRY_AFTER_S = 1.0
_TEMPLATE = "the model's chat template"

log = logging.getLogger(__name__)


class RenderBounds(Struct, frozen=True):
    """deadline_s: of one rendering. wait_s: of a chat, until it is rendered. max_waiting: chats that wait for their turn."""

    deadline_s: float = RENDER_S
    wait_s: float = 600.0
    max_waiting: int = 1024


class Renderer:
    """Made by `start`, from the main thread: its process dies with the thread that starts it. `close` it."""

    def __init__(self, source: TemplateSource, bounds: RenderBounds) -> None:
        self._source = source
        self._bounds = bounds
        self._child: _Child | None = None
        self._numbers = itertools.count(1)
        self._waiting: FairQueue[_Chat] = FairQueue()
        self._wake = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._warned_s = -WARN_EVERY_S
        self._unsaid = 0

    @classmethod
    async def start(cls, source: TemplateSource, bounds: RenderBounds | None = None) -> Self:
        """Compiles the template. Raises ConfigError where it cannot be compiled, DisaggError where somebody else ended the
        process that was to do it."""
        renderer = cls(source, bounds or RenderBounds())
        try:
            renderer._child = await _Child.start(source)
        except _Killed as error:
            raise DisaggError(str(error)) from error
        except _NoChild as error:
            raise ConfigError(str(error)) from error
        renderer._serving = asyncio.create_task(renderer._serve(), name="renderer")
        return renderer

    @property
    def pid(self) -> int | None:
        """Of the process that renders, while there is one."""
        return None if self._child is None else self._child.process.pid

    async def render(
        self, messages: bytes, max_chars: int, tenant: str = "", *, add_generation_prompt: bool = True
    ) -> str:
        """messages: as `render_messages.packed` writes them. The text has at most max_chars. tenant: who asks.

        Raises InvalidRequest, with the template's own words where it refuses the messages; Overloaded, DeadlineExceeded
        or Unavailable where it does not come to that.
        """
        if self._serving is None or self._serving.done():
            raise Unavailable("the router is shutting down")
        self._make_room(tenant)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        chat = _Chat(Ask(Raw(messages), add_generation_prompt, max_chars), done)
        self._waiting.append(tenant, chat, 1.0)  # whatever its size: how long it takes, nobody knows
        self._wake.set()
        try:
            async with asyncio.timeout(self._bounds.wait_s):
                return await done
        except TimeoutError:
            raise DeadlineExceeded(f"the chat waited {self._bounds.wait_s:g} s to be rendered") from None
        finally:
            self._waiting.discard(chat)
            del (
                done,
                chat,
                messages,
            )  # an error has this frame, and `done` the error: a circle that would keep the messages

    def _make_room(self, tenant: str) -> None:
        """For one more; where there is none, the youngest of whoever has most goes. Raises Overloaded."""
        if len(self._waiting) < self._bounds.max_waiting:
            return
        full = Overloaded(f"{len(self._waiting)} chats wait to be rendered, which is the most", RETRY_AFTER_S)
        displaced = self._waiting.displaced_by(tenant)
        if displaced is None:
            raise full
        self._waiting.remove(displaced)
        displaced.fail(full)

    async def close(self) -> None:
        """Ends the process, and whatever waits for it with Unavailable. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for chat in self._waiting:
            chat.fail(Unavailable("the router is shutting down"))
        await self._drop()

    async def _serve(self) -> None:
        while True:
            await self._wake.wait()
            if not self._waiting:
                self._wake.clear()
                continue
            chat = next(iter(self._waiting))
            self._waiting.take(chat)
            try:
                text = await self._rendered(next(self._numbers), chat.ask)
            except asyncio.CancelledError:
                chat.fail(Unavailable("the router is shutting down"))
                raise
            except DisaggError as error:
                chat.fail(error)
            except Exception as error:  # noqa: BLE001  raised again by whoever waits; the others must not wait for ever
                await self._drop()
                chat.fail(error)
            else:
                chat.succeed(text)
                del text
            del chat

    async def _rendered(self, number: int, ask: Ask) -> str:
        child = await self._living()
        try:
            async with asyncio.timeout(self._bounds.deadline_s):
                reply = await child.ask(number, ask, most_reply_bytes(ask.max_chars))
        except TimeoutError:
            reply = Reply("late")
            await self._drop()
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._drop()
            raise self._ended(f"and the process that ran it ended: {child.how_it_ended() or error}") from error
        if reply.outcome == "late":
            raise self._ended(f"it took more than {self._bounds.deadline_s:g} s")
        if reply.outcome == "memory":
            await self._drop()  # what it could not have may be in pieces that it still holds
            raise self._ended(f"it took more than {SPARE_BYTES >> 20} MiB of memory")
        if reply.outcome == "refused":
            raise InvalidRequest(reply.text, reply.param)
        return reply.text

    async def _living(self) -> _Child:
        """The process, or a new one where it has ended. Raises Unavailable where none can be had."""
        if self._child is not None and self._child.process.poll() is not None:
            self._warn(f"the process that renders chats has ended: {self._child.how_it_ended()}; a new one is started")
            await self._drop()
        if self._child is None:
            try:
                self._child = await _Child.start(self._source)
            except _NoChild as error:
                self._warn(str(error))
                raise Unavailable(f"{_TEMPLATE} cannot be run now") from error
        return self._child

    async def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    def _ended(self, why: str) -> InvalidRequest:
        self._warn(f"{_TEMPLATE} was ended while it rendered a request's messages: {why}")
        return InvalidRequest(f"{_TEMPLATE} cannot render these messages: {why}", "messages")

    def _warn(self, what: str) -> None:
        """Every WARN_EVERY_S at most: requests may bring it about."""
        now_s = time.monotonic()
        if now_s - self._warned_s < WARN_EVERY_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} such warnings were left out before)" if self._unsaid else ""
        self._warned_s, self._unsaid = now_s, 0
        log.warning("%s%s", what, more)


class _Chat:
    """One that waits, or is being rendered."""

    def __init__(self, ask: Ask, done: asyncio.Future[str]) -> None:
        self.ask = ask
        self._done = done

    def succeed(self, text: str) -> None:
        if not self._done.done():  # else its request has gone
            self._done.set_result(text)

    def fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)


def _spawned() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and the socket to it. By `subprocess`, which starts it without copying this process first."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            argv = [sys.executable, "-m", PROGRAM, str(os.getpid())]
            process = subprocess.Popen(argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours


class _NoChild(Exception):
    """Says why there is no process that could render."""


class _Killed(_NoChild):
    """By others, which says nothing of the template."""


class _Child:
    """A process that has compiled the template. Whoever gives it up ends it: after a lost answer it is not asked again."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, source: TemplateSource) -> Self:
        """Raises _NoChild."""
        try:
            process, ours = _spawned()
        except OSError as error:
            raise _NoChild(f"the process that renders chats cannot be started: {error.strerror}") from error
        child = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(START_S):
                reply = await child.ask(0, source, most_reply_bytes(0))
        except BaseException as error:
            killed = isinstance(error, OSError | EOFError) and await child.was_killed()
            await child.end()
            if killed:
                raise _Killed(
                    f"whether {_TEMPLATE} can be compiled is not known: the process {child.how_it_ended()}"
                ) from error
            match error:
                case TimeoutError():
                    raise _NoChild(f"{_TEMPLATE} cannot be compiled: it takes more than {START_S:g} s") from error
                case UnicodeError():
                    raise _NoChild(f"{_TEMPLATE} cannot be compiled: it has halves of surrogate pairs") from error
                case OSError() | EOFError() | msgspec.MsgspecError():
                    raise _NoChild(
                        f"{_TEMPLATE} cannot be compiled: the process that does it ended: {child.how_it_ended()}"
                    ) from error
            raise
        if reply.outcome != "text":
            await child.end()
            raise _NoChild(reply.text)
        return child

    async def ask(self, number: int, what: Struct, most_bytes: int) -> Reply:
        """Raises OSError, EOFError or MsgspecError where the process has ended or does not make sense."""
        self._writer.write(frame(number, what))
        await self._writer.drain()
        answered, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if answered != number or size > most_bytes:
            raise msgspec.DecodeError(f"a reply to {answered} of {size} bytes, where one to {number} was to come")
        return unpacked(await self._reader.readexactly(size), Reply)

    async def end(self) -> None:
        """kill -9. Its memory is given back by the kernel, for which nothing here waits longer than a second."""
        self.process.kill()
        self._writer.transport.abort()
        waiting = asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        await asyncio.wait((waiting,), timeout=1.0)

    async def was_killed(self) -> bool:
        """By others, after it does not answer any more. Its end is waited for no longer than a second."""
        try:
            status = await asyncio.to_thread(self.process.wait, 1.0)
        except subprocess.TimeoutExpired:
            return False
        return ended_from_outside(status)

    def how_it_ended(self) -> str:
        status = self.process.returncode
        if status is None:
            return "for a reason unknown"
        return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
