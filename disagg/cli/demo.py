"""`disagg demo`: a cluster from nothing to answers and back, with every step said and bounded in time.

Starts `disagg up` as a child on free ports, asks one question over gRPC and one over the OpenAI HTTP API, draws where
the time of each went, and lets the cluster drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console

from disagg.cli.generate import GenerateOptions, ask
from disagg.cli.terminal import for_terminal, note
from disagg.cli.timeline import print_timeline
from disagg.messages.legs import TimelineEvent
from disagg.types.errors import DisaggError

READY_S = 300.0  # converting and loading on a slow machine
ANSWER_S = 180.0
DRAIN_S = 90.0
MAX_TOKENS = 60
GRPC_QUESTION = "What is the capital of France? Answer in one sentence."
HTTP_QUESTION = "Name three uses of a paper clip."


def run_demo(model: str | None) -> int:
    """Runs the demo; returns the exit code. Raises DisaggError saying which step failed."""
    return asyncio.run(_demo(model))


async def _demo(model: str | None) -> int:
    console = Console()
    async with _cluster(model) as (process, http_url, grpc_address):
        with _step("asking over gRPC", ANSWER_S):
            console.print(f"\n[bold]gRPC[/] {GRPC_QUESTION}")
            async with asyncio.timeout(ANSWER_S):
                options = GenerateOptions(address=grpc_address, max_tokens=MAX_TOKENS, temperature=0.0)
                answer = await ask(GRPC_QUESTION, options, echo=True)
            print_timeline(console, answer.timeline, f"request {answer.request_id}")
        with _step("asking over HTTP", ANSWER_S):
            console.print(f"\n[bold]OpenAI HTTP[/] {HTTP_QUESTION}")
            async with asyncio.timeout(ANSWER_S):
                request_id, events = await _ask_http(http_url)
            print_timeline(console, events, f"request {request_id}")
        with _step("draining", DRAIN_S):
            note("\ndraining the cluster")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DRAIN_S):
                status = await process.wait()
        if status != 0:
            raise DisaggError(f"`disagg up` ended with status {status}")
    console.print("\n[bold]done:[/] two requests answered, everything shut down")
    return 0


@contextlib.contextmanager
def _step(what: str, seconds: float) -> Iterator[None]:
    """Says which step ran out of time."""
    try:
        yield
    except TimeoutError as error:
        raise DisaggError(f"demo: {what} took longer than {seconds:g} s") from error


@contextlib.asynccontextmanager
async def _cluster(model: str | None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """`disagg up`, ready: (process, HTTP base URL, gRPC address). Killed at the end if it still runs."""
    argv = [sys.executable, "-m", "disagg.cli", "up", "--http-port", "0", "--grpc-port", "0"]
    argv += ["--parent-pid", str(os.getpid())]
    argv += ["--model", model] if model else []
    note("starting a cluster: 1 router, 1 prefill server, 1 decode server")
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        with _step("waiting for `ready`", READY_S):
            async with asyncio.timeout(READY_S):
                http_url, grpc_address = await _ready(process.stdout)
        note(f"ready: {http_url}, gRPC {grpc_address}")
        yield process, http_url, grpc_address
    finally:
        if process.returncode is None:
            process.kill()  # its children die with it
            await process.wait()


async def _ready(stdout: asyncio.StreamReader) -> tuple[str, str]:
    async for raw in stdout:
        line = raw.decode("utf-8", "replace").strip()
        if line.startswith("ready"):
            found = dict(pair.split("=", 1) for pair in line.split()[1:])
            return found["http"], found["grpc"]
    raise DisaggError("`disagg up` ended before it was ready; what it said is above")


async def _ask_http(base_url: str) -> tuple[str, tuple[TimelineEvent, ...]]:
    """One streamed chat completion, printed as it comes; its id and timeline."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": HTTP_QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    request_id = ""
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_S, trust_env=False) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        body["model"] = models["data"][0]["id"]
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                raise DisaggError(f"demo: the HTTP API answered {answer.status_code}: {text}")
            async for event in sse_events(answer.aiter_lines()):
                if "error" in event:
                    raise DisaggError(f"demo: the answer broke off: {event['error']}")
                request_id = str(event.get("id", request_id))
                for choice in event.get("choices", []):
                    print(for_terminal(choice["delta"].get("content") or "", sys.stdout), end="", flush=True)
        print(flush=True)
        reply = await client.get("/debug/timeline", params={"request_id": request_id})
        events = msgspec.convert(reply.raise_for_status().json()["events"], tuple[TimelineEvent, ...])
    return request_id, events


async def sse_events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]`. Raises DisaggError if it ends before."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise DisaggError("demo: the stream ended without [DONE]")
