"""Two fake servers in a process of their own, and a client that reads one stream after another through a router.

`python -m tests.router.steady_cluster` is told what to do on stdin, a JSON line each, and answers each with one: it measures,
away from whoever disturbs the router, how late tokens are that the router passes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from disagg.messages.legs import StartLeg
from disagg.types.ids import FinishReason, Role
from tests.router.fake_server import FakeServer, first_index, prefill

STEADY = "steady"  # cache salt of the requests that are watched
STEP_S = 0.02
MAX_TOKENS = 200
OTHERS_TOKENS = 4  # so many for everybody else: then a stop, whatever was asked


class Steady:
    """The servers, and what the watched streams have shown since `reset`."""

    def __init__(self) -> None:
        self.servers = {
            "p0": FakeServer("p0", Role.PREFILL, prefill, max_model_len=256),
            "d0": FakeServer("d0", Role.DECODE, self._decode, max_model_len=256),
        }
        self._sent_s: dict[tuple[str, int], float] = {}
        self.tokens = 0
        self.late_s: list[float] = []  # of each token
        self.worst_lag_s = 0.0  # of this process: more is the machine's fault, not the router's

    def reset(self) -> None:
        self.tokens, self.worst_lag_s = 0, 0.0
        self.late_s.clear()

    async def _decode(self, server: FakeServer, leg: StartLeg) -> None:
        loop = asyncio.get_running_loop()
        watched = leg.cache_salt == STEADY
        first = first_index(leg)
        stop = leg.params.max_tokens if watched else min(leg.params.max_tokens, first + OTHERS_TOKENS)
        for index in range(first, stop):
            if watched:
                await asyncio.sleep(STEP_S)
                self._sent_s[leg.key.request_id, index] = loop.time()
            ended = FinishReason.LENGTH if stop == leg.params.max_tokens else FinishReason.STOP
            finish = ended if index + 1 == stop else None
            server.say(*(server.tokens(leg, choice, index, index + 1, finish) for choice in leg.choices))
        server.say(server.end(leg))

    async def watch(self, host: str, port: int) -> None:
        while True:
            await self._read_one(host, port)
            self._sent_s.clear()

    async def _read_one(self, host: str, port: int) -> None:
        fields = {"model": "tiny", "prompt": "hi", "max_tokens": MAX_TOKENS, "stream": True, "cache_salt": STEADY}
        body = json.dumps(fields).encode()
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        index = 0
        while line := await reader.readline():
            now_s = asyncio.get_running_loop().time()
            if not line.startswith(b"data: {"):
                continue
            said = json.loads(line[6:])
            request_id = said["id"].removeprefix("cmpl-")
            for _ in said["choices"][0]["text"]:
                if (sent_s := self._sent_s.get((request_id, index))) is not None:
                    self.tokens += 1
                    self.late_s.append(now_s - sent_s)
                index += 1
        writer.close()
        assert index == MAX_TOKENS, f"a watched stream ended after {index} tokens"

    async def measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(STEP_S)
            self.worst_lag_s = max(self.worst_lag_s, loop.time() - before_s - STEP_S)


async def main() -> None:
    steady = Steady()
    for server in steady.servers.values():
        await server.start()
    print(json.dumps({name: server.port for name, server in steady.servers.items()}), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks = [asyncio.create_task(steady.measure_lag())]
    while line := await lines.readline():
        said: dict[str, Any] = json.loads(line)
        if "watch" in said:
            tasks.append(asyncio.create_task(steady.watch(*said["watch"])))
            answer: dict[str, Any] = {}
        else:
            watching = [task.exception() for task in tasks if task.done()]
            answer = {
                "tokens": steady.tokens,
                "worst_late_s": max(steady.late_s, default=0.0),
                "worst_lag_s": steady.worst_lag_s,
                "failed": [repr(error) for error in watching],
            }
            steady.reset()
        print(json.dumps(answer), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in steady.servers.values():
        await server.kill()


if __name__ == "__main__":
    asyncio.run(main())
