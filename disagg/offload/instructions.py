"""What the offload manager tells the server that has it to do. Frozen values."""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.tiers import PageMove


class GpuPage(Struct, frozen=True, array_like=True):
    """page_no: for whoever lets go of the page."""

    group: int
    page_no: int
    page: int


class Pin(Struct, frozen=True):
    """Hold these pages, as one more holder, until they are unpinned."""

    pages: tuple[GpuPage, ...]


class Unpin(Struct, frozen=True):
    """Nothing reads these pages for an offload any more."""

    pages: tuple[GpuPage, ...]


class Copy(Struct, frozen=True):
    """Every rank copies its pages, in the order of the operations, and reports them (`OffloadManager.copied`)."""

    op: int
    moves: tuple[PageMove, ...]


class UploadShare(Struct, frozen=True):
    """Pages of one group: their numbers, names and where they are on the host."""

    page_nos: tuple[int, ...]
    hashes: tuple[bytes, ...]
    host_pages: tuple[int, ...]


class Upload(Struct, frozen=True):
    """Every rank writes the heads that it owns to storage, and reports (`OffloadManager.uploaded`).

    salt: the tenant's. start, parent, hashes, before: as of the span (messages/stored.Span). shares: by group.
    """

    op: int
    salt: str
    start: int
    parent: bytes
    hashes: tuple[bytes, ...]
    before: tuple[bytes, ...]
    shares: tuple[UploadShare, ...]


class Publish(Struct, frozen=True):
    """All parts of an upload are there, and so is all that comes before it: publish it, and report (`published`)."""

    op: int


class Discard(Struct, frozen=True):
    """The parts of an upload are of no use."""

    op: int


Instruction = Pin | Unpin | Copy | Upload | Publish | Discard


class Ask(Struct, frozen=True):
    """What does storage have of this sequence, from its page `first` on? Answered by a StoreFound, also when it fails."""

    ask: int
    salt: str
    hashes: tuple[bytes, ...]
    first: int


class Fetch(Struct, frozen=True):
    """Every rank reads its heads of these pages, which were found, into pages of the host, and reports (PartsRead).

    op: a number of its own series. places: by group, (page number, page of the host).
    """

    op: int
    ask: int
    places: tuple[tuple[tuple[int, int], ...], ...]


class ForgetAsk(Struct, frozen=True):
    """Nobody wants to read what that one found."""

    ask: int


class Beyond(Struct, frozen=True):
    """Pages of stored spans that a sequence goes through, behind where it ends or leaves them: of others, which are not to be
    stored again. keys: (group, hash) of what can be read of them.
    """

    hashes: tuple[bytes, ...] = ()
    keys: tuple[tuple[int, bytes], ...] = ()


class StoreFound(Struct, frozen=True):
    """pages: so many of the sequence's first are stored, those before `first` taken for granted. page_nos: by group, those
    of them that can be read. known: False if the store did not say, and has what it has.
    """

    ask: int
    pages: int
    page_nos: tuple[tuple[int, ...], ...]
    known: bool = True
    beyond: Beyond = Beyond()


class StorePublished(Struct, frozen=True):
    """See `OffloadManager.published`."""

    op: int
    pages: int | None
    beyond: Beyond = Beyond()


class StoreWorks(Struct, frozen=True):
    """The store has begun to fail, or works again."""

    works: bool


StoreCommand = Upload | Publish | Discard | Ask | Fetch | ForgetAsk
StoreEvent = StoreFound | StorePublished | StoreWorks
