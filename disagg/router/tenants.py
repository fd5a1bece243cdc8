"""Whose request it is, as far as a face can tell without asking anybody. Pure.

A tenant is a client's address together with the credentials that it shows. Nobody checks these here: they only tell
apart clients that come through one proxy, and their order of service depends on them, never what they may do. Without
credentials, HTTP clients of one address are one tenant, since each of their requests may have a connection of its own; a
gRPC client is its connection, which carries all its requests.
"""

from __future__ import annotations

import hashlib

MAX_CREDENTIAL_CHARS = 8192  # of which a tenant is told by: HTTP servers take about so much of a header


def tenant_of(address: str, credentials: str = "", connection: str = "") -> str:
    """A short name, which shows neither. address: without a port; connection: where it carries many requests."""
    who = ("key", address, credentials[:MAX_CREDENTIAL_CHARS]) if credentials else ("at", address, connection)
    digest = hashlib.blake2b("\0".join(who).encode("utf-8", "surrogatepass"), digest_size=12)
    return digest.hexdigest()
