"""Clients of a soak: some ask and compare, the others do what a service on an open port has to bear.

Each is a coroutine that runs until it is told to stop, and counts what it saw. Only `Asker` judges text.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from tests.cluster import reference

ANSWER_S = 300.0
REFUSED = {400, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 503}  # what abuse may be answered with


class Soak:
    """What all clients share: where the service is, when to stop, and what was seen."""

    def __init__(self, http: str, model: str) -> None:
        self.http = http
        self.model = model
        parts = urlsplit(http)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.stop = asyncio.Event()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def rest(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return

    async def keep(self, step: Callable[[], object], pause_s: float) -> None:
        """Does `step` again and again. What the network says to an abuser is no failure; what an asker gets may be."""
        while not self.stop.is_set():
            try:
                await step()  # type: ignore[misc]
            except (OSError, httpx.TransportError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.seen[f"{getattr(step, '__name__', 'asker')}: {type(error).__name__}"] += 1
            await self.rest(pause_s)

    def body(self, **fields: object) -> dict[str, object]:
        return {"model": self.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}


class Asker:
    """Asks what `transformers` has answered, streamed or whole, cached or not, and compares every token."""

    def __init__(self, soak: Soak, answers: Sequence[reference.Answer], seed: int) -> None:
        self.soak, self.answers, self.rng = soak, answers, random.Random(seed)
        self.client = httpx.AsyncClient(timeout=ANSWER_S)

    async def ask(self) -> None:
        answer = self.rng.choice(self.answers)
        body = self.soak.body(prompt=list(answer.prompt), max_tokens=len(answer.outputs))
        if self.rng.random() < 0.5:
            body["cache_salt"] = str(self.rng.random())  # nothing of it is cached
        got = await (self._streamed(body) if self.rng.random() < 0.5 else self._whole(body))
        if got is None:
            return
        if len(got) != len(answer.outputs):
            self.soak.wrong.append(f"{len(got)} tokens of {len(answer.outputs)}")
            return
        _, ties, wrong = reference.compare(answer, got)
        self.soak.seen["answers compared"] += 1
        self.soak.seen["tokens compared"] += len(got)
        self.soak.seen["ties"] += ties
        if wrong:
            self.soak.wrong.append(wrong)

    async def _whole(self, body: dict[str, object]) -> list[int] | None:
        reply = await self.client.post(f"{self.soak.http}/v1/completions", json=body)
        if reply.status_code != 200:
            self.soak.seen[f"asker refused: {reply.status_code}"] += 1
            return None
        return list(reply.json()["choices"][0]["token_ids"])

    async def _streamed(self, body: dict[str, object]) -> list[int] | None:
        ids: list[int] = []
        done = False
        async with self.client.stream(
            "POST", f"{self.soak.http}/v1/completions", json={**body, "stream": True}
        ) as reply:
            if reply.status_code != 200:
                self.soak.seen[f"asker refused: {reply.status_code}"] += 1
                return None
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.soak.seen[f"asker's stream ended: {event['error'].get('type')}"] += 1
                        return None
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
        if not done:
            self.soak.seen["asker's stream was cut"] += 1
            return None
        return ids


class Abuser:
    """One kind of abuse per method; all bounded, none of them waits without a deadline."""

    def __init__(self, soak: Soak, seed: int) -> None:
        self.soak, self.rng = soak, random.Random(seed)

    async def leaves(self) -> None:
        """Goes away in the middle of a stream."""
        prompt = [self.rng.randrange(3, 40_000) for _ in range(self.rng.randrange(1, 300))]
        body = self.soak.body(prompt=prompt, max_tokens=400, stream=True, n=self.rng.choice((1, 1, 4)))
        async with (
            httpx.AsyncClient(timeout=ANSWER_S) as client,
            client.stream("POST", f"{self.soak.http}/v1/completions", json=body) as reply,
        ):
            left = self.rng.randrange(0, 12)
            async for _ in reply.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.soak.seen["left"] += 1

    async def oversize(self) -> None:
        """Sends what no limit allows, of every kind."""
        kind = self.rng.randrange(5)
        body = (
            self.soak.body(prompt="word " * 800_000, max_tokens=4),
            self.soak.body(prompt=[5] * 1_000_000, max_tokens=4),
            self.soak.body(prompt="hello", max_tokens=4, stop=["x" * 4_000_000]),
            self.soak.body(prompt=["hello"] * 100_000, max_tokens=4),
            {"model": "m" * 6_000_000, "prompt": "hello"},
        )[kind]
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            reply = await client.post(f"{self.soak.http}/v1/completions", json=body)
        self.soak.seen["oversize refused"] += 1
        if reply.status_code not in REFUSED:
            self.soak.wrong.append(f"oversize of kind {kind} was answered with {reply.status_code}")

    async def reads_slowly(self) -> None:
        """Takes a few bytes at a time, and leaves before the end or stays to it."""
        reader, writer = await asyncio.open_connection(self.soak.host, self.soak.port, limit=1024)
        try:
            await self._post(writer, self.soak.body(prompt="Count to one hundred:", max_tokens=120, stream=True))
            for _ in range(self.rng.randrange(5, 60)):
                if not await asyncio.wait_for(reader.read(64), ANSWER_S) or self.soak.stop.is_set():
                    break
                await self.soak.rest(0.2)
            self.soak.seen["read slowly"] += 1
        finally:
            writer.close()

    async def writes_slowly(self) -> None:
        """Dribbles its headers, or its body, and never finishes."""
        _, writer = await asyncio.open_connection(self.soak.host, self.soak.port)
        try:
            text = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            text += b"content-length: 1000\r\n\r\n{" if self.rng.random() < 0.5 else b"x-filler: "
            for byte in text + b" " * 30:
                writer.write(bytes([byte]))
                await asyncio.wait_for(writer.drain(), ANSWER_S)
                await self.soak.rest(0.1)
                if self.soak.stop.is_set():
                    break
            self.soak.seen["wrote slowly"] += 1
        finally:
            writer.close()

    async def floods(self) -> None:
        """Opens many connections at once, says nothing or nonsense, and closes them."""
        opened = await asyncio.gather(
            *(asyncio.open_connection(self.soak.host, self.soak.port) for _ in range(200)), return_exceptions=True
        )
        writers = [each[1] for each in opened if not isinstance(each, BaseException)]
        for number, writer in enumerate(writers):
            if number % 2:
                writer.write(b"\x16\x03\x01 nonsense \r\n\r\n")
        await self.soak.rest(1.0)
        for writer in writers:
            writer.close()
        self.soak.seen["connections flooded"] += len(writers)

    async def _post(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + data)
        await asyncio.wait_for(writer.drain(), ANSWER_S)
