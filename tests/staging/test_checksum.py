"""The checksum: equal to its definition in integers, and not fooled by the errors that a weaker sum misses."""

from __future__ import annotations

import hashlib

import pytest
import torch
from msgspec.structs import replace

from disagg.messages.pieces import HeadSlice
from disagg.staging.checksum import checksum
from disagg.staging.identity import identity_seed
from disagg.staging.nh import MASK, key_seed, splitmix64, sum_bytes
from tests.staging.identities import IDENTITY, slice_of

SEED = identity_seed(slice_of())


def reference(payload: bytes, seed: int) -> int:
    padded = payload + bytes(-len(payload) % 8)
    start, total = key_seed(seed, len(payload)), 0
    for i in range(len(padded) // 8):
        word, key = int.from_bytes(padded[8 * i : 8 * i + 8], "little"), splitmix64(start, i)
        low = (word % 2**32 + key % 2**32) % 2**32
        high = (word // 2**32 + key // 2**32) % 2**32
        total += low * high
    return total & MASK


def sum_of(payload: bytes, seed: int = SEED) -> int:
    padded = bytearray(payload + bytes(-len(payload) % 8))
    return checksum(torch.frombuffer(padded, dtype=torch.uint8), len(payload), seed)


def some_bytes(n: int) -> bytes:
    return bytes(torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n)).tolist())


@pytest.mark.parametrize("n", [1, 7, 8, 9, 24, 1000, 16384 * 8, 16384 * 8 + 8, 300_001])
def test_it_is_what_the_definition_says(n: int) -> None:
    assert sum_of(some_bytes(n)) == reference(some_bytes(n), SEED)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 24, 1000, 16384 * 8 + 3])
def test_of_bytes_wherever_they_lie_it_is_the_same(n: int) -> None:
    for offset in (0, 1, 3, 8):
        lying = memoryview(bytes(offset) + some_bytes(n))[offset:]
        assert sum_bytes(lying, SEED) == reference(some_bytes(n), SEED)


def test_splitmix64_gives_its_published_numbers() -> None:
    assert [splitmix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_every_single_flipped_bit_is_caught() -> None:
    for payload in (bytes(128), some_bytes(128), b"\xff" * 128):
        right = sum_of(payload)
        for bit in range(8 * len(payload)):
            wrong = bytearray(payload)
            wrong[bit // 8] ^= 1 << bit % 8
            assert sum_of(bytes(wrong)) != right, f"bit {bit}"


def test_two_flipped_signs_are_caught_where_a_weighted_sum_misses_them() -> None:
    payload = some_bytes(256)
    words = torch.frombuffer(bytearray(payload), dtype=torch.int64)
    weights = torch.arange(1, 33) * 2 + 1
    right, weak = sum_of(payload), int((words * weights).sum())
    for i in range(31):
        for lane in (0x80, 0x8000):  # the highest sign of a word and one in the middle
            wrong = bytearray(payload)
            for word in (i, i + 1):
                wrong[8 * word + 7] ^= lane & 0xFF
                wrong[8 * word + 3] ^= lane >> 8
            assert sum_of(bytes(wrong)) != right
            if lane == 0x80:
                missed = torch.frombuffer(wrong, dtype=torch.int64)
                assert int((missed * weights).sum()) == weak, "odd weight x 2^63, twice, is nothing"


def test_words_that_changed_places_are_caught() -> None:
    payload = some_bytes(128)
    right = sum_of(payload)
    for i in range(16):
        for j in range(i):
            words = [payload[8 * k : 8 * k + 8] for k in range(16)]
            words[i], words[j] = words[j], words[i]
            assert sum_of(b"".join(words)) != right


def test_the_length_of_the_payload_is_part_of_it() -> None:
    assert len({sum_of(bytes(n)) for n in range(1, 17)}) == 16, "all of these are zeros, in one or two words"


@pytest.mark.parametrize("field", IDENTITY)
def test_a_stale_piece_with_another_identity_is_caught(field: str) -> None:
    value = IDENTITY[field]
    other = identity_seed(slice_of(**{field: value + 1 if isinstance(value, int) else value + "x"}))
    assert other != SEED
    for payload in (bytes(64), some_bytes(64)):
        assert sum_of(payload, other) != sum_of(payload, SEED)


def test_fields_of_an_identity_do_not_run_into_each_other() -> None:
    one = identity_seed(slice_of(request_id="r-1a", src_incarnation="a"))
    assert one != SEED
    assert identity_seed(slice_of(src_rank=1, dst_rank=0)) != SEED


def test_the_encoding_of_an_identity_does_not_change_between_versions() -> None:
    def number(n: int) -> bytes:
        return n.to_bytes(8, "little")

    strings = number(3) + b"r-1" + number(2) + b"aa" + number(2) + b"bb"
    numbers = b"".join(map(number, (1, 0, 0, 0, 4, 16, 32, 0, 1)))
    digest = hashlib.blake2b(strings + numbers, digest_size=8, person=b"disagg.piece.v1").digest()
    assert int.from_bytes(digest, "little") == SEED == 0x531A8E560EA9E94B


def test_seeds_of_former_versions_are_still_the_same() -> None:
    """Numbers from before a slice was one value: servers of both versions may meet."""
    other = slice_of(
        request_id="chatcmpl-é中",
        attempt=7,
        prefix_no=3,
        src_incarnation="5f0c1d",
        dst_incarnation="a9",
        group=2,
        layer_start=1,
        layer_stop=2,
        token_start=0,
        token_stop=1,
        src_rank=3,
        dst_rank=5,
    )
    nameless = slice_of(
        request_id="",
        attempt=0,
        src_incarnation="",
        dst_incarnation="P",
        layer_start=31,
        layer_stop=32,
        token_start=131071,
        token_stop=1 << 20,
        src_rank=15,
        dst_rank=0,
    )
    assert [identity_seed(each) for each in (other, nameless)] == [0x915FF352A8603FCB, 0x6A4A9EEC7A2BF3A1]


def test_an_identity_does_not_name_heads_for_the_ranks_say_which_they_are() -> None:
    one = slice_of()
    assert identity_seed(replace(one, head_slice=HeadSlice(0, 1, 2, 3, 4))) == identity_seed(one)
