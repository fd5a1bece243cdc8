"""The offload manager, case by case: a host that is full, what is evicted from it, and what is for the host only."""

from __future__ import annotations

from disagg.memory.hashing import extend_hashes
from tests.offload import world as worlds
from tests.offload.cases import named, new_world, run, spans
from tests.offload.world import PAGE_TOKENS, ROOT, layout_of


@named
def test_a_full_host_means_not_now_and_nothing_behind_it_is_written() -> None:
    world = new_world("full", ranks=1, stride_tokens=4, host_large=4)
    run(world, "a", 16, 1)
    assert len(world.copies) == 2
    world.make_copy(0)
    world.make_copy(0)
    world.report_copies(0, 0)
    world.sample("a", 7)
    world.write("a", 1)
    assert len(world.copies) == 2, "until it is stored, what is on the host stays there"
    world.settle()
    world.sample("a", 8)
    world.write("a", 1)
    assert len(world.copies) == 4, "the range is tried again"
    world.settle()
    assert sorted(spans(world)) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    world.finish("a")
    world.settle()
    world.check_end()


@named
def test_a_finished_request_waits_for_room_on_the_host_only_as_far_as_it_may_and_until_its_pages_are_needed() -> None:
    for lingering, expected in ((0, 4), (100, 8)):
        world = new_world("full", ranks=1, stride_tokens=4, host_large=4, lingering=lingering)
        run(world, "a", 16, 1)
        world.finish("a")
        world.settle()
        assert max(stop for _, stop in spans(world)) == expected
        assert world.manager.counts["dropped"] == 8 - expected
        world.check_end()
    world = new_world("full", ranks=1, stride_tokens=4, host_large=4, lingering=100)
    run(world, "a", 16, 1)
    world.finish("a")
    assert sum(world.pins.values()) == 8
    world.do(world.manager.give_up_waiting())
    assert sum(world.pins.values()) == 4, "what is being copied stays pinned"
    world.settle()
    world.check_end()


@named
def test_without_storage_what_ran_last_is_evicted_last_and_the_longest_prefix_first() -> None:
    world = new_world("full", ranks=1, stride_tokens=4, host_large=10, storage=False)
    for name, first in (("a", 0), ("b", 100)):
        run(world, name, 8, 1, first=first)
        world.finish(name)
        world.settle()
    hashes = {name: [] for name in "ab"}  # type: dict[str, list[bytes]]
    for name, first in (("a", 0), ("b", 100)):
        extend_hashes(hashes[name], ROOT, range(first, first + 8), PAGE_TOKENS)
    run(world, "c", 12, 1, first=200)
    world.finish("c")
    world.settle()
    assert world.manager.host.lookup(hashes["a"], 99) == 0
    assert world.manager.host.lookup(hashes["b"], 99) == 8
    world.check()
    world.check_end()


@named
def test_of_one_prefix_the_end_is_evicted_first() -> None:
    world = new_world("full", ranks=1, stride_tokens=4, host_large=5, storage=False)
    run(world, "a", 8, 1)
    world.finish("a")
    world.settle()
    run(world, "b", 4, 1, first=200)
    world.finish("b")
    world.settle()
    assert world.manager.host.lookup(world.to_be_stored[0], 99) == 6


@named
def test_what_goes_on_from_an_evicted_page_of_the_host_goes_with_it_unless_somebody_holds_it() -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, ROOT, range(8), PAGE_TOKENS)
    lost: list[bytes] = []
    pool = worlds.HostPool(layout_of("full"), 4, lost.append)
    taken = pool.take([4])
    assert taken is not None
    for page_no, page in enumerate(taken[0]):
        pool.name(0, page, hashes[page_no], hashes[page_no - 1] if page_no else ROOT)
    for page_no in (0, 1, 2):
        pool.release([(0, page_no, taken[0][page_no])])
    assert pool.take([1]) is not None
    assert [pool.find(0, each) is not None for each in hashes] == [False, False, False, True]
    assert set(lost) == set(hashes[:3]) and pool.evicted == 3
    assert pool.take([3]) is None and pool.take([2]) is not None
    pool.whole_prefixes = False
    pool.check_integrity()


@named
def test_what_is_for_the_host_only_is_copied_and_not_stored_until_somebody_stores_it() -> None:
    world = new_world("full", stride_tokens=4)
    world.begin("a", range(12), to_storage=False)
    world.write("a", 12)
    world.finish("a")
    world.settle()
    assert len(world.copies) and not world.uploads
    copies = len(world.copies)
    run(world, "b", 12, 5)
    world.finish("b")
    world.settle()
    hashes = world.to_be_stored[0]
    assert world.stored_pages(hashes) == 8
    assert len(world.copies) == copies + 1, "what is on the host is copied again"


@named
def test_a_page_of_a_window_that_goes_to_the_host_only_is_not_taken_for_stored() -> None:
    world = new_world("full and windows", stride_tokens=4, lingering=40)
    world.begin("a", range(8), to_storage=False)
    world.write("a", 8)
    world.finish("a")  # its copies are not made yet
    world.begin("b", range(10))
    hashes = world.sequences["b"].hashes
    world.put(ROOT, tuple(hashes[:4]), ())
    world.manager.found(hashes, 4, [(0, each) for each in hashes[:4]])  # somebody has stored no more than this
    world.write("b", 10)
    world.finish("b")
    world.settle()
    needed = world.rules.needed(1, 5)
    assert needed.start == 3
    assert [page_no for page_no in needed if world.stored[1, hashes[page_no]]] == list(needed)
