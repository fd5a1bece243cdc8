"""A cluster of the version before is upgraded under load, process by process: no request fails or is answered wrongly."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.config.load import dump_config
from disagg.config.tree import Config
from disagg.types.version import own_version
from tests.cluster.cluster import START_S
from tests.cluster.test_rolling import CLIENTS, Pools, role_of
from tests.cluster.wire_faults.questions import Questions, two_layers

ROOT = Path(__file__).parents[2]
BEFORE = "e19f75b"  # the commit before versions had numbers; it runs with the packages of this one
BUILD_S = 600.0
ORDERS = {"servers first": ("decode", "prefill", "router"), "routers first": ("router", "prefill", "decode")}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of the version before lies, with the messages generated from its own protos."""
    directory = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the commit before, {BEFORE}, is not in this checkout: {packed.stderr.decode().strip()}")
    source, site = directory / "source", directory / "site"
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(source, filter="data")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(source)]
    built = subprocess.run(install, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if built.returncode:
        pytest.skip(f"the commit before, {BEFORE}, cannot be built here: {built.stderr[-500:]}")
    return site


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    return two_layers(tmp_path_factory.mktemp("model"), prompts=16, shortest=20, longest=300, outputs=100)


class TwoVersions(Pools):
    """Processes of this version, or of the one before, which does not know every setting of this one."""

    def __init__(self, run_dir: Path, questions: Questions, before: Path) -> None:
        super().__init__(run_dir, questions, routers=2, prefill=2, decode=2)
        self.configs = {name: what_is_set(config) for name, config in self.configs.items()}
        self._enter = ("env", "-C", str(before), f"PYTHONPATH={before}")

    def run_old(self, *names: str) -> None:
        for name in names:
            self.start(name, role_of(name), self.configs[name], self._enter)
        self.wait(lambda: all(map(self.up, names)), START_S, f"{', '.join(names)} of the version before ready")
        self.serving += [name for name in names if name in self.urls]

    def ask_router(self, path: str, name: str) -> Any:
        return httpx.get(f"{self.urls[name]}{path}", timeout=60).json()


def several_versions(status: dict[str, Any]) -> bool:
    """Whether a router says so; those of the version before say no alarms."""
    return any("several versions" in alarm["text"] for alarm in status.get("alarms", ()))


def what_is_set(config: str) -> str:
    """Of a configuration only what differs from the defaults."""
    of, defaults = tomllib.loads(config), tomllib.loads(dump_config(Config()))
    set_here = {
        section: [name for name, value in fields.items() if value != defaults[section][name]]
        for section, fields in of.items()
    }
    lines, section = [], ""
    for line in config.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        name = line.partition(" = ")[0]
        if set_here[section] and (line == f"[{section}]" or name in set_here[section]):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", ORDERS)
def test_upgrade(order: str, tmp_path: Path, questions: Questions, before: Path) -> None:
    """Every prefill server meets decode servers of the other version, and routers meet both."""
    with TwoVersions(tmp_path, questions, before) as pools:
        pools.run_old(*pools.configs)
        assert "version" not in pools.ask_router("/status", "router-0")["servers"][0]  # it is the one before indeed
        mixed = 0
        with pools.load(questions) as outcome:
            pools.wait_answers(outcome)
            for role in ORDERS[order]:
                for name in [each for each in pools.configs if role_of(each) == role]:
                    if name in pools.urls:
                        print(f"attempts by {', '.join(pools.serving)}: {pools.attempts()}")
                    pools.end(name)
                    pools.run(name)
                    pools.wait_answers(outcome, 6 * CLIENTS)
                    mixed += sum(several_versions(pools.ask_router("/status", router)) for router in pools.serving)
        for router in pools.urls:
            status = pools.ask_router("/status", router)
            said = {each["version"] for each in (*status["servers"], *status["routers"])}
            assert said == {own_version().software}
            assert not several_versions(status)
        assert bool(mixed) == (order == "routers first")  # else no server of the version before is left for them
        pools.check_adds_up()
        print(f"{order}: {outcome.answered} answers, 0 failed, 0 wrong")
