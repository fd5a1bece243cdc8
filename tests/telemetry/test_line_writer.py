"""Lines that cannot be written, or not at once."""

from __future__ import annotations

import errno
import os
import random
import select
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.telemetry.line_budget import LineBudget
from disagg.telemetry.line_writer import DescriptorWriter, LineWriter, Target, _end_of_piece


def notice(lines: int, why: str) -> bytes:
    return f"({lines} lost: {why})\n".encode()


class Disk:
    """Takes what it is given while it has room."""

    def __init__(self) -> None:
        self.written = b""
        self.full = False

    def __call__(self, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += data


def test_what_a_full_disk_did_not_take_is_counted_and_said_when_there_is_room_again() -> None:
    disk = Disk()
    target = Target(disk, notice)
    target.put(b"one\n")
    disk.full = True
    assert not target.put(b"two\n")
    assert not target.put(b"three\nfour\n")
    disk.full = False
    target.put(b"five\n")
    assert disk.written == b"one\n(3 lost: No space left on device)\nfive\n"
    assert target.lost == 0


class Stalled:
    """A reader that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.written: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        assert self.go_on.wait(60)
        self.written.append(data)


def test_a_stalled_reader_costs_lines_and_no_time() -> None:
    reader = Stalled()
    writer = LineWriter(Target(reader, notice), max_queued_bytes=40)
    lines = [b"line %4d\n" % number for number in range(1000)]  # of ten bytes each
    for line in lines:
        writer.put(line)
    assert not writer.flush(0.05)
    reader.go_on.set()
    assert writer.flush(60)
    written = b"".join(reader.written).splitlines(keepends=True)
    kept = [line for line in written if line in lines]
    (said,) = [line for line in written if line not in lines]
    assert 4 <= len(kept) <= 5  # one may have been taken out of the queue already
    assert kept == lines[:4] + kept[4:]
    assert said == notice(1000 - len(kept), "the reader of this log did not keep up")


def test_lines_that_come_together_are_written_together_and_in_order() -> None:
    disk = Disk()
    writes: list[bytes] = []

    def write(data: bytes) -> None:
        writes.append(data)
        disk(data)

    writer = LineWriter(Target(write, notice))
    lines = [b"line %d\n" % number for number in range(5000)]
    for line in lines:
        writer.put(line)
    assert writer.flush(60)
    assert disk.written == b"".join(lines)
    assert len(writes) < len(lines) / 10


def test_a_line_is_written_soon_without_being_waited_for() -> None:
    written = threading.Event()
    writer = LineWriter(Target(lambda data: written.set(), notice))
    for _ in range(3):
        writer.put(b"line\n")
        assert written.wait(60)
        written.clear()
        assert writer.flush(60)


def test_a_pipe_that_does_not_block_gets_every_byte_too() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    read: list[bytes] = []

    def reads() -> None:
        while data := os.read(reading, 65536):
            read.append(data)

    reader = threading.Thread(target=reads)
    reader.start()
    data = b"x" * (1 << 20) + b"\n"
    DescriptorWriter(writing)(data)
    os.close(writing)
    reader.join(60)
    os.close(reading)
    assert b"".join(read) == data


def test_lines_of_two_writers_to_one_pipe_are_never_mixed() -> None:
    """As of stdout and stderr of a process that are one pipe, whose reader is slow."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    read: list[bytes] = []

    def reads() -> None:
        while data := os.read(reading, 999):
            read.append(data)

    rng = random.Random(5)
    said = [b"".join(name * rng.randrange(1, 3000) + b"\n" for _ in range(300)) for name in (b"a", b"b")]
    writers = [threading.Thread(target=DescriptorWriter(writing), args=(data,)) for data in said]
    for thread in writers:
        thread.start()
    reader = threading.Thread(target=reads)
    reader.start()
    for thread in writers:
        thread.join(60)
    os.close(writing)
    reader.join(60)
    os.close(reading)
    lines = b"".join(read).split(b"\n")[:-1]
    assert all(len(set(line)) == 1 for line in lines)
    assert [b"".join(line + b"\n" for line in lines if line[:1] == name) for name in (b"a", b"b")] == said


@settings(max_examples=200)
@given(st.lists(st.integers(0, 9000), max_size=12), st.booleans())
def test_what_is_cut_is_all_of_it_at_the_ends_of_lines(lengths: list[int], ends: bool) -> None:
    data = b"\n".join(b"x" * length for length in lengths) + b"\n" * ends
    start = 0
    while start < len(data):
        stop = _end_of_piece(data, start)
        piece = data[start:stop]
        assert piece and (stop == len(data) or piece.endswith(b"\n"))
        assert len(piece) <= select.PIPE_BUF or b"\n" not in piece[:-1]
        start = stop


def test_nobody_reading_is_an_error_for_the_target_only() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    target = Target(DescriptorWriter(writing), notice)
    assert not target.put(b"one\n")
    assert target.lost == 1
    os.close(writing)


@pytest.mark.parametrize("per_s", [1, 7, 1000])
@settings(derandomize=True, deadline=None, max_examples=100)
@given(events=st.lists(st.tuples(st.floats(0, 2), st.sampled_from([10, 20, 30, 40, 50])), max_size=200))
def test_the_budget_holds_and_every_line_is_written_or_counted(per_s: int, events: list[tuple[float, int]]) -> None:
    budget = LineBudget(per_s, 0.0)
    now_s, allowed, notices, counted = 0.0, 0, 0, 0
    for wait_s, level in events:
        now_s += wait_s
        allowed += budget.allows(level, now_s)
        said = budget.take_left_out(now_s)
        notices += bool(said)
        counted += sum(said.values())
        assert allowed + notices <= max(4, per_s) + per_s * now_s + 1e-6
    counted += sum(budget.take_left_out(now_s + 60).values())
    assert allowed + counted == len(events)


@pytest.mark.parametrize("per_s", [1, 7, 1000])
def test_a_flood_of_infos_leaves_room_for_errors(per_s: int) -> None:
    budget = LineBudget(per_s, 0.0)
    for _ in range(100_000):
        budget.allows(20, 0.0)
    assert budget.allows(30, 0.0)
    assert budget.allows(40, 0.0)
