"""The ring: no live byte is overwritten, nothing waits for ever, and the traps that naive rings fall into."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from disagg.staging.ring import RingAllocator, RingEntry, RingWriterView

CAPACITY, SEGMENT = 320, 64


class SeedRing:
    """The ring of the seed's excerpt: (round, offset), and a watermark that moves only when nothing is live."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.head, self.round = capacity, 0, 0
        self.live: set[tuple[int, int, int]] = set()
        self.watermark = (0, 0)

    def assign(self, nbytes: int) -> tuple[int, int, int] | None:
        if nbytes > self.capacity:
            return None
        if nbytes > self.capacity - self.head:
            self.round, self.head = self.round + 1, 0
        entry = (self.round, self.head, nbytes)
        self.head += nbytes
        self.live.add(entry)
        return entry

    def free(self, entry: tuple[int, int, int]) -> None:
        self.live.remove(entry)
        if not self.live:
            self.watermark = (self.round, self.head)

    def may_write(self, entry: tuple[int, int, int]) -> bool:
        round_, offset, nbytes = entry
        mark = self.watermark[0] * self.capacity + self.watermark[1]
        return round_ * self.capacity + offset + nbytes <= mark + self.capacity


def test_an_empty_ring_whose_head_is_past_the_watermark_does_not_wedge() -> None:
    # One segment, half used and freed: the next large entry skips to the next round, beyond watermark + capacity.
    naive = SeedRing(64)
    small = naive.assign(40)
    assert small is not None
    naive.free(small)
    large = naive.assign(60)
    assert large is not None
    assert not naive.may_write(large), "the naive ring is empty but for this entry, and may never write it"

    ring, writer = RingAllocator(64, 64), RingWriterView(64)
    ring.free(ring.assign(40))
    writer.update(ring.watermark)
    entry = ring.assign(60)
    assert entry.locate(64) == (1, 0)
    writer.update(ring.watermark)  # the watermark that travels with the entry is past the skipped bytes
    assert writer.may_write(entry)


def test_a_new_subscriber_needs_the_current_watermark() -> None:
    ring = RingAllocator(CAPACITY, SEGMENT)
    for _ in range(40):
        ring.free(ring.assign(SEGMENT))
    entry = ring.assign(SEGMENT)
    assert not RingWriterView(CAPACITY).may_write(entry), "a view that begins at zero waits for ever"
    assert RingWriterView(CAPACITY, watermark=ring.watermark).may_write(entry)


def test_a_leaked_entry_pins_the_watermark_until_the_abort_frees_it() -> None:
    ring, writer = RingAllocator(CAPACITY, SEGMENT), RingWriterView(CAPACITY)
    leaked = ring.assign(SEGMENT)
    for _ in range(4):
        ring.free(ring.assign(SEGMENT))
    waiting = ring.assign(SEGMENT)
    writer.update(ring.watermark)
    assert ring.watermark == leaked.position
    assert not writer.may_write(waiting), "its bytes are those of the leaked entry"
    ring.free(leaked)
    assert ring.watermark == waiting.position
    assert writer.update(ring.watermark)
    assert writer.may_write(waiting)


def test_the_watermark_advances_to_the_oldest_live_entry_at_each_free() -> None:
    naive = SeedRing(CAPACITY)
    entries = [naive.assign(SEGMENT) for _ in range(5)]
    assert None not in entries
    naive.free(entries[0])  # type: ignore[arg-type]
    sixth = naive.assign(SEGMENT)
    assert sixth is not None
    assert not naive.may_write(sixth), "the naive watermark waits until everything is free: a busy ring stops"

    ring, writer = RingAllocator(CAPACITY, SEGMENT), RingWriterView(CAPACITY)
    live = [ring.assign(SEGMENT) for _ in range(5)]
    ring.free(live[1])
    assert ring.watermark == live[0].position
    ring.free(live[0])
    assert ring.watermark == live[2].position
    writer.update(ring.watermark)
    assert writer.may_write(ring.assign(SEGMENT))


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
    assert (first.position, second.position) == (0, 64)
    assert ring.assign(16).position == 96, "entries begin aligned"


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
    assert ring.is_live(entry)
    ring.free(entry)
    assert not ring.is_live(entry)
    with pytest.raises(AssertionError):
        ring.free(entry)


def test_a_reset_ring_reuses_no_position_and_ignores_watermarks_from_before() -> None:
    ring, writer = RingAllocator(CAPACITY, SEGMENT), RingWriterView(CAPACITY)
    entries = [ring.assign(SEGMENT) for _ in range(7)]
    before = ring.watermark
    assert ring.reset() == tuple(entries)
    assert ring.live == ()
    assert ring.watermark % CAPACITY == 0
    assert ring.watermark >= entries[-1].stop
    writer.update(ring.watermark)
    assert not writer.update(before), "it was on its way while the ring was reset"
    assert writer.may_write(ring.assign(SEGMENT))
    ring.reset(capacity_bytes=2 * SEGMENT)
    assert ring.assign(1).locate(ring.capacity_bytes)[1] == 0
    ring.check_integrity()


class RingMachine(RuleBasedStateMachine):
    """Decode and prefill with a lossy, reordering channel for watermarks, against memory with an owner per byte."""

    assigned: Bundle[RingEntry] = Bundle("assigned")
    written: Bundle[RingEntry] = Bundle("written")

    @initialize(segments=st.integers(1, 4))
    def begin(self, segments: int) -> None:
        self.ring = RingAllocator(segments * SEGMENT, SEGMENT)
        self.writer = RingWriterView(self.ring.capacity_bytes)
        self.memory: list[RingEntry | None] = [None] * self.ring.capacity_bytes
        self.on_the_way: list[int] = []
        self.last_position = -1

    def cells(self, entry: RingEntry) -> range:
        offset = entry.locate(self.ring.capacity_bytes)[1]
        return range(offset, offset + entry.nbytes)

    @rule(target=assigned, nbytes=st.integers(1, SEGMENT))
    def assign(self, nbytes: int) -> RingEntry:
        entry = self.ring.assign(nbytes)
        assert entry.position > self.last_position, "a position is used once"
        self.last_position = entry.position
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
        live = self.ring.live
        assert not live or live[0].stop <= self.ring.watermark + self.ring.capacity_bytes
        assert self.writer.watermark <= self.ring.watermark
        self.ring.check_integrity()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=60, derandomize=True, deadline=None)
