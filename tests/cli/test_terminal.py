"""What commands say, to whom nobody listens, or to a terminal that must not be driven by it."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli import announce as announcing
from disagg.cli.children import Children
from disagg.cli.status import print_pools
from disagg.cli.supervise import Limits
from disagg.cli.terminal import for_terminal
from tests.cli.routers import status_of

ROOT = Path(__file__).resolve().parents[2]
TALKS = (
    "import sys; from disagg.cli.terminal import note, result, unblock_streams; unblock_streams(); "
    "[note(f'{number} ' + 'x' * 1000) for number in range(5000)]; result('ready'); "
    "open(sys.argv[1], 'w').write('went on'); sys.stdin.read()"
)


def talk(directory: Path, out: int) -> subprocess.Popen[bytes]:
    """A process that says more than a pipe and its own memory hold, to whoever reads `out`, and ends with its stdin."""
    argv = [sys.executable, "-c", TALKS, str(directory / "done")]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=out)


@pytest.mark.parametrize("reader", ["stalls", "is gone"])
def test_without_a_reader_a_process_goes_on_and_ends(tmp_path: Path, reader: str) -> None:
    reading, writing = os.pipe()
    if reader == "is gone":
        os.close(reading)
    process = talk(tmp_path, writing)
    os.close(writing)
    try:
        process.communicate(timeout=60)  # closes its stdin
    finally:
        process.kill()
    assert process.returncode == 0
    assert (tmp_path / "done").read_text() == "went on"
    if reader == "stalls":
        os.close(reading)


def test_a_reader_that_comes_back_is_told_what_it_missed(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = talk(tmp_path, writing)
    os.close(writing)
    assert process.stdin is not None
    try:
        with os.fdopen(reading, "rb") as reader:
            while not (tmp_path / "done").exists():
                assert process.poll() is None
            process.stdin.close()
            lines = reader.read().decode().splitlines()
        assert process.wait(60) == 0
    finally:
        process.kill()
    (said,) = [line for line in lines if "left out here" in line]
    assert said.startswith("disagg: ") and said.endswith("the reader of this log did not keep up")
    assert len(lines) - 2 + int(said.split()[1]) == 5000  # and `ready`, which has a stream of its own
    assert "ready" in lines


def test_up_needs_neither_stdout_nor_stderr(tmp_path: Path) -> None:
    """`disagg up >&- 2>&-`: no file or socket gets their numbers, and with them what is said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = f"exec {sys.executable} -m disagg.cli up --http-port {port} --run-dir {tmp_path} >&- 2>&- <&-"
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-"])
def test_what_up_says_is_in_its_log_whichever_descriptors_it_has(tmp_path: Path, closed: str) -> None:
    says = (
        "import sys; from disagg.cli.terminal import note, result, unblock_streams; from disagg.cli.up import keep_copy; "
        "from disagg.telemetry.line_writer import DescriptorWriter, Target; "
        "from disagg.telemetry.process import open_standard_descriptors; "
        "open_standard_descriptors(); streams = unblock_streams(); file = open(sys.argv[1], 'wb'); "
        "keep_copy(streams, Target(DescriptorWriter(file.fileno()), lambda lines, why: b'')); note('noted'); result('ready')"
    )
    command = f'exec {sys.executable} -c "$1" "$2" {closed}'
    subprocess.run(["sh", "-c", command, "sh", says, str(tmp_path / "up.log")], cwd=ROOT, timeout=60, check=True)
    assert (tmp_path / "up.log").read_text().splitlines() == ["noted", "ready"]


async def test_what_cannot_be_announced_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nonsense(routers: object, children: Children) -> None:
        raise KeyError("state")

    monkeypatch.setattr(announcing, "_say_states", nonsense)
    children = Children((), Limits(drain_s=()), None, {}, lambda name: 0)  # type: ignore[arg-type]
    await announcing.announce({}, children)
    assert "the cluster runs, but its state cannot be followed: KeyError: 'state'" in capsys.readouterr().err


# ---- what others say, on a terminal

FORGED = "\x1b[2J\x9b31m[red]x[/]\u202e"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_does_not_drive_the_terminal_and_pipes_get_it_as_it_is() -> None:
    text = "two\nlines\t" + FORGED
    assert for_terminal(text, io.StringIO()) == text
    assert for_terminal(text, Tty()) == "two\nlines\t\\x1b[2J\\x9b31m[red]x[/]\\u202e"


def test_a_status_shows_names_as_they_are_and_neither_markup_nor_escapes() -> None:
    out = io.StringIO()
    server = {"name": FORGED, "role": "prefill", "state": FORGED, "address": FORGED, "reason": FORGED}
    print_pools(Console(file=out, width=400), status_of(server, name=FORGED, error=FORGED))
    text = out.getvalue()
    assert text.count("\\x1b[2J\\x9b31m[red]x[/]\\u202e") == 7
    assert "\x1b" not in text and "\u202e" not in text
