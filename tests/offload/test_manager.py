"""The offload manager, case by case: what is copied and stored of a request, and in which order.

In test_manager_machine it meets everything at once.
"""

from __future__ import annotations

import pytest

from disagg.memory.allocator import PageAllocator
from disagg.memory.hashing import extend_hashes
from disagg.offload.host import HostPool
from disagg.offload.instructions import Copy, Discard, Pin, Publish, Unpin, Upload
from disagg.offload.manager import OffloadManager
from disagg.offload.rules import offload_rules
from tests.offload.campaign import walk
from tests.offload.cases import named, new_world, page_nos, run, spans
from tests.offload.world import PAGE_TOKENS, ROOT, layout_of


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


@pytest.mark.parametrize("seed", range(60))
def test_random_walks(seed: int) -> None:
    walk(seed)


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
