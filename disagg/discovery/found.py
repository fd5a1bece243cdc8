"""What discovery finds: servers, where they are, and which of them are to be left alone. Values and comparisons; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from disagg.config.tree import ServerRef, ServerRole


class Found(Struct, frozen=True, kw_only=True):
    """One server. name: empty where only the server itself can say it. address: host:port of its gRPC service.

    uid: of what carries it, such as a pod, so that another one in its place is told apart; empty where nothing is known of that.
    held: why nothing new is to be sent to it, if it is so.
    """

    name: str
    role: ServerRole
    address: str
    uid: str = ""
    held: str = ""

    @property
    def key(self) -> str:
        """Unlike that of all others found at the same time."""
        return self.name or self.address

    @property
    def carrier(self) -> tuple[str, str, str]:
        """As long as it is the same, it is the same server."""
        return self.uid, self.address, self.role


Publish = Callable[[Mapping[str, Found]], None]


class Discovery(Protocol):
    """Finds servers until it is cancelled, and publishes all of them by key whenever they may have changed.

    Raises ConfigError for what waiting cannot mend, before it has published anything.
    """

    async def run(self, publish: Publish) -> None: ...

    def faults(self) -> Mapping[str, str]:
        """What is found now and can be no server, though it is meant to be one: why, by its name. Bounded."""
        ...

    async def gone(self, pod: str) -> bool:
        """Whether this pod, NAMESPACE/NAME/UID, is known to have ended, with all of its processes. False where that cannot
        be told."""
        ...


def by_key(found: Iterable[Found]) -> dict[str, Found]:
    """The first of each key; what is found twice is one server or a mistake, which its greeting tells."""
    out: dict[str, Found] = {}
    for each in found:
        out.setdefault(each.key, each)
    return out


class Static:
    """The servers that the configuration lists."""

    def __init__(self, refs: Iterable[ServerRef]) -> None:
        self._found = by_key(Found(name=ref.name, role=ref.role, address=ref.address) for ref in refs)

    async def run(self, publish: Publish) -> None:
        publish(self._found)

    def faults(self) -> Mapping[str, str]:
        return {}

    async def gone(self, pod: str) -> bool:
        return False
