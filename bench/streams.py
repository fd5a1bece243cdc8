"""Requests to a cluster as clients make them: streams over HTTP, and when each token came.

`ask` is one request on an event loop. `Crowd` spreads many over processes, so that the client is not what is measured: one
process of Python reads some ten thousand events a second, and 256 sequences have twice as many.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

STREAMS_PER_PROCESS = 32


@dataclass
class Stream:
    """One request. Times of its arrival, of each token (by choice), and of its end; of one clock for all processes."""

    arrived_s: float
    heard_s: dict[int, list[float]] = field(default_factory=dict)
    ended_s: float = 0.0
    status: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.heard_s.values()))

    @property
    def first_s(self) -> float:
        return min((times[0] for times in self.heard_s.values()), default=float("inf"))

    @property
    def silence_s(self) -> float:
        """The longest, from one event with tokens to the next, of the request as its client sees it."""
        times = sorted(itertools.chain(*self.heard_s.values()))
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    @property
    def choice_silence_s(self) -> float:
        """The longest within one choice."""
        gaps = (b - a for times in self.heard_s.values() for a, b in itertools.pairwise(times))
        return max(gaps, default=0.0)


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=900, limits=limits, trust_env=False)


async def ask(http: httpx.AsyncClient, url: str, body: Mapping[str, Any], key: str = "one") -> Stream:
    """body: of a streamed completion that returns token ids. key: whose request it is."""
    stream = Stream(time.perf_counter())
    headers = {"authorization": f"Bearer {key}"}
    async with http.stream("POST", f"{url}/v1/completions", json=dict(body), headers=headers) as reply:
        stream.status = reply.status_code
        async for line in lines(reply):
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                for choice in json.loads(line.removeprefix(b"data: ")).get("choices", ()):
                    if choice.get("token_ids"):
                        stream.heard_s.setdefault(choice["index"], []).extend([now_s] * len(choice["token_ids"]))
    stream.ended_s = time.perf_counter()
    return stream


async def lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Ended by a line feed and nothing else: httpx's own lines end at U+2028, too, which an older version sends as it is."""
    rest = b""
    async for part in reply.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line


def completion(model: str, prompt: Sequence[int], outputs: int) -> dict[str, Any]:
    """A greedy one that is streamed, to its last token."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


class Crowd:
    """Processes of clients, which are started once."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Crowd:
        list(self._pool.map(time.sleep, [0.5] * self._processes))  # all of them have started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def ask(
        self, url: str, bodies: Sequence[Mapping[str, Any]], per_process: int = STREAMS_PER_PROCESS
    ) -> list[Stream]:
        """All at once. Raises AssertionError unless each is answered."""
        processes = min(self._processes, -(-len(bodies) // per_process))
        shares = [bodies[index::processes] for index in range(processes)]
        streams = list(itertools.chain(*self._pool.map(_ask_all, [url] * processes, shares)))
        refused = [stream.status for stream in streams if stream.status != 200 or not stream.heard_s]
        assert not refused, f"answers with status {refused}"
        return streams


def _ask_all(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Stream]:
    async def all_of_them() -> list[Stream]:
        async with client() as http:
            return await asyncio.gather(*(ask(http, url, body) for body in bodies))

    return asyncio.run(all_of_them())
