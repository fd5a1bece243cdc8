"""Streams and links between versions, over gRPC: who has a protocol in common is served, others are refused by both names."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from msgspec.structs import replace

from disagg.config.tree import Config
from disagg.messages.legs import PeerRef, ServerHello
from disagg.messages.link import LinkHello
from disagg.prefill_server.role import PREFILL
from disagg.router.dial import dial_server
from disagg.router.streams import VersionRefused
from disagg.server import same_code
from disagg.server.lifecycle import Server as LifeOfServer
from disagg.server.links import Links
from disagg.server.same_code import check_code
from disagg.types.errors import DisaggError
from disagg.types.protocol import BEFORE_NUMBERS, PROTOCOL, Version
from disagg.types.version import own_version
from disagg.wire.server import RouterHello
from disagg.wire.services import make_server, peer_handler
from tests.server.router_streams import DEADLINE_S, Router, Server
from tests.server.test_links import RANKS, Dialled, decode_hello

NEXT = Version(PROTOCOL + 1, PROTOCOL, "next")
TOO_NEW = Version(PROTOCOL + 2, PROTOCOL + 1, "too new")


class Versioned(Server):
    """A server of some version."""

    def __init__(self, version: Version) -> None:
        super().__init__()
        self.version = version

    def _hello(self) -> ServerHello:
        return replace(super()._hello(), version=self.version)


async def attach(server: Server, version: Version) -> Router:
    hello = RouterHello("router-0", "i", "s", 0, version=version)
    return Router(*await dial_server(f"127.0.0.1:{server.port}", hello, DEADLINE_S))


@pytest.mark.parametrize("server_version", [BEFORE_NUMBERS, own_version(), NEXT], ids=str)
@pytest.mark.parametrize("router_version", [own_version(), NEXT], ids=str)
async def test_routers_and_servers_next_to_each_other_are_served(
    server_version: Version, router_version: Version
) -> None:
    if server_version == BEFORE_NUMBERS and router_version == NEXT:
        router_version = own_version()
    async with Versioned(server_version) as server:
        router = await attach(server, router_version)
        assert router.hello is not None
        assert router.hello.version == server_version
        await router.close()


@pytest.mark.parametrize(("server_version", "router_version"), [(TOO_NEW, own_version()), (own_version(), TOO_NEW)])
async def test_a_router_too_far_away_is_refused_and_both_versions_are_named(
    server_version: Version, router_version: Version
) -> None:
    async with Versioned(server_version) as server:
        with pytest.raises(VersionRefused) as refused:
            await attach(server, router_version)
        assert f"server d0 is {server_version}; router router-0 is {router_version}" in str(refused.value)
        assert server.streams.describe() == {}


class Prefill:
    """Links of a prefill server of some version."""

    def __init__(self, version: Version) -> None:
        self.up: list[LinkHello] = []
        self.version = version
        self.failed: asyncio.Queue[str] = asyncio.Queue()
        self.links = Links(
            lease_s=30.0,
            greeting=lambda generation: LinkHello(
                "P", generation, "one", "same", 1, "here", RANKS, "process-p", version=version
            ),
            on_up=lambda number, hello, dialled: self.up.append(hello),
            on_message=lambda number, message: None,
            on_down=lambda number, gone, reason: None,
            on_gone=lambda number: None,
            on_dial_failed=lambda peer, reason: self.failed.put_nowait(reason),
        )
        self._grpc = make_server(peer_handler(self.links))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Prefill:
        await self._grpc.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close()
        await self._grpc.stop(None)


@pytest.mark.parametrize("version", [BEFORE_NUMBERS, own_version(), NEXT], ids=str)
async def test_a_decode_server_of_the_version_beside_links(version: Version) -> None:
    async with Prefill(own_version()) as prefill:
        dialled = Dialled(prefill, replace(decode_hello("g", "process"), version=version))  # type: ignore[arg-type]
        await dialled.greeted()
        assert [hello.version for hello in prefill.up] == [version]
        await dialled.close()


async def test_a_decode_server_too_far_away_is_refused_and_both_versions_are_named() -> None:
    async with Prefill(own_version()) as prefill:
        dialled = Dialled(prefill, replace(decode_hello("g", "process"), version=TOO_NEW))  # type: ignore[arg-type]
        code, why = await dialled.refusal()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"server P is {own_version()}; server D is {TOO_NEW}" in why
        assert prefill.up == []
        await dialled.close()


async def test_who_dials_a_server_too_far_away_is_told_at_once() -> None:
    """Also by one that would not refuse: whoever is newer knows."""
    async with Prefill(TOO_NEW) as far, Prefill(own_version()) as here:
        here.links.dial(PeerRef("P", f"127.0.0.1:{far.port}", "one"))
        async with asyncio.timeout(DEADLINE_S):
            why = await here.failed.get()
        assert str(TOO_NEW) in why
        assert str(own_version()) in why
        assert here.up == far.up == []


# ---- of one server


async def test_a_server_says_its_version_to_routers() -> None:
    server = LifeOfServer(Config(), lambda role: PREFILL, PREFILL.role, lambda: None)
    assert server._identity.hello().version == own_version()


def test_a_server_ends_where_its_workers_would_be_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_code("prefill-0")
    monkeypatch.setattr(same_code, "code_digest", lambda: "")  # cannot be read: that proves nothing
    check_code("prefill-0")
    monkeypatch.setattr(same_code, "code_digest", lambda: "0123456789")
    with pytest.raises(DisaggError, match=r"the code of disagg has been changed under prefill-0 .* is 01234567 now"):
        check_code("prefill-0")
