"""Certificates from files, which are read again when they change. Knows TLS; nothing of gRPC or HTTP."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge

from disagg.auth.chain import Validity, check_chain
from disagg.auth.reloaded import Reloaded
from disagg.config.tree import TlsConfig
from disagg.types.errors import ConfigError
from disagg.types.small_files import home_expanded, read_small

PEM_BYTES = 1 << 20


class Certificates(Struct, frozen=True):
    """As PEM; ca is empty where none is given. context: of a server that shows the certificate to whoever asks."""

    cert: bytes
    key: bytes
    ca: bytes
    context: ssl.SSLContext
    validity: Validity


def open_certificates(tls: TlsConfig) -> Reloaded[Certificates] | None:
    """None where there is no TLS. Raises ConfigError for files that cannot be used, do not belong together, or that peers would
    not take."""
    if not tls.cert:
        return None
    cert, key = home_expanded(tls.cert, "tls.cert"), home_expanded(tls.key, "tls.key")
    ca = home_expanded(tls.ca, "tls.ca") if tls.ca else None
    paths = (cert, key) if ca is None else (cert, key, ca)
    return Reloaded(paths, lambda: _read(cert, key, ca), "tls")


def expose_expiry(validity: Callable[[], Validity], registry: CollectorRegistry) -> None:
    Gauge(
        "disagg_tls_certificate_expires_in_seconds",
        "Until what this process shows as its certificate is taken no more; below 0 once it is not",
        registry=registry,
    ).set_function(lambda: validity().until_s - time.time())
    Gauge(
        "disagg_tls_certificate_life_seconds",
        "From when this process' certificate became valid until it is taken no more",
        registry=registry,
    ).set_function(lambda: validity().until_s - validity().from_s)


def serving_context(certificates: Reloaded[Certificates]) -> ssl.SSLContext:
    """For a server: each handshake begins with this and goes on with what the files have then."""
    context = _context()

    def now(connection: ssl.SSLObject, name: str | None, begun: ssl.SSLContext) -> None:
        connection.context = certificates.value.context

    context.sni_callback = now  # is asked for clients that send no name, too
    return context


def trusting(ca: Path | None, own: Path | None = None) -> ssl.SSLContext:
    """For a client. ca: whose certificates are trusted, beside none; None: those that this machine trusts. own: one certificate
    that is trusted for itself, whatever the name by which its server is dialled. Raises ConfigError."""
    if own is None and ca is None:
        return ssl.create_default_context()
    file = own or ca
    assert file is not None
    try:
        context = ssl.create_default_context(cafile=str(file))
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{file} has no certificates that can be read: {error}") from error
    if own is not None:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read(cert: Path, key: Path, ca: Path | None) -> Certificates:
    files = {"tls.cert": cert, "tls.key": key} | ({"tls.ca": ca} if ca is not None else {})
    read: dict[str, bytes] = {}
    for setting, path in files.items():
        try:
            read[setting] = read_small(path, PEM_BYTES)
        except FileNotFoundError as error:
            raise ConfigError(f"{setting} = {path}: there is no such file") from error
    context = _context()
    try:
        # An empty password, or a key that has one would be asked for at the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.cert = {cert} and tls.key = {key} are not a certificate and its key without a password, both PEM: {error}"
        ) from error
    if ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tls.ca = {ca} has no certificates, as PEM, that can be read: {error}") from error
    validity = check_chain(context, cert, key, ca, time.time())
    return Certificates(read["tls.cert"], read["tls.key"], read.get("tls.ca", b""), context, validity)
