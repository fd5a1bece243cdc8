"""Tests in several processes at once, each taking every n-th: `python -m bench.shards --processes 5 tests/models/test_parity.py`.

For a GPU machine, where most of a test's time is a compiler's, on one of many cores. What each process says at last is printed
when all have ended; any that fails makes it fail. It is pytest's plugin of these processes, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAID_CHARS = 4000  # of a process, at most, of which the end is kept
PYTEST_FLAGS = ("-q", "-m", "not slow", "-p", "no:cacheprovider")
NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)  # there were fewer than processes


def plugins() -> tuple[str, ...]:
    """A machine whose own pytest plugins do not suit turns them off, and has ours by name."""
    ours = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
    return ours if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") else ()


def shard(text: str) -> tuple[int, int]:
    """(which, of how many), of 0/5 to 4/5. Raises ValueError."""
    which, of = map(int, text.split("/"))
    if not 0 <= which < of:
        raise ValueError(f"there is no shard {which} of {of}")
    return which, of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="which of how many: 0/5 to 4/5")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which, of = shard(config.getoption("--shard"))
    items[:] = items[which::of]


def run(processes: int, selection: Sequence[str]) -> list[tuple[int, str]]:
    """(exit status, the end of what it said) of each process. They end with this process's group."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / str(which) for which in range(processes)]
        running = []
        for which, output in enumerate(outputs):
            flags = (*PYTEST_FLAGS, "-rfE", *plugins(), "-p", "bench.shards", "--shard", f"{which}/{processes}")
            command = [sys.executable, "-m", "pytest", *flags, *selection]
            with output.open("wb") as file:
                running.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT))
        codes = [process.wait() for process in running]
        return [
            (code, output.read_text(errors="replace")[-SAID_CHARS:])
            for code, output in zip(codes, outputs, strict=True)
        ]


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("selection", nargs="+", help="files of tests, or what else pytest takes for a place")
    arguments = parser.parse_args(argv)
    ran = run(arguments.processes, arguments.selection)
    for which, (code, said) in enumerate(ran):
        print(f"---- {which} of {arguments.processes}: exit status {code}\n{said.strip()}", flush=True)
    return 0 if all(code in (0, NO_TESTS) for code, _ in ran) and any(code == 0 for code, _ in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
