"""Where a server listens, for routers and peers and for whoever scrapes it; and under which name it is dialled."""

from __future__ import annotations

import socket

import grpc

from disagg.config.tree import ServerConfig
from disagg.telemetry.http import TelemetryServer
from disagg.telemetry.listening import cannot_listen, why_not_listen
from disagg.types.addresses import join
from disagg.types.errors import DisaggError
from disagg.wire.tls import WireTls


async def listen(
    at: ServerConfig, tls: WireTls, server: grpc.aio.Server, telemetry: TelemetryServer
) -> tuple[int, int]:
    """The ports of gRPC and of metrics. Raises ConfigError or DisaggError naming the setting of one that cannot be had."""
    free, address = "0 takes a free one", join(at.host, at.port)
    try:
        port = tls.listen_to_peers(server, address)
    except RuntimeError as error:  # gRPC does not say why
        why = why_not_listen(at.host, at.port, "server.port", free)
        raise why or DisaggError(f"server.port = {at.port}: cannot listen on {address}; {free}") from error
    try:
        return port, await telemetry.start(at.host, at.metrics_port)
    except (OSError, UnicodeError) as error:
        raise cannot_listen(at.host, at.metrics_port, "server.metrics_port", error, free) from error


def dialable(host: str) -> str:
    """What peers on this host dial when we listen on every address."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]", "") else host
