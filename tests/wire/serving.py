"""What a client asks of a server's health."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def is_serving(channel: grpc.aio.Channel, service: str = "", timeout_s: float = 5.0) -> bool:
    """Asks a server's health. Raises grpc.aio.AioRpcError when it cannot be reached or does not know the service."""
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
