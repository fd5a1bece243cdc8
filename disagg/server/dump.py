"""Everything worth knowing of a hung server, as text for a person."""

from __future__ import annotations

import asyncio
import json
import os
import socket

from disagg.messages.control import Dump, Dumped
from disagg.server.dispatch import Dispatch
from disagg.server.identity import Identity
from disagg.server.links import Links
from disagg.server.offloading import Offloading
from disagg.server.routers import RouterStreams
from disagg.server.workers import Workers, WorkersLost
from disagg.telemetry.stacks import format_stacks
from disagg.types.errors import ConfigError

DUMP_S = 5.0  # workers answer within so long, or are left out


class Dumper:
    """One dump at a time, whoever asks. workers: what there is of them now."""

    def __init__(self, identity: Identity, dispatch: Dispatch) -> None:
        self._identity = identity
        self._dispatch = dispatch
        self._dumping = asyncio.Lock()
        self.workers: Workers | None = None
        self.routers: RouterStreams
        self.links: Links
        self.offloading: Offloading

    async def dump(self) -> str:
        async with self._dumping:
            return await self._dump()

    async def _dump(self) -> str:
        who = self._identity
        parts = [f"== {who.name} ({who.role.value}), pid {os.getpid()}, {socket.gethostname()}, {who.state.value}"]
        if self._dispatch.engine is not None:
            parts.append(json.dumps(self._dispatch.engine.dump(), indent=1, default=str))
        parts.append("-- routers\n" + json.dumps(self.routers.describe(), indent=1))
        parts.append("-- links\n" + json.dumps(self.links.describe(), indent=1))
        parts.append("-- storage\n" + json.dumps(self.offloading.describe(), indent=1))
        parts.append("-- stacks\n" + format_stacks())
        if self.workers is not None:
            try:
                for reply in await self.workers.call(Dump(), DUMP_S):
                    if isinstance(reply, Dumped):
                        parts.append(f"-- worker\n{reply.text}")
            except (WorkersLost, ConfigError) as error:
                parts.append(f"-- workers do not answer: {error}")
        return "\n".join(parts)
