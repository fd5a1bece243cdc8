"""The offload manager, case by case; in test_manager_machine.py it meets everything at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from disagg.memory.allocator import PageAllocator
from disagg.memory.groups import GroupSpec
from disagg.memory.hashing import extend_hashes
from disagg.memory.layout import pool_layout
from disagg.messages.layout import GroupKind
from disagg.messages.stored import MAX_PAGES
from disagg.offload.acks import Acks
from disagg.offload.host import HostPool
from disagg.offload.instructions import Copy, Discard, Pin, Publish, Unpin, Upload
from disagg.offload.manager import OffloadManager
from disagg.offload.rules import offload_rules
from disagg.types.errors import ProtocolError
from tests.offload import world as worlds
from tests.offload.campaign import walk
from tests.offload.world import PAGE_TOKENS, ROOT, layout_of

World = worlds.World
NAMED: list[Callable[[], None]] = []  # tests that mutations are put through, too


def named(test: Callable[[], None]) -> Callable[[], None]:
    NAMED.append(test)
    return test


def new_world(model: str, **options: object) -> worlds.World:
    return worlds.World(model, manager=worlds.OffloadManager, host=worlds.HostPool, **options)  # type: ignore[arg-type]


def run(world: worlds.World, name: str, prompt: int, outputs: int, chunk: int = 4, first: int = 0) -> None:
    """A prompt in chunks, then tokens one by one, the last of which is not written."""
    world.begin(name, range(first, first + prompt))
    while world.sequences[name].written < prompt:
        world.write(name, chunk)
    for token in range(outputs):
        world.sample(name, 1000 + token)
        if token:
            world.write(name, 1)


def spans(world: worlds.World) -> list[tuple[int, int]]:
    return [(upload.start, upload.start + len(upload.hashes)) for upload in world.uploads.values()]


def page_nos(world: worlds.World, g: int) -> list[int]:
    return sorted(page_no for upload in world.uploads.values() for page_no in upload.shares[g].page_nos)


@named
def test_prompt_pages_go_first_then_increments_then_whole_pages_below_a_stride() -> None:
    world = new_world("full", stride_tokens=8)
    run(world, "a", 11, 13)  # 11 tokens of prompt and 12 of 13 outputs are written: 23 tokens, 11 whole pages
    world.settle()
    assert spans(world) == [(0, 4), (4, 5), (5, 9)]
    world.finish("a")
    world.settle()
    assert spans(world) == [(0, 4), (4, 5), (5, 9), (9, 11)], "the partial page is dropped"
    world.check_end()


@named
def test_the_token_that_was_sampled_last_is_never_offloaded() -> None:
    for outputs in range(1, 6):
        world = new_world("full", stride_tokens=0)
        run(world, "a", 3, outputs)
        world.finish("a")
        world.settle()
        stored = max((stop for _, stop in spans(world)), default=0)
        assert stored == (3 + outputs - 1) // PAGE_TOKENS
        world.check_end()


@named
def test_every_page_of_a_request_is_released_exactly_once_whichever_of_its_parts_was_offloaded() -> None:
    """The trap: a manager that lets go of the prompt's pages only where no increment was offloaded leaks them otherwise."""
    for outputs in (0, 1, 2, 4, 8, 9, 16):
        for late in (False, True):
            world = new_world("full", stride_tokens=8)
            run(world, "a", 11, outputs)
            if not late:
                world.settle()
            world.finish("a")
            if late:
                assert +world.pins, "copies in flight pin their pages"
            world.settle()
            world.check_end()
            assert all(count == 1 for count in world.released.values())


@named
def test_a_copy_counts_when_the_last_rank_has_made_it() -> None:
    world = new_world("full", ranks=3, stride_tokens=4)
    run(world, "a", 4, 1)
    for rank in (2, 0):
        world.make_copy(rank)
        world.report_copies(rank, 0)
        world.report_copies(rank, 0)
        world.report_copies(rank, 1)  # an old report comes once more
        assert +world.pins and not world.uploads
    world.make_copy(1)
    world.report_copies(1, 0)
    assert not +world.pins and list(world.uploads) == [1]


@named
def test_an_upload_counts_when_the_last_rank_has_made_it_and_none_has_failed() -> None:
    world = new_world("full", ranks=2, stride_tokens=4)
    run(world, "a", 8, 1)
    for rank in world.ranks:
        for _ in range(2):
            world.make_copy(rank)
        world.report_copies(rank, 0)
    world.make_upload(0)
    world.make_upload(0, fails=True)
    world.report_uploads(0, 0)
    assert not world.to_publish
    world.make_upload(1)
    world.make_upload(1)
    world.report_uploads(1, 0)
    assert world.to_publish == [1] and world.discarded == {2}


@named
def test_nothing_behind_a_span_that_failed_is_published() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    run(world, "a", 12, 1)
    for _ in range(3):
        world.make_copy(0)
    world.report_copies(0, 0)
    for fails in (True, False, False):
        world.make_upload(0, fails=fails)
    world.report_uploads(0, 0)
    assert world.discarded == {1, 2, 3} and not world.to_publish
    world.write("a", 1)
    world.sample("a", 7)
    world.write("a", 1)
    world.settle()
    world.finish("a")
    world.settle()
    assert world.stored_pages(list(world.before)) and len(world.published) >= 3, "it is tried again, from the host"
    assert len(world.copies) == 3, "nothing is copied twice"
    world.check_end()


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
def test_of_a_window_only_what_a_point_needs_is_stored_and_of_states_only_checkpoints() -> None:
    world = new_world("everything", ranks=1, stride_tokens=16)  # points every 2 pages; strides of 8
    run(world, "a", 39, 8, chunk=4)
    world.finish("a")
    world.settle()
    ends = [stop for _, stop in spans(world)]
    assert ends == [8, 16, 18, 22], "the last checkpoint within the prompt's 19 pages, and within the 23 at the end"
    assert page_nos(world, 0) == list(range(22))
    needed = {page_no for end in ends for page_no in world.rules.needed(1, end)}
    assert page_nos(world, 1) == sorted(needed)
    assert len(needed) < 22, "what no branch can use is not stored"
    assert page_nos(world, 2) == [end - 1 for end in ends]
    world.check_end()


@named
def test_what_has_left_a_window_makes_no_point_but_does_not_break_the_chain() -> None:
    """As on a decode server: of the prompt's window only the end is there."""
    world = new_world("full and windows", ranks=1, stride_tokens=8)
    world.begin("a", range(24))
    sequence = world.sequences["a"]
    for g in world.groups:
        first = world.rules.needed(g, 12).start
        for page_no in range(first, 12):
            world._have(sequence.tables[g], g, page_no, sequence)
    sequence.written = 24
    world.do(world.manager.progress("a", 24, world.view("a")))
    world.finish("a")
    world.settle()
    assert spans(world) == [(0, 4), (4, 8), (8, 12)]
    assert page_nos(world, 0) == list(range(12))
    assert page_nos(world, 1) == [10, 11] and page_nos(world, 2) == list(range(7, 12))
    world.check_end()


@named
def test_what_two_requests_share_is_copied_and_stored_once() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    for name in "ab":
        run(world, name, 9, 1)
    assert len(world.copies) == 2
    world.settle()
    run(world, "c", 9, 1)
    for name in "abc":
        world.finish(name)
    world.settle()
    assert max(world.stored.values()) == 1 and len(world.copies) == 2
    world.check_end()


@named
def test_what_somebody_else_stored_first_counts_and_the_rest_is_stored_from_the_host() -> None:
    world = new_world("full", ranks=1, stride_tokens=8)
    run(world, "a", 8, 1)
    world.other_server("a", 3)
    world.settle()
    assert world.seen["conflict"] == 1
    world.write("a", 1)
    world.finish("a")
    world.settle()
    assert spans(world) == [(0, 4), (3, 4)] and len(world.copies) == 1
    assert max(world.stored.values()) == 1
    world.check_end()


@named
def test_what_goes_on_from_somebody_elses_span_is_stored_though_the_sequence_has_ended() -> None:
    """A turn of a conversation: another server has stored the one before, whose end was no end of a stride."""
    world = new_world("full", ranks=1, stride_tokens=8)
    run(world, "a", 12, 3)
    world.other_server("a", 3)
    world.finish("a")
    world.settle()
    assert world.seen["conflict"] == 1
    assert spans(world) == [(0, 4), (4, 6), (6, 7), (3, 4)] and len(world.copies) == 3
    assert set(world.stored.values()) == {1}
    world.check_end()


@named
def test_a_store_that_comes_back_gets_what_is_on_the_host() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    world.set_store(False)
    run(world, "a", 12, 1)
    world.settle()
    assert not world.uploads and len(world.copies) == 3
    world.set_store(True)
    world.sample("a", 5)
    world.write("a", 1)
    world.settle()
    assert spans(world) == [(0, 2), (2, 4), (4, 6)] and len(world.copies) == 3
    world.finish("a")
    world.settle()
    world.check_end()


@named
def test_where_a_page_of_full_attention_is_gone_nothing_is_offloaded_from_there_on() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    world.begin("a", range(12))
    sequence = world.sequences["a"]
    for page_no in (0, 1, 2, 4, 5):
        world._have(sequence.tables[0], 0, page_no, sequence)
    sequence.written = 12
    world.do(world.manager.progress("a", 12, world.view("a")))
    world.finish("a")
    world.settle()
    assert spans(world) == [(0, 2)] and world.manager.counts["dropped"] == 4
    world.check_end()


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
def test_an_aborted_request_stores_no_end_and_its_name_is_free_at_once() -> None:
    world = new_world("full", ranks=1, stride_tokens=8)
    run(world, "a", 8, 5)
    world.finish("a", tail=False)
    run(world, "a", 6, 1, first=300)
    world.settle()
    world.finish("a", tail=False)
    world.settle()
    assert spans(world) == [(0, 4), (0, 3)]
    world.check_end()


@named
def test_at_most_so_many_uploads_are_under_way() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    run(world, "a", 24, 1)
    for _ in range(6):
        world.make_copy(0)
    world.report_copies(0, 0)
    assert len(world.uploads) == 3
    world.finish("a")
    world.settle()
    assert len(world.uploads) == 6
    world.check_end()


@named
def test_what_another_span_has_beyond_ours_is_not_stored_again() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    run(world, "a", 8, 1)
    world.other_server("a", 3)
    world.finish("a")
    world.settle()
    assert spans(world) == [(0, 2), (2, 4), (3, 4)] and world.discarded == {2}
    assert sorted(map(len, world.published.values())) == [1, 3]
    world.check_end()


@named
def test_the_end_of_what_storage_was_asked_for_waits_on_the_host_for_its_answer() -> None:
    for known, uploaded in ((True, [(3, 4)]), (False, [(0, 4), (3, 4)])):
        world = new_world("full", ranks=1, stride_tokens=40)
        run(world, "a", 8, 2)
        world.other_server("a", 3)
        world.finish("a", asked=True)
        world.make_copy(0)
        world.report_copies(0, 0)
        assert not +world.pins and not world.uploads and not world.manager.idle
        world.answer(0, known=known)
        world.settle()
        assert spans(world) == uploaded
        world.check_end()


@named
def test_all_of_what_has_ended_may_be_stored_when_storage_answers() -> None:
    world = new_world("full and windows", ranks=2, stride_tokens=4)
    run(world, "a", 8, 1)
    world.settle()
    run(world, "b", 8, 1)
    world.manager.stored.lost(world.sequences["b"].hashes)
    world.finish("b", asked=True)
    world.finish("a")
    before = len(world.uploads)
    world.settle()
    assert len(world.uploads) == before
    world.check_end()


@named
def test_what_storage_has_lost_is_stored_again_before_what_goes_on_from_it() -> None:
    world = new_world("full", ranks=1, stride_tokens=4)
    run(world, "a", 8, 1)
    world.settle()
    hashes = world.sequences["a"].hashes
    world.published.clear()
    world.stored.clear()
    world.before.clear()
    world.manager.found(hashes, 0)
    for token in range(4):
        world.sample("a", token)
        world.write("a", 1)
    world.settle()
    world.finish("a")
    world.settle()
    assert world.stored_pages(hashes) == 6
    world.check_end()


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


@pytest.mark.parametrize("seed", range(60))
def test_random_walks(seed: int) -> None:
    walk(seed)


# ---- the parts


@pytest.mark.parametrize(
    ("model", "wanted", "stride"),
    [("full", 0, 1), ("full", 1, 1), ("full", 9, 4), ("full", 8, 4), ("everything", 0, 2), ("everything", 9, 4)],
)
def test_a_stride_is_whole_pages_or_checkpoints_and_one_at_least(model: str, wanted: int, stride: int) -> None:
    assert offload_rules(layout_of(model), wanted).stride == stride


@pytest.mark.parametrize("model", ["full", "everything"])
def test_no_stride_is_longer_than_what_storage_takes_at_once(model: str) -> None:
    """Ranks refuse more, and end: a prompt that is long enough would end them again and again."""
    rules = offload_rules(layout_of(model), 1 << 30)
    prompt_end = rules.prompt_end(PAGE_TOKENS * (3 * MAX_PAGES + 10))
    at = 0
    while at < prompt_end + 2 * MAX_PAGES:
        stop = rules.cut(at, prompt_end)
        assert at < stop <= at + MAX_PAGES and stop % rules.unit == 0
        at = stop


def test_checkpoints_too_far_apart_to_be_stored_are_refused() -> None:
    layout = layout_of("everything")
    layout = replace(layout, checkpoint_tokens=layout.page_tokens * (MAX_PAGES + 1))
    with pytest.raises(ValueError, match="checkpoints are 4097 pages"):
        offload_rules(layout, 8)


@pytest.mark.parametrize(
    "spec", [GroupSpec("x", GroupKind.IMAGE, 8), GroupSpec("x", GroupKind.BUDGET, 8, budget_tokens=4)]
)
def test_a_kind_that_cannot_be_stored_is_refused(spec: GroupSpec) -> None:
    with pytest.raises(ValueError, match="cannot be offloaded"):
        offload_rules(pool_layout((spec,), 2, 4), 8)


def test_acks_are_the_least_over_the_ranks_and_reports_of_what_there_is_not_are_refused() -> None:
    acks = Acks(2)
    assert [acks.issue() for _ in range(4)] == [1, 2, 3, 4]
    assert list(acks.report(0, 3, failed=[2])) == []
    assert list(acks.report(1, 2)) == [1, 2]
    assert (acks.take_failed(1), acks.take_failed(2)) == (False, True)
    assert list(acks.report(1, 4)) == [3]
    assert list(acks.report(0, 1)) == []
    for rank, last, failed in ((2, 1, ()), (-1, 1, ()), (0, 5, ()), (0, -1, ()), (0, 4, (5,))):
        with pytest.raises(ProtocolError):
            acks.report(rank, last, failed)
    assert list(acks.report(0, 4)) == [4]


def test_on_the_real_allocator_every_holder_is_gone_at_the_end() -> None:
    """Pins are holders of the allocator that the sequence's pages come from."""
    layout = layout_of("full")
    gpu = PageAllocator(layout, 20, lambda g, page: None)
    manager = OffloadManager(
        offload_rules(layout, 4), lambda layout, gone: HostPool(layout, 20, gone), ranks=1, storage=False
    )
    hashes: list[bytes] = []
    extend_hashes(hashes, ROOT, range(20), PAGE_TOKENS)
    pages = gpu.allocate(0, 10, owner=1)
    assert pages is not None
    manager.begin("a", ROOT, hashes, 12)
    out = manager.progress("a", 20, lambda g, page_no: pages[page_no])
    out += manager.finish("a", 20, lambda g, page_no: pages[page_no])
    for each in out:
        if isinstance(each, Pin):
            gpu.share(0, [page.page for page in each.pages])
    gpu.release(0, pages, 1, range(1, 11))
    assert gpu.used_large > 0, "copies in flight pin their pages"
    copies = [each.op for each in out if isinstance(each, Copy)]
    for each in manager.copied(0, copies[-1]):
        assert isinstance(each, Unpin)
        gpu.release(0, [page.page for page in each.pages], 2, [page.page_no + 1 for page in each.pages])
    assert gpu.all_holders() == {} and gpu.used_large == 0
    assert not [each for each in out if isinstance(each, Upload | Publish | Discard)]
