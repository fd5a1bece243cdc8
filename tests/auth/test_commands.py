"""Commands that ask a router which wants keys, against the router's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.cli.rundir import pick_ports
from disagg.config.tree import AuthConfig, Config, ModelConfig, RouterConfig
from tests.cli.test_router_process import ROOT, Running, make_model


class Guarded:
    def __init__(self, directory: Path) -> None:
        (directory / "keys").write_text("# ours\nkey-a team-a\n")
        (directory / "mine").write_text("key-a\n")
        (directory / "wrong").write_text("SECRET-WRONG\n")
        http_port, grpc_port = pick_ports("127.0.0.1", 2)
        self.directory = directory
        self.grpc = f"127.0.0.1:{grpc_port}"
        config = Config(
            model=ModelConfig(name=str(make_model(directory / "model")), served_name="tiny"),
            router=RouterConfig(http_port=http_port, grpc_port=grpc_port),
            auth=AuthConfig(api_keys_file=str(directory / "keys")),
        )
        self.running = Running(config, directory)
        self.running.wait_until_it_answers()

    def disagg(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "disagg.cli", *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "200"},
        )


@pytest.fixture(scope="module", name="guarded")
def make_guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.running.close()


def test_the_process_lets_in_whom_it_should(guarded: Guarded) -> None:
    get = {"trust_env": False, "timeout": 30.0}
    assert httpx.get(f"{guarded.running.url}/status", **get).status_code == 401  # type: ignore[arg-type]
    keys = {"authorization": "Bearer key-a"}
    assert httpx.get(f"{guarded.running.url}/status", headers=keys, **get).status_code == 200  # type: ignore[arg-type]
    assert httpx.get(f"{guarded.running.url}/health", **get).status_code == 503  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["mine", "keys"])
def test_status_shows_the_key_that_a_file_has(guarded: Guarded, file: str) -> None:
    ours = ("--http", guarded.running.url, "--api-key-file", str(guarded.directory / file))
    assert guarded.disagg("status", *ours).returncode == 0
    assert guarded.disagg("debug", "dump", *ours).returncode == 0


def test_commands_without_the_key_say_what_is_asked_for_and_no_key(guarded: Guarded) -> None:
    wrong = ("--api-key-file", str(guarded.directory / "wrong"))
    for argv in (
        ("status", "--http", guarded.running.url),
        ("status", "--http", guarded.running.url, *wrong),
        ("generate", "hi", "--grpc", guarded.grpc),
        ("generate", "hi", "--grpc", guarded.grpc, *wrong),
    ):
        ended = guarded.disagg(*argv)
        assert ended.returncode == 1, (argv, ended)
        assert "key" in ended.stderr and "SECRET" not in ended.stderr + ended.stdout
    assert "SECRET" not in guarded.running.log.read_text()
    assert "key-a" not in guarded.running.log.read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("router", "--set", "router.host=0.0.0.0"), "auth.api_keys_file"),
        (("decode", "--set", "server.host=0.0.0.0"), "tls.ca"),
        (("up", "--host", "0.0.0.0"), "auth.api_keys_file"),
    ],
)
def test_a_process_that_others_reach_without_being_asked_who_they_are_does_not_start(
    guarded: Guarded, argv: tuple[str, ...], said: str
) -> None:
    ended = guarded.disagg(*argv)
    assert ended.returncode == 2 and said in ended.stderr and "--insecure" in ended.stderr
    # Told to, it gets as far as the model, of which there is none.
    nothing = (
        "--set",
        f"model.name={guarded.directory / 'nothing'}",
        "--set",
        "router.http_port=0",
        "--set",
        "router.grpc_port=0",
    )
    ended = guarded.disagg(*argv, "--insecure", *nothing)
    assert ended.returncode == 2 and "--insecure" not in ended.stderr and "nothing" in ended.stderr


def test_a_file_that_begins_with_no_key_is_refused(guarded: Guarded) -> None:
    (guarded.directory / "bad").write_bytes(b"\xffSECRET")
    ended = guarded.disagg("status", "--http", guarded.running.url, "--api-key-file", str(guarded.directory / "bad"))
    assert ended.returncode == 2 and "printable ASCII" in ended.stderr and "SECRET" not in ended.stderr
