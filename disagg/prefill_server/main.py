"""The prefill role: a server with a prefill engine. `disagg prefill` runs this."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from disagg.config.tree import Config
from disagg.server.server import Server
from disagg.types.ids import Role


def run(config: Config, heartbeat: Callable[[], None]) -> int:
    """Serve until SIGTERM has been drained. The exit status: 3 for a configuration that cannot work."""

    async def serve() -> int:
        return await Server(config, Role.PREFILL, heartbeat).run()

    return uvloop.run(serve())
