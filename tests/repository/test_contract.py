"""What people and scripts rely on from outside: flags of `disagg up`, targets of make, what CI runs."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from click.testing import CliRunner

from disagg.cli.main import cli
from tests.repository.source import ROOT

UP_CONTRACT = {
    "--model",
    "--dtype",
    "--prefill",
    "--decode",
    "--prefill-tp",
    "--decode-tp",
    "--page-tokens",
    "--chunk-tokens",
    "--kv-memory",
    "--max-model-len",
    "--prefix-cache",
    "--offload",
    "--host-memory",
    "--storage",
    "--record",
    "--mixed",
    "--mixed-tp",
    "--mixed-dp",
    "--mixed-pp",
    "--policy",
    "--host",
    "--http-port",
    "--grpc-port",
}
UP_BESIDES = {"--insecure", "--routers", "--config", "--set", "--run-dir", "--help"}
TARGETS = {"help", "demo", "serve", "test", "check", "test-slow", "setup", "clean"}
FLAG = re.compile(r"^ +(?:-\w, )?(--[a-z-]+)", re.MULTILINE)


def make(*arguments: str) -> str:
    """What make prints. Not through a make that runs these tests: its own flags would be handed down."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_up_has_the_flags_of_the_contract_and_no_unknown_ones() -> None:
    shown = CliRunner().invoke(cli, ["up", "--help"])
    assert shown.exit_code == 0
    assert set(FLAG.findall(shown.output)) == UP_CONTRACT | UP_BESIDES


def test_make_alone_lists_every_target() -> None:
    listed = set(re.findall(r"^ +make ([a-z-]+)", make(), re.MULTILINE))
    assert listed >= TARGETS


@pytest.mark.parametrize(
    ("target", "selections"),
    [
        (
            "test",
            [
                'pytest -n 2 --dist worksteal -m "not slow and not short and not cluster"',
                'pytest -m "cluster and not slow and not short"',
            ],
        ),
        ("check", ['pytest -n 2 --dist worksteal -m "not slow and not cluster and not long"']),
    ],
)
def test_tests_are_run_after_lint_types_and_contracts(target: str, selections: list[str]) -> None:
    commands = make("--dry-run", target).splitlines()
    wanted = ["ruff check", "ruff format --check", "mypy", "lint-imports", *selections]
    at = [next(i for i, command in enumerate(commands) if command.endswith(each)) for each in wanted]
    assert at == sorted(at)
    assert at[-1] == len(commands) - 1, "pytest's closing line must come last"
    assert [i for i, command in enumerate(commands) if "pytest" in command] == at[4:], "no test is run before them"


def test_every_test_that_is_not_slow_is_in_one_of_the_two_runs_of_make_test() -> None:
    runs = [command for command in make("--dry-run", "test").splitlines() if "pytest" in command]
    beside, clusters = (command.partition('-m "')[2].rstrip('"') for command in runs)
    marks = ("slow", "short", "cluster", "long")
    for mask in range(2 ** len(marks)):
        has = {mark: bool(mask >> i & 1) for i, mark in enumerate(marks)}
        chosen = [eval(selection, {}, has) for selection in (beside, clusters)]
        assert sum(chosen) == (not has["slow"] and not has["short"])


@pytest.mark.parametrize(
    ("target", "command"), [("demo", "disagg demo"), ("serve", "disagg up"), ("test-slow", "python -m tests.slow")]
)
def test_a_target_runs_its_command(target: str, command: str) -> None:
    assert make("--dry-run", target).splitlines()[-1].endswith(command)


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")
