"""Stored objects: what is read is what was written, or a miss that says why."""

from __future__ import annotations

import struct
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from disagg.messages.stored import PartRef, Share, Span
from disagg.offload import objects
from disagg.offload.causes import Cause
from disagg.offload.keys import page_key
from disagg.offload.objects import (
    BadObject,
    Compression,
    check_part,
    check_span,
    decode_part,
    decode_span,
    encode_part,
    encode_span,
    read_units,
)

ROOT, GROUP, PARENT = (bytes([n]) * 32 for n in (1, 2, 3))
HASHES = tuple(bytes([n]) * 32 for n in range(10, 14))
UNIT = 24
UNITS = np.random.default_rng(0).integers(0, 256, (3, 4, UNIT), dtype=np.uint8)
UNITS[1, 2] = 0  # what compresses
REF = PartRef("p", 2, 5, 0)


def part(compression: Compression = "none", group: bytes = GROUP, head_start: int = 2) -> bytes:
    return b"".join(bytes(each) for each in encode_part(group, HASHES, head_start, UNITS, compression))


def read_part(data: bytes, ref: PartRef = REF) -> np.ndarray:
    """[heads, pages, unit]. As a tier reads it. Raises BadObject."""
    header = decode_part(data, len(data))
    check_part(header, GROUP, HASHES, ref, UNIT)
    start, stop = header.span_of_heads(2, 5)
    return np.array(read_units(header, data[start:stop], 2, 5))


def span(**changes: object) -> Span:
    share = Share(GROUP, UNIT, 5, (6, 8), (PartRef("a", 0, 2, 9), PartRef("b", 2, 5, 9)))
    fields = {"root": ROOT, "parent": PARENT, "start": 7, "hashes": HASHES, "before": HASHES[:1], "shares": (share,)}
    return Span(**{**fields, **changes})  # type: ignore[arg-type]


def cause_of(data: bytes) -> Cause | None:
    try:
        read_part(data)
    except BadObject as bad:
        return bad.cause
    return None


COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_units_come_back_as_they_were(compression: Compression) -> None:
    data = part(compression)
    assert (read_part(data) == UNITS).all()
    header = decode_part(data, len(data))
    start, stop = header.span_of_heads(3, 4)
    assert (np.array(read_units(header, data[start:stop], 3, 4)) == UNITS[1:2]).all()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_bit_of_a_part_is_a_miss(compression: Compression) -> None:
    data = part(compression)
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        cause = cause_of(bytes(wrong))
        assert cause in (Cause.CORRUPT, Cause.TRUNCATED, Cause.VERSION), f"bit {bit}: {cause}"


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_part_that_ends_early_anywhere_is_truncated(compression: Compression) -> None:
    data = part(compression)
    assert {cause_of(data[:length]) for length in range(len(data))} == {Cause.TRUNCATED}
    assert cause_of(data + b"x") == Cause.CORRUPT


def test_every_flipped_bit_of_a_span_is_a_miss() -> None:
    data = encode_span(span())
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadObject):
            decode_span(bytes(wrong))
    for length in range(len(data)):
        with pytest.raises(BadObject) as caught:
            decode_span(data[:length])
        assert caught.value.cause is Cause.TRUNCATED


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_versions_object_is_told_from_a_corrupt_one(version: int) -> None:
    for data, decode in ((part(), read_part), (encode_span(span()), decode_span)):
        other = data[:8] + struct.pack("<I", version) + data[12:]
        with pytest.raises(BadObject) as caught:
            decode(other)
        assert caught.value.cause is Cause.VERSION


def test_swapped_and_foreign_parts_are_told_from_corrupt_ones() -> None:
    assert cause_of(part(group=ROOT)) is Cause.FOREIGN
    assert cause_of(part(head_start=0)) is Cause.FOREIGN
    other = b"".join(bytes(each) for each in encode_part(GROUP, HASHES[::-1], 2, UNITS, "none"))
    assert cause_of(other) is Cause.FOREIGN
    assert cause_of(encode_span(span())) is Cause.FOREIGN, "a span where a part should be"


def test_units_that_changed_places_within_a_part_are_found() -> None:
    """Each unit's checksum knows which page and head it is of."""
    data = bytearray(part())
    start = decode_part(data, len(data)).header_end
    one, other = slice(start, start + UNIT), slice(start + UNIT, start + 2 * UNIT)
    data[one], data[other] = data[other], data[one]
    sums = bytes(decode_part(data, len(data)).header.sums)
    swapped = sums[8:16] + sums[:8] + sums[16:]
    header = decode_part(data, len(data)).header
    again = objects._framed(objects.msgspec.structs.replace(header, sums=swapped)) + data[start:]
    assert cause_of(bytes(again)) is Cause.CORRUPT


def test_a_span_of_other_pages_is_foreign() -> None:
    check_span(span(), ROOT, PARENT, 7, HASHES[0])
    for wrong in ((GROUP, PARENT, 7, HASHES[0]), (ROOT, ROOT, 7, HASHES[0]), (ROOT, PARENT, 6, HASHES[0])):
        with pytest.raises(BadObject) as caught:
            check_span(span(), *wrong)
        assert caught.value.cause is Cause.FOREIGN


@pytest.mark.parametrize(
    "shares",
    [
        (Share(GROUP, UNIT, 5, (8, 6), (PartRef("a", 0, 5, 9),)),),
        (Share(GROUP, UNIT, 5, (5,), (PartRef("a", 0, 5, 9),)),),
        (Share(GROUP, UNIT, 5, (11,), (PartRef("a", 0, 5, 9),)),),
        (Share(GROUP, UNIT, 5, (7,), (PartRef("a", 0, 2, 9), PartRef("b", 3, 5, 9))),),
        (Share(GROUP, UNIT, 5, (7,), (PartRef("a", 0, 3, 9), PartRef("b", 2, 5, 9))),),
        (Share(GROUP, UNIT, 5, (7,), (PartRef("a", 0, 4, 9),)),),
        (Share(GROUP, UNIT, 5, (7,), (PartRef("a", 0, 5, 9), PartRef("b", 5, 5, 9))),),
        (Share(GROUP, UNIT, 5, (7,), ()),),
    ],
)
def test_a_span_that_contradicts_itself_is_refused(shares: tuple[Share, ...]) -> None:
    with pytest.raises(BadObject) as caught:
        decode_span(encode_span(span(shares=shares)))
    assert caught.value.cause is Cause.CORRUPT


def test_a_header_that_claims_gigabytes_is_refused_before_it_is_read() -> None:
    data = bytearray(part())
    data[12:16] = struct.pack("<I", 2**32 - 1)
    with pytest.raises(BadObject, match="at most"):
        decode_part(bytes(data), 1 << 40)


def test_a_unit_that_would_decompress_to_more_is_refused_before_it_is() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(BadObject, match="claims"):
        objects._decompressed(zstandard.ZstdDecompressor(), memoryview(bomb), UNIT)
    for no_size in (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20)), b"no zstd", b""):
        with pytest.raises(BadObject):
            objects._decompressed(zstandard.ZstdDecompressor(), memoryview(no_size), UNIT)


@pytest.mark.parametrize("examples", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_no_damage_of_any_kind_gives_other_units(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(_some_damage)()


@given(st.randoms(use_true_random=False), st.sampled_from(COMPRESSIONS), st.integers(1, 6))
def _some_damage(random: Random, compression: Compression, changes: int) -> None:
    """Bytes changed, inserted, removed, repeated; also where the header's checksum is made to fit again."""
    data = bytearray(part(compression))
    for _ in range(changes):
        at = random.randrange(len(data) + 1)
        size = random.choice([1, 1, 4, 8, 100])
        kind = random.randrange(4)
        if kind == 0:
            data[at : at + size] = random.randbytes(min(size, len(data) - at))
        elif kind == 1:
            data[at:at] = random.randbytes(size)
        elif kind == 2:
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size]
    if random.random() < 0.5 and len(data) > objects.FRAME_BYTES:
        length = int.from_bytes(data[12:16], "little")
        fitting = objects.sum_bytes(
            bytes(data[objects.FRAME_BYTES : objects.FRAME_BYTES + length]), objects._HEADER_SEED
        )
        data[16:24] = fitting.to_bytes(8, "little")
    try:
        units = read_part(bytes(data))
    except BadObject:
        return
    assert (units == UNITS).all()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_miss_or_a_whole_span(body: bytes, framed: bool) -> None:
    data = body
    if framed:
        head = struct.pack(
            "<8sIIQ", objects.MAGIC, objects.VERSION, len(body), objects.sum_bytes(body, objects._HEADER_SEED)
        )
        data = head + body
    for decode in (decode_span, lambda each: decode_part(each, len(each))):
        with pytest.raises(BadObject):
            decode(data)


def test_keys_are_those_of_the_group() -> None:
    data = part()
    assert decode_part(data, len(data)).header.keys == tuple(page_key(GROUP, each) for each in HASHES)
