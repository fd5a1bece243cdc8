"""What the router costs by itself: `python -m bench.router`. Servers answer at once and compute nothing; a few minutes.

One router process, or `--routers` that share a port; fake servers and clients in processes of their own. Servers speak
`Server.Attach` as real ones do:

    paced     every stream gets a token at each multiple of PERIOD_S of the machine's clock, and its letter says at which, so a
              client knows when it was due: what lies between is added, with the fake's and the client's own lateness in it;
              of all tokens, and of those after the last stream's first one, while none begins
    no router the same of a fake that speaks HTTP itself, with the same clients: what of that lateness is not the router's
    flood     every stream gets tokens as fast as the fake makes them: tokens a second, and a second of the router's processor
    short     answers of one token, one after the other by so many clients: requests a second, likewise
    idle      streams that begin and then say nothing: memory of each; then the router is killed and started again

On a machine that others use, what counts are the rates by the routers' own processor time. How several routers scale needs a
processor for each of them, of the fakes (two for each of `--pairs`) and of the `--clients`. `--peer COMMAND` measures another
router in the same way, with fake OpenAI workers over HTTP: in COMMAND {port} is where it is to listen, {one} and {two} are its
workers' URLs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from msgspec import Struct

from disagg.messages.legs import LegTokens, LoadReport, ServerState, StartLeg
from disagg.types.ids import FinishReason, Role
from tests.router.fake_server import MODEL, TOKENIZER, FakeServer, first_index, write_model

PERIOD_S = 0.05
START_S = 120.0
RUN_S = 300.0
PROMPT = "abcdefgh"
LETTERS = 26
TOKENS = [TOKENIZER.encode(chr(ord("a") + n))[0] for n in range(LETTERS)]
PAGES = 1 << 20
PAUSE_S = 0.002  # between two floods of one fake, in which it reads
TEXT = re.compile(rb'"text":"([a-z]+)"')
SILENT, SHORT = 10**5, 1  # answers so long that they are idle after their first token; answers of one token


def raise_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


# ---- servers


class Ticker:
    """Gives every answer that is under way a token at each tick. period_s 0: as fast as it can."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._legs: list[tuple[StartLeg, int]] = []

    async def play(self, server: FakeServer, leg: StartLeg) -> None:
        if leg.params.max_tokens < SILENT:
            self._legs.append((leg, first_index(leg)))
        else:
            await asyncio.Event().wait()

    async def run(self) -> None:
        while True:
            flooding = any(leg.params.max_tokens > 256 for leg, _ in self._legs)
            now_s = time.perf_counter()
            await asyncio.sleep(PAUSE_S if flooding else PERIOD_S - now_s % PERIOD_S)
            token = TOKENS[int(time.perf_counter() / PERIOD_S) % LETTERS]
            said: list[Any] = []
            legs, self._legs = self._legs, []
            for leg, index in legs:
                finish = FinishReason.LENGTH if index + 1 == leg.params.max_tokens else None
                letter = token if index else TOKENS[0]  # the first one is what prefill has said
                said += [LegTokens(leg.key, choice, index, (letter,), (), finish) for choice in leg.choices]
                if finish is None:
                    self._legs.append((leg, index + 1))
                else:
                    said.append(self._server.end(leg))
            if said:
                self._server.say(*said)


async def prefill(server: FakeServer, leg: StartLeg) -> None:
    finish = FinishReason.LENGTH if leg.params.max_tokens == 1 else None
    first = first_index(leg)
    server.say(
        *(LegTokens(leg.key, choice, first, (TOKENS[0],), (), finish) for choice in leg.choices), server.end(leg)
    )


async def decode_short(server: FakeServer, leg: StartLeg) -> None:
    """Says the only token, too, as a decode server does: the router takes whichever comes first."""
    first = first_index(leg)
    tokens = (LegTokens(leg.key, choice, first, (TOKENS[0],), (), FinishReason.LENGTH) for choice in leg.choices)
    server.say(*tokens, server.end(leg))


def serve(name: str, role: Role, told: Connection) -> None:
    async def forever() -> None:
        load = LoadReport(ServerState.READY, 0, 0, 0, PAGES, 0, PAGES)
        sizes = {"max_model_len": 2 * SILENT, "max_tokens_in_pool": 1 << 40, "load": load}
        server = FakeServer(name, role, prefill, **sizes)
        ticker = Ticker(server)
        if role is Role.DECODE:

            async def play(server: FakeServer, leg: StartLeg) -> None:
                await (decode_short if leg.params.max_tokens == SHORT else ticker.play)(server, leg)

            server.script = play
        await server.start()
        told.send(server.port)
        await ticker.run()

    asyncio.run(forever())


async def openai_worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of a peer's worker: completions as SSE, and whatever else it asks is answered with OK."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if b"/v1/completions" not in head.split(b"\r\n")[0]:
                answer = json.dumps({"data": [{"id": MODEL}], "status": "ok", "model_path": MODEL}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
                    + answer
                )
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            most = body["max_tokens"]
            for index in range(most):
                if index:
                    now_s = time.perf_counter()
                    await asyncio.sleep(PAUSE_S if most > 256 else PERIOD_S - now_s % PERIOD_S)
                letter = ord("a") + int(time.perf_counter() / PERIOD_S) % LETTERS
                event = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"%c"}]}\n\n' % letter
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
    writer.close()


def serve_openai(told: Connection) -> None:
    async def forever() -> None:
        raise_files()
        server = await asyncio.start_server(openai_worker, "127.0.0.1", 0, backlog=4096)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


# ---- clients


class Timed(NamedTuple):
    """at_s: of a clock that all processes share."""

    at_s: float
    seconds: float


async def one(port: int, outputs: int, late: list[Timed], until: str = "end") -> tuple[Timed, Any]:
    """(first token after so long, what is open). late: is told of each later token how late it is. until: "first" leaves the
    stream open."""
    body = json.dumps(
        {"model": MODEL, "prompt": PROMPT, "max_tokens": outputs, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked_s = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer one\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    first, rest = Timed(0.0, 0.0), b""
    while True:
        part = await reader.read(1 << 16)
        now_s = time.perf_counter()
        *events, rest = (rest + part).split(b"\n\n")
        letters = b"".join(found[1] for event in events if (found := TEXT.search(event)))
        if letters and not first.at_s:
            first, letters = Timed(now_s, now_s - asked_s), letters[1:]
            if until == "first":
                return first, (reader, writer)
        late.extend([Timed(now_s, late_by(letter, now_s)) for letter in letters])
        if not part or b"[DONE]" in part or any(b"[DONE]" in event for event in events):
            writer.close()
            return first, None


def late_by(letter: int, now_s: float) -> float:
    """Since the last tick that has this letter."""
    ticks = int(now_s / PERIOD_S)
    return now_s - (ticks - (ticks - (letter - ord("a"))) % LETTERS) * PERIOD_S


def crowd(port: int, streams: int, outputs: int, rounds: int) -> tuple[list[Timed], list[Timed]]:
    """(first tokens, how late later ones were) of so many at once, each of them so many after another."""
    raise_files()
    late: list[Timed] = []

    async def stream() -> list[Timed]:
        return [(await one(port, outputs, late))[0] for _ in range(rounds)]

    async def all_of_them() -> list[list[Timed]]:
        return await asyncio.gather(*(stream() for _ in range(streams)))

    return [each for some in asyncio.run(all_of_them()) for each in some], late


def hold(port: int, streams: int, told: Connection) -> None:
    """Begins so many streams and keeps them until it is told otherwise, or the router goes; says how many began."""
    raise_files()

    async def all_of_them() -> None:
        gate, held = asyncio.Semaphore(64), []

        async def begin() -> None:
            async with gate:
                try:
                    held.append((await one(port, SILENT, [], "first"))[1])
                except (OSError, AssertionError, asyncio.IncompleteReadError) as error:
                    causes[str(error)[:60]] += 1

        causes: Counter[str] = Counter()
        await asyncio.gather(*(begin() for _ in range(streams)))
        told.send((len(held), causes.most_common(2)))
        await asyncio.get_running_loop().run_in_executor(None, told.recv)

    asyncio.run(all_of_them())


# ---- processes


class Running(Struct):
    """Routers that are measured, behind one port. clients: processes that ask them."""

    processes: list[subprocess.Popen[bytes]]
    port: int
    clients: int

    def cpu_s(self) -> float:
        """Of all of them."""
        stats = (Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split() for each in self.processes)
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> int:
        """Of all of them."""
        lines = (line for each in self.processes for line in Path(f"/proc/{each.pid}/status").read_text().splitlines())
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    def kill(self) -> None:
        for each in self.processes:
            each.send_signal(signal.SIGKILL)
            each.wait()


def wait_for(done: Any, what: str) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(httpx.TransportError):
            if done():
                return
        time.sleep(0.1)
    sys.exit(f"{what} did not come within {START_S:g} s")


@contextlib.contextmanager
def fakes(targets: Sequence[tuple[Any, ...]]) -> Iterator[list[int]]:
    """The ports of fake servers. targets: (function, its arguments but the last one)."""
    spawn, processes, ports = multiprocessing.get_context("spawn"), [], []
    try:
        for function, *arguments in targets:
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=function, args=(*arguments, theirs), daemon=True))
            processes[-1].start()
            assert ours.poll(START_S), "a fake did not start"
            ports.append(ours.recv())
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]], port: int, own_ports: Sequence[int], clients: int, log: Path
) -> Iterator[Running]:
    """own_ports: where each of them says whether it is well."""
    with log.open("ab") as file:
        processes = [
            subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=raise_files) for command in commands
        ]
    router = Running(processes, port, clients)
    try:
        for own in own_ports:
            wait_for(
                lambda url=f"http://127.0.0.1:{own}/health": httpx.get(url, timeout=5).status_code == 200,
                f"{commands[0][0]} (its log: {log.read_text()[-500:]})",
            )
        yield router
    finally:
        router.kill()


def our_commands(folder: Path, ports: Sequence[int], port: int, own_ports: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Of one router on `port`, or of several that share it and have a port each beside it."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    facts = json.loads((write_model(model) / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 2 * SILENT}))
    servers = ", ".join(
        f'{{name = "{role}-{n}", role = "{role}", address = "127.0.0.1:{ports[2 * n + at]}"}}'
        for n in range(len(ports) // 2)
        for at, role in enumerate(("prefill", "decode"))
    )
    grpc_port = free_port()
    for number, own in enumerate(own_ports):
        shared = f"share_ports = true\nown_http_port = {own}\n" if own != port else ""
        file = folder / f"router-{number}.toml"
        file.write_text(
            f'[model]\nname = "{model}"\nserved_name = "{MODEL}"\n[router]\nname = "bench-{number}"\n{shared}'
            f"http_port = {port}\ngrpc_port = {grpc_port}\nmax_inflight = 11000\nmax_queued = 100\n"
            f"max_connections = 11000\nservers = [{servers}]\ntenant_share = 1.0\nrequest_deadline_s = 3600.0\n"
        )
        yield (sys.executable, "-m", "disagg.cli", "router", "--config", str(file))


# ---- measuring


def measure(router: Running, pool: ProcessPoolExecutor, name: str, streams: int, outputs: int, rounds: int) -> None:
    clients = min(router.clients, streams)
    shares = [streams // clients + (n < streams % clients) for n in range(clients)]
    cpu_s, began_s = router.cpu_s(), time.perf_counter()
    found = list(
        pool.map(crowd, [router.port] * clients, shares, [outputs] * clients, [rounds] * clients, timeout=RUN_S)
    )
    took_s, cpu_s = time.perf_counter() - began_s, max(1e-3, router.cpu_s() - cpu_s)
    firsts = [each for first, _ in found for each in first]
    requests, tokens = len(firsts), len(firsts) * outputs
    late = [each for _, some in found for each in some] if name in ("paced", "no router") else []
    begun_s = max(each.at_s for each in firsts)
    later = [each for each in late if each.at_s > begun_s]
    of_cpu = f"{requests / cpu_s:.0f} | {tokens / cpu_s:.0f}" if router.processes else "|"
    print(
        f"| {name} | {streams} | {requests / took_s:.0f} | {tokens / took_s:.0f} | {of_cpu} "
        f"| {spread_ms(firsts)} | {spread_ms(late)} | {spread_ms(later)} |",
        flush=True,
    )


def spread_ms(values: Sequence[Timed]) -> str:
    if not values:
        return ""
    ordered = sorted(each.seconds for each in values)
    return f"{1e3 * statistics.median(ordered):.1f} / {1e3 * ordered[math.ceil(0.99 * len(ordered)) - 1]:.1f}"


def idle(router: Running, streams: int) -> None:
    """How much memory so many streams take that have begun and say nothing."""
    spawn, before = multiprocessing.get_context("spawn"), router.rss()
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=hold, args=(router.port, streams, theirs), daemon=True)
    began_s = time.perf_counter()
    process.start()
    held, causes = ours.recv() if ours.poll(RUN_S) else (0, [])
    took_s = time.perf_counter() - began_s
    ok = httpx.get(f"http://127.0.0.1:{router.port}/health", timeout=30).status_code == 200
    grown = router.rss() - before
    print(
        f"\n{held} of {streams} idle streams began in {took_s:.0f} s: {grown / max(1, held) / 1024:.1f} KiB each "
        f"({router.rss() >> 20} MiB in all); healthy: {ok} {causes or ''}",
        flush=True,
    )
    router.kill()
    process.kill()
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--idle", type=int, default=10_000, help="streams that say nothing; 0: none")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--routers", type=int, default=1, help="that share the port")
    parser.add_argument("--clients", type=int, default=2, help="processes")
    parser.add_argument("--peer", metavar="COMMAND", help="another router, started so")
    options = parser.parse_args()
    raise_files()
    roles = [(serve, f"{r.value}-{n}", r) for n in range(options.pairs) for r in (Role.PREFILL, Role.DECODE)]
    alone = [(serve_openai,)]
    pool = ProcessPoolExecutor(options.clients, multiprocessing.get_context("spawn"))
    with (
        tempfile.TemporaryDirectory() as name,
        fakes(alone * 2 if options.peer else roles) as ports,
        fakes(alone) as (direct,),
        pool,
    ):
        folder, port = Path(name), free_port()
        own_ports = [port] if options.routers == 1 or options.peer else [free_port() for _ in range(options.routers)]
        if options.peer:
            one_url, two_url = (f"http://127.0.0.1:{each}" for each in ports)
            commands: list[Sequence[str]] = [shlex.split(options.peer.format(port=port, one=one_url, two=two_url))]
        else:
            commands = list(our_commands(folder, ports, port, own_ports))
        start = partial(running, commands, port, own_ports, options.clients, folder / "log")
        print(
            f"load of the machine: {', '.join(f'{each:.1f}' for each in os.getloadavg())} on {os.cpu_count()} processors\n"
        )
        print(
            "| | streams | requests/s | tokens/s | requests per s of processor | tokens per s of processor "
            "| first token ms, P50 / P99 | added to each token ms, P50 / P99 | once all have begun |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
        with start() as router:
            measure(router, pool, "warm-up", 8, 8, 2)
            for streams in options.streams:
                measure(Running([], direct, options.clients), pool, "no router", streams, 60, 1)
                measure(router, pool, "paced", streams, 60, 1)
                measure(router, pool, "short", streams, SHORT, max(1, 512 // streams))
            measure(router, pool, "flood", 64, 600, 1)
            if options.idle and not options.peer:
                idle(router, options.idle)
        if options.idle and not options.peer:
            with start() as router:
                measure(router, pool, "after a restart", 64, 20, 1)


if __name__ == "__main__":
    main()
