"""What children write: from their pipes into files that rotate."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cli.logfiles import RotatedFile
from disagg.cli.logpump import LAST_LINES, LogPump
from disagg.telemetry.line_writer import Target
from tests.small_disk import small_disk as small_disk

DEADLINE_S = 60.0


def notice(lines: int, why: str) -> bytes:
    return f"({lines} lost: {why})\n".encode()


def until(done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.01)


# ---- files


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    parts=st.lists(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), max_size=60),
    max_bytes=st.integers(1, 80),
    keep=st.integers(0, 3),
)
def test_files_stay_within_their_size_and_number_and_hold_the_end_of_what_was_written(
    parts: list[bytes], max_bytes: int, keep: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = RotatedFile(directory / "p.log", max_bytes, keep)
        for part in parts:
            file(part)
        file.close()
        order = [directory / "p.log", *(directory / f"p.log.{number}" for number in range(1, keep + 1))]
        assert set(directory.iterdir()) <= set(order)
        there = [path.read_bytes() for path in reversed(order) if path.exists()]
        assert all(len(data) <= max_bytes for data in there)
        assert b"".join(parts).endswith(b"".join(there))


def test_a_file_ends_with_a_whole_line(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "p.log", 100, 50)
    lines = [b"x" * (number % 30) + b"\n" for number in range(100)]
    for line in lines:
        file(line)
    order = sorted(tmp_path.glob("p.log.*"), key=lambda path: -int(path.suffix[1:]))
    contents = [path.read_bytes() for path in (*order, tmp_path / "p.log")]
    assert b"".join(contents) == b"".join(lines)
    assert all(data.endswith(b"\n") for data in contents)


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "p.log", 1000, 1)
    file(b"one\n")
    (tmp_path / "p.log").unlink()
    file(b"two\n")
    assert (tmp_path / "p.log").read_bytes() == b"two\n"


def test_a_full_disk_costs_lines_that_are_counted_and_nothing_else(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 60_000)
    target = Target(RotatedFile(small_disk / "p.log", 1 << 20, 1), notice)
    line = b"x" * 99 + b"\n"
    written = 0
    while target.put(line):
        written += 1
        assert written < 10_000
    for _ in range(9):
        target.put(line)
    (small_disk / "ballast").unlink()
    assert target.put(b"again\n")
    lines = (small_disk / "p.log").read_bytes().splitlines(keepends=True)
    assert lines[-2:] == [notice(10, "No space left on device"), b"again\n"]
    assert all(each == line for each in lines[:written])
    assert len(lines) <= written + 3  # one of them may be there in part


# ---- the pump


class Shown:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))


class Pumped:
    def __init__(self, directory: Path) -> None:
        self.shown = Shown()
        self.log = directory / "d0.log"
        self.pump = LogPump({"d0": Target(RotatedFile(self.log, 1 << 20, 1), notice)}, self.shown)


@pytest.fixture
def pumped(tmp_path: Path) -> Iterator[Pumped]:
    made = Pumped(tmp_path)
    yield made
    made.pump.close(DEADLINE_S)


def test_whole_lines_are_shown_once_and_everything_is_kept(pumped: Pumped) -> None:
    fd = pumped.pump.open("d0")
    os.write(fd, b'{"level"')
    os.write(fd, b': "error"}\nnext\npart')
    until(lambda: len(pumped.shown.lines) == 2)
    os.close(fd)
    assert pumped.pump.last_lines("d0", DEADLINE_S) == ['{"level": "error"}', "next", "part"]
    assert pumped.shown.lines == [("d0", '{"level": "error"}'), ("d0", "next"), ("d0", "part")]
    assert pumped.log.read_bytes() == b'{"level": "error"}\nnext\npart\n'


def test_a_line_that_does_not_end_is_kept_as_it_is(pumped: Pumped) -> None:
    fd = pumped.pump.open("d0")
    os.write(fd, b"loading ")
    until(lambda: pumped.log.exists() and pumped.log.read_bytes() == b"loading ")
    os.write(fd, b"done\n")
    os.close(fd)
    pumped.pump.last_lines("d0", DEADLINE_S)
    assert pumped.log.read_bytes() == b"loading done\n"


def test_what_native_code_writes_is_kept_and_bounded_too(pumped: Pumped) -> None:
    """Not a line of ours, no logging, no Python, and more than both files hold; never more at once than a pipe holds."""
    lines, burst = [f"{'x' * 60} {number}" for number in range(80_000)], 5_000
    loop = f"n=$0; while [ $n -lt $(($0+{burst})) ]; do echo {'x' * 60} $n >&2; n=$((n+1)); done"
    with os.fdopen(pumped.pump.open("d0"), "wb") as output:
        for first in range(0, len(lines), burst):
            subprocess.run(["sh", "-c", loop, str(first)], stderr=output, check=True, timeout=DEADLINE_S)
            until(lambda stop=first + burst: len(pumped.shown.lines) == stop)  # type: ignore[misc]
    assert pumped.pump.last_lines("d0", DEADLINE_S) == lines[-LAST_LINES:]
    files = sorted(pumped.log.parent.iterdir())
    assert [file.name for file in files] == ["d0.log", "d0.log.1"]
    assert all(0 < file.stat().st_size <= 1 << 20 for file in files)
    there = files[1].read_text().splitlines() + files[0].read_text().splitlines()
    assert there == lines[-len(there) :]


def test_a_child_never_waits_for_the_pump(tmp_path: Path) -> None:
    """Its disk hangs; the child writes more than a pipe holds, and ends."""
    go_on = threading.Event()
    pump = LogPump({"d0": Target(lambda data: go_on.wait() and None, notice)}, Shown())
    with os.fdopen(pump.open("d0"), "wb") as output:
        code = (
            "import logging; from disagg.telemetry.logs import configure_logging; configure_logging('d0', 'info', 'json')\n"
            "for _ in range(5000): logging.getLogger('disagg').error('x' * 1000)"
        )
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run([sys.executable, "-c", code], cwd=root, stderr=output, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0
    go_on.set()
    pump.close(DEADLINE_S)


def test_lives_of_a_child_follow_each_other_in_one_file(pumped: Pumped) -> None:
    for life in range(3):
        with os.fdopen(pumped.pump.open("d0"), "wb") as output:
            output.write(b"life %d\n" % life)
        pumped.pump.last_lines("d0", DEADLINE_S)
    assert pumped.log.read_bytes() == b"life 0\nlife 1\nlife 2\n"
