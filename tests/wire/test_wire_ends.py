"""Calls that end: by keepalive, by a client that cancels, and while a reader is cancelled or out of time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import grpc
import pytest

from disagg.wire import inference, pb, services
from tests.wire.servicers import EchoInference, serving

pytestmark = pytest.mark.timeout(120)


def test_keepalive_does_not_count_as_an_attack():
    options = dict(services.SERVER_OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < services.KEEPALIVE_MS


SILENT_SERVER = """
import asyncio
from disagg.wire import services

class Silent(services.ServerServicer):
    async def attach(self, requests, context):
        async for request in requests:
            yield services.pb.server.ServerFrame()

    async def dump(self, request, context):
        raise NotImplementedError

async def main():
    server = services.make_server(services.server_handler(Silent()))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_by_keepalive_and_an_idle_one_is_left_alone():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SILENT_SERVER, stdout=asyncio.subprocess.PIPE)
    try:
        channel = services.open_channel(f"127.0.0.1:{int(await process.stdout.readline())}")
        call = services.ServerStub(channel).attach()
        await call.write(pb.server.RouterFrame())
        await call.read()
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([reading], timeout=services.KEEPALIVE_MS / 1000 + 2)
        assert not done
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(reading, 2 * services.KEEPALIVE_MS / 1000 + 2)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
    finally:
        process.kill()
        await process.wait()


async def test_cancelling_a_call_ends_the_servicers_generator():
    ended = asyncio.Event()

    class Endless(EchoInference):
        async def generate(self, request, context):
            try:
                while True:
                    yield inference.choice_delta_to_proto(inference.ChoiceDeltaView(0, "x", (1,)))
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

    async with serving(services.inference_handler(Endless())) as channel:
        call = services.InferenceStub(channel).generate(pb.inference.GenerateRequest())
        await call.read()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 30)


class SwallowingCall:
    """What gRPC's call does when it ends just as a read that waits for it to begin is cancelled."""

    def __init__(self, ending: grpc.aio.AioRpcError | None) -> None:
        self.reads = 0
        self._ending = ending

    async def read(self):
        self.reads += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        if self._ending is not None:
            raise self._ending
        return grpc.aio.EOF


@pytest.mark.parametrize(
    "ending",
    [None, grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())],
    ids=["ended", "broken"],
)
async def test_who_is_cancelled_while_reading_ends_even_if_the_call_swallows_it(ending):
    call = SwallowingCall(ending)

    async def again_and_again():
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await services.read_message(call)

    task = asyncio.create_task(again_and_again())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert call.reads == 1


async def test_a_time_limit_that_a_call_swallows_is_a_time_limit_still():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await services.read_message(SwallowingCall(None))
