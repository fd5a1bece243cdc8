"""Ctrl-C at any moment of a command's start: no traceback, and the status of shells."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from disagg.cli import generate, interrupts
from disagg.cli.main import cli
from disagg.types.errors import Interrupted

ROOT = Path(__file__).resolve().parents[2]

# Runs a command that is interrupted when it imports the module of a given name.
AT_IMPORT = """
import builtins, os, signal, sys
when, real = sys.argv[1], builtins.__import__
def importing(name, *more):
    if name == when or name.startswith(when + "."):
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *more)
builtins.__import__ = importing
from disagg.cli.__main__ import main
del sys.argv[1]
main()
print("it was not imported")
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("click", ["up"]),
        ("msgspec", ["up"]),
        ("disagg.router", ["up"]),
        ("grpc", ["generate", "hello"]),
        ("rich", ["model", "list"]),
        ("httpx", ["status"]),
        ("disagg.server", ["prefill"]),
        ("zmq", ["decode"]),
        ("fastapi", ["router"]),
    ],
)
def test_while_modules_are_imported_it_ends_at_once_and_silently(module: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, module, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


@pytest.mark.parametrize("command", ["prefill", "router", "up"])
def test_the_first_process_of_a_container_ends_at_sigterm_while_modules_are_imported(command: str) -> None:
    """Without a handler the kernel would keep the signal from it, and a pod that is deleted now would live out its grace."""
    first = AT_IMPORT.replace("os.kill(os.getpid(), signal.SIGINT)", "signal.raise_signal(signal.SIGTERM)")
    first = first.replace("real = ", "real, os.getpid = ").replace("__import__\n", "__import__, lambda: 1\n", 1)
    done = subprocess.run(
        [sys.executable, "-c", first, "msgspec", command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr, done.stdout) == (143, "", "")


def test_a_command_that_is_interrupted_later_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run_generate", interrupted)
    shown = CliRunner().invoke(cli, ["generate", "hello"])
    assert (shown.exit_code, shown.output) == (130, "error: interrupted\n")


def test_a_request_that_is_cancelled_by_ctrl_c_has_the_same_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> int:
        raise Interrupted("interrupted; the request was cancelled")

    monkeypatch.setattr(generate, "run_generate", interrupted)
    assert CliRunner().invoke(cli, ["generate", "hello"]).exit_code == 130


def test_where_ctrl_c_is_ignored_it_stays_so() -> None:
    before, at_sigterm = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        interrupts.end_at_ctrl_c()
        interrupts.raise_at_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.end_at_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        interrupts.raise_at_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, at_sigterm)


TIDIES_UP = """
import signal, tempfile
from disagg.cli import interrupts

interrupts.end_at_ctrl_c()
interrupts.raise_at_ctrl_c()
with tempfile.TemporaryDirectory() as name:
    print(name, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_command_with_files_to_remove_removes_them_at_sigterm_as_at_ctrl_c(number: int, status: int) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", TIDIES_UP], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert command.stdout is not None
    folder = Path(command.stdout.readline().strip())
    assert folder.is_dir()
    command.send_signal(number)
    assert command.wait(30) == status and not folder.exists()
