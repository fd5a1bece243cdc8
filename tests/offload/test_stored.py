"""What a server knows to be in storage: bounded, and told as it changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.offload.stored import StoredPages

NAMES = [bytes([n]) for n in range(8)]


def test_what_was_heard_of_first_is_forgotten_first_and_not_said_to_be_gone() -> None:
    """It is stored still, and others may have said so, too."""
    stored = StoredPages((0, 1), known=2)
    stored.add(NAMES[:2], [(0, NAMES[0]), (1, NAMES[0])])
    assert set(stored.take_events().stored) == {(0, NAMES[0]), (1, NAMES[0])}
    stored.add((), [(0, NAMES[0]), (0, NAMES[1])])
    events = stored.take_events()
    assert (events.stored, events.removed) == (((0, NAMES[1]),), ())
    assert not stored.has_page((1, NAMES[0]))
    stored.add(NAMES[2:3])
    assert [stored.has_prefix(name) for name in NAMES[:3]] == [False, True, True]


def test_where_a_prefix_ends_is_told_though_it_was_not_known_to_go_on() -> None:
    """Somebody who is no more may have said that it does."""
    stored = StoredPages((0, 1))
    stored.add(NAMES[:1], [(0, NAMES[0])])
    stored.take_events()
    stored.lost(NAMES[1:])
    assert stored.take_events().removed == ((0, NAMES[1]), (1, NAMES[1]))
    stored.lost(NAMES[1:])
    stored.add(NAMES[1:2], [(0, NAMES[1])])
    events = stored.take_events()
    assert (events.stored, events.removed) == (((0, NAMES[1]),), ((1, NAMES[1]),))


STEPS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 7), max_size=4), st.sampled_from([(0,), (1,), (0, 1)])),
    max_size=40,
)


@given(STEPS, st.integers(1, 12))
def test_what_is_told_adds_up_to_what_is_known(
    steps: list[tuple[bool, list[int], tuple[int, ...]]], known: int
) -> None:
    stored = StoredPages((0, 1), known)
    told: set[tuple[int, bytes]] = set()
    for there, numbers, groups in steps:
        names = [NAMES[n] for n in numbers]
        if there:
            stored.add(names, [(g, name) for g in groups for name in names])
        else:
            stored.lost(names)
            assert not any(stored.has_prefix(name) or stored.has_page((g, name)) for name in names for g in (0, 1))
        events = stored.take_events()
        assert set(events.stored).isdisjoint(events.removed)
        told = told.union(events.stored).difference(events.removed)
        kept = set(stored.snapshot().stored)
        assert kept <= told and len(kept) <= known
        if not there:
            assert not told & {(g, name) for g in (0, 1) for name in names[:1]}
