"""Storage as a tier of KV: spans of pages found, read, written and published, for one model and tenant.

    write_part, by each rank that owns heads ──> publish, once, when all parts are there ──> a reader finds the span
                                                   └ somebody else's is there already: that one counts, ours is discarded

A sequence is stored as spans, one after the other, each named by the hash of its first page; where two sequences part within
a span, the second one's next span begins at the page where they part. So every page is stored once.

    A   [p0 p1 p2 p3] [p4 p5 p6 p7]          walk: p0 begins a span of four pages, of which B has three;
    B   [p0 p1 p2]'[q3 q4 q5]                so B goes on with the span that begins with q3

What is damaged, foreign, late or not there is a miss, counted by cause; nothing here raises for it but to say "a miss".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TypeVar

from msgspec import Struct

from disagg.memory.cache import PrefixCache
from disagg.memory.groups import spec_of
from disagg.memory.layout import pool_layout
from disagg.messages.stored import PartRead, PartRef, Share, Span
from disagg.offload.causes import Cause
from disagg.offload.instructions import Beyond, StorePublished
from disagg.offload.keys import Scope, page_key, part_path, read_path, span_path
from disagg.offload.objects import (
    FRAME_BYTES,
    MAX_HEADER_BYTES,
    BadObject,
    Compression,
    check_part,
    check_span,
    decode_part,
    decode_span,
    encode_part,
    encode_span,
    header_end,
    most_part_bytes,
    read_units,
)
from disagg.offload.store import ObjectStore, StoreError
from disagg.offload.units import Bytes, unit_bytes
from disagg.types.bounded import forget_oldest

AHEAD = 8  # spans that are asked for at once, where they are guessed to begin
TOUCH_EVERY_S = 60.0  # a span that is read again within this has been read lately as it is
REMEMBERED = 1 << 16  # spans of which something is remembered: 100 bytes each


V = TypeVar("V")


class Missed(Exception):
    """It cannot be had, and why."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class Found(Struct, frozen=True):
    """A span that a sequence goes through. pages: so many of its first are the sequence's."""

    span: Span
    pages: int


class Unit(Struct, frozen=True):
    """One head of one page, [unit_bytes], canonical (see units)."""

    page_no: int
    head: int
    data: Bytes


class StorageTier:
    """misses: what was looked for and could not be had, by cause. checkpoint_tokens: how far apart states are kept.

    random: draws names of parts. clock: seconds, rising.
    """

    def __init__(
        self,
        store: ObjectStore,
        scope: Scope,
        *,
        checkpoint_tokens: int,
        compression: Compression = "none",
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.misses: Counter[Cause] = Counter()
        self.scope = scope
        self._store = store
        self._root, self._folder = scope.root, scope.place
        self._group_roots = tuple(scope.group_root(g) for g in range(len(scope.groups)))
        self._units = tuple(unit_bytes(group, scope.page_tokens) for group in scope.groups)
        specs = [spec_of(group, scope.page_tokens) for group in scope.groups]
        self._layout = pool_layout(specs, scope.page_tokens, checkpoint_tokens)
        self._compression: Compression = compression
        self._random = random or Random()
        self._clock = clock
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # by first hash: when it was last said to be read
        self._damaged: OrderedDict[bytes, Span | None] = OrderedDict()  # by first hash: not to be read again

    # ---- finding

    async def walk(self, hashes: Sequence[bytes], first: int = 0) -> list[Found]:
        """The spans that hold pages of this sequence from page `first` on, where one begins, without a hole between them.

        Where the next ones begin is guessed from the last one's length, so that a long prefix takes few rounds.
        """
        found: list[Found] = []
        guessed: dict[int, Span | None] = {}
        at, step = first, 0
        while at < len(hashes):
            if at not in guessed:
                ahead = [at, *(at + step * i for i in range(1, AHEAD) if step and at + step * i < len(hashes))]
                guessed.update(zip(ahead, await asyncio.gather(*(self._span(hashes, i) for i in ahead)), strict=True))
            span = guessed[at]
            if span is None:
                break
            matched = _matching(span, hashes)
            found.append(Found(span, matched))
            if matched < len(span.hashes):
                at += matched
                step = 0
            else:
                at, step = span.stop, len(span.hashes)
        return found

    async def _span(self, hashes: Sequence[bytes], at: int) -> Span | None:
        """The span that begins with this page; None, and a miss of another cause than ABSENT is counted, if there is none."""
        if hashes[at] in self._damaged:
            return None
        try:
            return await self._read_span(hashes[at], hashes[at - 1] if at else self._root, at)
        except Missed as missed:
            if missed.cause is not Cause.ABSENT:
                self.misses[missed.cause] += 1
            return None

    async def _read_span(self, first_hash: bytes, parent: bytes, at: int) -> Span:
        path = span_path(self._folder, first_hash)
        try:
            span = decode_span(await self._store.get(path, FRAME_BYTES + MAX_HEADER_BYTES))
            check_span(span, self._root, parent, at, first_hash)
            self._check_shares(span)
        except BadObject as bad:
            raise Missed(bad.cause, f"{path}: {bad}") from bad
        except StoreError as error:
            raise Missed(error.cause, f"{path}: {error}") from error
        return span

    def _check_shares(self, span: Span) -> None:
        shares = [(share.group, share.unit_bytes, share.heads) for share in span.shares]
        ours = zip(self._group_roots, self._units, self.scope.groups, strict=True)
        if shares != [(root, unit, group.kv_heads) for root, unit, group in ours]:
            raise BadObject(Cause.FOREIGN, "its layer groups are not those of this model")

    def hit(self, hashes: Sequence[bytes], found: Sequence[Found], num_tokens_cap: int) -> int:
        """Tokens, in whole pages and at most the cap, of the longest prefix that is valid in every group: by the rules of the
        prefix cache. found: by `walk` from the first page on."""
        cache, pages = PrefixCache(self._layout), 0
        for each in found:
            pages = each.span.start + each.pages
            for g, share in enumerate(each.span.shares):
                for page_no in share.pages:
                    if page_no < pages:
                        cache.insert(g, hashes[page_no], page_no)
        return cache.lookup(hashes[:pages], min(num_tokens_cap, pages * self.scope.page_tokens))

    # ---- reading

    def reads(self, found: Sequence[Found], g: int, page_nos: Iterable[int], heads: range) -> list[PartRead]:
        """What has to be read so that one rank has these heads of a group's pages; all of them are in `found`."""
        left, out = set(page_nos), []
        for each in found:
            share = each.span.shares[g]
            here = tuple(page for page in share.pages if page in left and page < each.span.start + each.pages)
            left -= set(here)
            for ref in share.parts if here else ():
                start, stop = max(ref.head_start, heads.start), min(ref.head_stop, heads.stop)
                if start < stop:
                    out.append(PartRead(each.span, g, ref, start, stop, here))
        assert not left, f"pages {sorted(left)} of group {g} are in no span"
        return out

    async def fetch(self, read: PartRead) -> list[Unit]:
        """The units, verified. Raises Missed, counted, and then the span is not read again."""
        try:
            return await self._fetch(read)
        except BadObject as bad:
            missed = Missed(bad.cause, f"{read.ref.path}: {bad}")
        except StoreError as error:
            missed = Missed(error.cause, f"{read.ref.path}: {error}")
        self.misses[missed.cause] += 1
        if missed.cause not in (Cause.FAILED, Cause.LATE, Cause.DEGRADED):
            _remember(self._damaged, read.span.hashes[0], read.span)
        raise missed

    async def _fetch(self, read: PartRead) -> list[Unit]:
        ref, share = read.ref, read.span.shares[read.group]
        unit, heads = self._units[read.group], ref.head_stop - ref.head_start
        if ref.nbytes > most_part_bytes(len(share.pages), heads, unit):
            raise BadObject(Cause.CORRUPT, f"its span says it has {ref.nbytes} bytes")
        whole = (read.head_start, read.head_stop) == (ref.head_start, ref.head_stop)
        data: bytes | memoryview
        if whole:
            data = await self._store.get(ref.path, ref.nbytes)
            size = len(data)
        else:  # the whole header, as far as it can be long, in one call
            tables = FRAME_BYTES + 512 + len(share.pages) * (48 + 16 * heads)
            data = await self._store.get_range(ref.path, 0, min(tables, ref.nbytes))
            end = header_end(data)
            if end > len(data):
                data += await self._store.get_range(ref.path, len(data), min(end, ref.nbytes))
            size = ref.nbytes
        part = decode_part(data, size)
        if size != ref.nbytes:
            raise BadObject(Cause.FOREIGN, f"it has {size} bytes; its span says {ref.nbytes}")
        hashes = [read.span.hash_at(page_no) for page_no in share.pages]
        check_part(part, self._group_roots[read.group], hashes, ref, unit)
        start, stop = part.span_of_heads(read.head_start, read.head_stop)
        rows = memoryview(data)[start:stop] if whole else await self._store.get_range(ref.path, start, stop)
        wanted = set(read.page_nos)
        by_head = await asyncio.to_thread(read_units, part, rows, read.head_start, read.head_stop)
        return [
            Unit(page_no, head, data_of_unit)
            for head, units in zip(range(read.head_start, read.head_stop), by_head, strict=True)
            for page_no, data_of_unit in zip(share.pages, units, strict=True)
            if page_no in wanted
        ]

    async def note_read(self, found: Iterable[Found]) -> None:
        """These were read, or found to be of use: whoever keeps to a budget spares them. Failures do not matter."""
        now_s = self._clock()
        for each in found:
            first = each.span.hashes[0]
            if now_s - self._touched.get(first, float("-inf")) >= TOUCH_EVERY_S:
                _remember(self._touched, first, now_s)
                try:
                    await self._store.replace(read_path(self._folder, first), [b""])
                except StoreError:
                    return

    # ---- writing

    async def write_part(self, g: int, hashes: Sequence[bytes], head_start: int, units: Bytes) -> PartRef:
        """One rank's heads of a group's pages. units: [heads, pages, unit_bytes], contiguous. Raises StoreError."""
        heads, pages, unit = units.shape
        assert unit == self._units[g] and pages == len(hashes), f"{units.shape} for {pages} pages of {self._units[g]} B"
        buffers = await asyncio.to_thread(
            encode_part, self._group_roots[g], hashes, head_start, units, self._compression
        )
        nbytes = sum(map(len, buffers))
        first_key = page_key(self._group_roots[g], hashes[0])
        while True:
            path = part_path(self._folder, first_key, self._random.getrandbits(64), head_start, head_start + heads)
            if await self._store.create(path, buffers):
                return PartRef(path, head_start, head_start + heads, nbytes)

    def share(self, g: int, pages: Sequence[int], parts: Sequence[PartRef]) -> Share:
        """What a span says of group g: `parts` hold its pages."""
        by_head = tuple(sorted(parts, key=lambda part: part.head_start))
        return Share(self._group_roots[g], self._units[g], self.scope.groups[g].kv_heads, tuple(pages), by_head)

    def span(
        self, start: int, parent: bytes, hashes: Sequence[bytes], before: Sequence[bytes], shares: Sequence[Share]
    ) -> Span:
        return Span(self._root, parent, start, tuple(hashes), tuple(before), tuple(shares))

    async def publish(self, span: Span) -> Span:
        """The span can be found from now on; its parts must be written. Returns the one that is found: `span`, or what somebody
        else has published under its name before, whose parts are whole as far as is known; then ours are garbage, and
        removed. Raises StoreError, and then nobody knows.
        """
        first = span.hashes[0]
        path, data = span_path(self._folder, first), encode_span(span)
        if first in self._damaged:
            damaged = self._damaged[first]
            await self._store.replace(path, [data])
            del self._damaged[first]
            if damaged is not None:
                await self.discard(damaged)
            return span
        if await self._store.create(path, [data]):
            return span
        try:
            there = await self._read_span(first, span.parent, span.start)
        except Missed as missed:
            if missed.cause in (Cause.FAILED, Cause.LATE, Cause.DEGRADED, Cause.ABSENT):
                raise StoreError(missed.cause, str(missed)) from missed
            if missed.cause is not Cause.VERSION:  # what a newer version wrote is not ours to replace
                await self._store.replace(path, [data])
                return span
            await self.discard(span)
            raise StoreError(missed.cause, str(missed)) from missed
        if there == span:  # ours, of a call whose answer was lost
            return span
        await self.discard(span)
        return there

    async def remove(self, span: Span) -> None:
        """A damaged span, if it is still the one that is found, is a miss to everybody from now on, and stored again by those
        who have its pages. Raises StoreError.
        """
        first = span.hashes[0]
        try:
            there = await self._read_span(first, span.parent, span.start)
        except Missed as missed:
            if missed.cause in (Cause.FAILED, Cause.LATE, Cause.DEGRADED):
                raise StoreError(missed.cause, str(missed)) from missed
            return  # it is not there, or is damaged itself: whoever publishes next replaces it
        if there == span:
            await self._store.delete([span_path(self._folder, first)])
            await self.discard(span)
        self._damaged.pop(first, None)

    async def discard(self, span: Span) -> None:
        """The parts of a span that was not published. What cannot be removed is collected later (survey.collect)."""
        try:
            await self._store.delete([part.path for share in span.shares for part in share.parts])
        except StoreError:
            return


def what_is_found(op: int, there: Span, ours: Span) -> StorePublished:
    """Ours was to be published: how many of its pages are in one that begins with the same, and what else is there. Pure."""
    pairs = zip(there.hashes, ours.hashes, strict=False)
    shorter = min(len(there.hashes), len(ours.hashes))
    pages = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return StorePublished(op, pages, beyond([Found(there, pages)]))


def beyond(found: Iterable[Found]) -> Beyond:
    """What these spans have that is not the sequence's. Pure."""
    left = [(each.span, each.pages) for each in found if each.pages < len(each.span.hashes)]
    hashes = (page_hash for span, pages in left for page_hash in span.hashes[pages:])
    keys = (
        (g, span.hash_at(at))
        for span, pages in left
        for g, share in enumerate(span.shares)
        for at in share.pages
        if at >= span.start + pages
    )
    return Beyond(tuple(hashes), tuple(keys))


def _matching(span: Span, hashes: Sequence[bytes]) -> int:
    """How many of a span's pages are the sequence's. Its first one is."""
    ours = hashes[span.start : span.stop]
    return next((i for i, (a, b) in enumerate(zip(span.hashes, ours, strict=False)) if a != b), len(ours))


def _remember(remembered: OrderedDict[bytes, V], key: bytes, value: V) -> None:
    remembered[key] = value
    remembered.move_to_end(key)
    forget_oldest(remembered, REMEMBERED)
