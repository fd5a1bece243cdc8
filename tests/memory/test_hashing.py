"""Names of prefixes: equal tokens have equal names, and anything else has others."""

from __future__ import annotations

import hashlib
import struct

import hypothesis.strategies as st
from hypothesis import given, settings

from disagg.memory.hashing import chain_root, extend_hashes

QUICK = settings(max_examples=200, derandomize=True, deadline=None)

ROOT = chain_root("weights", "salt")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hashes_of(tokens: list[int], page_tokens: int = 4, root: bytes = ROOT) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root, tokens, page_tokens)
    return hashes


def test_a_page_is_named_by_the_name_before_it_and_its_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert hashes_of([1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9]) == [first, second]


@QUICK
@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_sequences_share_names_as_far_as_they_share_whole_pages(
    left: list[int], right: list[int], page_tokens: int
) -> None:
    for other in (right, left[: len(left) // 2] + right):
        same_tokens = next((i for i, (a, b) in enumerate(zip(left, other, strict=False)) if a != b), None)
        if same_tokens is None:
            same_tokens = min(len(left), len(other))
        names, other_names = hashes_of(left, page_tokens), hashes_of(other, page_tokens)
        shared = same_tokens // page_tokens
        assert names[:shared] == other_names[:shared]
        assert not set(names[shared:]) & set(other_names[shared:])


@QUICK
@given(TOKENS, st.lists(st.integers(0, 40), max_size=5), st.integers(1, 5))
def test_names_do_not_depend_on_how_often_they_were_extended(
    tokens: list[int], stops: list[int], page_tokens: int
) -> None:
    hashes: list[bytes] = []
    for stop in sorted(stops):
        extend_hashes(hashes, ROOT, tokens[:stop], page_tokens)
    extend_hashes(hashes, ROOT, tuple(tokens), page_tokens)
    assert hashes == hashes_of(tokens, page_tokens)
    assert len(hashes) == len(tokens) // page_tokens


def test_tokens_that_are_named_already_are_not_looked_at_again() -> None:
    hashes = hashes_of([1, 2, 3, 4])
    extend_hashes(hashes, ROOT, [0, 0, 0, 0, 5, 6, 7, 8], 4)
    assert hashes == hashes_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_another_salt_gives_other_names() -> None:
    tokens = list(range(16))
    assert not set(hashes_of(tokens)) & set(hashes_of(tokens, root=chain_root("weights", "another salt")))


def test_what_a_page_shows_beside_its_tokens_changes_its_name_and_those_after_it() -> None:
    tokens = [7] * 16
    cat: list[bytes] = []
    dog: list[bytes] = []
    plain = hashes_of(tokens)
    extend_hashes(cat, ROOT, tokens, 4, {2: b"cat"})
    extend_hashes(dog, ROOT, tokens, 4, {2: b"dog"})
    assert plain[:2] == cat[:2] == dog[:2]
    assert len({plain[2], cat[2], dog[2]}) == 3
    assert len({plain[3], cat[3], dog[3]}) == 3


def test_borders_between_the_parts_of_a_root_count() -> None:
    roots = [chain_root(*parts) for parts in ((), ("",), ("ab",), ("a", "b"), ("", "ab"), ("ab", ""), ("b", "a"))]
    assert len(set(roots)) == len(roots)
