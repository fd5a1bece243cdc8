"""The command line: names and flags that operators' scripts depend on, errors, and exit codes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from disagg.cli.main import cli
from disagg.cli.up import UpOptions, cluster_processes
from disagg.config.load import load_config
from disagg.config.tree import Config, OffloadConfig

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, args, env=env, prog_name="disagg")


@pytest.mark.parametrize(
    ("command", "mentions"),
    [
        ([], ["up", "generate", "status", "debug", "model", "config", "demo", "router", "prefill", "decode"]),
        (
            ["up"],
            [
                *("--offload", "--host-memory", "--storage"),
                *("--model", "--dtype", "--prefill", "--decode", "--prefill-tp", "--decode-tp", "--page-tokens"),
                *("--chunk-tokens", "--kv-memory", "--max-model-len", "--prefix-cache", "--host", "--http-port"),
                *("--grpc-port", "--run-dir", "auto|float32|bfloat16|float16", "on|off"),
            ],
        ),
        (
            ["generate"],
            ["PROMPT", "--grpc", "--max-tokens", "--temperature", "--stop", "--chat", "--raw", "--timeline", "--json"],
        ),
        (["status"], ["--json", "--http", "--memory"]),
        (["drain"], ["NAME", "--http", "--wait", "--undo", "--force", "--timeout"]),
        (["debug"], ["dump"]),
        (["debug", "dump"], ["--http"]),
        (["model"], ["path", "convert", "inspect", "list"]),
        (["model", "path"], ["[NAME]"]),
        (["config"], ["show"]),
        (["router"], ["--config", "--set"]),
        (["prefill"], ["--config", "--set"]),
        (["decode"], ["--config", "--set"]),
        (["demo"], ["--model"]),
    ],
)
def test_help_names_what_scripts_depend_on(command: list[str], mentions: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    words = result.output.replace(",", " ").split()
    for each in mentions:
        assert any(each in word for word in words), f"{each} is not in the help of disagg {' '.join(command)}"


def test_what_a_supervisor_passes_is_not_for_people() -> None:
    assert "heartbeat-fd" not in run("prefill", "--help").output


def test_help_is_there_at_once_and_imports_nothing_heavy() -> None:
    """At once: in 0.1 s of CPU time, where torch alone would take two."""
    code = (
        "import sys, time; from disagg.cli.main import cli; cli(['--help'], standalone_mode=False); "
        "heavy = {'torch', 'transformers', 'grpc', 'httpx', 'fastapi', 'rich', 'numpy', 'msgspec'} & set(sys.modules); "
        "print(time.process_time(), file=sys.stderr); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 1.5


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["config", "show", "--set", "engine.page_tokens=-1"], 2, "error: engine.page_tokens"),
        (["config", "show", "--set", "engine.page_tokens"], 2, "error: --set engine.page_tokens: it must be"),
        (["config", "show", "--config", "/does/not/exist.toml"], 2, "error: configuration file"),
        (["up", "--prefill-tp", "0"], 2, "Invalid value for '--prefill-tp': 0 is not in the range 1<=x<=64."),
        (["up", "--page-tokens", "24"], 2, "error: engine.checkpoint_tokens = 512: it must be a multiple"),
        (["up", "--kv-memory", "plenty"], 2, 'error: engine.kv_memory_bytes = "plenty"'),
        (["up", "--host-memory", "plenty"], 2, 'error: offload.host_bytes = "plenty"'),
        (["up", "--offload", "maybe"], 2, "'maybe' is not one of 'on', 'off'"),
        (
            ["up", "--offload", "on", "--prefix-cache", "off"],
            2,
            "error: offload.enabled = true and engine.prefix_cache",
        ),
        (["up", "--offload", "on", "--storage", "ftp://x"], 2, "error: storage.url = "),
        (
            ["up", "--offload", "on", "--storage", "file:///kv", "--set", "storage.options.x=1"],
            2,
            "error: storage.options.x",
        ),
        (["up", "--model", "/does/not/exist", "--http-port", "0", "--grpc-port", "0"], 2, "error: model"),
        (["prefill", "--set", "server.tp=0"], 2, 'error: server.tp = "0"'),
        (["model", "path", "gpt-17"], 2, "error: model 'gpt-17'"),
        (["status", "--http", "http://127.0.0.1:1"], 1, "error: no router answers at http://127.0.0.1:1"),
        (["up", "--prefill", "none"], 2, "--prefill"),
        (["up", "--dtype", "int4"], 2, "--dtype"),
        (["launch"], 2, "No such command"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(args: list[str], code: int, says: str) -> None:
    result = run(*args)
    assert (result.exit_code, says in result.output) == (code, True), result.output
    if says.startswith("error: "):
        assert result.stdout == ""
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["config", "show", "--set", "model\nERROR forged"], 2),
        (["config", "show", "--set", "model\nERROR forged.x=1"], 2),
        (["config", "show", "--config", "/no\nERROR forged"], 2),
        (["status", "--http", "http://127.0.0.1:1\n"], 2),
        (["status", "--http", "\nERROR forged"], 2),
        (["model", "path", "a\nERROR forged"], 2),
        (["model", "inspect", "a\nERROR forged"], 2),
        (["report", "/no\nERROR forged"], 2),
        (["status", "one\nERROR forged"], 2),
        (["status", "--one\nERROR forged"], 2),
        (["one\nERROR forged"], 2),
        (["--one\nERROR forged"], 2),
        (["generate", "hi", "--grpc", "a\nERROR forged"], 2),
        (["generate", "hi", "--api-key-file", "/no\nERROR forged"], 2),
        (["role", "a", "b\nERROR forged"], 2),
        (["up", "--run-dir", "~no\nERROR forged/"], 2),
        (["bench", "serve", "--token-ids", "a\nERROR forged"], 2),
        (["plan", "--http", "\nERROR forged"], 2),
        (["plan", "--trace", "/no\nERROR forged"], 2),
    ],
)
def test_what_is_repeated_in_an_error_forges_no_line(args: list[str], code: int) -> None:
    result = run(*args)
    assert result.exit_code == code, result.output
    assert not [line for line in result.output.splitlines() if line.startswith("ERROR")], result.output
    assert sum(line.lower().startswith("error:") for line in result.output.splitlines()) == 1
    assert not result.output.startswith("error:") or len(result.output.splitlines()) == 1


@pytest.mark.parametrize("args", [[], ["model"], ["config"]])
def test_a_group_without_a_command_shows_its_help(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) > 5 and "Commands:" in result.output.split("\n")


def test_flags_of_up_are_settings_of_every_process_and_win_over_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def run_up(options: UpOptions, file: Path | None, overrides: Mapping[str, object]) -> int:
        seen.extend(process.config for process in cluster_processes(load_config(file, overrides), options))
        assert options.num_decode == 2 and options.decode_tp is None
        return 0

    monkeypatch.setattr("disagg.cli.up.run_up", run_up)
    flags = (
        "--offload",
        "on",
        "--host-memory",
        "3GiB",
        "--storage",
        "file:///kv",
        "--page-tokens",
        "32",
        "--decode",
        "2",
    )
    assert run("up", *flags, "--set", "engine.page_tokens=8", "--set", "offload.stride_tokens=64").exit_code == 0
    assert len(seen) == 4
    for config in seen:
        assert config.offload == OffloadConfig(enabled=True, host_bytes=3 << 30, stride_tokens=64)
        assert (config.storage.url, config.engine.page_tokens) == ("file:///kv", 32)
    seen.clear()
    assert run("up", "--decode", "2", "--storage", "file:///kv").exit_code == 0
    assert seen[0].storage.url == "file:///kv" and not seen[0].offload.enabled
    assert seen[0].engine.page_tokens == 0, "what another call was given is forgotten"


def test_config_show_says_what_file_environment_and_flags_come_to(tmp_path: Path) -> None:
    file = tmp_path / "disagg.toml"
    file.write_text("[engine]\npage_tokens = 8\nchunk_tokens = 64\n")
    env = {"DISAGG__ENGINE__CHUNK_TOKENS": "128"}
    sets = ("--set", "engine.max_running=3", "--set", "transfer.arena_bytes=67108864")
    result = run("config", "show", "--config", str(file), *sets, env=env)
    assert result.exit_code == 0
    for line in ("page_tokens = 8", "chunk_tokens = 128", "max_running = 3", 'arena_bytes = "64MiB"'):
        assert line in result.output.splitlines()


def test_model_list_names_the_known_models() -> None:
    result = run("model", "list")
    assert result.exit_code == 0
    assert "smollm2-135m" in result.output


def test_version_is_one_line() -> None:
    result = run("--version")
    assert (result.exit_code, len(result.output.splitlines())) == (0, 1)
    assert result.output.startswith("disagg ")


def test_the_package_runs_as_a_module() -> None:
    for module in ("disagg", "disagg.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], cwd=ROOT, capture_output=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0


@pytest.mark.parametrize("setting", ["server.port", "server.metrics_port"])
def test_a_server_names_the_setting_of_a_port_that_is_taken(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "disagg.cli", "prefill", "--set", f"{setting}={port}"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, "somebody else has it now, and may give it back"
    last = done.stderr.splitlines()[-1]
    taken_by = "(Address already in use)"
    assert last == f"error: {setting} = {port}: cannot listen on 127.0.0.1:{port} {taken_by}; 0 takes a free one"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shape", "99999999x99999999x99999999xfloat32"], "1 to 1024 layers"),
        (["--shape", "1x1x100000000xfloat32"], "a head_dim of 1 to 4096"),
        (["--tokens", "99999999999"], "1<=x<=4194304"),
        (["--in-flight", "100000000"], "2<=x<=1024"),
        (["--repeat", "99999999999999"], "1<=x<=100000"),
        (["--tp", "1:99999999"], "each 1 to 64"),
    ],
)
def test_a_bench_of_transfers_has_bounds(flags: list[str], said: str) -> None:
    result = run("bench", "transfer", "--device", "cpu", *flags)
    assert result.exit_code == 2 and said in result.output, result.output


@pytest.mark.parametrize("flags", [["--arena", "999TiB"], ["--piece", "9TiB"], ["--shape", "1024x1024x4096xfloat32"]])
def test_a_bench_of_transfers_takes_no_more_memory_than_there_is(flags: list[str]) -> None:
    result = run("bench", "transfer", "--device", "cpu", "--tp", "1:1", "--no-curve", *flags)
    assert result.exit_code == 2 and "needs" in result.output and "this machine has" in result.output, result.output


def test_what_a_terminal_cannot_encode_is_escaped_and_ends_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from disagg.cli.terminal import write_whatever_is_said as first; first(); "
        "from disagg.cli.timeline import print_timeline; from disagg.messages.legs import TimelineEvent; "
        "from rich.console import Console; print('\U0001f642 \u6c49'); print(chr(0xdcff), file=sys.stderr); "
        "print_timeline(Console(), [TimelineEvent('\u6c49', 0.0, 1.0)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"\\U0001f642 \\u6c49") and b"####" in done.stdout
    assert done.stderr == b"\\udcff\n"
