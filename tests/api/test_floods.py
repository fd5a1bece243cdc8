"""Thousands of connections that do nothing, or little, to a router's process: others are served as if they were not there."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest

from disagg.wire import pb
from tests.api.target import DEADLINE_S, Target, make_target, make_watched, undisturbed  # noqa: F401  # two are fixtures

CONNECTIONS = 3000  # more than router.max_connections
ASKED_EVERY = 100
POST = b"POST /v1/completions HTTP/1.1\r\n"
LITTLE = (b"", b"G", POST + b"host: a\r\n", POST + b"host: a\r\ncontent-length: 9\r\n\r\n{")

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 500:
        pytest.skip(f"this machine allows {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(address: tuple[str, int], sent: tuple[bytes, ...], stack: contextlib.ExitStack) -> Iterator[int]:
    for number in range(CONNECTIONS):
        connection = stack.enter_context(socket.create_connection(address, DEADLINE_S))
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent[number % len(sent)])
        yield number


def test_others_are_served_while_thousands_of_connections_do_nothing(watched: Target) -> None:
    slowest_s = 0.0

    def run() -> None:
        nonlocal slowest_s
        with contextlib.ExitStack() as stack:
            for number in flood(watched.address, LITTLE, stack):
                if number % ASKED_EVERY == 0:
                    began_s = time.monotonic()
                    assert (
                        httpx.get(f"{watched.running.url}/health", trust_env=False, timeout=DEADLINE_S).status_code
                        == 200
                    )
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
            assert watched.metric("disagg_router_http_connections") <= 2048 + 256

    undisturbed(watched, lambda: None, run)
    print(f"the slowest of others' requests took {slowest_s:.3f} s")
    watched.until(lambda: watched.metric("disagg_router_http_connections") <= 3)


def test_a_grpc_port_full_of_silent_connections_serves_again_soon(watched: Target) -> None:
    method = "/disagg.v1.Inference/ListModels"

    def served(timeout_s: float) -> bool:
        address = ":".join(map(str, watched.grpc_address))
        with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            call = channel.unary_unary(method)
            with contextlib.suppress(grpc.RpcError):
                call(pb.inference.ListModelsRequest().SerializeToString(), timeout=timeout_s, wait_for_ready=True)
                return True
        return False

    def run() -> None:
        with contextlib.ExitStack() as stack:
            for _ in flood(watched.grpc_address, (b"", b"PRI * HT"), stack):
                pass
            assert served(DEADLINE_S)

    undisturbed(watched, lambda: None, run)
