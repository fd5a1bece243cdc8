"""The offload manager, case by case: what others have stored, and what storage has lost or is asked for."""

from __future__ import annotations

from tests.offload.cases import named, new_world, run, spans


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
