"""What a router answers to operators' commands, as values that are checked: who says something else is none.

Fields that are not known are ignored, those that older routers do not say have a default, and a server may be in a state that is
not known yet (docs/versions.md). Texts are as they came: who shows one escapes it. Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from disagg.cli.asking import Reply
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line, printable
from disagg.types.small_files import MAX_DEPTH, nested_too_deep

MOST_SERVERS: Final = 4096  # and peers of one of them; a cluster has up to 320
MOST_NAME_CHARS: Final = 256  # as between processes (wire/fields)

Name = Annotated[str, Meta(max_length=MOST_NAME_CHARS)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
T = TypeVar("T")


class GroupSaid(Struct, frozen=True):
    """One layer group's small pages, as in messages/legs.GroupMemory."""

    name: str
    page_bytes: Count
    empty_pages: Count
    evictable_pages: Count
    used_pages: Count


class HostSaid(Struct, frozen=True):
    """A rank's host pool, in large pages. bytes: of all of them."""

    pages_used: Count
    pages_total: Count
    bytes: Count


class MemorySaid(Struct, frozen=True):
    """A rank's KV pool, as in messages/legs.MemoryReport."""

    sizing: str
    large_bytes: Count
    large_free: Count
    large_evictable: Count
    large_used: Count
    fragmentation_bytes: Count
    groups: tuple[GroupSaid, ...]
    host: HostSaid | None = None


class OffloadSaid(Struct, frozen=True):
    """KV beside the GPU, in large pages of the host pool. store: the state of storage."""

    host_pages_used: Count = 0
    host_pages_total: Count = 0
    store: str = "off"


class CarriedSaid(Struct, frozen=True):
    """By what KV goes to one peer."""

    peer: str
    ways: tuple[str, ...] = ()
    slow: bool = False


class ServerSaid(Struct, frozen=True):
    """One server of /status. tp, dp, pp: ranks of each kind; 0 or none where it does not say. silent_s: since it was heard."""

    name: Name
    role: str
    state: str
    becomes: str | None = None
    role_failed: str | None = None
    tp: Count | None = None
    dp: Count | None = None
    pp: Count | None = None
    pid: Count = 0
    worker_pids: tuple[int, ...] = ()
    running: Count = 0
    waiting: Count = 0
    pages_used: Count = 0
    pages_total: Count = 0
    memory: MemorySaid | None = None
    offload: OffloadSaid | None = None
    carried: Annotated[tuple[CarriedSaid, ...], Meta(max_length=MOST_SERVERS)] = ()
    address: str = ""
    incarnation: str = ""
    silent_s: Seconds | None = None
    error: str | None = None
    reason: str | None = None
    version: str | None = None
    protocol: int | None = None


class RouterSaid(Struct, frozen=True):
    """A router of /status: itself."""

    name: Name
    pid: Count
    inflight: Count
    queued: Count
    version: str | None = None
    protocol: int | None = None
    error: str | None = None


class ClusterStatus(Struct, frozen=True):
    """All of /status that commands look at."""

    state: str
    servers: Annotated[tuple[ServerSaid, ...], Meta(max_length=MOST_SERVERS)]
    routers: Annotated[tuple[RouterSaid, ...], Meta(min_length=1, max_length=MOST_SERVERS)]

    def server(self, name: str) -> ServerSaid | None:
        return next((each for each in self.servers if each.name == name), None)


class DrainSaid(Struct, frozen=True):
    """Of POST /servers/NAME/drain and /undrain: the server as it was before it heard of that. Older routers do not say it."""

    server: str
    drain: bool
    state: str | None = None
    becomes: str | None = None
    silent_s: Seconds | None = None


class RoleSaid(Struct, frozen=True):
    """Of POST /servers/NAME/role. begun: false where it has the role already, or is becoming it."""

    server: str
    role: str
    begun: bool


def cluster_status(reply: Reply) -> ClusterStatus:
    """Raises ConfigError for what no router says."""
    status = read(reply, ClusterStatus)
    for name in (*(each.name for each in status.servers), *(each.name for each in status.routers)):
        if printable(name) != name:
            no_router(reply.url, f"a name has control characters: {one_line(name)}")
    return status


def drain_said(reply: Reply, name: str, on: bool) -> DrainSaid:
    """name, on: that it must be an answer to. Raises ConfigError for what no router says."""
    said = read(reply, DrainSaid)
    if (said.server, said.drain) != (name, on):
        no_router(reply.url, "it speaks of something else than was asked for")
    return said


def role_said(reply: Reply, name: str, role: str) -> RoleSaid:
    """name, role: that it must be an answer to. Raises ConfigError for what no router says."""
    said = read(reply, RoleSaid)
    if (said.server, said.role) != (name, role):
        no_router(reply.url, "it speaks of something else than was asked for")
    return said


def dump_said(reply: Reply) -> str | dict[str, Any]:
    """Of /debug/dump: a router's JSON, or a server's text where its own port was asked. Raises ConfigError for all else."""
    if reply.content_type.startswith("text/plain") and reply.content.startswith(b"== "):
        return reply.content.decode("utf-8", "replace")
    dump = read_json(reply)
    if (
        not isinstance(dump, dict)
        or not isinstance(dump.get("router"), dict)
        or not isinstance(dump.get("servers"), dict)
    ):
        no_router(reply.url, "it is no dump")
    return dump


def read(reply: Reply, kind: type[T]) -> T:
    """Raises ConfigError for what cannot be read as one."""
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        no_router(reply.url, str(error), error)


def read_json(reply: Reply) -> Any:
    """Any JSON, at most MAX_DEPTH deep. Raises ConfigError for what is none."""
    value = read(reply, Any)
    if nested_too_deep(value):
        no_router(reply.url, f"it is nested more than {MAX_DEPTH} deep")
    return value


def no_router(url: str, why: str, cause: Exception | None = None) -> NoReturn:
    """Raises ConfigError."""
    said = f"{url} answered what no router says: {one_line(why, 300)}; does --http name a router?"
    raise ConfigError(said) from cause
