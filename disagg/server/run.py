"""A server process from its configuration to its end, whatever its role."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from disagg.config.tree import Config
from disagg.server.lifecycle import Server
from disagg.server.role import RoleOf
from disagg.telemetry.threads import start_loop_threads
from disagg.types.ids import Role


def run_server(config: Config, role_of: RoleOf, role: Role, heartbeat: Callable[[], None]) -> int:
    """Serve until SIGTERM has been drained. Returns the exit status; see types/status.

    role_of: what each role is, of which this server may be another later. role: the one that it begins with.
    """

    async def serve() -> int:
        start_loop_threads()
        return await Server(config, role_of, role, heartbeat).run()

    return uvloop.run(serve())
