"""Servers by host names, such as those of headless Services. Each address is a server, which says its own name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from msgspec import Struct

from disagg.config.tree import ServerRole
from disagg.discovery.found import Found, Publish, by_key
from disagg.types.addresses import join

logger = logging.getLogger(__name__)

EVERY_S = 5.0
LOOKUP_S = 10.0
MISSES = 3  # lookups in a row that find no such name, before it is believed that nothing is there
MAX_ADDRESSES = 4096  # of one name

Lookup = Callable[[str, int], Coroutine[Any, Any, Sequence[str]]]


class Name(Struct, frozen=True):
    """Where to look. port: of the gRPC service of all that is found there."""

    role: ServerRole
    host: str
    port: int


class NoSuchName(Exception):
    """The name has no address now: for a headless Service, nothing is there."""


async def addresses(host: str, port: int) -> list[str]:
    """Raises NoSuchName, or OSError where nobody could be asked."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            raise NoSuchName(host) from error
        raise
    hosts = {str(sockaddr[0]) for _, _, _, _, sockaddr in found}
    return sorted(join(each, port) for each in hosts)


class DnsDiscovery:
    def __init__(
        self,
        names: Sequence[Name],
        *,
        every_s: float = EVERY_S,
        lookup_s: float = LOOKUP_S,
        lookup: Lookup = addresses,
    ) -> None:
        self._names = tuple(names)
        self._every_s = every_s
        self._lookup_s = lookup_s
        self._lookup = lookup
        self._found: dict[Name, tuple[str, ...]] = dict.fromkeys(self._names, ())
        self._misses: dict[Name, int] = dict.fromkeys(self._names, 0)
        self._errors: dict[Name, str] = dict.fromkeys(self._names, "")
        self._asked: dict[Name, asyncio.Future[Sequence[str]]] = {}  # that have no answer yet

    async def run(self, publish: Publish) -> None:
        try:
            while True:
                await asyncio.gather(*map(self._look, self._names))
                publish(
                    by_key(
                        Found(name="", role=name.role, address=address)
                        for name, found in self._found.items()
                        for address in found
                    )
                )
                await asyncio.sleep(self._every_s)
        finally:
            for asked in self._asked.values():
                asked.cancel()

    def faults(self) -> Mapping[str, str]:
        return {}

    async def gone(self, pod: str) -> bool:
        return False  # an address that is not listed any more proves nothing of the process behind it

    async def _look(self, name: Name) -> None:
        """Where nobody answers, what was known stays."""
        error = ""
        try:
            self._found[name] = tuple((await self._addresses(name))[:MAX_ADDRESSES])
            self._misses[name] = 0
        except NoSuchName:
            self._misses[name] += 1
            if self._misses[name] >= MISSES:
                self._found[name] = ()
            error = "it has no address"
        except (OSError, UnicodeError, TimeoutError) as failure:  # UnicodeError: it is too long for a name
            error = str(failure) or f"no answer within {self._lookup_s:g} s"
        if error != self._errors[name]:
            log = logger.warning if error else logger.info
            log("router.selector: %s: %s", name.host, error or "it has addresses again")
            self._errors[name] = error

    async def _addresses(self, name: Name) -> Sequence[str]:
        """Raises as `addresses`, and TimeoutError. A lookup that hangs keeps its thread, so the next one waits for the same."""
        asked = self._asked.pop(name, None) or asyncio.ensure_future(self._lookup(name.host, name.port))
        self._asked[name] = asked
        done, _ = await asyncio.wait({asked}, timeout=self._lookup_s)
        if not done:
            raise TimeoutError
        del self._asked[name]
        return asked.result()
