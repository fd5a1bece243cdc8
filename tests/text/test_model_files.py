"""Files are read once and compared by what was read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disagg.text.model_files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    LIMITS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    ModelFiles,
    differing,
)
from disagg.types.errors import ConfigError

ALL = {name: name for name in LIMITS}


@pytest.mark.parametrize("name", LIMITS)
def test_a_file_that_differs_is_named_also_when_one_side_lacks_it(name: str) -> None:
    assert differing(ALL, ALL) == ()
    assert differing(ALL, {**ALL, name: "other"}) == (name,)
    if name not in (CONFIG, TOKENIZER):
        without = {each: digest for each, digest in ALL.items() if each != name}
        said = () if name in (SPECIAL_TOKENS_MAP, ADDED_TOKENS) else (name,)  # versions before do not read these two
        assert differing(ALL, without) == differing(without, ALL) == said


def test_who_says_nothing_may_have_the_same() -> None:
    assert differing(ALL, {}) == differing({}, ALL) == ()
    weights_only = {name: digest for name, digest in ALL.items() if name in (CONFIG, "generation_config.json")}
    assert differing(ALL, weights_only) == ()
    assert differing(ALL, {**weights_only, CONFIG: "other"}) == (CONFIG,)


def test_what_is_used_is_what_was_hashed(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"vocab_size": 1}')
    files = ModelFiles.read(tmp_path)
    before = files.digests()
    (tmp_path / CONFIG).write_text('{"vocab_size": 2}')
    assert files.json(CONFIG) == {"vocab_size": 1} and files.digests() == before
    assert differing(before, ModelFiles.read(tmp_path).digests()) == (CONFIG,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{" * 100_000, "nested|JSON"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64 deep"),
        (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "nested more than 64 deep"),
        (b"[" * 20_000 + b"]" * 20_000, "nested|object"),
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"{}" + b" " * LIMITS[CONFIG], "at most 4194304 are read"),
        (b'{"a":' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
    ],
    ids=["open", "65 deep", "20,000 deep", "list", "no object", "no text", "too long", "long number"],
)
def test_a_file_that_makes_no_sense_is_one_error(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        ModelFiles.read(tmp_path).json(CONFIG)
    assert str(tmp_path / CONFIG) in str(caught.value)


def test_a_pipe_or_a_directory_in_place_of_a_file_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(ConfigError, match="no regular file"):
        ModelFiles.read(tmp_path)
    (tmp_path / CONFIG).unlink()
    (tmp_path / CHAT_TEMPLATE).mkdir()
    with pytest.raises(ConfigError, match=r"no regular file|cannot be read"):
        ModelFiles.read(tmp_path)
