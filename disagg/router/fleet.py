"""Who is there: the streams to all servers, and the picture of them that decisions are made on. Knows nothing of requests.

What a stream says goes on to the `FleetOwner`; what servers have in common (weights, the longest context) is judged here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from disagg.discovery.found import Discovery, Found
from disagg.messages.legs import (
    PeerRef,
    PodGone,
    PrefixRules,
    RouterMessage,
    ServerHello,
    ServerMessage,
    ServerState,
)
from disagg.router.circuits import Circuits
from disagg.router.outstanding import Outstanding
from disagg.router.prefixes import ways_of
from disagg.router.speeds import Speeds
from disagg.router.streams import Caller, Dialer, ServerStream, log_death
from disagg.router.view import ClusterView, Work
from disagg.types.bounded import forget_oldest
from disagg.types.errors import ProtocolError
from disagg.types.ids import Role

logger = logging.getLogger(__name__)

FIRST_S = 5.0  # how long a start waits for what discovery finds first; the router serves without, too, as servers come
ASK_AGAIN_S = 5.0
MAX_ASKED = 4096
UNLISTED = "discovery does not find it any more"


class FleetOwner(Protocol):
    """Is told what happens, on the event loop; must not block."""

    def fleet_changed(self) -> None: ...

    def server_left(self, name: str) -> None:
        """It is not found any more, or its address is that of another one; and lost if it was not."""

    def server_said(self, name: str, message: ServerMessage) -> None: ...

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None: ...

    def server_emptied(self, name: str, incarnation: str, reason: str) -> None:
        """It has ended its workers itself, as it was asked to."""

    def role_changed(self, name: str) -> None:
        """It does other work from now on."""


class Fleet:
    """The servers of one router, as discovery finds them. speeds: at which they compute prompts, for whoever times them.
    circuits: which of them fail, for whoever sees that."""

    def __init__(
        self, discovery: Discovery, caller: Caller, outstanding: Outstanding, owner: FleetOwner, dial: Dialer
    ) -> None:
        self._discovery = discovery
        self._caller = caller
        self._outstanding = outstanding
        self._owner = owner
        self._dial = dial
        self.speeds = Speeds()
        self.circuits = Circuits()
        self._streams: dict[str, ServerStream] = {}  # by key of what was found
        self._named: dict[str, ServerStream] = {}  # by name, of those whose name is known
        self._finding: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # each ends soon, by itself
        self._roles: dict[str, Role] = {}  # of servers that were heard, the last that each said
        self._asked_s: dict[tuple[str, str], float] = {}  # when a server's question for a pod was passed on
        self._weights: frozenset[str] = frozenset()  # of all servers, when last heard

    async def start(self) -> None:
        """Raises ConfigError for what discovery cannot begin with."""
        published = asyncio.Event()

        def publish(found: Mapping[str, Found]) -> None:
            self.update(found)
            published.set()

        self._finding = asyncio.create_task(self._discovery.run(publish), name="discovery")
        first = asyncio.create_task(published.wait())
        await asyncio.wait({self._finding, first}, return_when=asyncio.FIRST_COMPLETED, timeout=FIRST_S)
        first.cancel()
        if self._finding.done():
            self._finding.result()
        self._finding.add_done_callback(log_death)

    async def close(self, flush_s: float) -> None:
        """Waits flush_s at most for what was sent to arrive."""
        if self._finding is not None:
            self._finding.cancel()
        await asyncio.gather(*(stream.flush(flush_s) for stream in self._streams.values()))
        await asyncio.gather(*(stream.close() for stream in self._streams.values()), *self._tasks)

    def update(self, found: Mapping[str, Found]) -> None:
        """All that there is now, by key.

        Whose carrier is another is gone. Who is not found any more is gone too, if discovery knows what carried it; else
        it gets nothing new, and stays as long as it is heard.
        """
        still = [stream.first for key, stream in self._streams.items() if key in found]  # at another address
        for key, stream in list(self._streams.items()):
            now = found.get(key)
            if now is not None and now.carrier == stream.found.carrier:
                stream.held = now.held
            elif now is not None or stream.found.uid or stream.hello is None or stream.lost:
                self._drop(key, "another has come in its place" if now is not None else "it is not there any more")
            else:
                stream.held = "" if stream in still else UNLISTED
        for key, each in found.items():
            if key not in self._streams:
                stream = ServerStream(each, self._caller, dial=self._dial, owner=self)
                self._streams[key] = stream
                if each.name:
                    self._named[each.name] = stream
                stream.start()
        self._owner.fleet_changed()

    def _drop(self, key: str, reason: str) -> None:
        stream = self._streams[key]
        stream.remove(reason)
        self._streams.pop(key, None)
        logger.info("server %s at %s is left: %s", stream.name, stream.address, reason)
        self._forget(stream)
        self._spawn(stream.close(), f"leave {stream.name}")

    def _forget(self, stream: ServerStream) -> None:
        """What is known under its name, unless another has that by now: a server that has come to another address."""
        name = stream.name
        if self._named.get(name) is not stream:
            return
        del self._named[name]
        self.speeds.forget(name)
        self.circuits.forget(name)
        self._roles.pop(name, None)
        self._owner.server_left(name)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(log_death)

    @property
    def no_servers(self) -> Mapping[str, str]:
        """What discovery finds that can be no server, though it is meant to be one: why, by its name."""
        return self._discovery.faults()

    def send(self, server: str, message: RouterMessage) -> None:
        """To a server that has left, nothing is sent."""
        stream = self._named.get(server)
        if stream is not None:
            stream.send(message)

    def view(self) -> ClusterView:
        speeds, circuits, now_s = self.speeds, self.circuits, self._caller.clock()
        usual = speeds.usual
        return ClusterView(
            tuple(
                stream.view(self._outstanding, speeds.of(stream.name, now_s), usual, circuits.of(stream.name, now_s))
                for stream in self._streams.values()
                if stream.first is None
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stream.name for stream in self._streams.values())

    def role_of(self, name: str) -> Role | None:
        stream = self._named.get(name)
        return None if stream is None else stream.role

    def ends(self, ref: PeerRef) -> bool:
        """Whether this incarnation is known to be gone, or to be going: it has left, is lost, drains, or another is there."""
        stream = self._named.get(ref.name)
        if stream is None or stream.lost or stream.hello is None or stream.hello.incarnation != ref.incarnation:
            return True
        return bool(stream.held) or (stream.load is not None and stream.load.state is ServerState.DRAINING)

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """Name and address of each."""
        return tuple((stream.name, stream.address) for stream in self._streams.values())

    @property
    def rival(self) -> str:
        """Who holds this router's name at a server, if somebody else does."""
        return next((stream.error for stream in self._streams.values() if stream.name_taken), "")

    def longest(self, at_most: int) -> int:
        """Prompt and output together, as far as is known now; what a pool can hold is checked with the pair."""
        hellos = [s.hello for s in self._streams.values() if s.hello is not None and s.hello.max_model_len > 0]
        served = [hello.max_model_len for hello in hellos if hello.model == self._caller.model]
        return min(at_most, max(served, default=at_most))

    def ways(self) -> tuple[PrefixRules, ...]:
        """In which its servers name pages now."""
        return ways_of(s.hello.prefix for s in self._streams.values() if s.hello is not None and not s.lost)

    # ---- streams call these

    def prompts_sent(self, name: str) -> int:
        return self._outstanding.choices(name, Work.PREFILL)

    def server_changed(self, name: str) -> None:
        stream = self._named.get(name)
        if stream is not None and stream.hello is not None:
            role = self._roles.setdefault(name, stream.role)
            if role is not stream.role:
                self._roles[name] = stream.role
                self.circuits.forget(name)
                self._owner.role_changed(name)
        weights = frozenset(s.hello.weights_hash for s in self._streams.values() if s.hello is not None) - {""}
        if len(weights) > 1 and weights != self._weights:
            logger.warning(
                "servers of %s have different weights (%s): only equals are paired, and answers depend on which are taken",
                self._caller.model,
                ", ".join(sorted(each[:12] for each in weights)),
            )
        self._weights = weights
        self._owner.fleet_changed()

    def server_named(self, stream: ServerStream, hello: ServerHello) -> None:
        name = hello.name
        other = self._named.get(name)
        if other is not None and other is not stream and other.process is not None:
            also = " too" if stream.is_also(other, hello) else ""
            raise ProtocolError(f"{stream.address} says that it is {name}, which is at {other.address}{also}")
        self._forget(stream)
        self._named[name] = stream

    def pods_lost(self, name: str, pods: tuple[str, ...]) -> None:
        """Each pod is asked for once at a time, and again after ASK_AGAIN_S."""
        for pod in pods:
            asked_s = self._asked_s.get((name, pod), -math.inf)
            if self._caller.clock() - asked_s >= ASK_AGAIN_S:
                self._asked_s[name, pod] = self._caller.clock()
                forget_oldest(self._asked_s, MAX_ASKED)
                self._spawn(self._ask_for_pod(name, pod), f"ask for pod {pod}")

    async def _ask_for_pod(self, name: str, pod: str) -> None:
        if await self._discovery.gone(pod):
            logger.info("server %s is told that pod %s has ended", name, pod)
            self.send(name, PodGone(pod))

    def server_said(self, name: str, message: ServerMessage) -> None:
        self._owner.server_said(name, message)

    def server_lost(self, name: str, incarnation: str, crashed: bool, reason: str) -> None:
        self.speeds.forget(name)
        self._owner.server_lost(name, incarnation, crashed, reason)
        stream = self._named.get(name)
        if stream is not None and stream.lost and stream.held == UNLISTED:
            asyncio.get_running_loop().call_soon(self._leave_if_lost, stream)

    def server_emptied(self, name: str, incarnation: str, reason: str) -> None:
        self.speeds.forget(name)
        self._owner.server_emptied(name, incarnation, reason)

    def _leave_if_lost(self, stream: ServerStream) -> None:
        if stream.lost and stream.held == UNLISTED and self._streams.get(stream.found.key) is stream:
            self._drop(stream.found.key, UNLISTED)
