"""Sockets to listen at; and why a host and port cannot be had, in the operator's words: whose fault it is decides whether to try
again."""

from __future__ import annotations

import enum
import errno
import os
import socket
from typing import Any, Final

from disagg.types.addresses import bare, join
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.plain import quoted

EVERY: Final = "::"
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
_MAY_PASS = frozenset({errno.EADDRINUSE, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EINTR})


class Sharing(enum.Enum):
    """Whether other routers listen at a port, too."""

    NONE = "none"
    SHARED = "shared"
    BESIDE = "beside"  # it is this one's alone, beside one that is shared

    @property
    def hint(self) -> str:
        """To whoever cannot have the port."""
        if self is Sharing.SHARED:
            return "all who listen there must share it (router.share_ports)"
        return "0 takes a free one" if self is Sharing.NONE else "0: none"


def why_not_listen(host: str, port: int, setting: str, hint: str, *, shared: bool = False) -> DisaggError | None:
    """None if it can be listened on now. setting: of the port, whose section has the `host`, too. shared: as of `bound_socket`.

    ConfigError for what is wrong however often it is tried; DisaggError for a port that somebody else has just now.
    """
    try:
        with bound_socket(host, port, shared=shared) as probe:
            probe.listen(1)  # two may bind a port with SO_REUSEADDR, but only one may listen
    except (OSError, UnicodeError) as error:
        return cannot_listen(host, port, setting, error, hint)
    return None


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket to listen at. host: a name or an address, with or without brackets; `::` is every address of IPv6 and of IPv4,
    and of IPv4 alone where the machine has no other. shared: with other processes of this user that say so, too. Raises OSError
    or UnicodeError, of which `cannot_listen` makes an error to show."""
    plain = bare(host)
    if plain == EVERY:
        try:
            return _bound(socket.AF_INET6, (EVERY, port), shared)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
        return _bound(socket.AF_INET, ("0.0.0.0", port), shared)
    found = socket.getaddrinfo(plain or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return _bound(family, address, shared)


def _bound(family: int, address: Any, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != EVERY))
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _no_such_host(host: str, setting: str, error: Exception) -> ConfigError:
    """setting: as above."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"{setting.partition('.')[0]}.host = {quoted(host)}: {why}; it must be a name or address of this machine, such as "
        "127.0.0.1, or :: for all of them, 0.0.0.0 for those of IPv4"
    )


def cannot_listen(host: str, port: int, setting: str, error: OSError | UnicodeError, hint: str) -> DisaggError:
    """What `bound_socket` or `listen` said of it."""
    if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return _no_such_host(host, setting, error)
    why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's words repeat the address
    kind = DisaggError if error.errno in _MAY_PASS else ConfigError
    return kind(f"{setting} = {port}: cannot listen on {join(host, port)} ({why}); {hint}")
