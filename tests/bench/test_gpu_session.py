"""What is run on a GPU machine: which parts fit, that a part ends with all it started, and that commands are still there."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu_session import (
    ALL_FUSIONS,
    OUTPUT_BYTES,
    PARTS,
    ROOT,
    Part,
    Session,
    chosen,
    command_of,
    environment,
    last_chars,
    latest_end_s,
    run_session,
    wanted,
)
from disagg.models.fused.passes import FUSIONS

PART_LISTS = st.lists(
    st.builds(
        Part,
        name=st.uuids().map(str),
        minutes=st.floats(0.1, 9),
        answers=st.just(""),
        args=st.just(()),
        gpus=st.integers(1, 3),
    ),
    max_size=8,
)


def python(name: str, program: str, minutes: float = 1.0, drops: tuple[str, ...] = ()) -> Part:
    return Part(name, minutes, f"what {name} says", ("-c", program), drops=drops)


def session(folder: Path) -> Session:
    return Session(folder, str(folder), "a machine", lambda _: None)


@given(PART_LISTS, st.floats(0, 20), st.integers(0, 3))
def test_the_first_part_that_fits_is_next(parts: list[Part], left: float, gpus: int) -> None:
    fits = [part.minutes <= left and part.gpus <= gpus for part in parts]
    found = chosen(parts, left, gpus)
    assert (found is None) == (not any(fits))
    assert found is None or found is parts[fits.index(True)]


@given(st.floats(0.1, 9), st.floats(0, 600))
def test_a_part_that_began_in_time_never_takes_longer_than_what_was_left(minutes: float, more_s: float) -> None:
    left_s = minutes * 60 + more_s
    assert minutes * 60 <= latest_end_s(Part("", minutes, "", ()), left_s) <= left_s


def test_every_command_is_there_and_takes_its_flags() -> None:
    """A flag is looked for where arguments are declared: nobody can start most of these without a GPU."""
    declared = "".join(
        path.read_text() for path in [*(ROOT / "bench").glob("*.py"), *(ROOT / "disagg/cli").glob("*.py")]
    )
    for part in PARTS:
        _, name, *rest = part.args
        assert importlib.util.find_spec(name) is not None, part
        if name == "pytest":
            files = [each for each in rest if each.startswith("tests/")]
            assert files and all((ROOT / each).is_file() for each in files), part
        else:
            missing = [each for each in rest if each.startswith("--") and f'"{each}"' not in declared]
            assert not missing or missing == ["--no-curve"], part


def test_names_are_unique_and_all_parts_are_wanted_by_default() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert wanted(None, PARTS[0].name) == list(PARTS)
    assert wanted(None, PARTS[3].name) == list(PARTS[3:])
    assert [part.name for part in wanted(["starts", "decode"], PARTS[0].name)] == ["decode", "starts"]
    assert max(part.minutes for part in PARTS) <= 9


def test_what_ran_is_kept_and_what_did_not_fit_is_said(tmp_path: Path) -> None:
    ran = session(tmp_path)
    parts = [
        python("one", "print('a figure')"),
        python("two", "raise SystemExit(3)"),
        python("long", "", minutes=100),
        python("three", "print('x' * 5_000_000)"),
    ]
    left = run_session(ran, parts, 9, 1, time.monotonic)
    assert [part.name for part in left] == ["long"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(part["name"], part["status"]) for part in summary["parts"]] == [
        ("one", "passed"),
        ("two", "failed"),
        ("three", "passed"),
    ]
    assert "a figure" in (tmp_path / "output.txt").read_text()
    assert (tmp_path / "output.txt").stat().st_size < OUTPUT_BYTES + 10_000
    assert "a figure" in ran.digest() and len(ran.digest()) < 12_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt", "summary.json"]


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = tmp_path / "beat"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(beat)!r}).write_text(str(time.time())); time.sleep(0.05)"
    )
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    for latest_s in (3.0, 30.0):  # the latter where a slow machine has not even begun the child by then
        monkeypatch.setattr("bench.gpu_session.latest_end_s", lambda *_, latest_s=latest_s: latest_s)
        ran = session(tmp_path / f"{latest_s:g}").run(python("endless", program), 60)
        if beat.exists():
            break
    assert ran.status == "ended: too late" and ran.tail == "begun\n"
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last, "its child still runs"


def test_later_parts_go_without_fusions_that_failed(tmp_path: Path) -> None:
    ran = session(tmp_path)
    show = "import os, sys; print(os.environ.get('DISAGG__MODEL__FUSIONS'), sys.argv)"
    assert json.loads(ran.run(python("before", show), 60).tail.partition(" [")[0] + "") == list(FUSIONS)
    ran.run(python("parity", "raise SystemExit(1)", drops=(FUSIONS[-1],)), 60)
    assert json.loads(ran.run(python("after", show), 60).tail.partition(" [")[0] + "") == list(FUSIONS[:-1])
    engine = Part("steps", 1, "", ("-m", "bench.engine"))
    assert command_of(engine, "", (FUSIONS[-1],)) == [sys.executable, "-m", "bench.engine", "--fusions", *FUSIONS[:-1]]
    assert json.loads(environment(())["DISAGG__MODEL__FUSIONS"]) == list(FUSIONS)


def test_every_fusion_is_known() -> None:
    assert ALL_FUSIONS == FUSIONS


def test_the_end_of_a_text_is_whole_lines() -> None:
    assert last_chars("one\ntwo\nthree", 9) == "three"
    assert last_chars("one\ntwo\nthree", 10) == "two\nthree"
    assert last_chars("one\ntwo", 100) == "one\ntwo" and last_chars("x" * 10, 4) == "xxxx"
