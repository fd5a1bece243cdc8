"""Where settings come from, which wins, and what a wrong one says."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.config import load
from disagg.config.load import child_environ, dump_config, load_config
from disagg.config.tree import Config, LogConfig, ModelConfig, RouterConfig, ServerRef, TransferConfig, WorkerConfig
from disagg.types.errors import ConfigError

MIB = 1 << 20


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "disagg.toml"
    file.write_text(text)
    return file


def test_nothing_given_is_the_default_tree() -> None:
    assert load_config(None, {}, {}) == Config()


@pytest.mark.parametrize(
    ("in_file", "in_env", "in_flag", "wins"),
    [
        (None, None, None, 0),
        (32, None, None, 32),
        (32, "64", None, 64),
        (32, "64", 128, 128),
        (None, "64", None, 64),
        (None, None, "128", 128),
        (32, None, 128, 128),
    ],
)
def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, in_file: int | None, in_env: str | None, in_flag: object, wins: int
) -> None:
    file = written(tmp_path, f"[engine]\npage_tokens = {in_file}\n") if in_file else None
    environ = {"DISAGG__ENGINE__PAGE_TOKENS": in_env} if in_env else {}
    assert load_config(file, {"engine.page_tokens": in_flag}, environ).engine.page_tokens == wins


def test_values_are_read_by_the_kind_of_their_field(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [engine]
        kv_memory_bytes = "1GiB"
        prefix_cache = "off"
        ungranted_share = 1
        [worker]
        command = ["python", "-m", "disagg.worker"]
        load_timeout_s = "2m"
        [router]
        drain_s = "500ms"
        servers = [{ name = "p", role = "prefill", address = "127.0.0.1:5000" }]
        """,
    )
    environ = {"DISAGG__WORKER__THREADS": "2", "DISAGG__LOG__FORMAT": "text", "HOME": "/", "DISAGG_SERVICE_PORT": "1"}
    config = load_config(file, {"transfer.arena_bytes": "64 MiB", "server.drain_s": "1.5"}, environ)
    assert config.engine.kv_memory_bytes == 1 << 30
    assert config.engine.prefix_cache is False
    assert config.engine.ungranted_share == 1.0
    assert config.worker.command == ("python", "-m", "disagg.worker")
    assert config.worker.load_timeout_s == 120.0
    assert config.worker.threads == 2
    assert config.router.drain_s == 0.5
    assert config.router.servers == (ServerRef(name="p", role="prefill", address="127.0.0.1:5000"),)
    assert config.transfer.arena_bytes == 64 * MIB
    assert config.server.drain_s == 1.5
    assert config.log.format == "text"


def test_lists_in_the_environment_are_json_or_words() -> None:
    words = {"DISAGG__WORKER__COMMAND": "strace -f python -m disagg.worker"}
    assert load_config(None, {}, words).worker.command == ("strace", "-f", "python", "-m", "disagg.worker")
    listed = {"DISAGG__ROUTER__SERVERS": '[{"name": "d", "role": "decode", "address": "h:1"}]'}
    assert load_config(None, {}, listed).router.servers == (ServerRef(name="d", role="decode", address="h:1"),)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("engine.page_tokens", -1, ["engine.page_tokens = -1", "at least 0", "at most 1024"]),
        ("engine.page_tokens", "many", ['engine.page_tokens = "many"', "a whole number"]),
        ("engine.page_tokens", 1.5, ["engine.page_tokens = 1.5", "a whole number"]),
        ("engine.kv_memory_bytes", "5 apples", ['engine.kv_memory_bytes = "5 apples"', "MiB", "at least 0"]),
        ("engine.kv_memory_bytes", "15KiB", ["engine.kv_memory_bytes = 15KiB", "at least 16KiB", "or 0"]),
        ("engine.gpu_memory_utilization", 1.1, ["engine.gpu_memory_utilization = 1.1", "above 0 and at most 1"]),
        ("engine.page_sizing", "gcd", ['engine.page_sizing = "gcd"', "lcm, max"]),
        ("engine.preemption", "oldest", ['engine.preemption = "oldest"', "fewest_tokens, latest"]),
        ("engine.preempt_after_s", 0, ["engine.preempt_after_s = 0", "a number of seconds", "above 0"]),
        ("engine.prefix_cache", "maybe", ['engine.prefix_cache = "maybe"', "on, off"]),
        ("engine.ungranted_share", 2, ["engine.ungranted_share", "a number", "at most 1"]),
        ("model.dtype", "int8", ['model.dtype = "int8"', "auto, bfloat16, float16, float32"]),
        ("model.name", 7, ["model.name = 7", "a string"]),
        ("router.http_port", 70000, ["router.http_port = 70000", "at most 65535"]),
        ("router.lease_s", -1, ["router.lease_s = -1", "a number of seconds", "above 0"]),
        ("router.servers", [{"name": "p"}], ["router.servers", "name, role, address", "address"]),
        (
            "router.servers",
            "nonsense",
            ["router.servers", "a list of tables", 'in a variable or flag JSON: [{"name": ...'],
        ),
        ("worker.command", [1], ["worker.command", "a list of strings"]),
        ("model.fusions", ["bogus"], ["model.fusions", "a list of some of ends, few_rows, gate_up"]),
        ("engine.page_token", 1, ["engine.page_token", "nearest: engine.page_tokens"]),
        ("page_tokens", 1, ["page_tokens", "nearest: engine.page_tokens"]),
        ("router.tp", 1, ["nearest: server.tp"]),
        ("engine.qqqqqqqq", 1, ["engine has page_tokens"]),
        ("zzz.qqqqqqqq", 1, ["the sections are model, engine"]),
        ("server.tp", 0, ["server.tp = 0", "at least 1"]),
        ("engine.checkpoint_tokens", 40, ["engine.checkpoint_tokens = 40", "a multiple of engine.page_tokens = 16"]),
    ],
)
def test_a_wrong_setting_says_its_path_its_value_and_what_is_allowed(path: str, value: object, says: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {path: value}, {})
    for each in says:
        assert each in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_setting_says_where_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment variable DISAGG__ENGINE__PAGE_TOKENS"):
        load_config(None, {}, {"DISAGG__ENGINE__PAGE_TOKENS": "x"})
    file = written(tmp_path, "[engine]\npage_tokens = -1\n")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        load_config(file, {}, {})
    with pytest.raises(ConfigError, match=r"nearest: engine\.page_tokens"):
        load_config(None, {}, {"DISAGG__ENGINE__PAGETOKENS": "16"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine", "is not TOML"),
        ("page_tokens = 16", "settings live in sections"),
        ("[motor]", "is not a section"),
        ("[motor]\nx = 1", "is not a setting"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(written(tmp_path, text), {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "[" * 65 + "]" * 65,
        "a = " + "{a = " * 5000 + "1" + "}" * 5000,
        "[model]\n" + ".".join("a" * 5000) + " = 1",
        f"[{'.'.join('a' * 5000)}]",
    ],
)
def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is nested more than 64 deep") as raised:
        load_config(written(tmp_path, text), {}, {})
    assert raised.value.__cause__ is None  # a log would have its frames


@pytest.mark.parametrize("setting", ["router.servers", "worker.command", "storage.options"])
def test_a_flag_that_is_nested_without_end_is_refused(setting: str) -> None:
    for value in ("[" * 5000, "[" * 5000 + "]" * 5000):
        with pytest.raises(ConfigError, match=re.escape(f"{setting} = ")):
            load_config(None, {setting: value}, {})


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has more than 4194304 bytes"):
        load_config(written(tmp_path, "#" * (4 << 20) + "\n"), {}, {})


@pytest.mark.parametrize("text", ['["model\\nERROR forged"]\nx=1', '["model\\nERROR forged"]', '"a\\n\\u001bb" = 1'])
def test_names_of_a_file_do_not_forge_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "of\nline").mkdir()
    file = written(tmp_path / "of\nline", text)
    with pytest.raises(ConfigError) as raised:
        load_config(file, {}, {})
    assert str(raised.value).isprintable() and "\\n" in str(raised.value) and "of\\nline" in str(raised.value)
    for name in ("model\nx.y", "\x1b[2J"):
        with pytest.raises(ConfigError) as raised:
            load_config(None, {name: 1}, {f"DISAGG__{name}": "1"})
        assert str(raised.value).isprintable()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml", {}, {})


def test_children_do_not_inherit_settings_that_their_file_already_holds() -> None:
    environ = {"PATH": "/bin", "DISAGG__SERVER__PORT": "1", "disagg__log__level": "debug", "DISAGG_OTHER": "x"}
    environ["PYTHONOPTIMIZE"] = "2"  # transformers could not be imported
    assert child_environ(environ) == {"PATH": "/bin", "DISAGG_OTHER": "x"}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
served_names = st.text("aZ09éß._-/:@+=", min_size=1, max_size=20)
trees = st.builds(
    Config,
    model=st.builds(ModelConfig, name=texts, served_name=served_names),
    worker=st.builds(WorkerConfig, command=st.lists(texts, max_size=3).map(tuple)),
    transfer=st.builds(
        TransferConfig,
        arena_bytes=st.just(256 * MIB),
        progress_s=st.floats(min_value=2, max_value=1e6),
    ),
    router=st.builds(
        RouterConfig,
        http_port=st.integers(min_value=1, max_value=49999),
        servers=st.lists(st.sampled_from(["a", "b", "c"]), unique=True).map(
            lambda names: tuple(
                ServerRef(name=name, role="prefill", address=f"h:{index + 1}") for index, name in enumerate(names)
            )
        ),
    ),
    log=st.builds(LogConfig, format=st.sampled_from(["json", "text"])),
)


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_a_dumped_tree_reads_back_equal(tmp_path: Path, tree: Config) -> None:
    file = tmp_path / "dumped.toml"
    file.write_text(dump_config(tree), newline="")
    assert load_config(file, {}, {}) == tree


def test_a_dumped_tree_is_fit_for_people() -> None:
    text = dump_config(Config(transfer=TransferConfig(arena_bytes=64 * MIB)))
    assert 'arena_bytes = "64MiB"' in text
    assert "[router]" in text
    assert "kv_memory_bytes = 0" in text
    assert "prefix_cache = true" in text


# ---- tables


def test_one_entry_of_a_table_is_a_setting_that_later_sources_change(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[storage.options]\nregion = "a"\nallow_http = true\nmax_retries = 3\n')
    environ = {"DISAGG__STORAGE__OPTIONS__REGION": "b"}
    config = load_config(file, {"storage.options.endpoint": "http://x"}, environ)
    assert config.storage.options == {"region": "b", "allow_http": True, "max_retries": 3, "endpoint": "http://x"}
    replaced = load_config(file, {"storage.options": '{"region": "c"}'}, environ)
    assert replaced.storage.options == {"region": "c"}
    file.write_text(dump_config(config))
    assert load_config(file, None, {}) == config


@pytest.mark.parametrize("value", ["[]", "{", '{"a": []}', '{"a": null}', 7, {str(n): n for n in range(65)}])
def test_what_is_no_flat_table_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"storage\.options = .*it must be a table"):
        load_config(None, {"storage.options": value}, {})


@pytest.mark.parametrize(
    "value",
    [
        '{"aws_secret_access_key": "hush", "region": []}',
        '{"aws_secret_access_key": "hush"',
        {"aws_secret_access_key": "hush", "region": ["eu-west-1"]},
        ["hush"],
    ],
)
def test_what_is_wrong_with_a_table_is_said_without_its_values(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage\.options = .*it must be a table") as raised:
        load_config(None, {"storage.options": value}, {})
    file = written(tmp_path, '[storage.options]\naws_secret_access_key = "hush"\n')
    with pytest.raises(ConfigError, match=r'"aws_secret_access_key": "a str", "region": "a list"') as beside:
        load_config(file, {"storage.options.region": ["x"]}, {})
    for error in (raised.value, beside.value):
        assert "hush" not in str(error) and error.__cause__ is None


def test_an_entry_of_what_is_no_table_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="is not a setting"):
        load_config(None, {"storage.url.x": "y"}, {})


def test_a_file_may_be_a_pipe_that_says_all_of_it_in_parts(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")

    def write() -> None:
        with fifo.open("wb", buffering=0) as opened:
            for part in (b"[engine]\n", b"page_tokens", b" = 64\n"):
                opened.write(part)
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert load_config(fifo, {}, {}).engine.page_tokens == 64
    writer.join()


@pytest.mark.parametrize("writes", [False, True])
def test_a_pipe_that_does_not_end_is_not_waited_for(
    tmp_path: Path, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "PIPE_S", 0.2)
    os.mkfifo(fifo := tmp_path / "fifo")
    held = os.open(fifo, os.O_RDWR)
    if writes:
        os.write(held, b"[engine]\n")
    try:
        with pytest.raises(ConfigError, match=r"fifo is no regular file, and does not end within 0.2 s"):
            load_config(fifo, {}, {})
    finally:
        os.close(held)


def test_a_device_that_never_ends_is_read_as_far_as_a_file_may_be_long() -> None:
    with pytest.raises(ConfigError, match="has more than"):
        load_config(Path("/dev/zero"), {}, {})
