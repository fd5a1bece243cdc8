"""The prefill role: a server with a prefill engine. `disagg prefill` runs this."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from disagg.config.tree import Config
from disagg.prefill_server.role import PREFILL
from disagg.server.lifecycle import Server


def run(config: Config, heartbeat: Callable[[], None]) -> int:
    """Serve until SIGTERM has been drained. Returns the exit status; see types/status."""

    async def serve() -> int:
        return await Server(config, PREFILL, heartbeat).run()

    return uvloop.run(serve())
