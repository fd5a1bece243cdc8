"""One long-lived stream to each server that is found: dialling, hellos, the lease, and the verdict.

    dial ──hello, attached──> connected ──broken──> dial again, at once if it held for 1 s, else after 0.1 .. 1 s
      │                                                 │
      └── refused twice within 0.5 s, or nothing heard for the lease, or another incarnation ──> lost

*Lost* means that whatever that incarnation held of ours is gone, so its requests are replayed. Until then a broken stream
proves nothing: the stream is resumed (`streams`) and repeats what was not acknowledged. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct, field

from disagg.discovery.found import Found
from disagg.messages.channel import Frame
from disagg.messages.legs import LoadReport, RouterMessage, ServerHello, ServerMessage, StartLeg
from disagg.messages.needs import lacks
from disagg.router.known_kv import KnownKv, Stores
from disagg.router.outstanding import Outstanding
from disagg.router.speeds import Speed
from disagg.router.view import Circuit, ServerView, Work, others_prompts
from disagg.streams.awake import Awake
from disagg.streams.state import Queue, Verdict
from disagg.streams.stream import ResumableStream
from disagg.text.model_files import differing
from disagg.types.errors import ProtocolError, Unavailable
from disagg.types.ids import Role
from disagg.types.protocol import Version, refusal
from disagg.types.version import own_version
from disagg.wire.server import RouterHello, ServerSays

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
REFUSED_TWICE_WITHIN_S = 0.5
TICK_S = 0.1  # how soon it is noticed that a lease is over
MAX_FRAME_TOKENS = 256 << 10  # of the legs in one frame: 1.3 MiB at most; a gRPC message may have 64
MAX_KEPT_TOKENS = 64 << 20  # of legs that a server has not acknowledged, 0.5 GiB; it acknowledges within a second
FRESH_HEARTBEATS = 3.0
_Stream = ResumableStream[RouterMessage, ServerMessage]
NO_FILES: Mapping[str, str] = MappingProxyType({})


class Connection(Protocol):
    """One attached stream. Every method raises Unavailable when it breaks, ProtocolError when it makes no sense."""

    async def write(self, frame: Frame[RouterMessage]) -> None: ...

    def heard(self) -> AsyncIterator[ServerSays]: ...

    async def close(self) -> None: ...


class Refused(Unavailable):
    """Nobody listens at the address: the server's process is gone."""


class NameTaken(Unavailable):
    """Another router holds this router's name at the server, and lives."""


class VersionRefused(Unavailable):
    """The server's version and this router's cannot speak with each other; the text names both."""


class Dialer(Protocol):
    """Opens a stream to host:port and exchanges hellos; the server's has `hello` and `attached`.

    Raises Refused, NameTaken, VersionRefused, Unavailable or ProtocolError.
    """

    async def __call__(self, address: str, hello: RouterHello, timeout_s: float) -> tuple[Connection, ServerSays]: ...


class StreamOwner(Protocol):
    """Is told what happens, on the event loop; must not block."""

    def server_changed(self, name: str) -> None: ...

    def server_named(self, stream: ServerStream, hello: ServerHello) -> None:
        """It says its name, which nobody knew. Raises ProtocolError where that is another's."""

    def server_said(self, name: str, message: ServerMessage) -> None: ...

    def prompts_sent(self, name: str) -> int:
        """Choices of prompts that it was sent and is not known to be done with."""

    def pods_lost(self, name: str, pods: tuple[str, ...]) -> None:
        """A server has lost peers in these pods, which may still write to it. Said again as long as it is so."""

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None: ...

    def server_emptied(self, name: str, incarnation: str, reason: str) -> None:
        """It has ended its workers itself, as it was asked to."""


class Caller(Struct, frozen=True, kw_only=True):
    """Who dials: the same for all streams of one router. files: digests of what it makes tokens and text with, by name."""

    model: str
    name: str
    incarnation: str
    heartbeat_s: float
    lease_s: float
    files: Mapping[str, str] = NO_FILES
    version: Version = field(default_factory=own_version)
    clock: Callable[[], float] = time.monotonic
    stores: Stores = field(default_factory=Stores)


class ServerStream:
    """The stream to one server. name: its address, until it says its name, where discovery does not know it."""

    def __init__(self, found: Found, caller: Caller, *, dial: Dialer, owner: StreamOwner) -> None:
        self.found = found
        self.name = found.key
        self.role = Role(found.role)
        self.address = found.address
        self.held = found.held
        self.hello: ServerHello | None = None
        self.load: LoadReport | None = None
        self.others_prompts = 0
        self.kv = KnownKv(caller.stores)
        self.connected = False
        self.lost = False
        self.error = ""
        self.name_taken = False  # which is what `error` says, then
        self.refused = ""  # why its version and ours cannot speak with each other
        self.differing: tuple[str, ...] = ()
        self.changed = ""  # that its weights are not those of before, also when its process is another
        self._loaded = ("", "")  # incarnation and weights of the last workers that said them
        self._known_weights = ""  # the last that two of them had, or the first: any others are news
        self._caller = caller
        self._heartbeat_s = caller.heartbeat_s
        self._lease_s = caller.lease_s
        self._tick_s = min(TICK_S, caller.heartbeat_s / 2)
        self._dial = dial
        self._owner = owner
        self._clock = caller.clock
        self._attached_s = caller.clock()
        self._refused_s: float | None = None
        # The stream to the same server by another address, and which process that was.
        self._same: tuple[ServerStream, tuple[str, int]] | None = None
        self._stream_id, self._stream = secrets.token_hex(8), self._new_stream()
        self._attach: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(), name=f"stream {self.name}"),
            asyncio.create_task(self._watch_lease(), name=f"lease {self.name}"),
        ]
        for task in self._tasks:
            task.add_done_callback(log_death)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        self.connected = False

    def is_also(self, other: ServerStream, hello: ServerHello) -> bool:
        """Whether what says this hello here is what `other` has a stream to, by another address of it."""
        process = (hello.incarnation, hello.pid)
        if other.process != process:
            return False
        self._same = other, process
        return True

    @property
    def process(self) -> tuple[str, int] | None:
        """Workers and process that are heard; None: there are none."""
        return None if self.hello is None or self.lost else (self.hello.incarnation, self.hello.pid)

    @property
    def first(self) -> ServerStream | None:
        """By which the same server is heard at another address. This one is not dialled then: a server ends what it has of a
        router that begins another stream."""
        return self._same[0] if self._same is not None and self._same[0].process == self._same[1] else None

    def remove(self, reason: str) -> None:
        """It is known to be gone. `close` follows."""
        self._lose(reason, crashed=False)

    async def flush(self, timeout_s: float) -> None:
        """Waits until what was sent has arrived, if it can."""
        until_s = self._clock() + timeout_s
        while self.connected and not self._stream.state.idle and self._clock() < until_s:
            await asyncio.sleep(0.01)

    def send(self, message: RouterMessage) -> None:
        """Will arrive, unless the server is lost first. Dropped is what is sent to a lost server, or would end its stream."""
        if self.lost or self.hello is None:
            return
        if why := lacks(self.hello, message):
            logger.error("not sent to server %s: %s", self.name, why)
            return
        self._stream.put(message)
        self._stream.flush()

    def view(
        self, outstanding: Outstanding, speed: Speed, usual_speed: Speed, circuits: Mapping[Work, Circuit]
    ) -> ServerView:
        name, quiet_s = self.name, self._clock() - self._stream.state.heard_s
        fresh = quiet_s < FRESH_HEARTBEATS * self._heartbeat_s
        return ServerView(
            name=self.name,
            role=self.role,
            address=self.address,
            hello=self.hello,
            load=self.load,
            connected=self.connected,
            lost=self.lost,
            fresh=fresh,
            silent_s=0.0 if fresh else quiet_s,
            outstanding_prompt_tokens=outstanding.amount(name, Work.PREFILL),
            outstanding_choices=outstanding.amount(name, Work.DECODE),
            outstanding_prompts=outstanding.choices(name, Work.PREFILL),
            others_prompts=self.others_prompts,
            coming=outstanding.pages(name),
            speed=speed,
            usual_speed=usual_speed,
            cached=self.kv.cached,
            on_host=self.kv.on_host,
            stored=self.kv.stored,
            error=self.error,
            refused=self.refused,
            differing=self.differing,
            changed=self.changed,
            held=self.held,
            circuits=circuits,
        )

    # ---- dialling

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            while self.first is not None:
                await asyncio.sleep(MAX_BACKOFF_S)
            self._attach = asyncio.create_task(self._attached(), name=f"attach {self.name}")
            try:
                await asyncio.wait({self._attach})
                was_connected = self.connected
                failure = self._failure_of(self._attach)
            finally:
                if not self._attach.done():
                    self._attach.cancel()
                    await asyncio.wait({self._attach})
            if was_connected and isinstance(failure, ProtocolError):
                # It would say the same again on the next connection, since it was not acknowledged.
                self._lose(f"it broke the protocol: {failure}", crashed=False)
            self.connected = False
            self.name_taken = isinstance(failure, NameTaken)
            self.refused = str(failure) if isinstance(failure, VersionRefused) else ""
            if str(failure) != self.error:
                level = logging.ERROR if self.name_taken or self.refused else logging.INFO
                logger.log(level, "stream to %s at %s: %s", self.name, self.address, failure)
                self.error = str(failure)
            self._note_refusal(isinstance(failure, Refused))
            self._owner.server_changed(self.name)
            if was_connected and self._clock() - self._attached_s >= MAX_BACKOFF_S:
                backoff_s = 0.0
                continue
            backoff_s = min(MAX_BACKOFF_S, max(FIRST_BACKOFF_S, backoff_s * 2))
            if isinstance(failure, Refused) and self.hello is not None and not self.lost:
                backoff_s = FIRST_BACKOFF_S  # who refuses again at once is gone
            await asyncio.sleep(backoff_s)

    @staticmethod
    def _failure_of(attach: asyncio.Task[None]) -> Unavailable | ProtocolError:
        """Why the stream ended. A bug of ours is raised, not taken for a broken stream."""
        if attach.cancelled():
            return Unavailable("given up")
        error = attach.exception()
        if error is None:
            return Unavailable("the server ended the stream")
        if isinstance(error, Unavailable | ProtocolError):
            return error
        raise error

    def _note_refusal(self, refused: bool) -> None:
        """A process that is gone refuses at once; one that restarts may refuse once in between."""
        now_s = self._clock()
        last_s, self._refused_s = self._refused_s, now_s if refused else None
        if refused and last_s is not None and now_s - last_s <= REFUSED_TWICE_WITHIN_S:
            self._lose("nobody listens at its address any more", crashed=False)

    async def _attached(self) -> None:
        """One stream, from dialling to its end."""
        greeting = RouterHello(
            router_name=self._caller.name,
            router_incarnation=self._caller.incarnation,
            stream_id=self._stream_id,
            last_received=self._stream.state.received,
            expected_server_incarnation=self.hello.incarnation if self.hello is not None and not self.lost else "",
            server_name=self.found.name,
            version=self._caller.version,
        )
        connection, first = await self._dial(self.address, greeting, self._lease_s)
        hello, attached = first.hello, first.attached
        assert hello is not None
        assert attached is not None
        try:
            self._check(hello)
            if greeting.stream_id != self._stream_id:
                raise Unavailable("given up while it was dialled")
            # First the loss, if there is one: the requests that it hits must not be sent more on the new channel.
            if not attached.resumed:
                self._forgotten(hello)
                self._begin(self._stream_id)
            stream = self._stream
            served = stream.connect(attached.last_received)
            self._greeted(hello)
            self._take(stream, first)
            self.connected, self.error, self._attached_s = True, "", self._clock()
            self.name_taken, self.refused = False, ""
            self._owner.server_changed(self.name)
            writer = asyncio.create_task(self._write(connection, stream, served), name=f"write {self.name}")
            reader = asyncio.create_task(self._read(connection, stream, served), name=f"read {self.name}")
            try:
                done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                writer.cancel()
                reader.cancel()
                await asyncio.gather(writer, reader, return_exceptions=True)
                stream.disconnect(served)
        finally:
            await connection.close()

    def _check(self, hello: ServerHello) -> None:
        own = f"router {self._caller.name}"
        if refused := refusal(own, self._caller.version, f"server {hello.name}", hello.version):
            raise VersionRefused(refused)
        if not self.found.name and hello.name != self.name:
            self._lose(f"another server has its address, {hello.name}", crashed=False)
            self._owner.server_named(self, hello)
            self.name = hello.name
        started = hello.role_change.started if hello.role_change is not None else hello.role
        if (hello.name, started.value) != (self.name, self.found.role):
            raise ProtocolError(
                f"{self.address} should be {self.found.role} server {self.name}, "
                f"but says that it is {started.value} server {hello.name}"
            )
        if hello.model and hello.model != self._caller.model:
            raise ProtocolError(f"{self.name} serves model {hello.model!r}, this router {self._caller.model!r}")

    async def _write(self, connection: Connection, stream: _Stream, served: int) -> None:
        """Ends when the stream does: a late frame of it must not be taken for one of the next."""
        async for frame in stream.frames(served):
            await connection.write(frame)

    async def _read(self, connection: Connection, stream: _Stream, served: int) -> None:
        async for heard in connection.heard():
            if not stream.state.serves(served):
                return
            self._take(stream, heard)
            if heard.hello is not None:
                self._check(heard.hello)
                self._greeted(heard.hello)
                self._owner.server_changed(self.name)
            elif heard.load is not None:
                self._loaded_so(heard.load)
            if heard.load is not None and heard.load.lost_pods:
                self._owner.pods_lost(self.name, heard.load.lost_pods)
            if heard.kv is not None:
                self.kv.apply(heard.kv)

    def _loaded_so(self, load: LoadReport) -> None:
        self.others_prompts = others_prompts(self.role, load, self._owner.prompts_sent(self.name))
        if load != self.load:
            self.load = load
            self._owner.server_changed(self.name)

    def _take(self, stream: _Stream, heard: ServerSays) -> None:
        for message in stream.hear(heard.frame):
            self._owner.server_said(self.name, message)

    # ---- verdicts

    async def _watch_lease(self) -> None:
        awake = Awake(self._clock())
        while True:
            await asyncio.sleep(self._tick_s)
            now_s = self._clock()
            verdict = self._stream.state.verdict(self._lease_s, now_s, awake=awake.look(now_s))
            if self.hello is None or self.lost or verdict is None:
                continue
            if self._attach is not None:
                self._attach.cancel()
            if verdict is Verdict.SILENT:
                self._lose(f"nothing was heard for {self._lease_s:g} s", crashed=False)
            else:
                self._lose("it leaves more legs unacknowledged than are kept for it", crashed=False)

    def _greeted(self, hello: ServerHello) -> None:
        before, self.hello, self.load = self.hello, hello, hello.load
        self.role = hello.role  # which may be another than the one that was found
        was_lost, self.lost = self.lost, False
        self._compare_files(hello)
        self._compare_weights(hello)
        if before is None or before.incarnation != hello.incarnation:
            self.kv.clear()
        if before is None or before.storage != hello.storage:
            self.kv.stores_at(hello.storage)
        if before is None or was_lost or not before.incarnation:  # it has none while it loads
            return
        if before.incarnation == hello.incarnation:
            return
        if before.pid == hello.pid and before.role is not hello.role:
            reason = f"it was asked to be a {hello.role.value} server"
            logger.info("server %s (incarnation %s) has ended: %s", self.name, before.incarnation, reason)
            self._owner.server_emptied(self.name, before.incarnation, reason)
        else:
            crashed = before.pid == hello.pid
            came_back = f"it came back as another incarnation, {hello.incarnation}"
            self._report(before.incarnation, crashed, came_back if hello.incarnation else "its workers are lost")

    def _compare_files(self, hello: ServerHello) -> None:
        """A router never loads its files again, so that no request is of two tokenizers: it says what has to be done."""
        before, self.differing = self.differing, differing(self._caller.files, hello.files)
        if self.differing and self.differing != before:
            logger.error(
                "server %s (incarnation %s) is not used: its %s is not what this router has loaded; restart whichever of the "
                "two has the old files",
                self.name,
                hello.incarnation,
                ", ".join(self.differing),
            )
        elif before and not self.differing:
            logger.info("server %s has the same model files as this router again", self.name)

    def _compare_weights(self, hello: ServerHello) -> None:
        """A server whose process has ended, too, cannot say itself that its workers had other weights before."""
        if not hello.weights_hash:
            return
        incarnation, weights = self._loaded
        self._loaded = (hello.incarnation, hello.weights_hash)
        if weights and weights != hello.weights_hash:
            changed = f"its weights were {weights[:12]} before, and are {hello.weights_hash[:12]} now"
            logger.error("server %s came back with another model: %s", self.name, changed)
            self.changed = "" if hello.weights_hash == self._known_weights else changed
        elif incarnation != hello.incarnation:
            self._known_weights, self.changed = hello.weights_hash, ""

    def _forgotten(self, hello: ServerHello) -> None:
        """The server does not know our channel. If it is the incarnation that we knew, our legs there are gone too."""
        known = self.hello
        if known is not None and not self.lost and known.incarnation and known.incarnation == hello.incarnation:
            self._report(known.incarnation, False, "it has forgotten this router's stream")

    def _lose(self, reason: str, crashed: bool) -> None:
        if self.hello is None or self.lost:
            return
        self.lost, self.connected = True, False
        self.kv.clear()
        self._begin(secrets.token_hex(8))
        self._report(self.hello.incarnation, crashed, reason)
        self._owner.server_changed(self.name)

    def _report(self, incarnation: str, crashed: bool, reason: str) -> None:
        logger.warning("server %s (incarnation %s) is lost: %s", self.name, incarnation, reason)
        self._owner.server_lost(self.name, incarnation, crashed, reason)

    def _begin(self, stream_id: str) -> None:
        """A stream of which the server knows nothing; what was sent on the one before is given up."""
        heard_s = self._stream.state.heard_s
        self._stream.end()
        self._stream_id, self._stream = stream_id, self._new_stream()
        self._stream.state.heard_s = heard_s

    def _new_stream(self) -> _Stream:
        outbox = Queue(num_tokens, MAX_FRAME_TOKENS)
        return ResumableStream(outbox, heartbeat_s=self._heartbeat_s, max_kept=MAX_KEPT_TOKENS, clock=self._clock)


def num_tokens(message: RouterMessage) -> int:
    """What bounds a frame: what a server's loop reads in some 10 ms."""
    return len(message.token_ids) if isinstance(message, StartLeg) else 0


def log_death(task: asyncio.Task[None]) -> None:
    """These tasks end only when cancelled. Anything else is a bug of ours: requests still end, at their deadline."""
    if not task.cancelled() and task.exception() is not None:
        logger.critical("task %r died", task.get_name(), exc_info=task.exception())
