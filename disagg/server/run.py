"""A server process from its configuration to its end, whatever its role."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from disagg.config.tree import Config
from disagg.server.lifecycle import Server
from disagg.server.role import ServerRole


def run_server(config: Config, role: ServerRole, heartbeat: Callable[[], None]) -> int:
    """Serve until SIGTERM has been drained. Returns the exit status; see types/status."""

    async def serve() -> int:
        return await Server(config, role, heartbeat).run()

    return uvloop.run(serve())
