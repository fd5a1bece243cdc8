"""An OpenAI endpoint that answers with what a test says, when it says so: plain sockets on a thread of its own.

A test gives a function from (number of the request, its body) to a row of (seconds before, bytes) that are sent as chunks of
an HTTP answer; `RAW` bytes go out as they are. It answers what `bench serve` tries out before a load without being asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

HANG = "hang"  # in place of bytes: nothing more comes
CLOSE = "close"  # the connection is closed there
Step = tuple[float, bytes | str]
Script = Callable[[int, dict[str, Any]], list[Step]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = "x", finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def answer(body: dict[str, Any], ttft_s: float = 0.0, itl_s: float = 0.0, per_chunk: int = 1) -> list[Step]:
    """As a server streams it, to its end."""
    count = -(-body["max_tokens"] // per_chunk)
    steps = [(ttft_s if n == 0 else itl_s, token(finish="length" if n == count - 1 else None)) for n in range(count)]
    return [*steps, (0.0, usage(len(body["prompt"]), body["max_tokens"])), (0.0, b"data: [DONE]\n\n")]


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    head = f"HTTP/1.1 {status} No\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class FakeEndpoint:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.bodies: list[dict[str, Any]] = []  # of the load, in the order in which they came
        self.heads: list[bytes] = []
        self.url = ""
        self.probes = True  # what is tried out before a load is answered here; else by the script, as all the rest

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET /v1/models "):
            body = b'{"data": [{"id": "fake"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return True
        length = sum(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        content = await reader.readexactly(length)
        if not head.startswith(b"POST /v1/"):  # whatever else a client would like to know
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return True
        body = json.loads(content)
        probe = self.probes and body["max_tokens"] == 2 and not self.bodies
        if not probe:
            self.bodies.append(body)
        steps = answer(body) if probe else self._script(len(self.bodies) - 1, body)
        begun = False
        for wait_s, part in steps:
            await asyncio.sleep(wait_s)
            if part == CLOSE:
                return False
            if part == HANG:
                await asyncio.sleep(3600)
            assert isinstance(part, bytes)
            if not begun and part.startswith(b"HTTP/"):
                writer.write(part)
                return True
            writer.write((b"" if begun else HEAD) + b"%x\r\n%s\r\n" % (len(part), part))
            begun = True
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True


@contextlib.contextmanager
def fake_endpoint(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint(script)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake._serve, "127.0.0.1", 0, ssl=tls))
    fake.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:

        def end() -> None:
            server.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(end)
        thread.join(10)
        loop.close()
