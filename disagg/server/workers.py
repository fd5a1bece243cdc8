"""The worker processes of one server: starts them, talks to them over ZeroMQ, and ends them all when one ends.

One object is one incarnation. Ranks share fate: a rank that exits, goes silent, or takes too long over a step ends them
all; the server then starts others. Knows processes and sockets; nothing of what plans and commands mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from disagg.config.tree import LogConfig, WorkerConfig
from disagg.messages.control import (
    ControlFailed,
    ControlReply,
    ControlRequest,
    Dump,
    Dumped,
    Shutdown,
    decode_reply,
    encode_request,
)
from disagg.messages.plan import (
    Hello,
    Ready,
    StepResult,
    WorkerFailed,
    WorkerPlan,
    decode_from_worker,
    encode_to_worker,
    plans_of,
)
from disagg.messages.tiers import TierCommand, TierEvent
from disagg.messages.transfer import Beat, CommandFrame, TransferCommand, TransferEvent, decode_events, encode_commands
from disagg.server.pids import is_stopped
from disagg.server.ucx_log import log_last_words
from disagg.streams.awake import Awake
from disagg.telemetry.held_dirs import HeldDir, remove_abandoned
from disagg.telemetry.process import describe_status
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.plain import one_line

logger = logging.getLogger(__name__)

CONNECT_POLL_S = 0.02
HELLO_EVERY_S = 0.05
STOP_WAIT_S = 5.0
LOOK_S = 0.25  # from one look for silence to the next
SOCKETS_PREFIX = "disagg-"
MAX_SOCKET_PATH_BYTES = 107  # of Linux
_NO_COMMAND = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.E2BIG}
)


class WorkersLost(DisaggError):
    """The workers have ended, or had to be ended."""


def make_sockets_dir() -> HeldDir:
    """A directory of this process for its workers' sockets. Raises WorkersLost if there is no room, ConfigError if none fits.

    It is beside those of other servers in the system's temporary directory, because the path of a socket is short.
    What servers left there that were killed is cleared away.
    """
    where = "the temporary directory"
    try:
        parent = Path(tempfile.gettempdir())
        where = str(parent)
        remove_abandoned(parent.glob(f"{SOCKETS_PREFIX}*"))
        path = parent / f"{SOCKETS_PREFIX}{secrets.token_hex(4)}"
        if len(os.fsencode(path)) + len("/control") > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"TMPDIR = {parent}: a socket in it would have a path of more than {MAX_SOCKET_PATH_BYTES} bytes; "
                "set it to a shorter one"
            )
        return HeldDir(path)
    except OSError as error:
        raise WorkersLost(
            f"no directory for the workers' sockets can be made in {where}: {error.strerror or error}; make room there, "
            "or set TMPDIR"
        ) from error


class Workers:
    """`start`, `call` for loading, the opening of transfers and `barrier`, then `publish` and `send` while `wait_lost` waits."""

    def __init__(
        self,
        server_name: str,
        config: WorkerConfig,
        log: LogConfig,
        tp: int,
        on_result: Callable[[StepResult], None],
        on_event: Callable[[int, TransferEvent | TierEvent], None],
        dp: int = 1,
    ) -> None:
        """tp: workers of each of dp data-parallel ranks, which get plans of their own; workers count through all of them."""
        self.incarnation = secrets.token_hex(8)
        self._name = server_name
        self._config = config
        self._log = log
        self._tp = tp
        self._dp = dp
        self._num_ranks = tp * dp
        self._on_result = on_result
        self._on_event = on_event
        self._processes: list[subprocess.Popen[bytes]] = []
        self._held = make_sockets_dir()
        self._directory = str(self._held.path)
        self._context = zmq.asyncio.Context()
        try:
            self._plans = self._bind(zmq.PUB, "plans")
            self._results = self._bind(zmq.PULL, "results")
            self._control = self._bind(zmq.ROUTER, "control")
            self._transfers = self._bind(zmq.ROUTER, "transfer")
        except zmq.ZMQError as error:
            self._close()
            raise WorkersLost(f"the workers' sockets cannot be made in {self._directory}: {error.strerror}") from error
        self._command_numbers = [0] * self._num_ranks
        self._report_numbers = [0] * self._num_ranks
        self._ready: set[int] = set()
        self._silent_exit = ""  # how a rank ended by itself before any of them had said a word
        self._heard = False
        self._last_beat_s: list[float | None] = [None] * self._num_ranks
        self._replies: asyncio.Queue[ControlReply] = asyncio.Queue()  # to all but Dump
        self._dumps: asyncio.Queue[ControlReply] = asyncio.Queue()
        self._calls = 0  # that wait for replies, and during which ranks may be silent
        self.call_s: dict[str, float] = {}  # how long each kind of call took, the last time; of all ranks
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._pidfds: list[int] = []

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    @property
    def silent_exit(self) -> str:
        """How they ended, if it was by a rank that exited before any had said a word; else empty."""
        return self._silent_exit

    @property
    def directory(self) -> str:
        """Of these workers alone, and gone with them."""
        return self._directory

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Start every rank. Call it from the main thread: a worker dies with the thread that started it.

        Raises ConfigError for a command that no system could run, OSError if one cannot be started now; `kill` ends the
        others.
        """
        loop = asyncio.get_running_loop()
        for rank in range(self._num_ranks):
            process = self._start_rank(rank)
            self._processes.append(process)
            fd = os.pidfd_open(process.pid)
            self._pidfds.append(fd)
            loop.add_reader(fd, self._exited, rank)
        for coroutine in (self._read_results(), self._read_control(), self._read_events(), self._watch()):
            self._spawn(coroutine)

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        command = self._config.command or (sys.executable, "-m", "disagg.worker")
        argv = [
            *command,
            *("--rank", str(rank)),
            *("--group", str(rank // self._tp)),
            *("--sockets", self._directory),
            *("--incarnation", self.incarnation),
            *("--parent", str(os.getpid())),
            *("--name", self._name),
            *("--log-level", self._log.level),
            *("--log-format", self._log.format),
            *("--log-lines-per-s", str(self._log.lines_per_s)),
        ]
        try:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_COMMAND:
                raise
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"worker.command = {one_line(str(list(command)))}: it cannot be run: {why}; it must be a program and its "
                "first arguments, or empty"
            ) from error

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the workers failed", exc_info=task.exception())
            self._lose(f"{type(task.exception()).__name__}: {task.exception()}")

    def _exited(self, rank: int) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfds[rank])
        self._exited_with(rank, self._processes[rank].wait())

    def _exited_with(self, rank: int, status: int) -> None:
        if status < 0:
            log_last_words(self._directory, rank)
        how = describe_status(status)
        if status >= 0 and not self._heard and not self._lost.done():
            self._silent_exit = f"rank {rank} {how}"
        self._lose(f"rank {rank} {how}")

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    async def wait_lost(self) -> str:
        """Why they ended; returns when they have, or must."""
        return await asyncio.shield(self._lost)

    # ---- control

    async def call(self, request: ControlRequest, timeout_s: float) -> list[ControlReply]:
        """Ask every rank, and collect every reply, by rank. Raises ConfigError, WorkersLost.

        One call at a time, and beside it one for a dump, which is answered whatever else a rank is doing.
        Meanwhile ranks may be silent: to open a transfer agent, or to compile for a GPU, keeps the thread that beats. Not
        while they are asked for a dump: that thread writes it, and whoever asks may well suspect that it hangs.
        """
        keeps_it = not isinstance(request, Dump)
        self._calls += keeps_it
        asked_s = time.monotonic()
        try:
            return await self._call(request, asked_s + timeout_s)
        finally:
            self._calls -= keeps_it
            self.call_s[type(request).__name__] = time.monotonic() - asked_s

    async def _call(self, request: ControlRequest, deadline: float) -> list[ControlReply]:
        arrived = self._dumps if isinstance(request, Dump) else self._replies
        while not arrived.empty():
            arrived.get_nowait()  # came after its call had been given up
        for rank in range(self._num_ranks):
            await self._route(self._control, rank, encode_request(request), deadline)
        replies: dict[int, ControlReply] = {}
        while len(replies) < self._num_ranks:
            reply = await self._until(arrived.get(), deadline, request)
            if isinstance(reply, ControlFailed):
                if reply.config:
                    raise ConfigError(reply.reason)
                raise WorkersLost(f"rank {reply.rank}: {reply.reason}")
            replies[reply.rank] = reply
        return [replies[rank] for rank in range(self._num_ranks)]

    async def _route(self, socket: zmq.asyncio.Socket, rank: int, payload: bytes, deadline: float) -> None:
        """Send to a rank that may not have connected yet."""
        while True:
            try:
                await socket.send_multipart([str(rank).encode(), payload])
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            if self._lost.done():
                raise WorkersLost(self._lost.result())
            if time.monotonic() > deadline:
                raise WorkersLost(f"rank {rank} has not connected in time")
            await asyncio.sleep(CONNECT_POLL_S)

    async def _until(self, awaitable: Any, deadline: float, request: ControlRequest) -> Any:
        """Wait for a reply, the end of the workers, or the deadline."""
        task = asyncio.ensure_future(awaitable)
        await asyncio.wait({task, self._lost}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        if self._lost.done():
            raise WorkersLost(self._lost.result())
        raise WorkersLost(f"no answer to {type(request).__name__} in time")

    async def barrier(self, timeout_s: float) -> None:
        """Publish HELLO until every rank has answered READY: only then does a plan reach them all."""
        deadline = time.monotonic() + timeout_s
        hello = encode_to_worker(Hello(self.incarnation))
        while len(self._ready) < self._num_ranks:
            if self._lost.done():
                raise WorkersLost(self._lost.result())
            if time.monotonic() > deadline:
                raise WorkersLost(
                    f"ranks {sorted(set(range(self._num_ranks)) - self._ready)} do not hear the plan socket"
                )
            for dp_rank in range(self._dp):
                await self._plans.send_multipart([plans_of(dp_rank), hello])
            await asyncio.sleep(HELLO_EVERY_S)

    # ---- running

    def publish(self, plan: WorkerPlan) -> None:
        self._send(self._plans, [plans_of(plan.dp_rank), encode_to_worker(plan)])

    def send(self, rank: int, messages: Sequence[TransferCommand | TierCommand]) -> None:
        """Send commands to one rank's transfer thread, in order."""
        frame = CommandFrame(self._command_numbers[rank], tuple(messages))
        self._command_numbers[rank] += 1
        self._send(self._transfers, [str(rank).encode(), encode_commands(frame)])

    def _send(self, socket: zmq.asyncio.Socket, parts: list[bytes]) -> None:
        """Without a high-water mark a send never waits, so it is done at once and in order."""
        try:
            zmq.Socket.send_multipart(socket, parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(f"a worker's socket is gone: {error}")

    async def _read_results(self) -> None:
        while True:
            message = decode_from_worker(await self._results.recv())
            match message:
                case StepResult():
                    self._on_result(message)
                case Ready():
                    if message.incarnation == self.incarnation:
                        self._ready.add(message.rank)
                case WorkerFailed():
                    self._lose(f"rank {message.rank}: {message.reason}")

    async def _read_control(self) -> None:
        while True:
            _, payload = await self._control.recv_multipart()
            reply = decode_reply(payload)
            self._heard = True
            (self._dumps if isinstance(reply, Dumped) else self._replies).put_nowait(reply)

    async def _read_events(self) -> None:
        while True:
            _, payload = await self._transfers.recv_multipart()
            frame = decode_events(payload)
            self._heard = True
            if frame.number != self._report_numbers[frame.rank]:
                self._lose(f"a transfer event of rank {frame.rank} was lost")
                return
            self._report_numbers[frame.rank] += 1
            for message in frame.messages:
                if isinstance(message, Beat):
                    self._last_beat_s[frame.rank] = time.monotonic()
                    if message.busy_s > self._config.step_deadline_s:
                        self._lose(f"rank {frame.rank} has computed one step for {message.busy_s:.0f} s")
                self._on_event(frame.rank, message)

    async def _watch(self) -> None:
        """Silence ends them all. Before its first beat a rank is starting, which `call` bounds, as it does what it asks for; but
        a process that is stopped does nothing meanwhile. While this process stood still itself, nobody was silent.
        """
        ran_s = [time.monotonic()] * self._num_ranks
        awake = Awake(ran_s[0])
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if not awake.look(now):
                ran_s = [now] * self._num_ranks
                continue
            for rank, pid in enumerate(self.pids):
                if not is_stopped(pid):
                    ran_s[rank] = now
                elif now - ran_s[rank] > self._config.silent_s:
                    self._lose(f"rank {rank} has been stopped for {now - ran_s[rank]:.0f} s")
            if self._calls:
                self._last_beat_s = [beat_s and now for beat_s in self._last_beat_s]
            for rank, beat_s in enumerate(self._last_beat_s):
                if beat_s is not None and now - beat_s > self._config.silent_s:
                    self._lose(f"rank {rank} has been silent for {now - beat_s:.0f} s")

    # ---- the end

    async def stop(self) -> None:
        """Ask every rank to exit, wait a little, then end what is left."""
        if not self._lost.done():
            with contextlib.suppress(WorkersLost, zmq.ZMQError):
                for rank in range(self._num_ranks):
                    await self._route(self._control, rank, encode_request(Shutdown()), time.monotonic() + 1.0)
            deadline = time.monotonic() + STOP_WAIT_S
            while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
                await asyncio.sleep(0.02)
        await self.kill()

    async def kill(self) -> None:
        """End every rank with SIGKILL, and return when all have exited: nothing that they wrote can arrive any more."""
        loop = asyncio.get_running_loop()
        for fd in self._pidfds:
            loop.remove_reader(fd)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            while process.poll() is None:
                await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()
        self._close()

    def _close(self) -> None:
        self._context.destroy(linger=0)
        self._held.remove()
