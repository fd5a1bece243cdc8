"""Who may ask what is for operators alone: `/debug`, and what changes what servers do. Pure.

A client's address says where it is, and is believed alone: what a proxy says of its client, any client can say. But a browser on
this machine is here, too, and runs pages of anybody. So a page of another origin is refused (it could drain a server, though
it could not read the answer), and so is a name that is not this machine's: whose owner lets it point to 127.0.0.1 once a
page was loaded from it ("DNS rebinding") has a page of the same origin, which could read prompts.
"""

from __future__ import annotations

import ipaddress

from msgspec import Struct

from disagg.types.addresses import is_loopback
from disagg.types.plain import quoted

OWN_SITES = ("", "same-origin", "none")  # Sec-Fetch-Site: of no browser, of our own page, of who typed the address


class Asker(Struct, frozen=True):
    """address: of the socket's other end, "" when unknown. host, origin, site: Host, Origin and Sec-Fetch-Site, or ""."""

    address: str
    host: str = ""
    origin: str = ""
    site: str = ""


def fault_of_asker(asker: Asker, remote: bool) -> str | None:
    """Why it may not ask, or None. remote: clients on other machines may (the setting debug.remote)."""
    if not remote and not is_loopback(asker.address):
        return "answered on this machine only, unless the setting debug.remote is true"
    if asker.site not in OWN_SITES or (asker.origin and _authority(asker.origin) != asker.host.lower()):
        return f"not answered to pages of another origin ({quoted(asker.origin or asker.site)})"
    if not remote and asker.host and not _names_no_other(asker.host):
        return (
            f"not answered under the name {quoted(asker.host)}, which others may have pointed here; ask for localhost, "
            "127.0.0.1 or [::1], or set debug.remote to true"
        )
    return None


def _authority(origin: str) -> str:
    """Host and port of an origin; "null" and what is none stay as they are, and equal no host."""
    return origin.partition("://")[2].lower() or origin


def _names_no_other(host: str) -> bool:
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    """Nobody can point an address elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
