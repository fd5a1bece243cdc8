"""Addresses as text: a host and a port, with brackets around a host of IPv6. Pure.

    join("::1", 50061)          "[::1]:50061"
    split("[::1]:50061")        ("::1", 50061)

A host is a name or an address, with brackets or without; `bare` has none.
"""

from __future__ import annotations

import ipaddress
from typing import Final

MAX_HOST_CHARS: Final = 255  # of a DNS name; addresses are shorter
FORM: Final = "host:port with a port from 1 to 65535, and brackets around an address of IPv6, such as [::1]:50061"


def bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join(host: str, port: int) -> str:
    """As gRPC and URLs take it."""
    plain = bare(host)
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def split(address: str) -> tuple[str, int]:
    """(host without brackets, port). Raises ValueError for what is not FORM."""
    host, colon, port = address.rpartition(":")
    plain = bare(host)
    if not (colon and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ValueError(f"it has no port; it must be {FORM}")
    if plain != host or ":" in plain:
        if plain == host or not _is_ipv6(plain):
            raise ValueError(f"its host is no address of IPv6 in brackets; it must be {FORM}")
    elif not plain or len(plain) > MAX_HOST_CHARS or not plain.isprintable() or set(plain) & set(" /[]@?#"):
        raise ValueError(f"it has no host; it must be {FORM}")
    return plain, int(port)


def is_loopback(host: str) -> bool:
    """Whether what listens at `host`, or asks from it, can only be on this machine. host: with or without a zone; an address of
    IPv4 may be written as one of IPv6, as sockets do. Of names only localhost is known to be."""
    plain = bare(host)
    try:
        address = ipaddress.ip_address(plain.partition("%")[0])
    except ValueError:
        return plain.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def unmapped(host: str) -> str:
    """A client's address as its own network writes it: a socket of IPv6 that takes IPv4, too, says ::ffff:10.0.0.1."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or host)


def _is_ipv6(host: str) -> bool:
    """With or without a zone."""
    address, _, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not zone or zone.isalnum()
