"""The bytes of stored objects: two kinds, one frame. Whatever is read is checked before it is believed or made room for.

    0    magic          8 bytes
    8    version        u32, little-endian
    12   header bytes   u32
    16   checksum of the header (staging/nh), u64
    24   header         msgpack
    ..   units          of a part: [heads, pages] units, each as long as the header says; of a span: nothing

A *span* says which pages follow each other and in which parts their bytes are; a *part* holds units of one group. A
reader knows the span's place and its own layout, and takes nothing from an object that does not agree with them: so a
corrupt, truncated, swapped or foreign object is a miss with a cause. Each unit has a checksum of its own, over its bytes
as stored, seeded with what it is of: it is verified before it is decompressed. Checksums find accidents, not forgeries.

What decoding costs at most: MAX_HEADER_BYTES of header, ten times that in objects of Python, and the raw units that the
reader asked for.

Later versions keep the frame, and seed the checksum of the header with their number (`_seed`): so an object of another version
can be told from one of this whose version has been damaged.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import zstandard
from msgspec import Meta, Struct

from disagg.messages.stored import MAX_PAGES, Count, Hash, PartRef, Span
from disagg.offload.causes import Cause
from disagg.offload.keys import page_key
from disagg.offload.units import Bytes
from disagg.staging.nh import sum_bytes

MAGIC = b"DISAGGKV"
VERSION = 1
_FRAME = struct.Struct("<8sIIQ")
FRAME_BYTES = _FRAME.size
MAX_HEADER_BYTES = 4 << 20
_PERSON = b"disagg.unit.v1"
_HEADER_SEED = 0x6469736167676B76
ZSTD_LEVEL = 1

Compression = Literal["none", "zstd"]


class BadObject(Exception):
    """An object that cannot be used, and why."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


class PartHeader(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """keys: of its pages, in order. sizes: of the units as stored, head by head; sums: their checksums, 8 bytes each."""

    group: Hash
    keys: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=MAX_PAGES)]
    head_start: Count
    head_stop: Count
    unit_bytes: Count
    compression: Compression
    sizes: bytes  # u32 each
    sums: bytes


T = TypeVar("T", Span, PartHeader)
_DECODERS: dict[type[Any], Any] = {kind: msgspec.msgpack.Decoder(kind, strict=True) for kind in (Span, PartHeader)}


# ---- the frame


def _seed(version: int) -> int:
    return _HEADER_SEED + version - 1


def _framed(header: Span | PartHeader) -> bytes:
    data = msgspec.msgpack.encode(header)
    assert len(data) <= MAX_HEADER_BYTES, f"a header of {len(data)} bytes"
    return _FRAME.pack(MAGIC, VERSION, len(data), sum_bytes(data, _seed(VERSION))) + data


def header_end(data: bytes | memoryview) -> int:
    """Where the header ends, of an object whose first FRAME_BYTES these are at least. Raises BadObject."""
    if len(data) < FRAME_BYTES:
        raise BadObject(Cause.TRUNCATED, f"it has {len(data)} bytes; its frame alone has {FRAME_BYTES}")
    magic, version, length, _ = _FRAME.unpack_from(data)
    if magic != MAGIC:
        raise BadObject(Cause.CORRUPT, "it does not begin as our objects do")
    if version != VERSION:
        raise BadObject(Cause.VERSION, f"its format is version {version}; this is version {VERSION}")
    if length > MAX_HEADER_BYTES:
        raise BadObject(Cause.CORRUPT, f"it claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    return FRAME_BYTES + int(length)


def only_says_another_version(data: bytes | memoryview) -> bool:
    """Whether a span says that it is of another version, and its header is one of this: a bit has been flipped."""
    if len(data) < FRAME_BYTES:
        return False
    magic, version, length, total = _FRAME.unpack_from(data)
    own = (magic, len(data)) == (MAGIC, FRAME_BYTES + length) and version != VERSION
    return own and sum_bytes(memoryview(data)[FRAME_BYTES:], _seed(VERSION)) == total


def _header(data: bytes | memoryview, kind: type[T]) -> tuple[T, int]:
    end = header_end(data)
    if len(data) < end:
        raise BadObject(Cause.TRUNCATED, f"it has {len(data)} bytes; its header alone ends at {end}")
    encoded = memoryview(data)[FRAME_BYTES:end]
    if sum_bytes(encoded, _seed(VERSION)) != _FRAME.unpack_from(data)[3]:
        raise BadObject(Cause.CORRUPT, "the checksum of its header is wrong")
    try:
        header: T = _DECODERS[kind].decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a text that is none
        raise BadObject(Cause.FOREIGN, f"its header is not that of a {kind.__name__.lower()}: {error}") from error
    return header, end


# ---- spans


def encode_span(span: Span) -> bytes:
    return _framed(span)


def decode_span(data: bytes | memoryview) -> Span:
    """Consistent in itself; whether it is the one that was asked for, `check_span` says. Raises BadObject."""
    span, end = _header(data, Span)
    if end != len(data):
        raise BadObject(Cause.CORRUPT, f"{len(data) - end} bytes follow its header")
    first = span.start - len(span.before)
    if first < 0:
        raise BadObject(Cause.CORRUPT, f"it refers to pages before the first, from {first} on")
    for share in span.shares:
        pages = share.pages
        if any(a >= b for a, b in pairwise(pages)):
            raise BadObject(Cause.CORRUPT, "the pages of a share are not in rising order")
        if pages and not first <= pages[0] <= pages[-1] < span.stop:
            raise BadObject(Cause.CORRUPT, f"a share has pages {pages[0]} to {pages[-1]} of {first} to {span.stop - 1}")
        heads = sorted((part.head_start, part.head_stop) for part in share.parts)
        ends = [0, *(stop for _, stop in heads)]
        if pages and ([start for start, _ in heads] != ends[:-1] or ends[-1] != share.heads):
            raise BadObject(Cause.CORRUPT, f"its parts are of heads {heads}, not of each of {share.heads} once")
        if any(part.head_start >= part.head_stop for part in share.parts):
            raise BadObject(Cause.CORRUPT, "a part has no heads")
    return span


def check_span(span: Span, root: bytes, parent: bytes, start: int, first_hash: bytes) -> None:
    """Raises BadObject if it is not the span that begins with this page."""
    if span.root != root:
        raise BadObject(Cause.FOREIGN, "it is of another model or tenant")
    if (span.start, span.hashes[0], span.parent) != (start, first_hash, parent):
        raise BadObject(
            Cause.FOREIGN, f"it begins at page {span.start} of another sequence, not at page {start} of this"
        )


# ---- parts


def unit_seed(key: bytes, head: int) -> int:
    """The identity of a unit: the key of its page, which has the group in it, and its head."""
    digest = hashlib.blake2b(key + head.to_bytes(8, "little"), digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little")


def encode_part(
    group_root: bytes, hashes: Sequence[bytes], head_start: int, units: Bytes, compression: Compression
) -> list[bytes | memoryview]:
    """Buffers that make up the object, one after the other. units: [heads, pages, unit_bytes], contiguous."""
    heads, pages, unit = units.shape
    assert len(hashes) == pages and units.flags.c_contiguous, f"{len(hashes)} hashes for {pages} pages"
    keys = tuple(page_key(group_root, each) for each in hashes)
    stored: list[bytes | memoryview] = [units.reshape(-1).data]
    rows: list[bytes | memoryview] = [row.data for row in units.reshape(heads * pages, unit)]
    if compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        rows = stored = [compressor.compress(row) for row in rows]
    sums = np.array(
        [sum_bytes(row, unit_seed(keys[i % pages], head_start + i // pages)) for i, row in enumerate(rows)],
        dtype="<u8",
    )
    header = PartHeader(
        group=group_root,
        keys=keys,
        head_start=head_start,
        head_stop=head_start + heads,
        unit_bytes=unit,
        compression=compression,
        sizes=np.array([len(row) for row in rows], dtype="<u4").tobytes(),
        sums=sums.tobytes(),
    )
    return [_framed(header), *stored]


class Part(Struct, frozen=True):
    """A part's header, checked. offsets: where each unit begins behind the header, head by head, and where the last ends."""

    header: PartHeader
    header_end: int
    offsets: tuple[int, ...]

    def span_of_heads(self, head_start: int, head_stop: int) -> tuple[int, int]:
        """The bytes of the object that hold these heads: [start, stop)."""
        pages, first = len(self.header.keys), self.header.head_start
        begin, end = ((head - first) * pages for head in (head_start, head_stop))
        return self.header_end + self.offsets[begin], self.header_end + self.offsets[end]


def most_part_bytes(pages: int, heads: int, unit: int) -> int:
    """No part of so many units is longer. zstd adds less than 1/128 and 512 bytes to what it cannot compress."""
    return FRAME_BYTES + MAX_HEADER_BYTES + pages * heads * (unit + unit // 128 + 512)


def decode_part(data: bytes | memoryview, nbytes: int) -> Part:
    """The header of a part whose first bytes these are, of `nbytes`. Raises BadObject."""
    header, end = _header(data, PartHeader)
    units = (header.head_stop - header.head_start) * len(header.keys)
    if units <= 0 or len(header.sizes) != units * 4 or len(header.sums) != units * 8:
        raise BadObject(Cause.CORRUPT, f"its tables are not those of {units} units")
    sizes = np.frombuffer(header.sizes, dtype="<u4").astype(np.int64)
    if header.compression == "none" and (sizes != header.unit_bytes).any():
        raise BadObject(Cause.CORRUPT, f"it has units that are not of {header.unit_bytes} bytes")
    offsets = (0, *np.cumsum(sizes).tolist())
    if nbytes != end + offsets[-1]:
        cause = Cause.TRUNCATED if nbytes < end + offsets[-1] else Cause.CORRUPT
        raise BadObject(cause, f"it has {nbytes} bytes; its header says {end + offsets[-1]}")
    return Part(header, end, offsets)


def check_part(part: Part, group_root: bytes, hashes: Sequence[bytes], ref: PartRef, unit: int) -> None:
    """Raises BadObject if it does not hold these heads of these pages. unit: bytes of one, uncompressed."""
    header = part.header
    if header.group != group_root:
        raise BadObject(Cause.FOREIGN, "it is of another model, tenant or layer group")
    if (header.head_start, header.head_stop) != (ref.head_start, ref.head_stop):
        raise BadObject(Cause.FOREIGN, f"it holds heads {header.head_start} to {header.head_stop - 1}")
    if header.unit_bytes != unit:
        raise BadObject(Cause.FOREIGN, f"its units have {header.unit_bytes} bytes; they must have {unit}")
    if header.keys != tuple(page_key(group_root, each) for each in hashes):
        raise BadObject(Cause.FOREIGN, "it holds other pages")


def read_units(part: Part, data: bytes | memoryview, head_start: int, head_stop: int) -> list[list[Bytes]]:
    """data: the bytes of `span_of_heads`. Returns units by head and page, uncompressed. Raises BadObject."""
    header, pages = part.header, len(part.header.keys)
    first = (head_start - header.head_start) * pages
    base = part.offsets[first]
    sums = np.frombuffer(header.sums, dtype="<u8")
    view, out = memoryview(data), []
    if len(view) != part.offsets[(head_stop - header.head_start) * pages] - base:
        raise BadObject(Cause.TRUNCATED, f"{len(view)} bytes of it came")
    decompressor = zstandard.ZstdDecompressor() if header.compression == "zstd" else None
    for head in range(head_start, head_stop):
        units = []
        for page in range(pages):
            index = (head - header.head_start) * pages + page
            stored = view[part.offsets[index] - base : part.offsets[index + 1] - base]
            if sum_bytes(stored, unit_seed(header.keys[page], head)) != int(sums[index]):
                raise BadObject(Cause.CORRUPT, f"the checksum of head {head} of its page {page} is wrong")
            if decompressor is not None:
                stored = _decompressed(decompressor, stored, header.unit_bytes)
            units.append(np.frombuffer(stored, dtype=np.uint8))
        out.append(units)
    return out


def _decompressed(decompressor: zstandard.ZstdDecompressor, stored: memoryview, unit: int) -> memoryview:
    """The size that a frame claims is compared before anything is made room for."""
    try:
        claimed = zstandard.get_frame_parameters(stored).content_size
        if claimed != unit:
            raise BadObject(Cause.CORRUPT, f"a unit claims {claimed} bytes; it must have {unit}")
        return memoryview(decompressor.decompress(stored, max_output_size=unit))
    except zstandard.ZstdError as error:
        raise BadObject(Cause.CORRUPT, f"a unit cannot be decompressed: {error}") from error
