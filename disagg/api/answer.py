"""Answers one call: starts its requests, writes their tokens as one JSON reply or as a stream of events.

Everything happens inside one coroutine that ends when the client goes away, so that whichever way it ends (done, error,
disconnect, shutdown), the router's iterators are closed, which aborts what still runs. A stream's HTTP status is sent only
once every request has been accepted and the first token is there; an error after that becomes an event of the stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.bodies import Call
from disagg.api.connections import WRITER, Writer
from disagg.api.errors import INTERNAL, fault_of
from disagg.api.events import Events, error_event
from disagg.api.ports import RouterPort
from disagg.api.replies import ChatWriter, CompletionWriter, usage_reply
from disagg.api.whole import PART_BYTES, WholeAnswer, sized
from disagg.auth.quotas import Use
from disagg.router.budget import Held
from disagg.router.mailbox import Taker
from disagg.router.requests import ChoiceDelta, Finished, GenerateRequest, Started, Update, Usage
from disagg.types.errors import DisaggError, Unavailable

T = TypeVar("T")

_CLOSING = "the router is shutting down"
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would otherwise collect tokens before it passes them on
}


class Answer(Response):
    """The response to one completion or chat call. An ASGI app: all the work happens when it is called."""

    def __init__(self, router: RouterPort, call: Call, fingerprint: str, held: Held, use: Use, most_bytes: int) -> None:
        """held: what the call holds of the router's memory; use: of its tenant's limits. Both end with the answer.

        most_bytes: of an answer that is not streamed.
        """
        super().__init__()
        self._router = router
        self._call = _named(sized(call, most_bytes))
        self._fingerprint = fingerprint
        self._begun = False  # the status has been sent
        self._held = held
        self._use = use
        self._most_bytes = most_bytes
        self._at_once: Taker | None = None  # once what comes first has been written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises DisaggError if a request fails before anything was sent."""
        try:
            await until_gone(receive, self._run(send, scope.get(WRITER)))
        except asyncio.CancelledError:  # the server ends; whoever was being answered is told
            if self._begun:
                raise
            closing = Unavailable(_CLOSING)
            self._use.end(closing)
            raise closing from None
        except DisaggError as error:
            self._use.end(error)
            raise
        finally:
            self._use.end()
            self._held.release()

    def _take(self, delta: ChoiceDelta) -> bool:
        return self._at_once is not None and self._at_once(delta)

    async def _run(self, send: Send, connection: Writer | None) -> None:
        call = self._call
        taker = self._take if call.stream and connection is not None else None
        async with aclosing(merged(self._router, call.requests, self._use, taker)) as updates:
            started = await _all_started(updates, len(call.requests))
            writer = (ChatWriter if call.kind == "chat" else CompletionWriter)(call, started, self._fingerprint)
            if call.stream:
                await self._stream(send, connection, Events(call, writer, started), updates)
            else:
                await self._whole(send, writer, started, updates)

    async def _whole(
        self,
        send: Send,
        writer: ChatWriter | CompletionWriter,
        started: list[Started],
        updates: AsyncGenerator[tuple[int, Update], None],
    ) -> None:
        whole = WholeAnswer(self._call, len(started), self._most_bytes)
        usages: dict[int, Usage] = {}
        async for prompt, update in updates:
            if isinstance(update, ChoiceDelta):
                self._held.add(whole.add(prompt, update))
            elif isinstance(update, Finished):
                usages[prompt] = update.usage
        _assert_finished(usages, len(started))
        parts = []
        for part in whole.parts(writer, usage_reply(usages.values())):
            parts.append(part)
            if len(part) > PART_BYTES:
                await asyncio.sleep(0)
        headers = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
        self._begun = True
        await _send_start(send, started, headers)
        last = b""
        for body in in_parts(parts):
            if last:
                await send({"type": "http.response.body", "body": last, "more_body": True})
            last = body
        await _send_last(send, last)

    async def _stream(
        self,
        send: Send,
        connection: Writer | None,
        events: Events,
        updates: AsyncGenerator[tuple[int, Update], None],
    ) -> None:
        # Waiting for the first token makes a plain HTTP status of what goes wrong before it: clients retry those.
        first = await anext(updates, None)
        self._begun = True
        await _send_start(send, events.started, _EVENT_HEADERS)
        try:
            if opening := events.opening():
                await _send_part(send, opening)
            if connection is not None:
                self._at_once = partial(_write_at_once, connection, events)
            await self._events(send, events, first, updates)
        except DisaggError as error:
            self._use.end(error)
            await _send_last(send, error_event(fault_of(error)))
        except asyncio.CancelledError:  # the client is gone, and nothing is sent; or the server ends
            await _send_last(send, error_event(fault_of(Unavailable(_CLOSING))))
            raise
        except Exception:
            await _send_last(send, error_event(INTERNAL))
            raise

    async def _events(
        self,
        send: Send,
        events: Events,
        first: tuple[int, Update] | None,
        updates: AsyncGenerator[tuple[int, Update], None],
    ) -> None:
        usages: dict[int, Usage] = {}
        came = first
        while came is not None:
            prompt, update = came
            if isinstance(update, Finished):
                usages[prompt] = update.usage
            elif isinstance(update, ChoiceDelta) and (body := events.of(prompt, update)):
                await _send_part(send, body)
            came = await anext(updates, None)
        _assert_finished(usages, len(events.started))
        await _send_last(send, events.last(usages.values()))


def _named(call: Call) -> Call:
    """Its prompts, if there are several, are known to belong together."""
    if len(call.requests) == 1:
        return call
    name = secrets.token_hex(8)
    return replace(call, requests=tuple(replace(request, call=name) for request in call.requests))


# ---- the client


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Runs `work`, and cancels it when the client disconnects: None. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_start(send: Send, started: list[Started], headers: Mapping[str, str]) -> None:
    named = {**headers, "x-request-id": started[0].request_id}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


def in_parts(pieces: list[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of PART_BYTES or less: small pieces together, large ones cut."""
    together = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), PART_BYTES):
            cut = piece[at : at + PART_BYTES]
            if len(together) + len(cut) > PART_BYTES:
                yield bytes(together)
                together.clear()
            together += cut
    if together:
        yield bytes(together)


def _write_at_once(connection: Writer, events: Events, delta: ChoiceDelta) -> bool:
    """What is done with nearly all deltas of a single request: no task has to wake for it. Whatever is out of the ordinary is
    left to the task, errors too, which would end more than this answer here.
    """
    if not connection.ready:
        return False
    try:
        body = events.of(0, delta)
    except Exception:  # noqa: BLE001  the task meets it again
        return False
    if body:
        connection.write(body)
    return True


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


# ---- the router


async def merged(
    router: RouterPort, requests: tuple[GenerateRequest, ...], use: Use, taker: Taker | None
) -> AsyncGenerator[tuple[int, Update], None]:
    """The updates of several requests, each with its request's index. The first error ends all of them. taker: of a single one.

    First comes the Started of every request, then everything else, as it comes. All are read at the client's pace: what a
    slow client leaves waits with the router, which merges it and counts it.
    """
    if len(requests) == 1:
        async with aclosing(router.generate(requests[0], use, taker)) as updates:
            async for update in updates:
                yield 0, update
        return
    waiting: asyncio.Queue[tuple[int, Update | Exception | None]] = asyncio.Queue(maxsize=len(requests))
    all_started = asyncio.Event()

    async def read(index: int, request: GenerateRequest) -> None:
        """Ends in None, or in what it failed with."""
        try:
            async with aclosing(router.generate(request, use)) as updates:
                async for update in updates:
                    if not isinstance(update, Started):
                        await all_started.wait()
                    await waiting.put((index, update))
        except Exception as error:  # noqa: BLE001  raised again by whoever reads
            await waiting.put((index, error))
        else:
            await waiting.put((index, None))

    readers = [asyncio.create_task(read(i, request)) for i, request in enumerate(requests)]
    unstarted = reading = len(readers)
    try:
        while reading:
            index, item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                reading -= 1
                continue
            if isinstance(item, Started):
                unstarted -= 1
                if unstarted == 0:
                    all_started.set()
            yield index, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _all_started(updates: AsyncGenerator[tuple[int, Update], None], count: int) -> list[Started]:
    started: dict[int, Started] = {}
    async for prompt, update in updates:
        assert isinstance(update, Started), f"the router began request {prompt} with {type(update).__name__}"
        started[prompt] = update
        if len(started) == count:
            break
    assert len(started) == count, "the router ended a request that it neither accepted nor refused"
    return [started[prompt] for prompt in range(count)]


def _assert_finished(usages: Mapping[int, Usage], count: int) -> None:
    assert len(usages) == count, "the router ended a request in neither tokens nor an error"
