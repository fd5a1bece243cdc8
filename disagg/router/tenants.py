"""Whose request it is, as far as a face can tell without asking anybody. Pure.

A tenant is whoever the header `x-tenant` names, as gateways and applications set it; without one, a client's address together
with the credentials that it shows. Nobody checks these here: they only tell apart clients that come through one proxy, and
their order of service depends on them, never what they may do. Where keys are asked for (`disagg.auth`), a tenant is whose key it
is, and nothing else counts. Without either, HTTP clients of one address are one tenant,
since each of their requests may have a connection of its own; a gRPC client is its connection, which carries all its requests.
"""

from __future__ import annotations

import hashlib

TENANT_HEADER = "x-tenant"  # counts only where no keys are asked for: a key says whose it is
MAX_CREDENTIAL_CHARS = 8192  # of which a tenant is told by: HTTP servers take about so much of a header


def salt_of(owner: str, salt: str) -> str:
    """The cache salt that servers are given. owner: whose key was shown; empty: nobody's, and the
    client's salt is taken as it is.

    Otherwise no two owners have a salt in common, whatever they ask for, so a prefix that one has cached is neither found by
    another nor faster for it.
    """
    if not owner:
        return salt
    digest = hashlib.sha256(f"{len(owner)}:{owner}{salt}".encode("utf-8", "surrogatepass"))
    return f"owned:{digest.hexdigest()}"


def tenant_of(address: str, credentials: str = "", connection: str = "", name: str = "") -> str:
    """A short name, which shows none of these. address: without a port; connection: where it carries many requests; name: of
    TENANT_HEADER.
    """
    if name:
        who = ("named", name[:MAX_CREDENTIAL_CHARS], "")
    elif credentials:
        who = ("key", address, credentials[:MAX_CREDENTIAL_CHARS])
    else:
        who = ("at", address, connection)
    digest = hashlib.blake2b("\0".join(who).encode("utf-8", "surrogatepass"), digest_size=12)
    return digest.hexdigest()
