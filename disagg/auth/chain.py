"""Whether others would take a certificate, and until when. Asks OpenSSL by a handshake in memory, as a peer would; knows
nothing of gRPC or HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from disagg.types.errors import ConfigError

DAY_S = 86400.0
SOON_S = 7 * DAY_S
SOON_SHARE = 0.25  # of its life: what lives for a day is renewed within that day
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME, which Python does not name
_CHAIN = 10  # certificates that one may rest on
_ROUND_TRIPS = 10  # a handshake takes 2
_EXPIRED, _NOT_YET = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID

Decoded = Mapping[str, Any]  # as ssl.SSLSocket.getpeercert gives it


class Validity(Struct, frozen=True):
    """In seconds of the epoch. until_s: when the certificate, or the last of those that it can rest on, expires."""

    from_s: float
    until_s: float

    def ends_soon(self, now_s: float) -> bool:
        return self.until_s - now_s < min(SOON_S, SOON_SHARE * (self.until_s - self.from_s))


def check_chain(shown: ssl.SSLContext, cert: Path, key: Path, ca: Path | None, now_s: float) -> Validity:
    """shown: a server's, with cert and key. ca: None where certificates are not asked for.

    Raises ConfigError for a certificate that has expired or is not valid yet, and for one that whoever trusts ca alone would
    not take, from a server or from a client.
    """
    decoded = _decoded(shown, cert)
    own = _validity(decoded)
    if now_s > own.until_s:
        raise ConfigError(
            f"tls.cert = {cert}: it has expired on {_day(own.until_s)}; a certificate that is valid is needed"
        )
    if now_s < own.from_s:
        raise ConfigError(f"tls.cert = {cert}: it is not valid before {_day(own.from_s)}, by this machine's clock")
    if ca is None:
        return own
    try:
        _check_signed(cert, key, ca)
        between, trusted = _authorities(cert), _authorities(ca)
    except (OSError, ValueError) as error:  # they are being written just now, say
        raise ConfigError(f"tls.cert = {cert}, tls.key = {key} and tls.ca = {ca} cannot be read: {error}") from error
    return Validity(own.from_s, until(decoded, [each for each in between if each != decoded], trusted))


def until(certificate: Decoded, between: Iterable[Decoded], trusted: Iterable[Decoded]) -> float:
    """When a certificate ceases to be taken: it expires, or no chain of names to what is trusted is left. The last there is,
    if names fit several; the certificate alone, if none fits."""
    between, trusted = list(between), list(trusted)

    def last(each: Decoded, depth: int) -> float:
        own, issuer = _validity(each).until_s, each.get("issuer")
        if depth == 0:
            return own
        ends = [_validity(other).until_s for other in trusted if other.get("subject") == issuer]
        ends += [last(other, depth - 1) for other in between if other.get("subject") == issuer and other != each]
        return min(own, max(ends)) if ends else own

    return last(certificate, _CHAIN if len(between) <= _CHAIN else 0)


def _check_signed(cert: Path, key: Path, ca: Path) -> None:
    """Both ways, since a process shows one certificate to whom it dials and to who dials it."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # which name is asked for is known to whoever dials
    for context in (server, client):
        context.load_cert_chain(cert, key, password="")
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST  # as gRPC does
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"tls.cert = {cert}: {_why_not(error, ca)}") from error
    except ssl.SSLError as error:
        raise ConfigError(f"tls.cert = {cert}: no handshake succeeds with it: {error}") from error


def _why_not(error: ssl.SSLCertVerificationError, ca: Path) -> str:
    if error.verify_code in (_EXPIRED, _NOT_YET):
        state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
        return f"a certificate that it rests on, beside it or in tls.ca = {ca}, {state}"
    return (
        f"it is not one that tls.ca = {ca} has signed for servers and clients, so no router or server would let this process "
        f"in: {error.verify_message}; what is between it and tls.ca belongs behind it in its file"
    )


def _decoded(shown: ssl.SSLContext, cert: Path) -> Decoded:
    """The certificate of a server, trusted for itself at any time."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    try:
        client.load_verify_locations(cert)
        found = _shake_hands(shown, client).getpeercert()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"tls.cert = {cert}: clients would not take it: {error.verify_message}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.cert = {cert}: no handshake succeeds with it: {error}") from error
    assert found, "it was asked for, and verified"
    return found


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """The client's end. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = client.wrap_bio(to_client, to_server)
    ends = [dials, server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_ROUND_TRIPS):
        for end in tuple(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not ends:
            return dials
    raise ssl.SSLError(f"the handshake did not end within {_ROUND_TRIPS} round trips")


def _authorities(path: Path) -> list[Decoded]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    return list(context.get_ca_certs())


def _validity(certificate: Decoded) -> Validity:
    return Validity(*(float(ssl.cert_time_to_seconds(certificate[name])) for name in ("notBefore", "notAfter")))


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
