"""Commands to a worker's offload thread, and its reports: copies between the GPU and the host, and the host and storage.

They travel with the transfer thread's (`messages/transfer.CommandFrame`), so they are numbered and none is lost. The engine
decides; the thread copies, writes and reads. Each of the four kinds has numbers of its own, and is reported in their order.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.stored import PartRead, PartRef


class PageMove(Struct, frozen=True, array_like=True):
    """A page of the GPU's pool and one of the host pool, both of this group."""

    group: int
    gpu_page: int
    host_page: int


class CopyOut(Struct, frozen=True, tag="copy_out"):
    """Copy pages of the GPU to the host."""

    op: int
    moves: tuple[PageMove, ...]


class CopyIn(Struct, frozen=True, tag="copy_in"):
    """Copy pages of the host to the GPU."""

    op: int
    moves: tuple[PageMove, ...]


class GroupParts(Struct, frozen=True):
    """Pages of one group, in order: their names, and where they are on the host."""

    hashes: tuple[bytes, ...]
    host_pages: tuple[int, ...]


class WriteParts(Struct, frozen=True, tag="write_parts"):
    """Write those heads of these pages to storage that this rank is to write. salt: whose. groups: all, some of them empty."""

    op: int
    salt: str
    groups: tuple[GroupParts, ...]


class ReadParts(Struct, frozen=True, tag="read_parts"):
    """Read heads from storage into pages of the host, whole ones. places: by group, (page number, page of the host)."""

    op: int
    salt: str
    reads: tuple[PartRead, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]


class CopiedOut(Struct, frozen=True, tag="copied_out"):
    """All up to `last` are copied."""

    last: int
    nbytes: int  # since the report before
    seconds: float  # that took


class CopiedIn(Struct, frozen=True, tag="copied_in"):
    """As CopiedOut."""

    last: int
    nbytes: int
    seconds: float


class PartsWritten(Struct, frozen=True, tag="parts_written"):
    """parts: by group, what this rank wrote; empty where others hold the same heads. error: empty, or why they are not there."""

    op: int
    error: str
    parts: tuple[tuple[PartRef, ...], ...]
    nbytes: int  # of these heads of the pages, uncompressed; 0 if there is an error
    seconds: float


class PartsRead(Struct, frozen=True, tag="parts_read"):
    """error: empty, or why the pages of the host hold nothing that anybody may read."""

    op: int
    error: str
    nbytes: int  # of the rank's pages, uncompressed; 0 if there is an error
    seconds: float


TierCommand = CopyOut | CopyIn | WriteParts | ReadParts
TierEvent = CopiedOut | CopiedIn | PartsWritten | PartsRead
