"""A store's directory is listed whatever else lies in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.offload.directory import walk
from disagg.offload.keys import DEEPEST
from disagg.offload.store import StoreError, open_store


def listed(root: Path, prefix: str = "kv", chunk: int = 2) -> list[str]:
    chunks = list(walk(root, prefix, chunk, DEEPEST))
    assert all(0 < len(each) <= chunk for each in chunks)
    return sorted(entry.path for each in chunks for entry in each)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path in ("kv/a/1", "kv/a/2", "kv/b/c/3", "other/4"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"four")
    return tmp_path


def test_files_below_a_folder_are_listed_with_their_sizes(root: Path) -> None:
    assert listed(root) == listed(root, "kv/") == ["kv/a/1", "kv/a/2", "kv/b/c/3"]
    assert listed(root, "") == ["kv/a/1", "kv/a/2", "kv/b/c/3", "other/4"]
    assert listed(root, "nowhere") == listed(root, "kv/a/1") == []
    ((entry,),) = walk(root, "other", 10, DEEPEST)
    assert (entry.nbytes, entry.modified_s) == (4, (root / "other/4").stat().st_mtime)


def test_what_is_no_file_is_passed_over_and_loops_of_links_end(root: Path) -> None:
    (root / "kv/a/up").symlink_to(root / "kv")
    (root / "kv/a/self").symlink_to("self")
    (root / "kv/a/nowhere").symlink_to("nothing")
    os.mkfifo(root / "kv/b/pipe")
    assert listed(root) == ["kv/a/1", "kv/a/2", "kv/b/c/3"]


def test_a_folder_that_is_a_link_to_another_disk_is_listed(root: Path) -> None:
    (root / "kv/far").symlink_to(root / "other")
    assert listed(root) == ["kv/a/1", "kv/a/2", "kv/b/c/3", "kv/far/4"]


def test_what_is_removed_meanwhile_is_passed_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.listdir

    def removing(folder: Path) -> Iterator[str]:
        found = sorted(names(folder))
        for path in ("kv/a/2", "kv/b/c/3", "kv/b/c"):
            if (root / path).is_dir():
                (root / path).rmdir()
            else:
                (root / path).unlink(missing_ok=True)
        return iter(found)

    monkeypatch.setattr(os, "listdir", removing)
    assert listed(root) == ["kv/a/1"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_of_which_nothing_can_be_said_is_not_taken_for_one_that_is_gone(
    code: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a span would be removed with all of its parts because the system did not answer for one of them."""
    stat = os.stat

    def failing(path: Path, **how: bool) -> os.stat_result:
        if path == root / "kv/a/2":
            raise OSError(code, os.strerror(code), str(path))
        return stat(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing)
        with pytest.raises(OSError, match=os.strerror(code)):
            listed(root)


async def test_a_folder_that_may_not_be_read_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.listdir

    def refusing(folder: Path) -> list[str]:
        if folder == root / "kv/b":
            raise PermissionError(13, "Permission denied", str(folder))
        return names(folder)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(StoreError, match="Permission denied"):
        [each async for each in open_store(f"file://{root}", {}).listing("kv")]


def test_a_link_to_what_is_no_part_of_the_store_leads_no_further_than_objects_lie(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep" / "deeper").mkdir(parents=True)
    (elsewhere / "file").write_bytes(b"x")
    (elsewhere / "deep" / "deeper" / "file").write_bytes(b"x")
    root = tmp_path / "kv"
    objects = root / "v1/model/tenant/spans/zz"
    objects.mkdir(parents=True)
    (objects / "own").write_bytes(b"x")
    (objects / "link").symlink_to(elsewhere)
    (objects.parent / "yy").symlink_to(elsewhere)
    found = {entry.path for chunk in walk(root, "v1", 10, DEEPEST) for entry in chunk}
    assert found == {"v1/model/tenant/spans/zz/own", "v1/model/tenant/spans/yy/file"}
