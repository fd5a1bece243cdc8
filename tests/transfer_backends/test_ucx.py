"""What is learned from UCX's log."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.transfer.backends.ucx import MAX_SAID, MAX_WAY_CHARS, UcxLog, Ways, WayTables

# As UCX 1.23 writes them.
TABLES = """\
+--------+-------------+-----------------------------------+
| D/1 self cfg#0                                           |
| remote memory write by ucp_put* from host memory to host |
+--------+-------------+-----------------------------------+
| Range  | Description |              Config               |
+--------+-------------+-----------------------------------+
| 0..inf | zero-copy   | cma/memory                        |
+--------+-------------+-----------------------------------+
+-----------+--------------------+---------------------------------------------------+
| P/0 inter-node cfg#2                                                               |
| remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda                      |
+-----------+--------------------+---------------------------------------------------+
|   Range   |    Description     |                      Config                       |
+-----------+--------------------+---------------------------------------------------+
|   0..8184 | short              | tcp/eth0                                          |
| 8185..inf | zero-copy          | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
+-----------+--------------------+---------------------------------------------------+
"""
WAY = "zero-copy 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
STAMP = "[1795443726.297037] [vm:18895:0]   "


def ways_of(text: str) -> list[str]:
    tables = WayTables()
    return [way for line in text.splitlines() if (way := tables.line(line)) is not None]


def test_a_table_says_by_what_large_writes_to_other_processes_go() -> None:
    assert ways_of(TABLES) == [WAY]


def test_a_way_of_any_length_is_cut() -> None:
    assert ways_of(TABLES.replace("50% on", "9" * 400)) == [WAY.replace("50% on", "9" * 400)[:MAX_WAY_CHARS]]


@given(st.lists(st.sampled_from(TABLES.splitlines()) | st.text(), max_size=40))
def test_tables_in_any_disorder_are_read_without_a_fault(lines: list[str]) -> None:
    assert set(ways_of("\n".join(lines))) - {WAY} <= {
        way for line in lines for way in ways_of(f"| P intra-node cfg#1 |\n{line}\n+-")
    }


def test_the_log_is_read_as_it_grows_and_what_is_no_table_is_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ucx.log"
    log = UcxLog(file)
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(str(file).encode(), b"w"))  # as UCX opens it: buffered

    def write(text: str) -> None:
        libc.fputs(text.encode(), stream)

    lines = [STAMP + line for line in TABLES.splitlines()]
    assert log.ways() == ()
    write("\n".join(lines[:11]))
    assert log.ways() == ()
    write("\n" + "\n".join(lines[11:]) + f"\n{STAMP}ib.c:7  UCX  WARN  slow\n{STAMP}tcp.c:9 UCX  ERROR bad\n")
    with caplog.at_level(logging.WARNING):
        assert log.ways() == (WAY,)
        assert log.ways() == ()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "UCX  WARN  slow" in caplog.text
    libc.fclose(stream)


def test_what_is_expected_of_it_is_not_passed_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "ucx.log"
    logs = UcxLog(file, "transport 'cuda_copy' is not available"), UcxLog(tmp_path / "other.log")
    said = f"{STAMP}ucp_context.c:1508 UCX  WARN  transport 'cuda_copy' is not available, use tcp\n{STAMP}UCX  WARN  slow\n"
    with caplog.at_level(logging.WARNING):
        for log, path in zip(logs, (file, tmp_path / "other.log"), strict=True):
            path.write_text(said)
            assert log.ways() == ()
    assert [record.getMessage().rpartition("WARN  ")[2] for record in caplog.records] == [
        "slow",
        "transport 'cuda_copy' is not available, use tcp",
        "slow",
    ]


def test_a_log_that_grows_without_end_keeps_a_bounded_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("disagg.transfer.backends.ucx.MAX_KEPT_BYTES", 4096)
    file = tmp_path / "ucx.log"
    log = UcxLog(file)
    with file.open("wb") as out, caplog.at_level(logging.WARNING):
        for number in range(200):
            out.write(f"warning {number} {'x' * 100}\n".encode())
            out.flush()
            log.ways()
            assert file.stat().st_blocks * 512 <= 16384
    assert [record.getMessage().split()[3] for record in caplog.records] == [str(number) for number in range(200)]


def test_a_way_is_that_of_the_peer_in_whose_wiring_it_was_taken_and_else_one_of_all() -> None:
    ways = Ways()
    ways.wiring("a")
    ways.taken(("tcp/eth0",))
    assert ways.wired("a") == ("tcp/eth0",)
    ways.wiring("b")
    ways.taken(("cma/memory", "cma/memory"))
    assert ways.wired("b") == ("cma/memory",)
    ways.wiring("c")
    assert ways.wired("c") == ("tcp/eth0", "cma/memory")


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.text("ab", max_size=4), max_size=20))))
def test_what_is_said_of_a_peer_has_been_taken_and_is_little(steps: list[tuple[int, list[str]]]) -> None:
    ways, taken = Ways(), set[str]()
    for peer, new in steps:
        ways.wiring(peer)
        ways.taken(tuple(new))
        taken |= set(new)
        said = ways.wired(peer)
        assert set(said) <= taken
        assert len(said) <= MAX_SAID
        assert bool(said) == bool(taken)


REAL = """
import multiprocessing, sys, time
from disagg.transfer.backends.base import create
from tests.transfer_backends.memory import HostMemory
from tests.transfer_backends.peer import UCX, run_process

if __name__ == "__main__":
    backend = create("nixl", name="near", log_file=sys.argv[1], **UCX)
    region = backend.register(HostMemory(4096))
    for name in ("one", "two"):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=run_process, args=(theirs, name, 4096), daemon=True)
        process.start()
        ours.send(("metadata",))
        peer = backend.add_peer(ours.recv())
        ours.send(("region",))
        backend.warm_up(peer, region, ours.recv())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if wired := backend.poll().wired:
                print(name, *wired[0].ways, sep="|")
                break
"""


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
def test_ucx_itself_says_by_what_it_writes_to_every_peer(tmp_path: Path) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "ucx.log")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=root,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == ["one", "two"], done.stderr
    for _, *ways in lines:
        assert len(ways) == 1 and ways[0].split(" ")[-1] in ("cma/memory", "posix/memory", "tcp/lo"), ways
