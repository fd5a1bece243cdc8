"""`disagg model inspect` refuses what routers and servers would refuse, with their words and status 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from disagg.cli import models, up
from disagg.cli.main import cli
from disagg.cli.up import ProcessSpec
from disagg.config.tree import Config, ServerConfig
from disagg.convert.inspect import inspect_model
from disagg.mixed_server.role import MIXED
from disagg.server.bringup import Bringup
from disagg.types.errors import ConfigError
from disagg.worker import check
from tests.models.tiny import make_tiny


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "llama")


def inspect(model_dir: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["model", "inspect", str(model_dir), "--set", "model.device=cpu", *more])


def edit_config(model_dir: Path, **fields: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_model_that_is_served_is_described(llama: Path) -> None:
    shown = inspect(llama, "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["num_layers"]) == (0, 3), shown.output


def refused(shown: Result) -> str:
    """The one line."""
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    (line,) = shown.stderr.splitlines()
    return line


def test_what_workers_refuse_is_refused_in_their_words(llama: Path) -> None:
    edit_config(llama, rms_norm_eps="a")
    assert refused(inspect(llama)) == f"error: {llama}/config.json: rms_norm_eps is 'a'; it must be a number"


def test_whatever_workers_stumble_over_in_files_is_a_refusal(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stumbles(*_: object) -> int:
        raise KeyError("rope")

    monkeypatch.setattr(check, "check_model", stumbles)
    monkeypatch.setattr("sys.argv", ["check", str(llama), "float32", "1", "1"])
    check.main()
    said = f"{llama} cannot be read, what its files say makes no sense: KeyError: 'rope'"
    assert json.loads(capsys.readouterr().out)["refused"] == said


def without_tokenizer(model_dir: Path) -> str:
    (model_dir / "tokenizer.json").unlink()
    return f"error: model directory {model_dir} lacks tokenizer.json"


def with_broken_template(model_dir: Path) -> str:
    (model_dir / "chat_template.jinja").write_text("{% if %}")
    return "error: the model's chat template cannot be compiled"


def with_pipe_as_weights(model_dir: Path) -> str:
    (model_dir / "model.safetensors").unlink()
    os.mkfifo(model_dir / "model.safetensors")
    return f"error: {model_dir}/model.safetensors is no regular file"


@pytest.mark.parametrize("spoil", [without_tokenizer, with_broken_template, with_pipe_as_weights])
def test_what_needs_no_torch_is_refused_without_it(
    llama: Path, spoil: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    said = spoil(llama)
    assert refused(inspect(llama)).startswith(said)


def test_heads_that_ranks_cannot_share_are_refused(llama: Path) -> None:
    assert "server.tp = 3: TP size 3 cannot share" in refused(inspect(llama, "--set", "server.tp=3"))


def test_more_pipeline_stages_than_layers_are_refused_before_anything_is_loaded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    layers = inspect_model(llama).num_layers
    allowed = f"with the {layers} layers of this model it must be at most {layers}"
    said = refused(inspect(llama, "--set", f"server.pp={layers + 1}"))
    assert f"server.pp = {layers + 1}: every pipeline stage" in said and allowed in said

    def mixed(pp: int) -> Config:
        return Config(server=ServerConfig(pp=pp))

    with pytest.raises(ConfigError, match=f"^server.pp = {layers + 1}: .* {allowed}$"):
        Bringup(mixed(layers + 1), MIXED, "cuda", llama).inspect()
    Bringup(mixed(layers), MIXED, "cuda", llama).inspect()
    with pytest.raises(ConfigError, match=f"^mixed servers with pp = {layers + 1}: .* {allowed}$"):
        up._check_ranks(llama, (ProcessSpec("mixed-0", "mixed", mixed(layers + 1)),))
    up._check_ranks(llama, (ProcessSpec("mixed-0", "mixed", mixed(layers)),))


def test_without_torch_it_is_not_known_and_said_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    shown = inspect(llama)
    assert shown.exit_code == 0
    assert "cannot be said here: torch and transformers are not installed" in shown.stderr


def test_a_path_that_is_no_text_is_refused_wherever_a_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q\udcff"
    make_tiny("llama", tmp_path / "llama").rename(path)
    assert refused(inspect(path)).endswith(f"it is not UTF-8 at character {len(str(path)) - 1}")
    for command in (["model", "path"], ["bench", "engine", "--decode", "1x4", "--model"]):
        shown = CliRunner().invoke(cli, [*command, str(path)])
        assert shown.exit_code == 2 and "it is not UTF-8" in shown.output, shown.output
