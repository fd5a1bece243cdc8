"""What stands where a file of a model should be, and is none: refused by its name, and never opened."""

from __future__ import annotations

import builtins
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.convert.model_dir import resolve
from disagg.convert.safetensors_file import INDEX_NAME, SINGLE_NAME, find_weight_files, read_header
from disagg.text.model_files import LIMITS, ModelFiles
from disagg.types.errors import ConfigError


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


ODD = [a_pipe, a_socket, a_device, a_directory, a_link_to_itself]
Make = Callable[[Path], None]


@pytest.fixture
def never_opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is not to be opened."""
    names: list[str] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, *args: Any, **kwargs: Any) -> Any:
            assert not (isinstance(path, str | os.PathLike) and Path(path).name in names), f"{path} was opened"
            return real(path, *args, **kwargs)

        return opening

    monkeypatch.setattr(os, "open", watched(os.open))
    monkeypatch.setattr(builtins, "open", watched(builtins.open))
    monkeypatch.setattr(Path, "open", watched(Path.open))
    return names


@pytest.mark.parametrize("make", ODD)
def test_what_has_another_name_is_no_weight_file_whatever_it_is(
    tmp_path: Path, make: Make, never_opened: list[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    make(tmp_path / "other.safetensors")
    never_opened.append("other.safetensors")
    said = r"lacks safetensors weights \(model.safetensors or model.safetensors.index.json\); other.safetensors by another name"
    for look in (find_weight_files, lambda folder: resolve(str(folder), folder)):
        with pytest.raises(ConfigError, match=said):
            look(tmp_path)


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME, "part-1.safetensors"])
def test_what_is_no_file_is_no_weight_file(tmp_path: Path, make: Make, name: str, never_opened: list[str]) -> None:
    """part-1: as an index names it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "whole.safetensors").touch()
    if name == "part-1.safetensors":
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name, "b": "whole.safetensors"}}))
    make(tmp_path / name)
    never_opened.append(name)
    for look in (find_weight_files, lambda folder: resolve(str(folder), folder)):
        with pytest.raises(ConfigError, match=f"{name} (is no regular file|cannot be looked at)"):
            look(tmp_path)


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_what_is_no_file_is_no_small_file(tmp_path: Path, make: Make, name: str, never_opened: list[str]) -> None:
    make(tmp_path / name)
    never_opened.append(name)
    with pytest.raises(ConfigError, match=f"{name} (is no regular file|cannot be read)"):
        ModelFiles.read(tmp_path)


@pytest.mark.parametrize("make", [a_pipe, a_device, a_directory])
def test_what_has_become_none_since_it_was_looked_at_holds_nobody(tmp_path: Path, make: Make) -> None:
    path = tmp_path / SINGLE_NAME
    make(path)
    with pytest.raises(ConfigError, match=r"no regular file|Is a directory"):
        read_header(path)


def test_a_link_to_nothing_is_nothing(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).symlink_to("gone")
    with pytest.raises(ConfigError, match="lacks safetensors weights"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-has-this-name/model", "a\0b", "", "."])
def test_a_name_that_no_model_can_have_is_one_short_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(name, tmp_path)
    assert len(str(refused.value)) < 500
