"""The router's process, started as `disagg up` starts it, with servers that are not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from disagg.cli import router_process
from disagg.cli.rundir import pick_ports
from disagg.cli.status import show_dump
from disagg.config.load import dump_config
from disagg.config.tree import Config, ModelConfig, RouterConfig, ServerRef
from disagg.telemetry.process import ending_signals, leave_signals_to_parent, no_heartbeat
from disagg.types.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def make_model(directory: Path) -> Path:
    """A model directory that a router can read: no more than a configuration, a tokenizer and a weights' header."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 4,
        "head_dim": 4,
        "vocab_size": 3,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    words = tokenizers.models.WordLevel({"<unk>": 0, "hello": 1, "<eos>": 2}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file({"model.embed_tokens.weight": np.zeros((3, 4), np.float32)}, str(directory / "model.safetensors"))
    return directory


class Running:
    """A router process and the reading end of its heartbeats."""

    def __init__(self, config: Config, directory: Path, closed: str = "") -> None:
        """closed: which of its descriptors, as a shell has it."""
        file = directory / "router.toml"
        file.write_text(dump_config(config))
        self.beats, child_end = os.pipe()
        self.url = f"http://127.0.0.1:{config.router.http_port}"
        self.log = directory / "router.log"
        argv = [sys.executable, "-m", "disagg.cli", "router", "--config", str(file)]
        parent = str(os.getpid())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "sh",
                    "-c",
                    f'exec "$0" "$@" {closed}',
                    *argv,
                    "--heartbeat-fd",
                    str(child_end),
                    "--parent-pid",
                    parent,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                pass_fds=(child_end,),
            )
        os.close(child_end)

    def wait_until_it_answers(self) -> None:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/version", trust_env=False)
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"the router never answered: {self.log.read_text()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.beats)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Running]:
    model = make_model(tmp_path / "tiny")
    yield from running_router(model, tmp_path)


@pytest.fixture
def chatting_router(tmp_path: Path) -> Iterator[Running]:
    """One whose model has a chat template."""
    model = make_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    yield from running_router(model, tmp_path)


def running_router(model: Path, tmp_path: Path, closed: str = "") -> Iterator[Running]:
    ports = pick_ports("127.0.0.1", 4)
    servers = (
        ServerRef(name="prefill-0", role="prefill", address=f"127.0.0.1:{ports[2]}"),
        ServerRef(name="decode-0", role="decode", address=f"127.0.0.1:{ports[3]}"),
    )
    config = Config(
        model=ModelConfig(name=str(model)),
        router=RouterConfig(http_port=ports[0], grpc_port=ports[1], servers=servers),
    )
    running = Running(config, tmp_path, closed)
    yield running
    running.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture
def terminal_counts() -> Iterator[None]:
    """As where the tests were not started by nohup, whose children ignore the end of a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal_counts")
@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_a_router_without_stderr_runs_and_nothing_else_gets_its_number(tmp_path: Path, closed: str) -> None:
    for router in running_router(make_model(tmp_path / "tiny"), tmp_path, closed):
        router.wait_until_it_answers()
        for each in closed.split():
            assert os.readlink(f"/proc/{router.process.pid}/fd/{each[0]}") == os.devnull
        router.process.send_signal(signal.SIGUSR1)  # its stacks go there, too
        assert httpx.get(f"{router.url}/version", trust_env=False).status_code == 200
        router.process.send_signal(signal.SIGHUP)  # the end of its terminal
        assert router.process.wait(DEADLINE_S) == 0


@pytest.mark.usefixtures("terminal_counts")
def test_the_end_of_a_terminal_is_for_who_drains_and_for_nobody_whom_nohup_started() -> None:
    assert ending_signals() == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        leave_signals_to_parent()
        assert ending_signals() == (signal.SIGTERM, signal.SIGINT)
        for number in before:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_router_leaves_no_renderer_behind(chatting_router: Running, number: int) -> None:
    chatting_router.wait_until_it_answers()
    (renderer,) = children_of(chatting_router.process.pid)
    assert "disagg.text.render_process" in Path(f"/proc/{renderer}/cmdline").read_text()
    chatting_router.process.send_signal(number)
    chatting_router.process.wait(DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    while not has_ended(renderer):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.usefixtures("terminal_counts")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_router_that_is_told_to_end_while_it_starts_is_not_one_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    """A signal to the process group ends what the start waits for, too."""

    async def start(config: Config, stopping: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stopping.wait()
        raise ConfigError("a process that it needs was ended")

    monkeypatch.setattr(router_process, "_until", start)
    assert router_process.run(Config(), no_heartbeat) == status


def test_a_router_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(config: Config, stopping: asyncio.Event) -> None:
        raise ConfigError("it cannot")

    monkeypatch.setattr(router_process, "_until", start)
    with pytest.raises(ConfigError, match="it cannot"):
        router_process.run(Config(), no_heartbeat)


def test_a_router_without_servers_beats_answers_dumps_and_drains(
    router: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    router.wait_until_it_answers()
    assert httpx.get(f"{router.url}/health", trust_env=False).status_code == 503
    assert httpx.get(f"{router.url}/live", trust_env=False).status_code == 200
    status = httpx.get(f"{router.url}/status", trust_env=False).json()
    assert {server["name"] for server in status["servers"]} == {"prefill-0", "decode-0"}
    assert "disagg_router_" in httpx.get(f"{router.url}/metrics", trust_env=False).text
    show_dump(router.url)
    dump = capsys.readouterr().out
    assert "no dump: UNAVAILABLE" in dump
    assert "=== router_stacks" in dump
    os.read(router.beats, 65536)
    os.set_blocking(router.beats, True)
    assert os.read(router.beats, 1) == b"."  # another one comes
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(DEADLINE_S) == 0
    records = [json.loads(line) for line in router.log.read_text().splitlines()]
    assert {record["process"] for record in records} == {status["routers"][0]["name"]}
    assert {"router is listening", "draining"} <= {record["message"] for record in records}
    assert not [record for record in records if record["level"] in ("error", "critical")]
