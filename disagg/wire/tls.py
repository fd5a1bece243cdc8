"""TLS of gRPC: what a process shows of itself, and whom it takes. Certificates are read again when their files change: each
handshake has those of then, and streams that are open stay."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from prometheus_client import CollectorRegistry

from disagg.auth.chain import DAY_S, Validity
from disagg.auth.reloaded import LOOK_S, Reloaded
from disagg.auth.tls import Certificates, expose_expiry, open_certificates
from disagg.config.tree import TlsConfig
from disagg.wire.services import open_channel

logger = logging.getLogger(__name__)


class WireTls:
    """Of one process; without certificates it speaks in the clear. Made by `open_wire_tls`.

    mutual: routers, servers and peers speak TLS to each other, and both ends show a certificate that tls.ca has signed.
    """

    def __init__(self, certificates: Reloaded[Certificates] | None = None, server_name: str = "") -> None:
        self.certificates = certificates
        self.mutual = certificates is not None and bool(certificates.value.ca)
        self._server_name = server_name
        self._said: tuple[Validity, bool] | None = None

    def dial(self, address: str) -> grpc.aio.Channel:
        """To a server or a peer. Connects lazily."""
        if self.certificates is None or not self.mutual:
            return open_channel(address)
        now = self.certificates.value
        return open_channel(address, grpc.ssl_channel_credentials(now.ca, now.key, now.cert), self._server_name)

    def listen_to_clients(self, server: grpc.aio.Server, address: str) -> int:
        """The port. Raises RuntimeError if the address cannot be had."""
        return self._listen(server, address, mutual=False, secure=self.certificates is not None)

    def listen_to_peers(self, server: grpc.aio.Server, address: str) -> int:
        """The port; whoever shows no certificate of tls.ca gets no further than that. Raises as listen_to_clients does."""
        return self._listen(server, address, mutual=True, secure=self.mutual)

    def _listen(self, server: grpc.aio.Server, address: str, *, mutual: bool, secure: bool) -> int:
        if not secure:
            return int(server.add_insecure_port(address))

        def now() -> grpc.ServerCertificateConfiguration:
            assert self.certificates is not None
            read = self.certificates.value
            pair = [(read.key, read.cert)]
            return grpc.ssl_server_certificate_configuration(pair, read.ca if mutual else None)

        credentials = grpc.dynamic_ssl_server_credentials(now(), now, require_client_authentication=mutual)
        return int(server.add_secure_port(address, credentials))

    def expose(self, registry: CollectorRegistry) -> None:
        if (certificates := self.certificates) is not None:
            expose_expiry(lambda: certificates.value.validity, registry)

    def ends_in_s(self, now_s: float) -> float | None:
        """How long the certificate is taken yet, if that is not long; below 0 if it is taken no more. now_s: of the epoch."""
        if self.certificates is None or not (validity := self.certificates.value.validity).ends_soon(now_s):
            return None
        return validity.until_s - now_s

    def say_expiry(self, now_s: float) -> None:
        """In the log: once that it is soon, and once that it is so."""
        left_s = self.ends_in_s(now_s)
        if self.certificates is None or left_s is None:
            return
        said = self.certificates.value.validity, left_s < 0
        if said == self._said:
            return
        self._said = said
        if left_s < 0:
            logger.error("tls.cert, or what it rests on, has expired, and clients and peers do not take it: renew it")
        else:
            logger.warning("tls.cert, or what it rests on, expires in %.1f days: renew it", left_s / DAY_S)

    async def look_always(self, every_s: float = LOOK_S) -> None:
        """Keeps up with the files, and warns before they expire. Runs until it is cancelled."""
        if self.certificates is None:
            await asyncio.Event().wait()
            return
        while True:
            self.say_expiry(time.time())
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.certificates.look)


def open_wire_tls(tls: TlsConfig) -> WireTls:
    """Raises ConfigError for files that cannot be used."""
    return WireTls(open_certificates(tls), tls.server_name)


CLEAR = WireTls()  # of a process without certificates
