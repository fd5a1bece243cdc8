"""The worked examples of the Jenga paper, step by step, with its numbers and its letters.

Pages of one token are named by the tokens that they hold, so a prefix reads [A, B, C, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest

from disagg.memory.allocator import PageAllocator
from disagg.memory.cache import ImageRef, PrefixCache, image_key
from disagg.memory.extents import num_extents
from disagg.memory.groups import GroupSpec, spec_of
from disagg.memory.hashing import chain_root, extend_hashes
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout
from disagg.messages.layout import GroupKind, LayerGroup
from tests.memory.images import image_rank

IMAGE, TEXT = 0, 1


def vision_layout() -> PoolLayout:
    """Llama 3.2 Vision's two kinds of pages, as the paper draws them."""
    image = GroupSpec("image", GroupKind.IMAGE, page_bytes=256)
    text = GroupSpec("text", GroupKind.FULL, page_bytes=384)
    return pool_layout((image, text), page_tokens=1)


def nothing_is_evicted(g: int, page: int) -> None:
    raise AssertionError(f"page {page} of group {g} was evicted")


def chain(tokens: str) -> list[bytes]:
    """The hashes of all prefixes of pages of one token."""
    hashes: list[bytes] = []
    extend_hashes(hashes, chain_root("weights"), [ord(token) for token in tokens], page_tokens=1)
    return hashes


# ---- two levels of pages


def test_the_large_page_is_the_least_common_multiple_of_256_and_384() -> None:
    layout = vision_layout()
    assert layout.sizing is PageSizing.LCM
    assert layout.large_bytes == 768
    assert layout.per_large == (3, 2), "three image pages, or two text pages"
    assert layout.strides == (256, 384), "and no byte is lost between them"


def test_image_tokens_have_large_pages_0_and_2_and_text_tokens_large_page_1() -> None:
    allocator = PageAllocator(vision_layout(), 4, nothing_is_evicted)
    assert allocator.allocate(IMAGE, 3, owner=1) == [0, 1, 2], "large page 0, cut in three"
    assert allocator.allocate(TEXT, 2, owner=1) == [2, 3], "large page 1, cut in two"
    assert allocator.allocate(IMAGE, 1, owner=1) == [6], "all small pages are in use: large page 2, cut in three"
    assert allocator.allocate(IMAGE, 2, owner=1) == [7, 8], "which has room for two more"
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (1, 0, 3)
    allocator.check_integrity()


def test_small_pages_lie_one_behind_the_other_in_their_large_page() -> None:
    layout = vision_layout()
    offsets = [page * layout.strides[IMAGE] for page in (0, 1, 2, 6, 7, 8)]
    assert offsets == [0, 256, 512, 1536, 1792, 2048]
    assert [page * layout.strides[TEXT] for page in (2, 3)] == [768, 1152]


def test_a_large_page_goes_back_when_none_of_its_small_pages_is_used() -> None:
    allocator = PageAllocator(vision_layout(), 3, nothing_is_evicted)
    images = allocator.allocate(IMAGE, 3, owner=1)
    texts = allocator.allocate(TEXT, 4, owner=1)
    assert images == [0, 1, 2] and texts == [2, 3, 4, 5] and allocator.free_large == 0
    allocator.release(IMAGE, [0, 1], 1, [1, 2])
    assert allocator.free_large == 0, "image page 2 is still used"
    assert allocator.small_counts(IMAGE) == (2, 0, 1)
    allocator.release(IMAGE, [2], 1, [3])
    assert allocator.free_large == 1
    assert allocator.small_counts(IMAGE) == (0, 0, 0)
    assert allocator.allocate(TEXT, 2, owner=1) == [0, 1], "and can be cut for the other kind"


def test_the_largest_page_wastes_bytes_where_the_common_divisor_and_multiple_do_not() -> None:
    groups = vision_layout().groups
    largest = pool_layout(groups, page_tokens=1, sizing=PageSizing.MAX)
    assert largest.large_bytes == 384
    assert [largest.padding_bytes(g) for g in (IMAGE, TEXT)] == [128, 0]
    assert math.gcd(*(group.page_bytes for group in groups)) == 128, "pages would have to be read in pieces"


def test_pages_of_one_request_are_freed_together_when_requests_take_turns() -> None:
    """Allocation goes with that of other requests, and a request frees all at once: pages handed out as they come would
    leave two half empty large pages, pages of one request side by side leave one for anybody."""
    allocator = PageAllocator(vision_layout(), 4, nothing_is_evicted)
    pages: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(4):
        for request in (1, 2):
            pages[request] += allocator.allocate(TEXT, 1, owner=request) or []
    assert pages == {1: [0, 1, 4, 5], 2: [2, 3, 6, 7]}
    allocator.release(TEXT, pages[1], 1, [1, 2, 3, 4])
    assert allocator.free_large == 2 and allocator.fragmentation_bytes == 0


def test_a_request_that_asks_at_once_has_its_pages_side_by_side() -> None:
    allocator = PageAllocator(vision_layout(), 8, nothing_is_evicted)
    allocator.allocate(IMAGE, 1, owner=1)
    pages = allocator.allocate(TEXT, 9, owner=2)
    assert pages is not None and num_extents(pages) == 1


# ---- states, and the five steps


def test_small_and_large_pages_are_empty_evictable_or_used() -> None:
    allocator = PageAllocator(vision_layout(), 2, nothing_is_evicted)
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (2, 0, 0)
    allocator.allocate(TEXT, 2, owner=1)
    allocator.keep(TEXT, 0)
    allocator.keep(TEXT, 1)
    assert allocator.small_counts(TEXT) == (0, 0, 2)
    allocator.release(TEXT, [0], 1, [1])
    assert allocator.small_counts(TEXT) == (0, 1, 1), "valid KV, and no request uses it"
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (1, 0, 1)
    allocator.release(TEXT, [1], 1, [2])
    assert allocator.small_counts(TEXT) == (0, 2, 0)
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (1, 1, 0)


def test_a_small_page_comes_from_the_first_of_five_steps() -> None:
    evicted: list[tuple[int, int]] = []
    allocator = PageAllocator(vision_layout(), 4, lambda g, page: evicted.append((g, page)))

    def cached(g: int, pages: list[int], step: int) -> None:
        for page in pages:
            allocator.keep(g, page)
        allocator.release(g, pages, step, [page + 1 for page in pages])

    assert allocator.allocate(TEXT, 1, owner=1) == [0]
    assert allocator.allocate(TEXT, 1, owner=1) == [1], "1: the unused small page beside the request's own"
    assert allocator.allocate(TEXT, 1, owner=2) == [2], "2: another request takes an empty large page, which is its own"
    assert allocator.allocate(IMAGE, 3, owner=3) == [6, 7, 8]
    assert allocator.allocate(IMAGE, 3, owner=4) == [9, 10, 11]
    cached(IMAGE, [9, 10, 11], step=1)
    cached(IMAGE, [6, 7, 8], step=2)
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (0, 2, 2)

    assert allocator.allocate(TEXT, 1, owner=5) == [6]
    assert sorted(evicted) == [(IMAGE, 9), (IMAGE, 10), (IMAGE, 11)], "3: the evictable large page used longest ago"
    evicted.clear()
    assert allocator.allocate(TEXT, 2, owner=6) == [4, 5]
    assert sorted(evicted) == [(IMAGE, 6), (IMAGE, 7), (IMAGE, 8)]
    evicted.clear()

    unused = {3, 7}
    first = allocator.allocate(TEXT, 1, owner=7)
    second = allocator.allocate(TEXT, 1, owner=7)
    assert first is not None and second is not None
    assert {*first, *second} == unused, "4: an unused small page that is of another request"
    assert evicted == []

    cached(TEXT, [5], step=3)
    cached(TEXT, [0], step=4)
    assert (allocator.free_large, allocator.evictable_large, allocator.used_large) == (0, 0, 4)
    assert allocator.allocate(TEXT, 1, owner=8) == [5], "5: the evictable small page used longest ago"
    assert allocator.allocate(TEXT, 1, owner=8) == [0]
    assert evicted == [(TEXT, 5), (TEXT, 0)]
    assert allocator.allocate(TEXT, 1, owner=8) is None, "all is in use"


# ---- eviction, balanced and aligned


class TwoLayers:
    """A model with a full and a sliding-window layer group, pages of one token in both, all of one size."""

    def __init__(self, sliding_window: int, num_pages: int) -> None:
        full = LayerGroup("full", (0,), 1, 4, "float32")
        window = LayerGroup("window", (1,), 1, 4, "float32", GroupKind.WINDOW, sliding_window)
        self.layout = pool_layout([spec_of(full, 1), spec_of(window, 1)], page_tokens=1)
        self.memory = KvMemory(self.layout, num_pages)
        self.token_of: dict[bytes, str] = {}  # which page a hash names: that of the prefix's last token

    def run(self, *steps: tuple[int, str]) -> None:
        """One request. steps: the number of each, and the tokens whose KV there is after it; the prompt's first."""
        _, prompt = steps[0]
        pages = self.memory.open(chain(prompt), len(prompt), len(prompt), chunk_tokens=len(prompt), step=steps[0][0])
        assert pages is not None
        computed = pages.computed
        for step, tokens in steps:
            hashes = chain(tokens)
            self.token_of.update(zip(hashes, tokens, strict=True))
            assert pages.grow(computed, len(tokens)) is not None
            computed = len(tokens)
            pages.advance(computed, hashes, step)
            if tokens == prompt:
                pages.end_prefill(hashes, step, goes_on=True)
        pages.close(step)
        self.memory.check_integrity([])

    def evict_one_by_one(self) -> Iterator[tuple[str, str]]:
        """Somebody else wants all pages: what each one costs, as (layer group, token)."""
        self.memory.cache.take_events()
        while self.memory.allocator.allocate(0, 1, owner=99) is not None:
            for g, key in self.memory.cache.take_events().removed:
                yield self.layout.groups[g].name, self.token_of[key]


@pytest.fixture
def two_requests() -> TwoLayers:
    """Window 2. The first request has the prompt [A, B, C, D], and generates E and F; the second one is [A, B, C, D, G]."""
    layers = TwoLayers(sliding_window=2, num_pages=12)
    layers.run((1, "ABCD"), (2, "ABCDE"))
    layers.run((3, "ABCDG"))
    return layers


def test_when_f_is_generated_full_layers_touch_a_to_e_and_window_layers_d_and_e() -> None:
    layers = TwoLayers(sliding_window=2, num_pages=12)
    layers.run((1, "ABCD"), (2, "ABCDE"))
    order = list(layers.evict_one_by_one())
    assert order[:3] == [("window", "C"), ("window", "B"), ("window", "A")], "not touched since step 1"
    touched_at_2 = {("full", token) for token in "ABCDE"} | {("window", token) for token in "DE"}
    assert set(order[3:]) == touched_at_2


def test_both_requests_share_a_b_c_d(two_requests: TwoLayers) -> None:
    memory = two_requests.memory
    full, window = (memory.allocator.small_counts(g) for g in (0, 1))
    assert full == window == (0, 6, 0), "A, B, C, D, E and G, once each"
    assert memory.lookup(chain("ABCDX"), 5) == 4


def test_what_was_touched_longest_ago_goes_first_and_of_that_the_longest_prefix(two_requests: TwoLayers) -> None:
    order = list(two_requests.evict_one_by_one())
    assert [token for name, token in order if name == "full"] == [
        "E",  # step 2
        *"GDCBA",  # step 3: [A, B, C, D, G]
    ]
    assert [token for name, token in order if name == "window"] == [
        *"CBA",  # step 1
        "E",  # step 2
        *"GD",  # step 3
    ]


def test_the_layers_give_up_the_same_tokens_together(two_requests: TwoLayers) -> None:
    order = list(two_requests.evict_one_by_one())
    pairs = [{order[i], order[i + 1]} for i in (3, 5, 7)]
    assert pairs == [{("full", token), ("window", token)} for token in "EGD"]


def test_hits_grow_shorter_from_the_end(two_requests: TwoLayers) -> None:
    """Whatever is evicted from a sequence, a hit is lost only when no layer could have spared its last tokens."""
    hits = [two_requests.memory.cache.lookup(chain("ABCDG"), 5) for _ in two_requests.evict_one_by_one()]
    assert hits == [5, 5, 5, 5, 5, 4, 4, 0, 0, 0, 0, 0]


# ---- which prefixes are valid


def hybrid(*groups: GroupSpec, page_tokens: int = 1, checkpoint_tokens: int = 512) -> PrefixCache:
    return PrefixCache(pool_layout(groups, page_tokens, checkpoint_tokens))


FULL_LAYERS = GroupSpec("full", GroupKind.FULL, 16)
WINDOW_LAYERS = GroupSpec("window", GroupKind.WINDOW, 16, window_tokens=2)


def hold(cache: PrefixCache, g: int, tokens: str, held: str) -> None:
    for position, (token, key) in enumerate(zip(tokens, chain(tokens), strict=True)):
        if token in held:
            assert cache.insert(g, key, position)


def valid_prefixes(cache: PrefixCache, tokens: str) -> list[str]:
    """A prefix is valid when it is the longest that is found of itself."""
    hashes = chain(tokens)
    return [tokens[:n] for n in range(1, len(tokens) + 1) if cache.lookup(hashes[:n], n) == n]


REQUEST = "ABCDEFGHIJ"


def test_full_layers_that_hold_a_to_i_have_every_prefix_up_to_a_to_i() -> None:
    cache = hybrid(FULL_LAYERS)
    hold(cache, 0, REQUEST, "ABCDEFGHI")
    assert valid_prefixes(cache, REQUEST) == [
        "A",
        "AB",
        "ABC",
        "ABCD",
        "ABCDE",
        "ABCDEF",
        "ABCDEFG",
        "ABCDEFGH",
        "ABCDEFGHI",
    ]


def test_window_layers_that_hold_c_d_h_i_j_have_a_to_d_and_a_to_i_and_a_to_j() -> None:
    cache = hybrid(WINDOW_LAYERS)
    hold(cache, 0, REQUEST, "CDHIJ")
    assert valid_prefixes(cache, REQUEST) == ["ABCD", "ABCDEFGHI", "ABCDEFGHIJ"]


def test_the_hit_is_the_longest_prefix_valid_in_all_layers_at_once() -> None:
    cache = hybrid(FULL_LAYERS, WINDOW_LAYERS)
    hold(cache, 0, REQUEST, "ABCDEFGHI")
    hold(cache, 1, REQUEST, "CDHIJ")
    assert valid_prefixes(cache, REQUEST) == ["ABCD", "ABCDEFGHI"]
    hashes = chain(REQUEST)
    assert cache.lookup(hashes, 10) == 9, "[A, B, C, D, E, F, G, H, I]"
    assert cache.lookup(hashes, 8) == 4, "and if H is the last that may be reused, [A, B, C, D]"
    cache.remove(1, REQUEST.index("H"))
    assert cache.lookup(hashes, 10) == 4, "[A, B, C, D] also when the window layers lost H"


# ---- Mamba: a state every 512 tokens


def test_only_prefixes_of_multiples_of_512_tokens_hit_in_mamba_layers() -> None:
    page_tokens = 16
    cache = hybrid(
        GroupSpec("full", GroupKind.FULL, 16), GroupSpec("mamba", GroupKind.STATE, 64), page_tokens=page_tokens
    )
    tokens = list(range(2000))
    hashes: list[bytes] = []
    extend_hashes(hashes, chain_root("weights"), tokens, page_tokens)
    for position, key in enumerate(hashes):
        cache.insert(0, key, position)
    assert cache.lookup(hashes, 1999) == 0, "no state, no hit"
    for page, num_tokens in enumerate((512, 1024, 1040, 1536)):
        cache.insert(1, hashes[num_tokens // page_tokens - 1], page)
    assert [cache.lookup(hashes, n) for n in (511, 512, 1000, 1024, 1535, 1536, 1999)] == [
        0,
        512,
        512,
        1024,
        1024,
        1536,
        1536,
    ]
    cache.remove(1, 3)
    assert cache.lookup(hashes, 1999) == 1024, "and not the 1040 tokens of a state between two checkpoints"
    cache.remove(1, 1)
    assert cache.lookup(hashes, 1999) == 512
    cache.remove(0, 31)
    assert cache.lookup(hashes, 1999) == 0, "attention layers lost the last of the 512 tokens"


# ---- images: all or nothing


def test_images_are_evicted_whole() -> None:
    """Of images that were last used together, every page of one goes before any of the next; which is drawn at random."""
    image_layers = GroupSpec("cross-attention", GroupKind.IMAGE, 256)
    images = [ImageRef(bytes([number]), 10 * number, 3) for number in range(5)]
    orders = set()
    for seed in range(6):
        layout = pool_layout([image_layers], page_tokens=1)
        cache, rank_seed = PrefixCache(layout), Random(seed).randbytes(16)
        evicted: list[int] = []

        def on_evict(g: int, page: int, cache: PrefixCache = cache, evicted: list[int] = evicted) -> None:
            cache.remove(g, page)
            evicted.append(page)

        allocator = PageAllocator(layout, 3 * len(images), on_evict)
        pages = allocator.allocate(0, 3 * len(images), owner=1)
        assert pages is not None
        for number, image in enumerate(images):
            for index in range(image.num_pages):
                page = pages[index * len(images) + number]
                cache.insert(0, image_key(image.hash, index), page)
                allocator.keep(0, page)
                allocator.release(0, [page], 1, [image_rank(image.hash, rank_seed)])
        hashes = chain("x" * 60)
        assert cache.lookup(hashes, 60, images) == 60
        of_page = {page: index % len(images) for index, page in enumerate(pages)}
        order: list[int] = []
        for _ in images:
            assert allocator.allocate(0, 3, owner=2) is not None
            gone = {of_page[page] for page in evicted[-3:]}
            assert len(gone) == 1, f"pages of the images {gone} were evicted"
            order += gone
            lost = min(order)
            assert cache.lookup(hashes, 60, images) == images[lost].start_token, (
                "valid up to the first image that is lost"
            )
        orders.add(tuple(order))
    assert len(orders) > 1, "not always the same image first"
