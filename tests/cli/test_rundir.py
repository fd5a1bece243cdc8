"""Run directories, ports, and what of the logs is echoed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.cli import up
from disagg.cli.logecho import shown
from disagg.cli.logfiles import RotatedFile
from disagg.cli.rundir import PORTS, cannot_write, make_run_dir, pick_ports, prune_run_dirs, require_free
from disagg.config.tree import Config
from disagg.telemetry.held_dirs import HeldDir, remove_abandoned
from disagg.types.errors import ConfigError, DisaggError

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_directory_is_named_by_pid_and_time(tmp_path: Path) -> None:
    directory = make_run_dir(tmp_path / "run").path
    assert directory.is_dir()
    assert re.fullmatch(rf"{os.getpid()}-\d{{8}}-\d{{6}}", directory.name)


def test_runs_of_one_pid_in_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    """Two containers that share a volume may both be pid 7."""
    runs = [make_run_dir(tmp_path) for _ in range(5)]
    assert len({run.path for run in runs}) == 5
    prune_run_dirs(tmp_path, keep=0)
    assert all(run.path.is_dir() for run in runs)


def test_a_run_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        make_run_dir(tmp_path / "file")


def test_a_full_disk_is_no_fault_of_the_configuration() -> None:
    full = cannot_write("it cannot be written", OSError(errno.ENOSPC, "No space left on device"), "take another")
    assert str(full) == "it cannot be written: No space left on device; take another"
    assert type(full) is DisaggError
    assert type(cannot_write("x", OSError(errno.EACCES, "Permission denied"), "y")) is ConfigError


def test_only_the_newest_runs_are_kept_and_those_that_are_held(tmp_path: Path) -> None:
    """A pid says nothing: this process' own, and one that is nobody's here, are each held once and once not."""
    names = [f"999999{day:02d}-202601{day:02d}-000000" for day in range(1, 25)]
    for name in names:
        HeldDir(tmp_path / name).release()
    held = [HeldDir(tmp_path / name) for name in ("999998-20250101-000000", f"{os.getpid()}-20250102-000000")]
    HeldDir(tmp_path / f"{os.getpid()}-20250103-000000").release()
    (tmp_path / "1-20240101-000000").mkdir()  # of a version without locks: unknown
    (tmp_path / "notes").mkdir()
    prune_run_dirs(tmp_path, keep=20)
    kept = {each.name for each in tmp_path.iterdir()}
    assert kept == {*names[4:], *(run.path.name for run in held), "1-20240101-000000", "notes"}


def test_a_directory_is_held_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from disagg.telemetry.held_dirs import HeldDir; "
        "held = HeldDir(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    directory = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        assert remove_abandoned([directory]) == []
        assert directory.is_dir()
    finally:
        process.kill()
        process.communicate()
    assert remove_abandoned([directory, tmp_path / "nowhere"]) == [directory]
    assert not directory.exists()


def test_ports_are_free_different_and_out_of_the_ephemeral_range() -> None:
    ports = pick_ports("127.0.0.1", 6, taken=[20_001])
    assert len(set(ports)) == 6
    assert all(port in PORTS and port != 20_001 for port in ports)


def test_a_port_that_something_listens_on_is_refused_by_its_setting() -> None:
    (port,) = pick_ports("127.0.0.1", 1)  # not one that the system may give to somebody else meanwhile
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(DisaggError, match=rf"router.http_port = {port}: cannot listen") as taken,
    ):
        require_free("127.0.0.1", port, "router.http_port", "--http-port")
    assert not isinstance(taken.value, ConfigError), "it may be free in a moment"
    require_free("127.0.0.1", port, "router.http_port", "--http-port")


@pytest.mark.parametrize("host", ["nonsense.invalid", "203.0.113.7", "a" * 5000, "under..dots", "::zz"])
def test_a_host_that_is_none_of_this_machine_is_named_with_its_value(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_free(host, 0, "router.http_port", "--http-port")
    said = str(refused.value)
    assert said.startswith(f"router.host = '{host[:128]}") and "http_port" not in said
    assert "it must be a name or address of this machine" in said and len(said) < 500


@pytest.mark.parametrize(
    ("line", "echoed"),
    [
        ('{"level": "info", "message": "x"}', None),
        ('{"level": "warning", "message": "link lost", "peer": "d0"}', "warning: link lost peer=d0"),
        (
            '{"level": "error", "message": "m", "exception": "Traceback\\n  x\\nValueError: bad"}',
            "error: m (ValueError: bad)",
        ),
        ("2026-01-01T00:00:00.000Z WARNING d0 disagg: m", "2026-01-01T00:00:00.000Z WARNING d0 disagg: m"),
        ("2026-01-01T00:00:00.000Z INFO    d0 disagg: m", None),
        ("some library's WARNING", None),
        ("{not json", None),
        ('{"level": ["error"], "message": "x"}', None),
        ('{"level": "error", "message": "a\\nd0: error: forged\\u001b[2J"}', "error: a\\nd0: error: forged\\x1b[2J"),
        ("2026-01-01T00:00:00.000Z ERROR d0 disagg: \x1b[2J", "2026-01-01T00:00:00.000Z ERROR d0 disagg: \\x1b[2J"),
        ('{"level": "error", "message": "' + "x" * 300_000 + '"}', None),
    ],
)
def test_warnings_and_errors_of_ours_are_echoed(line: str, echoed: str | None) -> None:
    assert shown(line) == echoed


def test_what_children_read_is_written_again_where_it_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "cache" / "run"
    run_dir.mkdir(parents=True)
    files = up._RunFiles(run_dir)
    processes = [up.ProcessSpec(name, "decode", Config()) for name in ("decode-0", "decode-1")]
    for process in processes:
        files.write(process)
    said = {process.name: (run_dir / f"{process.name}.toml").read_bytes() for process in processes}
    files.restore("decode-0")
    assert capsys.readouterr().err == ""
    shutil.rmtree(tmp_path / "cache")
    for process in processes:
        files.restore(process.name)
        file = run_dir / f"{process.name}.toml"
        assert file.read_bytes() == said[process.name] and file.stat().st_mode & 0o077 == 0
    assert capsys.readouterr().err.count("was removed") == 1


def test_a_log_goes_on_where_its_directory_was_removed(tmp_path: Path) -> None:
    log = RotatedFile(tmp_path / "run" / "decode-0.log", 1000, 1)
    log(b"first\n")
    shutil.rmtree(tmp_path / "run")
    log(b"second\n")
    assert (tmp_path / "run" / "decode-0.log").read_bytes() == b"second\n"
