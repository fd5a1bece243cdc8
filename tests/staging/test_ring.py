"""The ring: no live byte is overwritten and nothing waits for ever. What naive rings do instead: tests/transfer/test_traps."""

from __future__ import annotations

import random
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from disagg.staging.ring import RingAllocator, RingEntry, RingWriterView

CAPACITY, SEGMENT = 320, 64


def test_a_busy_ring_with_skips_keeps_moving() -> None:
    rng = random.Random(7)
    for capacity in (64, 128, 320):
        ring, writer = RingAllocator(capacity, 64), RingWriterView(capacity)
        waiting: list[RingEntry] = []
        for _ in range(500):
            waiting.append(ring.assign(rng.randint(1, 64)))
            if len(waiting) > 5:
                writer.update(ring.watermark)
                assert writer.may_write(waiting[0]), "the oldest entry can always be written"
                ring.free(waiting.pop(0))


def test_stale_and_repeated_watermarks_change_nothing() -> None:
    writer = RingWriterView(CAPACITY)
    assert writer.update(128)
    assert not writer.update(128)
    assert not writer.update(64)
    assert writer.watermark == 128
    naive_watermark = 64  # a view that takes whatever comes last
    entry = RingEntry(128 + CAPACITY - SEGMENT, SEGMENT)
    assert writer.may_write(entry)
    assert not entry.stop <= naive_watermark + CAPACITY, "it would block what it had allowed before"


def test_an_entry_never_crosses_a_segment() -> None:
    ring = RingAllocator(CAPACITY, SEGMENT)
    first, second = ring.assign(48), ring.assign(17)
    assert (first.ring_byte, second.ring_byte) == (0, 64)
    assert ring.assign(16).ring_byte == 96, "entries begin aligned"


@pytest.mark.parametrize("nbytes", [0, -1, SEGMENT + 1])
def test_sizes_that_no_entry_can_have_are_refused(nbytes: int) -> None:
    ring = RingAllocator(CAPACITY, SEGMENT)
    with pytest.raises(ValueError, match="allowed are 1 to 64"):
        ring.assign(nbytes)
    assert ring.live == ()


@pytest.mark.parametrize(("capacity", "segment"), [(0, 64), (100, 64), (64, 0), (60, 30), (64, 128)])
def test_sizes_that_no_ring_can_have_are_refused(capacity: int, segment: int) -> None:
    with pytest.raises(ValueError, match="must be a positive multiple"):
        RingAllocator(capacity, segment)


def test_an_entry_is_freed_once() -> None:
    ring = RingAllocator(CAPACITY, SEGMENT)
    entry = ring.assign(10)
    assert ring.live == (entry,)
    ring.free(entry)
    assert ring.live == ()
    with pytest.raises(AssertionError):
        ring.free(entry)


def test_a_ring_is_overcommitted_from_the_first_entry_on_that_has_to_wait() -> None:
    ring, writer = RingAllocator(CAPACITY, SEGMENT), RingWriterView(CAPACITY)
    entries = [ring.assign(SEGMENT) for _ in range(CAPACITY // SEGMENT)]
    assert writer.may_write(entries[-1]) and not ring.overcommitted
    entries.append(ring.assign(1))
    assert not writer.may_write(entries[-1]) and ring.overcommitted
    ring.free(entries[0])
    writer.update(ring.watermark)
    assert writer.may_write(entries[-1]) and not ring.overcommitted


class RingMachine(RuleBasedStateMachine):
    """Decode and prefill with a lossy, reordering channel for watermarks, against memory with an owner per byte."""

    steps: ClassVar[int] = 0  # of all runs
    assigned: Bundle[RingEntry] = Bundle("assigned")
    written: Bundle[RingEntry] = Bundle("written")

    @initialize(segments=st.integers(1, 4))
    def begin(self, segments: int) -> None:
        self.ring = RingAllocator(segments * SEGMENT, SEGMENT)
        self.writer = RingWriterView(self.ring.capacity_bytes)
        self.memory: list[RingEntry | None] = [None] * self.ring.capacity_bytes
        self.on_the_way: list[int] = []
        self.last_ring_byte = -1

    def cells(self, entry: RingEntry) -> range:
        offset = entry.locate(self.ring.capacity_bytes)[1]
        return range(offset, offset + entry.nbytes)

    @rule(target=assigned, nbytes=st.integers(1, SEGMENT))
    def assign(self, nbytes: int) -> RingEntry:
        entry = self.ring.assign(nbytes)
        assert entry.ring_byte > self.last_ring_byte, "a ring byte is used once"
        self.last_ring_byte = entry.ring_byte
        self.on_the_way.append(self.ring.watermark)
        return entry

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def a_watermark_arrives(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        watermark = self.on_the_way[index]
        if data.draw(st.booleans()):
            self.on_the_way.pop(index)  # else it will arrive again
        self.writer.update(watermark)

    @rule(target=written, entry=consumes(assigned))
    def write_when_allowed(self, entry: RingEntry) -> RingEntry:
        if not self.writer.may_write(entry):
            self.writer.update(self.ring.watermark)
        if self.writer.may_write(entry):
            for cell in self.cells(entry):
                owner = self.memory[cell]
                assert owner is None, f"writing {entry} overwrites {owner}"
                self.memory[cell] = entry
        return entry

    @rule(entry=consumes(written))
    def scatter_and_free(self, entry: RingEntry) -> None:
        for cell in self.cells(entry):
            if self.memory[cell] == entry:
                self.memory[cell] = None
        self.ring.free(entry)
        self.on_the_way.append(self.ring.watermark)

    @rule(entry=consumes(assigned))
    def abort(self, entry: RingEntry) -> None:
        self.ring.free(entry)
        self.on_the_way.append(self.ring.watermark)

    @invariant()
    def the_oldest_entry_may_always_be_written(self) -> None:
        type(self).steps += 1
        live = self.ring.live
        assert not live or live[0].stop <= self.ring.watermark + self.ring.capacity_bytes
        assert self.writer.watermark <= self.ring.watermark
        self.ring.check_integrity()


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(30, 500, marks=pytest.mark.short),
        pytest.param(150, 5_000, marks=pytest.mark.long),
        pytest.param(1_200, 50_000, marks=pytest.mark.slow),
    ],
)
def test_no_live_byte_of_a_ring_is_overwritten_and_its_oldest_entry_may_always_be_written(
    examples: int, steps: int
) -> None:
    RingMachine.steps = 0
    campaign = settings(max_examples=examples, stateful_step_count=60, derandomize=True, deadline=None, database=None)
    run_state_machine_as_test(RingMachine, settings=campaign)
    assert RingMachine.steps >= steps
