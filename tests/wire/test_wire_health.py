"""Health of a server on a real loopback port: of what it is asked, whether it serves, and when that changes."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.wire import services
from tests.wire.servicers import serving
from tests.wire.serving import is_serving

pytestmark = pytest.mark.timeout(120)


async def test_health_follows_the_server():
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        await made[0].set_serving(True)
        assert await is_serving(channel)
        assert await is_serving(channel, services.SERVER)
        await made[0].set_serving(False)
        assert not await is_serving(channel, services.SERVER)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await is_serving(channel, services.PEER)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_lists_what_it_is_asked_of():
    """Or anybody could fill the log with a failure: health asks for no key."""
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        await made[0].set_serving(True)
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert {name: each.status for name, each in listed.statuses.items()} == {
            "": serving_now,
            services.SERVER: serving_now,
        }


async def test_health_begins_as_not_serving_and_can_be_watched():
    made = []

    async def prepare(grpc_server):
        made.append(services.Health(grpc_server, [services.SERVER]))

    async with serving(prepare=prepare) as channel:
        assert not await is_serving(channel)
        reply = health_pb2.HealthCheckResponse
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=services.SERVER))
        unknown = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=services.PEER))
        assert (await call.read()).status == reply.NOT_SERVING
        await made[0].set_serving(True)
        assert (await call.read()).status == reply.SERVING
        await made[0].set_serving(False)
        assert (await call.read()).status == reply.NOT_SERVING
        assert (await unknown.read()).status == reply.SERVICE_UNKNOWN
        call.cancel()
        unknown.cancel()
