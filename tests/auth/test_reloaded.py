"""Files that change under a process: what is good is taken, what is not is said and changes nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from disagg.auth.keys import ApiKeys, read_keys
from disagg.auth.reloaded import Reloaded
from disagg.types.errors import ConfigError


def reloaded(path: Path) -> Reloaded[ApiKeys]:
    return Reloaded((path,), lambda: read_keys(path), "auth.api_keys_file")


def test_a_file_that_is_wrong_at_first_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        reloaded(tmp_path / "none")


def test_a_changed_file_is_read_again_and_a_bad_one_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("one a\n")
    keys = reloaded(path)
    assert not keys.look()
    path.write_text("second b\n")
    assert keys.look()
    assert (keys.value.tenant_of(b"second"), keys.value.tenant_of(b"one")) == ("b", None)
    with caplog.at_level(logging.ERROR):
        for bad in ("second\n", ""):
            path.write_text(bad)
            assert not keys.look()
            assert not keys.look()
        path.unlink()
        assert not keys.look()
    assert len(caplog.records) == 3
    assert keys.value.tenant_of(b"second") == "b"
    path.write_text("third c\n")
    assert keys.look() and keys.value.tenant_of(b"third") == "c"


def test_what_a_secret_shows_by_a_link_that_is_swapped_is_seen(tmp_path: Path) -> None:
    for name, key in (("old", "aaa"), ("new", "bbb")):
        (tmp_path / name).write_text(f"{key} t\n")
        os.utime(tmp_path / name, (1000, 1000))
    link = tmp_path / "keys"
    link.symlink_to("old")
    keys = reloaded(link)
    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(link)
    assert keys.look() and keys.value.tenant_of(b"bbb") == "t"


async def test_it_looks_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one a\n")
    keys = reloaded(path)
    looking = asyncio.create_task(keys.look_always(0.01))
    try:
        for key in ("second", "and-third"):
            path.write_text(f"{key} a\n")
            async with asyncio.timeout(10):
                while keys.value.tenant_of(key.encode()) is None:
                    await asyncio.sleep(0.01)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def test_a_reader_that_fails_as_nobody_thought_of_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("1")
    value = Reloaded((path,), lambda: 12 // int(path.read_text()), "a number")
    with caplog.at_level(logging.ERROR):
        path.write_text("00")
        assert not value.look() and not value.look()
    assert len(caplog.records) == 1 and "ZeroDivisionError" in str(caplog.records[0].exc_info)
    path.write_text("003")
    assert value.look() and value.value == 4
