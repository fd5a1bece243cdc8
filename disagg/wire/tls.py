"""TLS of gRPC: what a process shows of itself, and whom it takes. Certificates are read again when their files change: each
handshake has those of then, and streams that are open stay."""

from __future__ import annotations

import asyncio

import grpc

from disagg.auth.reloaded import Reloaded
from disagg.auth.tls import Certificates, open_certificates
from disagg.config.tree import TlsConfig
from disagg.wire.services import open_channel


class WireTls:
    """Of one process; without certificates it speaks in the clear. Made by `open_wire_tls`.

    mutual: routers, servers and peers speak TLS to each other, and both ends show a certificate that tls.ca has signed.
    """

    def __init__(self, certificates: Reloaded[Certificates] | None = None, server_name: str = "") -> None:
        self.certificates = certificates
        self.mutual = certificates is not None and bool(certificates.value.ca)
        self._server_name = server_name

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

    async def look_always(self) -> None:
        """Keeps up with the files. Runs until it is cancelled."""
        if self.certificates is None:
            await asyncio.Event().wait()
        else:
            await self.certificates.look_always()


def open_wire_tls(tls: TlsConfig) -> WireTls:
    """Raises ConfigError for files that cannot be used."""
    return WireTls(open_certificates(tls), tls.server_name)


CLEAR = WireTls()  # of a process without certificates
