"""Keeps a server's workers alive: brings them up, waits until they are lost or are to be of another role, takes them down.

    bring up ──> wait ──lost──────────────────────────────> take down ──pause──> bring up
                  └──another role──> empty ──nothing left──────┘

Decides what is an accident and what the configuration's fault, and how long to wait. How each step is done is `Supervised`'s,
which is the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from asyncio import create_task
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from disagg.messages.legs import ServerState
from disagg.server.identity import Identity
from disagg.server.roles import RoleChanges
from disagg.server.workers import Workers, WorkersLost
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line
from disagg.wire.services import Health

logger = logging.getLogger(__name__)

RESTART_FIRST_S = 0.2
RESTART_MOST_S = 10.0
STEADY_S = 30.0  # up for this long: the next restart is quick again
MOST_SILENT_EXITS = 5  # of workers that never said a word: by then it is no accident


class Supervised(Protocol):
    """A server's workers, as far as whoever keeps them alive sees them."""

    @property
    def workers(self) -> Workers | None: ...

    @property
    def model_dir(self) -> Path: ...

    async def prepare(self) -> None:
        """Finds, once, what every incarnation needs. Raises ConfigError."""

    async def bring_up(self) -> None:
        """Starts a new incarnation; then READY. Raises ConfigError, WorkersLost."""

    async def empty(self, reason: str) -> None:
        """Ends all that it does."""

    async def take_down(self, reason: str, *, another_role: bool, intended: bool) -> None:
        """Ends the workers. another_role: the next ones are of another role. intended: these are not lost."""


class Supervisor:
    """Of one server. stop: it shuts down. command: of its workers, for messages."""

    def __init__(
        self, identity: Identity, roles: RoleChanges, stop: asyncio.Event, server: Supervised, command: Sequence[str]
    ) -> None:
        self._identity = identity
        self._roles = roles
        self._stop = stop
        self._server = server
        self._command = command
        self._another_role = asyncio.Event()  # is asked for

    def ask_for_role(self) -> None:
        """Another role is asked for: `roles` has it."""
        self._another_role.set()

    async def run(self, health: Health) -> None:
        """Keeps workers alive. Raises ConfigError when none can come up with this configuration."""
        await self._server.prepare()
        pause_s = RESTART_FIRST_S
        silent_exits = 0
        while True:
            up_s, intended = math.inf, False  # how long it takes to come up, or not to, is no sign of health
            try:
                await self._server.bring_up()
                up_s = time.monotonic()
                await health.set_serving(self._identity.state is ServerState.READY)  # not if it drains
                reason, intended = await self._lost_or_empty(health)
            except WorkersLost as error:
                reason = str(error)
                self._identity.note = f"its workers could not start: {reason}"
            except ConfigError as error:
                if self._identity.model is None:
                    raise
                # It worked before, so it is what the model's files have become, perhaps for a moment while they are replaced.
                reason = str(error)
                note = f"the model in {self._server.model_dir} could be served before, and cannot now: {reason}"
                self._identity.note = note
            changed = self._roles.fail(reason) or self._roles.take()
            if not intended:
                logger.error("the workers of %s are lost: %s", self._identity.name, reason)
            if changed:
                logger.info("%s begins anew as a %s server", self._identity.name, self._roles.now.value)
            workers = self._server.workers
            silent_exit = workers.silent_exit if workers is not None else ""
            silent_exits = silent_exits + 1 if silent_exit else 0
            if self._identity.model is None and silent_exits == MOST_SILENT_EXITS:
                command = one_line(str(list(self._command)))
                raise ConfigError(
                    f"worker.command = {command}: {silent_exit} before it said anything, {silent_exits} times in a row; what "
                    "it printed says why"
                )
            await health.set_serving(False)
            if changed:
                self._another_role.clear()
            await self._server.take_down(reason, another_role=changed, intended=intended)
            if changed or time.monotonic() - up_s > STEADY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RESTART_MOST_S)

    async def _lost_or_empty(self, health: Health) -> tuple[str, bool]:
        """Why the workers end, and whether that is intended: they are lost, or have nothing left and change role."""
        workers = self._server.workers
        assert workers is not None
        lost, asked = create_task(workers.wait_lost()), create_task(self._another_role.wait())
        emptied: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({lost, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                await health.set_serving(False)
                assert self._roles.becomes is not None
                reason = f"it becomes a {self._roles.becomes.value} server"
                emptied = create_task(self._server.empty(f"{self._identity.name} is emptied: {reason}"))
                await asyncio.wait({lost, emptied}, return_when=asyncio.FIRST_COMPLETED)
                if emptied.done():
                    emptied.result()
                    if not self._stop.is_set():
                        return reason, True
            return await lost, False
        finally:
            for task in (lost, asked, emptied):
                if task is not None:
                    task.cancel()
