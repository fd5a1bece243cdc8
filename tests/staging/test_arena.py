"""The arena: every segment in one place, nobody above a share, and quarantine ends only on purpose."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from disagg.staging.arena import Arena, SegmentLease, locate


def test_a_link_gets_adjacent_segments_when_there_are_some() -> None:
    arena = Arena(8 * 100, 100, max_share=1.0)
    first, second, third = (arena.lease("a", 2) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    arena.release(second)
    one = arena.lease("b", 1)
    assert one is not None
    assert one.segments == (2,)
    two = arena.lease("b", 2)
    assert two is not None
    assert two.segments == (6, 7), "3 alone is free before them"


def test_a_ring_on_scattered_segments_finds_its_bytes() -> None:
    arena = Arena(4 * 100, 100, max_share=1.0)
    leases = [arena.lease("a", 1) for _ in range(4)]
    for lease in (leases[1], leases[3]):
        assert lease is not None
        arena.release(lease)
    scattered = arena.lease("b", 2)
    assert scattered is not None
    assert scattered.segments == (1, 3)
    assert [locate(scattered, offset) for offset in (0, 99, 100, 199)] == [100, 199, 300, 399]
    with pytest.raises(AssertionError):
        locate(scattered, 200)


def test_no_link_holds_more_than_its_share() -> None:
    arena = Arena(16 * 64, 64)
    assert arena.lease("greedy", 5) is None
    assert arena.lease("greedy", 4) is not None
    assert arena.lease("greedy", 1) is None
    assert arena.lease("other", 4) is not None


def test_a_small_arena_still_gives_every_link_one_segment() -> None:
    arena = Arena(2 * 64, 64)
    assert arena.lease("a", 1) is not None
    assert arena.lease("b", 1) is not None
    assert arena.lease("c", 1) is None


def test_quarantined_segments_go_to_nobody_and_count_against_the_link() -> None:
    arena = Arena(4 * 64, 64, max_share=0.5)
    lease = arena.lease("broken", 2)
    assert lease is not None
    arena.quarantine(lease)
    assert (arena.free_bytes, arena.leased_bytes, arena.quarantined_bytes) == (128, 0, 128)
    assert arena.lease("broken", 1) is None, "a peer that keeps breaking its link must not take the arena"
    with pytest.raises(AssertionError):
        arena.release(lease)
    other = arena.lease("other", 2)
    assert other is not None
    assert not set(other.segments) & set(lease.segments)
    arena.unquarantine(lease)
    assert arena.lease("broken", 2) is not None
    with pytest.raises(AssertionError):
        arena.unquarantine(lease)


@pytest.mark.parametrize(("arena_bytes", "segment_bytes", "share"), [(100, 64, 1), (0, 64, 1), (64, 0, 1), (64, 64, 0)])
def test_sizes_that_cannot_work_are_refused(arena_bytes: int, segment_bytes: int, share: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Arena(arena_bytes, segment_bytes, share)


class ArenaMachine(RuleBasedStateMachine):
    """Against an owner per segment."""

    steps: ClassVar[int] = 0  # of all runs
    leased: Bundle[SegmentLease] = Bundle("leased")
    quarantined: Bundle[SegmentLease] = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(12 * 64, 64, max_share=0.4)
        self.owners: dict[int, tuple[str, str]] = {}  # segment: (link, state)

    @rule(target=leased, link=st.sampled_from("abcd"), segments=st.integers(1, 5))
    def lease(self, link: str, segments: int) -> SegmentLease | object:
        held = sum(owner[0] == link for owner in self.owners.values())
        lease = self.arena.lease(link, segments)
        if lease is None:
            assert segments > 12 - len(self.owners) or held + segments > 4, "refused although it fits"
            return SegmentLease(-1, link, (), 64)
        assert held + segments <= 4
        assert len(lease.segments) == segments
        for segment in lease.segments:
            assert segment not in self.owners
            self.owners[segment] = (link, "leased")
        return lease

    @rule(lease=consumes(leased))
    def release(self, lease: SegmentLease) -> None:
        if lease.lease_id >= 0:
            self.arena.release(lease)
            for segment in lease.segments:
                del self.owners[segment]

    @rule(target=quarantined, lease=consumes(leased))
    def quarantine(self, lease: SegmentLease) -> SegmentLease:
        if lease.lease_id >= 0:
            self.arena.quarantine(lease)
            for segment in lease.segments:
                self.owners[segment] = (lease.link, "quarantined")
        return lease

    @rule(lease=consumes(quarantined))
    def unquarantine(self, lease: SegmentLease) -> None:
        if lease.lease_id >= 0:
            self.arena.unquarantine(lease)
            for segment in lease.segments:
                del self.owners[segment]

    @invariant()
    def the_bytes_add_up(self) -> None:
        type(self).steps += 1
        states = [state for _, state in self.owners.values()]
        assert self.arena.leased_bytes == 64 * states.count("leased")
        assert self.arena.quarantined_bytes == 64 * states.count("quarantined")
        assert self.arena.free_bytes == 64 * (12 - len(states))
        self.arena.check_integrity()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(30, 500, marks=pytest.mark.short),
        pytest.param(150, 5_000, marks=pytest.mark.long),
        pytest.param(1_200, 50_000, marks=pytest.mark.slow),
    ],
)
def test_every_segment_is_in_one_place_and_the_bytes_add_up(examples: int, steps: int) -> None:
    ArenaMachine.steps = 0
    campaign = settings(max_examples=examples, stateful_step_count=60, derandomize=True, deadline=None, database=None)
    run_state_machine_as_test(ArenaMachine, settings=campaign)
    assert ArenaMachine.steps >= steps
