"""All that a store holds, whatever model and tenant it is of: statistics, verification, and keeping to a budget.

Reads listings and spans; parts are read by `verify` alone. Others may read and write meanwhile: what appears or goes while
a survey runs is neither damage nor garbage, and what is deleted goes in an order that leaves no chain with a hole:
the last span of a sequence first, and of a span its name before its parts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

from disagg.config.sizes import show_bytes
from disagg.messages.stored import PartRef, Share, Span
from disagg.offload.causes import Cause
from disagg.offload.chains import going_on_from, without_parent
from disagg.offload.directory import STAGED, Entry
from disagg.offload.keys import LAYOUT, PARTS, READS, SPANS, page_key, parse_path
from disagg.offload.objects import (
    FRAME_BYTES,
    MAX_HEADER_BYTES,
    BadObject,
    check_part,
    decode_part,
    decode_span,
    most_part_bytes,
    only_says_another_version,
    read_units,
)
from disagg.offload.store import ObjectStore, StoreError

AT_ONCE = 16
GRACE_S = 3600.0  # parts without a span that are younger may be about to get one
CLOCK_PATH = f"{LAYOUT}/clock"
COLLECTED_PATH = f"{LAYOUT}/collected"  # when a server last began to keep it to its budget
Progress = Callable[[str, int, int], None]  # what is done, how many of how many; 0: unknown
T = TypeVar("T")


class Damage(Struct, frozen=True):
    """An object that cannot be used. spared: it is of another version, whose servers may use it."""

    path: str
    cause: Cause
    why: str
    spared: bool = False


class OtherVersion(BadObject):
    """A span of a format that is not known here, so neither are its parts."""


class StoredSpan(Struct, frozen=True):
    """A span, where it is, and how the store sees it. read_s: when it was last read, or 0."""

    path: str
    folder: str
    model: str
    tenant: str
    span: Span
    nbytes: int
    written_s: float
    read_s: float

    @property
    def used_s(self) -> float:
        return max(self.written_s, self.read_s)

    @property
    def parts(self) -> tuple[PartRef, ...]:
        return tuple(part for share in self.span.shares for part in share.parts)

    @property
    def pages(self) -> int:
        return sum(len(share.pages) for share in self.span.shares)


class Survey(Struct, frozen=True):
    """parts, reads: by path. spans: those that can be read; damage: those that cannot. spans_bytes: by path, of both. staged:
    what is being written, or was when its writer was killed. strangers: objects of other kinds."""

    spans: tuple[StoredSpan, ...]
    parts: dict[str, Entry]
    reads: dict[str, Entry]
    damage: tuple[Damage, ...]
    spans_bytes: dict[str, int]
    staged: tuple[Entry, ...]
    strangers: int

    @property
    def all_bytes(self) -> int:
        entries = (*self.parts.values(), *self.reads.values(), *self.staged)
        return sum(self.spans_bytes.values()) + sum(entry.nbytes for entry in entries)


class Stats(Struct, frozen=True):
    """A page covers all heads, and counts once per layer group. bytes: of pages as they are stored; object_bytes: of everything
    that is there, names and garbage too."""

    pages: int
    bytes: int
    distinct_pages: int
    tenants: int
    models: int
    spans: int
    parts: int
    object_bytes: int
    damaged: int
    unused_parts: int


class Collected(Struct, frozen=True):
    """What `collect` removed, and what is left. young_bytes: of that, what no span names and may be about to be named by one.
    undeleted: objects that could not be removed; why: of one of them."""

    spans: int
    objects: int
    freed_bytes: int
    left_bytes: int
    young_bytes: int = 0
    undeleted: int = 0
    why: str = ""

    def reasons(self, budget_bytes: int) -> str:
        """Why more is left than there may be, for a person; empty if that is not so, and all that was to go has gone."""
        said = ""
        if budget_bytes and self.left_bytes > budget_bytes and self.young_bytes:
            said = (
                f"; {show_bytes(self.young_bytes)} of that may be about to be used, and stay for {GRACE_S / 3600:g} h"
            )
        if self.undeleted:
            said += f"; {self.undeleted} could not be removed, such as {self.why}"
        return said


async def survey(store: ObjectStore, progress: Progress = lambda what, done, total: None) -> Survey:
    """Everything that is there. Takes memory for all names (some hundred bytes each). Raises StoreError."""
    by_kind: dict[str, dict[str, Entry]] = {SPANS: {}, PARTS: {}, READS: {}}
    staged: list[Entry] = []
    strangers = listed = 0
    async for entry in store.listing(LAYOUT):
        listed += 1
        place = parse_path(entry.path)
        if place is not None:
            by_kind[place.kind][entry.path] = entry
        elif STAGED in entry.path and parse_path(entry.path.partition(STAGED)[0]) is not None:
            staged.append(entry)
        elif entry.path.partition(STAGED)[0] not in (CLOCK_PATH, COLLECTED_PATH):
            strangers += 1
        if listed % 1000 == 0:
            progress("listing", listed, 0)
    entries = by_kind[SPANS]
    spans: list[StoredSpan] = []
    damage: list[Damage] = []

    async def read(entry: Entry) -> None:
        try:
            spans.append(await _stored_span(store, entry, by_kind[READS]))
        except BadObject as bad:
            damage.append(Damage(entry.path, bad.cause, str(bad), isinstance(bad, OtherVersion)))
        except StoreError as error:
            if error.cause in (Cause.FAILED, Cause.LATE, Cause.DEGRADED):
                raise
            if error.cause is not Cause.ABSENT:  # it has gone since it was listed
                damage.append(Damage(entry.path, error.cause, str(error)))

    await _each(read, entries.values(), len(entries), "reading spans", progress)
    spans.sort(key=lambda each: each.path)
    damage.sort(key=lambda each: each.path)
    spans_bytes = {path: entry.nbytes for path, entry in entries.items()}
    return Survey(tuple(spans), by_kind[PARTS], by_kind[READS], tuple(damage), spans_bytes, tuple(staged), strangers)


async def _stored_span(store: ObjectStore, entry: Entry, reads: dict[str, Entry]) -> StoredSpan:
    place = parse_path(entry.path)
    assert place is not None
    data = await store.get(entry.path, FRAME_BYTES + MAX_HEADER_BYTES)
    try:
        span = decode_span(data)
    except BadObject as bad:
        if bad.cause is Cause.VERSION and not only_says_another_version(data):
            raise OtherVersion(bad.cause, str(bad)) from bad
        raise
    if span.hashes[0].hex() != place.name:
        raise BadObject(Cause.FOREIGN, f"it is the span that begins with {span.hashes[0].hex()[:16]}")
    for part in (part for share in span.shares for part in share.parts):
        other = parse_path(part.path)
        if other is None or other.kind != PARTS or other.folder != place.folder:
            raise BadObject(Cause.FOREIGN, "it is of another model or tenant: its parts are not in this folder")
    read = reads.get(_note_of(entry.path))
    return StoredSpan(
        entry.path,
        place.folder,
        place.model,
        place.tenant,
        span,
        entry.nbytes,
        entry.modified_s,
        read.modified_s if read else 0.0,
    )


def statistics(found: Survey) -> Stats:
    """Spans whose parts are not all there do not count."""
    whole = [each for each in found.spans if all(part.path in found.parts for part in each.parts)]
    keys = {
        page_key(share.group, each.span.hash_at(page))
        for each in whole
        for share in each.span.shares
        for page in share.pages
    }
    return Stats(
        pages=sum(each.pages for each in whole),
        bytes=sum(_page_bytes(share) for each in whole for share in each.span.shares),
        distinct_pages=len(keys),
        tenants=len({each.tenant for each in found.spans}),
        models=len({each.model for each in found.spans}),
        spans=len(found.spans),
        parts=len(found.parts),
        object_bytes=found.all_bytes,
        damaged=len(found.damage) + len(found.spans) - len(whole),
        unused_parts=sum(entry.path in found.parts for entry in _unused(found)),
    )


def _page_bytes(share: Share) -> int:
    """Bytes of a share's pages as they are stored: those of its parts less their headers, which are about as long as their
    tables; uncompressed, exactly."""
    raw = len(share.pages) * share.heads * share.unit_bytes
    return min(raw, sum(part.nbytes for part in share.parts))


# ---- verification


async def verify(
    store: ObjectStore, found: Survey, progress: Progress = lambda what, done, total: None
) -> list[Damage]:
    """Every object that cannot be used, read to its last byte. Raises StoreError when the store does not answer."""
    damage = list(found.damage)
    lost = without_parent(found.spans)
    if lost:  # what they go on from may have been written when the survey had passed it
        still = without_parent((await survey(store, progress)).spans)
        lost = {path: each for path, each in lost.items() if path in still}
    for each in lost.values():
        why = f"the page before its first, page {each.span.start - 1}, is in no span: nobody can find it"
        damage.append(Damage(each.path, Cause.ABSENT, why))

    async def read(job: tuple[StoredSpan, Share, PartRef]) -> None:
        each, share, part = job
        try:
            await _verify_part(store, each, share, part)
        except BadObject as bad:
            damage.append(Damage(part.path, bad.cause, str(bad)))
        except StoreError as error:
            if error.cause in (Cause.FAILED, Cause.LATE, Cause.DEGRADED):
                raise
            if error.cause is not Cause.ABSENT or await _is_there(store, each.path):
                damage.append(Damage(part.path, error.cause, str(error)))

    jobs = [(each, share, part) for each in found.spans for share in each.span.shares for part in share.parts]
    await _each(read, jobs, len(jobs), "verifying parts", progress)
    return sorted(damage, key=lambda each: each.path)


async def _verify_part(store: ObjectStore, each: StoredSpan, share: Share, ref: PartRef) -> None:
    if ref.nbytes > most_part_bytes(len(share.pages), ref.head_stop - ref.head_start, share.unit_bytes):
        raise BadObject(Cause.CORRUPT, f"its span says it has {ref.nbytes} bytes")
    data = await store.get(ref.path, ref.nbytes)
    part = decode_part(data, len(data))
    check_part(part, share.group, [each.span.hash_at(page) for page in share.pages], ref, share.unit_bytes)
    start, stop = part.span_of_heads(ref.head_start, ref.head_stop)
    await asyncio.to_thread(read_units, part, memoryview(data)[start:stop], ref.head_start, ref.head_stop)


async def _is_there(store: ObjectStore, path: str) -> bool:
    try:
        await store.size(path)
    except StoreError as error:
        if error.cause is Cause.ABSENT:
            return False
        raise
    return True


# ---- the budget


def eviction_order(spans: Iterable[StoredSpan], lost_before_s: float = math.inf) -> list[StoredSpan]:
    """What nobody can find first, and then the least recently used. A span is as young as the youngest of those that go on from
    it, since whoever reads them reads it: so what goes on from a span goes before it, and no chain gets a hole.

    lost_before_s: of a span that was written later, what it goes on from may have been written after a survey had passed it.
    """
    spans = sorted(spans, key=lambda each: each.span.start)
    before, lost = _chains(spans)
    age = {each.path: (each.used_s, each.read_s) for each in spans}
    for each in reversed(spans):
        if each.path in before:
            path = before[each.path].path
            age[path] = max(age[path], age[each.path])

    def place(each: StoredSpan) -> tuple[bool, tuple[float, float], int, str]:
        is_lost = each.path in lost and each.written_s < lost_before_s
        return not is_lost, age[each.path], -each.span.start, each.path

    return sorted(spans, key=place)


def _chains(spans: Iterable[StoredSpan]) -> tuple[dict[str, StoredSpan], set[str]]:
    """By path, the span that each goes on from; and the paths of those that nobody can find, since what they go on from is gone.

    spans: by where they start.
    """
    spans = list(spans)
    holder = {(each.folder, page_hash): each for each in spans for page_hash in each.span.hashes}
    before: dict[str, StoredSpan] = {}
    lost: set[str] = set()
    for each in spans:
        holding = holder.get((each.folder, each.span.parent))
        if holding is not None and holding.span.start < each.span.start:
            before[each.path] = holding
        if each.span.start and (each.path not in before or before[each.path].path in lost):
            lost.add(each.path)
    return before, lost


async def collect(
    store: ObjectStore,
    budget_bytes: int,
    progress: Progress = lambda what, done, total: None,
    *,
    grace_s: float = GRACE_S,
) -> Collected:
    """Removes garbage, and then what was least recently used, until at most budget_bytes are left (0: no limit).

    Garbage: spans that cannot be read, but for those of another version; and when they are older than grace_s, spans whose
    parts are not all there or that nobody can find, parts that belong to no span, notes of reads of spans that have gone and
    files that were never whole.
    Half of the budget is for spans that can be used, whatever else is there: young parts that no span names would push them out,
    and go by themselves.
    A store lists parts before spans: those of a span that was written meanwhile are not in the survey.
    """
    began_s = time.monotonic()
    found = await survey(store, progress)
    if not (found.spans or found.damage or found.parts or found.reads or found.staged):
        return Collected(0, 0, 0, 0)  # and nothing is written where nothing is stored
    took_s = time.monotonic() - began_s
    now_s = await store_clock(store) - took_s  # when the survey began: nothing is taken for older than it was
    _, lost = _chains(sorted(found.spans, key=lambda each: each.span.start))
    broken = [
        each
        for each in found.spans
        if each.written_s < now_s - grace_s
        and (each.path in lost or not all(part.path in found.parts for part in each.parts))
    ]
    order = eviction_order(found.spans, now_s - grace_s) if budget_bytes else []
    order = [each for each in order if each not in broken]
    removal = _Removal(store, found)
    await removal.delete([each.path for each in found.damage if not each.spared])
    await removal.spans(broken)
    unused = _unused(found)
    young = [entry for entry in (*unused, *found.staged) if entry.modified_s >= now_s - grace_s]
    await removal.delete([entry.path for entry in unused if entry.modified_s < now_s - grace_s])
    await removal.staged([entry for entry in found.staged if entry.modified_s < now_s - grace_s])
    usable_bytes = sum(_bytes_there(found, each) for each in order)
    spans = len(broken)
    while order and removal.left_bytes > budget_bytes and usable_bytes > budget_bytes // 2:
        batch: list[StoredSpan] = []
        parents: set[bytes] = set()
        left_bytes = removal.left_bytes
        while order and left_bytes > budget_bytes and usable_bytes > budget_bytes // 2 and len(batch) < AT_ONCE:
            if not parents.isdisjoint(order[0].span.hashes):
                break  # what goes on from it is removed before it is
            batch.append(order.pop(0))
            parents.add(batch[-1].span.parent)
            left_bytes -= _bytes_there(found, batch[-1])
            usable_bytes -= _bytes_there(found, batch[-1])
        await removal.spans(batch)
        spans += len(batch)
        progress("removing spans", spans, 0)
    return removal.collected(spans, sum(entry.nbytes for entry in young))


async def remove_damaged(store: ObjectStore, found: Survey, damage: Sequence[Damage]) -> Collected:
    """What `verify` found, but for what is spared: a part goes with the span that names it, since without one of its parts a span
    is of no use, and with the span goes what goes on from there, which nobody could find any more."""
    bad = {each.path for each in damage if not each.spared}
    removal = _Removal(store, found)
    spans = [each for each in found.spans if each.path in bad or any(part.path in bad for part in each.parts)]
    spans = [*going_on_from(spans, found.spans), *spans]
    await removal.spans(spans)
    gone = {each.path for each in spans} | {part.path for each in spans for part in each.parts}
    await removal.delete(sorted(bad - gone))
    return removal.collected(len(spans), 0)


class _Removal:
    """What is removed, counted; and what cannot be, which stops nothing."""

    def __init__(self, store: ObjectStore, found: Survey) -> None:
        self.left_bytes = found.all_bytes
        self._store = store
        self._all_bytes = found.all_bytes
        self._bytes = dict(found.spans_bytes)
        self._bytes |= {path: entry.nbytes for path, entry in (*found.parts.items(), *found.reads.items())}
        self._objects = 0
        self._failed: dict[str, str] = {}

    async def delete(self, paths: Sequence[str]) -> None:
        failed = await self._store.delete_each(paths)
        self._failed |= failed
        self._objects += len(paths) - len(failed)
        self.left_bytes -= sum(self._bytes.pop(path, 0) for path in paths if path not in failed)

    async def spans(self, batch: Sequence[StoredSpan]) -> None:
        """Names before parts, so that nobody begins to read what is about to go. A span whose name stays keeps its parts."""
        await self.delete([each.path for each in batch])
        gone = [each for each in batch if each.path not in self._failed]
        await self.delete([part.path for each in gone for part in each.parts])
        await self.delete([_note_of(each.path) for each in gone if each.read_s])

    async def staged(self, entries: Sequence[Entry]) -> None:
        if entries:
            await self._store.remove_staged([entry.path for entry in entries])
            self._objects += len(entries)
            self.left_bytes -= sum(entry.nbytes for entry in entries)

    def collected(self, spans: int, young_bytes: int) -> Collected:
        path, why = next(iter(self._failed.items()), ("", ""))
        freed = self._all_bytes - self.left_bytes
        said = f"{path}: {why}" if path else ""
        return Collected(spans, self._objects, freed, self.left_bytes, young_bytes, len(self._failed), said)


def _unused(found: Survey) -> list[Entry]:
    """Parts and notes that belong to no span. Of a version that cannot be read it is not known which parts of its folder are its
    own."""
    known = {part.path for each in found.spans for part in each.parts} | {_note_of(each.path) for each in found.spans}
    spared = {_folder_of(each.path) for each in found.damage if each.spared}
    entries = [*found.reads.values(), *(each for each in found.parts.values() if _folder_of(each.path) not in spared)]
    return [entry for entry in entries if entry.path not in known]


def _folder_of(path: str) -> str:
    """A model's and tenant's."""
    place = parse_path(path)
    return place.folder if place is not None else ""


def _note_of(path: str) -> str:
    """path: of a span. Where it is noted that it was read."""
    return path.replace(f"/{SPANS}/", f"/{READS}/", 1)


def _bytes_there(found: Survey, each: StoredSpan) -> int:
    return each.nbytes + sum(found.parts[part.path].nbytes for part in each.parts if part.path in found.parts)


async def store_clock(store: ObjectStore) -> float:
    """What the store says the time is, as it does of every object."""
    await store.replace(CLOCK_PATH, [b""])
    return await store.modified(CLOCK_PATH)


async def _each(
    work: Callable[[T], Awaitable[None]], items: Iterable[T], total: int, what: str, progress: Progress
) -> None:
    """AT_ONCE of them at a time; the first that raises ends all."""
    waiting, done = iter(items), 0

    async def worker() -> None:
        nonlocal done
        for item in waiting:
            await work(item)
            done += 1
            if done % 100 == 0 or done == total:
                progress(what, done, total)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(AT_ONCE, total)):
            group.create_task(worker())
