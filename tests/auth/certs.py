"""Authorities and certificates for tests, made when they are asked for."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from disagg.config.tree import TlsConfig


class Authority:
    def __init__(self, name: str = "authority", by: Authority | None = None, days: float = 1.0) -> None:
        """by: whoever has signed this one, which is between it and what this one signs."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        issuer, key = (by._name, by._key) if by else (self._name, self._key)
        self.certificate = _signed(self._name, issuer, self._key.public_key(), key, ca=True, days=days)
        self.pem = self.certificate.public_bytes(Encoding.PEM)

    def write(
        self,
        directory: Path,
        host: str = "127.0.0.1",
        password: bytes = b"",
        days: float = 1.0,
        begins_days: float = -1 / 24,
        usages: Sequence[x509.ObjectIdentifier] = (),
    ) -> TlsConfig:
        """A new certificate for that host, its key and this authority, over what the directory has of them. usages: none: any.

        days, begins_days: from now until it ceases and begins to be valid.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(
            _name("member"),
            self._name,
            key.public_key(),
            self._key,
            host=host,
            days=days,
            begins_days=begins_days,
            usages=usages,
        )
        hidden: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
        directory.mkdir(exist_ok=True)
        (directory / "cert").write_bytes(certificate.public_bytes(Encoding.PEM))
        (directory / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
        (directory / "ca").write_bytes(self.pem)
        return TlsConfig(cert=str(directory / "cert"), key=str(directory / "key"), ca=str(directory / "ca"))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool = False,
    host: str = "",
    days: float = 1.0,
    begins_days: float = -1 / 24,
    usages: Sequence[x509.ObjectIdentifier] = (),
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=begins_days))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
    )
    if host:
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        made = made.add_extension(x509.SubjectAlternativeName([name]), critical=False)
    if usages:
        made = made.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return made.sign(key, hashes.SHA256())
