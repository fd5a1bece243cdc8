"""The decode role: a server with a decode engine. `disagg decode` runs this."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from disagg.config.tree import Config
from disagg.decode_server.role import DECODE
from disagg.server.lifecycle import Server


def run(config: Config, heartbeat: Callable[[], None]) -> int:
    """Serve until SIGTERM has been drained. Returns the exit status; see types/status."""

    async def serve() -> int:
        return await Server(config, DECODE, heartbeat).run()

    return uvloop.run(serve())
