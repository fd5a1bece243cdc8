"""TLS of the HTTP face, and between routers, servers and peers: who is let in, and what a changed file changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import grpc
import httpx
import pytest
import uvloop
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from disagg.api.app import HttpServer, create_app, serve
from disagg.api.crowd import Bounds
from disagg.auth.chain import DAY_S, Validity, check_chain
from disagg.auth.reloaded import Reloaded
from disagg.auth.tls import Certificates, open_certificates, trusting
from disagg.config.tree import TlsConfig
from disagg.router.dial import dial_server
from disagg.types.errors import ConfigError, Unavailable
from disagg.types.ids import Role
from disagg.wire.server import RouterHello
from disagg.wire.services import (
    INFERENCE,
    PEER,
    SERVER,
    Health,
    make_server,
    open_channel,
    server_handler,
)
from disagg.wire.tls import CLEAR, WireTls, open_wire_tls
from tests.api.fakes import FakeChatTemplate, FakeRouter
from tests.auth.certs import Authority
from tests.router.fake_server import FakeServer, prefill
from tests.wire.serving import is_serving

DEADLINE_S = 10.0


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


def opened(authority: Authority, directory: Path) -> Reloaded[Certificates]:
    made = open_certificates(authority.write(directory))
    assert made is not None
    return made


# ---- HTTP


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def certificates(authority: Authority, tmp_path: Path) -> Reloaded[Certificates]:
    return opened(authority, tmp_path / "router")


@pytest.fixture
async def https(certificates: Reloaded[Certificates]) -> AsyncIterator[HttpServer]:
    app = create_app(FakeRouter(), FakeChatTemplate(), CollectorRegistry(), version="1")
    running = await serve(app, "127.0.0.1", 0, Bounds(head_s=1.0), certificates=certificates)
    assert running.base_url.startswith("https://")
    yield running
    await running.shutdown(grace_s=1.0)


async def status_of(server: HttpServer, verify: ssl.SSLContext, **body: object) -> int:
    async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=DEADLINE_S) as client:
        if body:
            return (await client.post(f"{server.base_url}/v1/completions", json=body)).status_code
        return (await client.get(f"{server.base_url}/status")).status_code


def trust(authority: Authority, directory: Path) -> ssl.SSLContext:
    directory.mkdir(exist_ok=True)
    (directory / "trusted").write_bytes(authority.pem)
    return trusting(directory / "trusted")


async def test_the_http_face_speaks_tls_and_nothing_else(
    https: HttpServer, authority: Authority, tmp_path: Path
) -> None:
    assert await status_of(https, trust(authority, tmp_path)) == 200
    assert await status_of(https, trust(authority, tmp_path), model="fake/words", prompt="hi", max_tokens=2) == 200
    assert await status_of(https, trust(authority, tmp_path), model="fake/words", prompt="hi", n=-1) == 400
    assert await status_of(https, trusting(None, own=tmp_path / "router" / "cert")) == 200
    with pytest.raises(httpx.ConnectError):
        await status_of(https, trust(Authority("other"), tmp_path))
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(https.base_url.replace("https", "http") + "/health")


async def test_a_new_certificate_is_shown_to_whoever_comes_then_and_a_bad_one_is_not(
    https: HttpServer, authority: Authority, certificates: Reloaded[Certificates], tmp_path: Path
) -> None:
    async with httpx.AsyncClient(verify=trust(authority, tmp_path), trust_env=False) as old:
        assert (await old.get(f"{https.base_url}/status")).status_code == 200
        (tmp_path / "router" / "key").write_text("no key")
        assert not certificates.look()
        assert await status_of(https, trust(authority, tmp_path)) == 200
        other = Authority("other")
        other.write(tmp_path / "router")
        assert certificates.look()
        assert await status_of(https, trust(other, tmp_path)) == 200
        with pytest.raises(httpx.ConnectError):
            await status_of(https, trust(authority, tmp_path))
        assert (await old.get(f"{https.base_url}/status")).status_code == 200  # on the connection that it has


async def test_whoever_never_ends_the_handshake_is_cut_off(https: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(https.host, https.port)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read() == b""
    writer.close()


def test_files_that_do_not_go_together_are_refused(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.write(tmp_path / "one"), authority.write(tmp_path / "two")
    hidden = authority.write(tmp_path / "three", password=b"secret")
    for bad, said in (
        (replace(good, key=other.key), "not a certificate and its key"),
        (replace(good, key=good.cert), "not a certificate and its key"),
        (replace(good, cert=str(tmp_path / "none")), "no such file"),
        (replace(good, ca=good.key), "has no certificates"),
        (hidden, "without a password"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_certificates(bad)


def refusal(config: TlsConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        open_certificates(config)
    return str(refused.value)


def test_a_certificate_that_nobody_would_take_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority("other")
    expired = authority.write(tmp_path / "expired", days=-1, begins_days=-2)
    assert "it has expired on" in refusal(expired) and "it has expired on" in refusal(replace(expired, ca=""))
    early = authority.write(tmp_path / "early", days=2, begins_days=1)
    assert "is not valid before" in refusal(early) and "is not valid before" in refusal(replace(early, ca=""))
    strange = replace(authority.write(tmp_path / "strange"), ca=other.write(tmp_path / "other").ca)
    assert f"not one that tls.ca = {strange.ca} has signed" in refusal(strange)
    assert open_certificates(replace(strange, ca="")) is not None  # nobody asks who has signed it
    for usage in (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH):
        half = authority.write(tmp_path / "half", usages=[usage])
        assert "unsuitable certificate purpose" in refusal(half)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    assert open_certificates(authority.write(tmp_path / "half", usages=both)) is not None
    ended = Authority("authority", days=-1 / 48)
    assert "a certificate that it rests on" in refusal(ended.write(tmp_path / "ended"))


def test_files_that_are_being_written_just_now_are_refused_like_others(authority: Authority, tmp_path: Path) -> None:
    """They were read, and are gone when the certificate is tried; whoever looks again and again goes on looking."""
    config = authority.write(tmp_path / "one")
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(config.cert, config.key)
    Path(config.key).unlink()
    with pytest.raises(ConfigError, match="cannot be read: "):
        check_chain(shown, Path(config.cert), Path(config.key), Path(config.ca), time.time())


@pytest.mark.parametrize("named_like", ["other", "authority"])
def test_of_a_bundle_of_authorities_one_is_enough(authority: Authority, tmp_path: Path, named_like: str) -> None:
    config, other = authority.write(tmp_path / "one"), Authority(named_like, days=-1 / 48)
    for bundle in (other.pem + authority.pem, authority.pem + other.pem):
        (tmp_path / "one" / "ca").write_bytes(bundle)
        assert open_certificates(config) is not None
    (tmp_path / "one" / "ca").write_bytes(other.pem)
    refusal(config)


async def test_what_is_between_a_certificate_and_its_authority_is_behind_it(
    authority: Authority, tmp_path: Path
) -> None:
    between = Authority("between", by=authority, days=0.5)
    config = between.write(tmp_path / "chain")
    cert, ca = tmp_path / "chain" / "cert", tmp_path / "chain" / "ca"
    below = opened_from(config)  # between it and tls.ca is nothing
    ca.write_bytes(authority.pem)
    assert "belongs behind it in its file" in refusal(config)
    cert.write_bytes(cert.read_bytes() + between.pem)
    chained = opened_from(config)
    for made in (below, chained):
        assert abs(made.value.validity.until_s - between.certificate.not_valid_after_utc.timestamp()) < 1
    async with Listening(open_wire_tls(config), SERVER) as server:  # gRPC says the same
        assert await answers(open_wire_tls(authority.write(tmp_path / "ours")).dial(server.address))
        assert await answers(open_wire_tls(config).dial(server.address))


def opened_from(config: TlsConfig) -> Reloaded[Certificates]:
    made = open_certificates(config)
    assert made is not None
    return made


def test_a_running_process_keeps_the_certificate_that_is_taken_until_it_is_given_another(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "router"
    certificates = opened(authority, directory)
    first = certificates.value
    for write in (
        lambda: authority.write(directory, days=-1, begins_days=-2),
        lambda: authority.write(directory, days=2, begins_days=1),
        lambda: (Authority("other").write(directory), (directory / "ca").write_bytes(authority.pem)),
    ):
        caplog.clear()
        write()
        with caplog.at_level(logging.INFO):
            assert not certificates.look() and not certificates.look()
        [record] = caplog.records
        assert record.levelno == logging.ERROR and "what was read before stays" in record.getMessage()
        assert certificates.value is first
    authority.write(directory)
    assert certificates.look() and certificates.value is not first


def test_a_certificate_that_is_not_valid_yet_is_taken_when_it_is(authority: Authority, tmp_path: Path) -> None:
    certificates = opened(authority, tmp_path / "router")
    authority.write(tmp_path / "router", begins_days=2 / 86400)
    assert not certificates.look()
    until_s = time.monotonic() + DEADLINE_S
    while not certificates.look():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_that_a_certificate_ends_soon_is_said_once_and_counted_down(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls, registry = open_wire_tls(Authority(days=40).write(tmp_path / "router", days=30)), CollectorRegistry()
    tls.expose(registry)
    left_s = registry.get_sample_value("disagg_tls_certificate_expires_in_seconds")
    assert left_s is not None and abs(left_s - 30 * DAY_S) < 60
    life_s = registry.get_sample_value("disagg_tls_certificate_life_seconds")
    assert life_s is not None and abs(life_s - 30 * DAY_S - 3600) < 60
    now_s = time.time()
    assert tls.ends_in_s(now_s) is None and CLEAR.ends_in_s(now_s) is None
    with caplog.at_level(logging.WARNING):
        for days in (0, 22, 24, 25, 31, 32):
            tls.say_expiry(now_s + days * DAY_S)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "expires in 6.0 days" in caplog.text


@pytest.mark.parametrize(
    ("life_days", "left_days", "soon"), [(90, 8, False), (90, 6, True), (1, 0.3, False), (1, 0.2, True)]
)
def test_soon_is_a_week_or_a_quarter_of_a_shorter_life(life_days: float, left_days: float, soon: bool) -> None:
    assert Validity(0.0, life_days * DAY_S).ends_soon((life_days - left_days) * DAY_S) is soon


# ---- gRPC


class Listening:
    """A gRPC server with health, for peers or for clients."""

    def __init__(self, tls: WireTls, service: str) -> None:
        self._server = make_server()
        self._health = Health(self._server, (service,))
        listen = tls.listen_to_clients if service == INFERENCE else tls.listen_to_peers
        self.address = f"127.0.0.1:{listen(self._server, '127.0.0.1:0')}"

    async def __aenter__(self) -> Listening:
        await self._server.start()
        await self._health.set_serving(True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


async def answers(channel: grpc.aio.Channel) -> bool:
    try:
        return await is_serving(channel, timeout_s=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    finally:
        await channel.close()


@pytest.mark.parametrize("service", [SERVER, PEER])
async def test_a_server_takes_whoever_has_a_certificate_of_its_authority_and_nobody_else(
    authority: Authority, tmp_path: Path, service: str
) -> None:
    other = Authority("other")
    async with Listening(open_wire_tls(authority.write(tmp_path / "server")), service) as server:
        ours = open_wire_tls(authority.write(tmp_path / "ours", host="elsewhere"))
        theirs = open_wire_tls(other.write(tmp_path / "theirs"))
        assert await answers(ours.dial(server.address))
        assert not await answers(theirs.dial(server.address))
        assert not await answers(CLEAR.dial(server.address))
        assert not await answers(open_channel(server.address, grpc.ssl_channel_credentials(authority.pem)))
        theirs_that_trusts_us = other.write(tmp_path / "mixed")
        (tmp_path / "mixed" / "ca").write_bytes(authority.pem + other.pem)
        assert not await answers(open_wire_tls(theirs_that_trusts_us).dial(server.address))


async def test_a_server_of_another_authority_or_name_is_not_talked_to(authority: Authority, tmp_path: Path) -> None:
    ours = authority.write(tmp_path / "ours")
    async with Listening(open_wire_tls(Authority("other").write(tmp_path / "other")), SERVER) as server:
        assert not await answers(open_wire_tls(ours).dial(server.address))
    async with Listening(open_wire_tls(authority.write(tmp_path / "named", host="pool.example")), SERVER) as server:
        assert not await answers(open_wire_tls(ours).dial(server.address))
        assert await answers(open_wire_tls(replace(ours, server_name="pool.example")).dial(server.address))


async def test_certificates_change_under_a_server_and_open_streams_stay(authority: Authority, tmp_path: Path) -> None:
    other, tls = Authority("other"), open_wire_tls(authority.write(tmp_path / "server"))
    assert tls.certificates is not None
    async with Listening(tls, SERVER) as server:
        ours = open_wire_tls(authority.write(tmp_path / "ours"))
        assert ours.certificates is not None
        stays = ours.dial(server.address)
        assert await is_serving(stays)
        other.write(tmp_path / "server")
        assert tls.certificates.look()
        assert not await answers(ours.dial(server.address))
        other.write(tmp_path / "ours")
        assert ours.certificates.look()
        assert await answers(ours.dial(server.address))
        assert await answers(stays)


async def test_clients_of_the_grpc_face_need_no_certificate(authority: Authority, tmp_path: Path) -> None:
    async with Listening(open_wire_tls(authority.write(tmp_path / "router")), INFERENCE) as router:
        assert await answers(open_channel(router.address, grpc.ssl_channel_credentials(authority.pem)))
        assert not await answers(open_channel(router.address))
        assert not await answers(open_channel(router.address, grpc.ssl_channel_credentials(Authority("other").pem)))


async def test_a_router_attaches_with_a_certificate_and_not_without(authority: Authority, tmp_path: Path) -> None:
    server = make_server(server_handler(FakeServer("p0", Role.PREFILL, prefill)))
    address = f"127.0.0.1:{open_wire_tls(authority.write(tmp_path / 'server')).listen_to_peers(server, '127.0.0.1:0')}"
    await server.start()
    try:
        hello = RouterHello("router-0", "i", "s", 0)
        for tls in (CLEAR, open_wire_tls(Authority("other").write(tmp_path / "other"))):
            with pytest.raises(Unavailable):
                await dial_server(address, hello, 3.0, tls.dial)
        ours = open_wire_tls(authority.write(tmp_path / "ours"))
        connection, says = await dial_server(address, hello, DEADLINE_S, ours.dial)
        assert says.hello is not None and says.hello.name == "p0"
        await connection.close()
    finally:
        await server.stop(None)
