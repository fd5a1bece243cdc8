"""Run directories, ports, and what of the logs is echoed."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from disagg.cli.logecho import LogFollower, last_lines, shown
from disagg.cli.rundir import PORTS, make_run_dir, pick_ports, prune_run_dirs, require_free
from disagg.types.errors import ConfigError


def test_a_run_directory_is_named_by_pid_and_time(tmp_path: Path) -> None:
    directory = make_run_dir(tmp_path / "run")
    assert directory.is_dir()
    assert re.fullmatch(rf"{os.getpid()}-\d{{8}}-\d{{6}}", directory.name)


def test_a_run_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        make_run_dir(tmp_path / "file")


def test_only_the_newest_runs_are_kept_and_those_that_live(tmp_path: Path) -> None:
    names = [f"999999{day:02d}-202601{day:02d}-000000" for day in range(1, 25)]
    living = f"{os.getpid()}-20250101-000000"
    for name in (*names, living, "notes"):
        (tmp_path / name).mkdir()
    prune_run_dirs(tmp_path, keep=20)
    assert {each.name for each in tmp_path.iterdir()} == {*names[4:], living, "notes"}


def test_ports_are_free_different_and_out_of_the_ephemeral_range() -> None:
    ports = pick_ports("127.0.0.1", 6, taken=[20_001])
    assert len(set(ports)) == 6
    assert all(port in PORTS and port != 20_001 for port in ports)


def test_a_port_that_something_listens_on_is_refused_by_its_setting() -> None:
    (port,) = pick_ports("127.0.0.1", 1)  # not one that the system may give to somebody else meanwhile
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"router.http_port = {port}: cannot listen"),
    ):
        require_free("127.0.0.1", port, "router.http_port")
    require_free("127.0.0.1", port, "router.http_port")


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
    ],
)
def test_warnings_and_errors_of_ours_are_echoed(line: str, echoed: str | None) -> None:
    assert shown(line) == echoed


def test_the_follower_waits_for_whole_lines_and_shows_each_once(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    follower = LogFollower({"d0": log})
    assert list(follower.new_lines()) == []
    line = json.dumps({"level": "error", "message": "one"})
    log.write_text(line[:10])
    assert list(follower.new_lines()) == []
    log.write_text(line + "\n" + line.replace("one", "two") + "\n")
    assert list(follower.new_lines()) == [("d0", "error: one"), ("d0", "error: two")]
    assert list(follower.new_lines()) == []


def test_the_last_lines_of_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "d0.log"
    assert last_lines(log, 3) == []
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert last_lines(log, 2) == ["line 99998", "line 99999"]
