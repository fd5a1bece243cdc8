"""Why a host and port cannot be listened on, in the operator's words: whose fault it is decides whether to try again."""

from __future__ import annotations

import errno
import os
import socket

from disagg.types.errors import ConfigError, DisaggError
from disagg.types.plain import quoted

_MAY_PASS = frozenset({errno.EADDRINUSE, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EINTR})


def why_not_listen(host: str, port: int, setting: str, hint: str) -> DisaggError | None:
    """None if it can be listened on now. setting: of the port, whose section has the `host`, too.

    ConfigError for what is wrong however often it is tried; DisaggError for a port that somebody else has just now.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        return no_such_host(host, setting, error)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # two may bind a port with SO_REUSEADDR, but only one may listen
    except OSError as error:
        return cannot_listen(host, port, setting, error, hint)
    return None


def no_such_host(host: str, setting: str, error: Exception) -> ConfigError:
    """setting: as above."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"{setting.partition('.')[0]}.host = {quoted(host)}: {why}; it must be a name or address of this machine, such as "
        "127.0.0.1, or 0.0.0.0 for all of them"
    )


def cannot_listen(host: str, port: int, setting: str, error: OSError, hint: str) -> DisaggError:
    """What `bind` or `listen` said of it."""
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return no_such_host(host, setting, error)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    why = os.strerror(error.errno) if error.errno else str(error)  # asyncio's words repeat the address
    kind = DisaggError if error.errno in _MAY_PASS else ConfigError
    return kind(f"{setting} = {port}: cannot listen on {shown}:{port} ({why}); {hint}")
