"""A first start that can never work ends `disagg up` at once, with the server's own words and status 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "llama")


def up(model: Path, directory: Path, *flags: str) -> tuple[int, str]:
    """Status and all that it said. It ends by itself."""
    argv = [sys.executable, "-m", "disagg.cli", "up", "--model", str(model), "--run-dir", str(directory / "run")]
    argv += ["--http-port", "0", "--grpc-port", "0", "--set", "model.device=cpu", *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv-memory", "999999TiB"), 'engine.kv_memory_bytes = "999999TiB"'),
        (("--set", 'worker.command=["/does/not/exist"]'), "worker.command = ['/does/not/exist']: it cannot be run"),
        (("--set", 'worker.command=["true"]'), "rank 0 exited with status 0 before it said anything, 5 times"),
        (("--max-model-len", "4096"), "model.max_model_len is 4096; the model allows at most 2048"),
    ],
)
def test_a_configuration_that_cannot_work_is_not_tried_again(
    llama: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    status, text = up(llama, tmp_path, *flags)
    assert status == 2, text
    assert said.replace('"', "") in text.replace('"', "")
    assert "starting it again" not in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("below", "said"),
    [("file", "it is no directory"), ("file/records", "ot a directory"), ("x" * 300, "ile name too long")],
)
def test_records_that_cannot_be_written_are_refused_before_anything_is_started(
    llama: Path, tmp_path: Path, below: str, said: str
) -> None:
    (tmp_path / "file").write_text("")
    status, text = up(llama, tmp_path, "--record", str(tmp_path / below))
    assert status == 2, text
    assert "record.dir = " in text and said in text
    assert "starting " not in text and "Traceback" not in text and not (tmp_path / "run").exists()


def test_a_model_that_is_refused_is_not_tried_again(llama: Path, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": "a"}))
    status, text = up(model, tmp_path)
    assert status == 2, text
    assert "rms_norm_eps is 'a'; it must be a number" in text
    assert "starting it again" not in text and "Traceback" not in text


def test_a_port_that_is_taken_for_a_moment_is_waited_for(llama: Path, tmp_path: Path) -> None:
    """As a server alone it ends with status 1, which `up` takes for something that may pass."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "disagg.cli", "decode", "--set", f"server.port={port}"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert f"server.port = {port}: cannot listen on 127.0.0.1:{port} (Address already in use)" in done.stderr
