"""Objects by path: a directory and an S3 endpoint that are what they should be, and all the ways in which they are not."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.exceptions import NotSupportedError

from disagg.offload import store as store_module
from disagg.offload.breaker import Breaker, StoreState
from disagg.offload.causes import Cause
from disagg.offload.store import ObjectStore, StoreError, open_store
from disagg.types.errors import ConfigError
from tests.offload import s3_server
from tests.offload.no_links import LINK_CALLS
from tests.offload.s3_server import S3Server

MANY = 1 << 20


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "directory":
        yield open_store(f"file://{tmp_path}/with%20blank/kv", {})
        return
    server: S3Server = request.getfixturevalue("s3")
    yield open_store(server.url, server.options)


async def cause_of(call: object) -> Cause:
    with pytest.raises(StoreError) as caught:
        await call  # type: ignore[misc]
    return caught.value.cause


async def test_objects_are_created_once_read_listed_and_deleted(store: ObjectStore) -> None:
    assert await store.create("a/b", [b"hello ", memoryview(b"world")])
    assert not await store.create("a/b", [b"other"]), "the first one stays"
    assert await store.get("a/b", MANY) == b"hello world"
    assert await store.get_range("a/b", 6, 9) == b"wor"
    assert await store.get_range("a/b", 6, 100) == b"world"
    assert await store.get_range("a/b", 11, 100) == await store.get_range("a/b", 50, 100) == b""
    assert not store.breaker.failed_calls, "it is the object that ends there"
    assert await store.size("a/b") == 11
    await store.replace("a/b", [b""])
    assert await store.get("a/b", MANY) == b""
    await store.replace("a/c", [b"x"])
    await store.replace("b/c", [b"x"])
    assert {(each.path, each.nbytes) async for each in store.listing("a")} == {("a/b", 0), ("a/c", 1)}
    assert [each async for each in store.listing("nowhere")] == []
    await store.delete(["a/b", "a/none", "a/c"])
    assert [each.path async for each in store.listing("")] == ["b/c"]
    assert store.state is StoreState.OK and not store.breaker.failed_calls


async def test_what_is_not_there_is_an_answer_and_no_failure(store: ObjectStore) -> None:
    for _ in range(5):
        assert await cause_of(store.get("a/none", MANY)) is Cause.ABSENT
        assert await cause_of(store.get_range("a/none", 0, 5)) is Cause.ABSENT
        assert await cause_of(store.size("a/none")) is Cause.ABSENT
    assert store.state is StoreState.OK and not store.breaker.failed_calls


async def test_an_object_that_is_too_large_is_not_fetched(store: ObjectStore) -> None:
    await store.create("a", [bytes(1000)])
    assert await cause_of(store.get("a", 999)) is Cause.CORRUPT
    assert len(await store.get("a", 1000)) == 1000


async def test_of_two_that_create_one_object_at_once_one_wins(store: ObjectStore) -> None:
    wrote = await asyncio.gather(*(store.create("a", [bytes([n]) * 1000]) for n in range(8)))
    assert sum(wrote) == 1
    assert await store.get("a", MANY) == bytes([wrote.index(True)]) * 1000


async def test_a_store_without_conditional_writes_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, put = open_store(f"file://{tmp_path}", {}), store_module.obstore.put_async

    async def unconditional(*args: object, mode: str, **rest: object) -> object:
        if mode == "create":
            raise NotSupportedError("no conditions here")
        return await put(*args, mode=mode, **rest)

    monkeypatch.setattr(store_module.obstore, "put_async", unconditional)
    assert await store.create("a", [b"first"])
    assert not await store.create("a", [b"second"])
    assert await store.get("a", MANY) == b"first"


@pytest.mark.skipif(os.uname().machine not in LINK_CALLS, reason="of this machine the system's calls are not known")
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_directory_without_hard_links_holds_objects_too(code: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.offload.no_links", f"file://{tmp_path}/kv", str(code)], check=True)
    assert sorted(file.name for file in (tmp_path / "kv/a").iterdir()) == ["b", "c"], "nothing half written stays"


async def test_a_directory_that_is_not_there_is_made_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        open_store(f"file://{tmp_path}/none", {}, make=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(f"file://{tmp_path}/file/x", {})


# ---- what fails


def impatient(server: S3Server, call_s: float = 5.0, **options: bool | int | float | str) -> ObjectStore:
    store = open_store(server.url, {**server.options, **options})
    store._call_s, store._bytes_per_s = call_s, 1e12
    return store


async def every_call(store: ObjectStore) -> list[Cause]:
    calls = (
        store.get("a", MANY),
        store.get_range("a", 0, 900),
        store.create("b", [b"x"]),
        store.replace("b", [b"x"]),
        store.delete(["a"]),
        anext(store.listing("")),
    )
    store.breaker = Breaker(failures=100)
    return [await cause_of(call) for call in calls]


async def test_every_call_says_that_the_store_failed(s3: S3Server) -> None:
    store = impatient(s3)
    await store.create("a", [bytes(1000)])
    s3.fault = s3_server.says_500
    assert set(await every_call(store)) == {Cause.FAILED}


async def test_a_client_that_breaks_is_a_store_that_fails(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panics of the client's native code come as exceptions of its own, some of which are no Exception."""

    class PanicException(BaseException):
        pass

    for kind in (PanicException, RuntimeError):

        def breaks(*args: object, kind: type[BaseException] = kind, **more: object) -> None:
            raise kind("called `Result::unwrap()` on an `Err` value")

        for name in ("get_async", "get_range_async", "head_async", "put_async", "delete_async"):
            monkeypatch.setattr(f"obstore.{name}", breaks)
        causes = {await cause_of(call) for call in (store.get("a", 9), store.create("a", [b"x"]), store.delete(["a"]))}
        assert causes == {Cause.FAILED}
        assert store.breaker.failed_calls[Cause.FAILED] == 3
        store.breaker = Breaker()


async def test_every_call_has_a_deadline(s3: S3Server) -> None:
    store = impatient(s3, call_s=0.2)
    s3.fault = s3_server.says_nothing_for(2.0)
    began = time.monotonic()
    assert set(await every_call(store)) == {Cause.LATE}
    assert time.monotonic() - began < 2.0 * 6, "each was given up before it was answered"


async def test_a_body_that_ends_early_is_never_taken_for_the_object(s3: S3Server) -> None:
    store = impatient(s3)
    await store.create("a", [bytes(1000)])
    s3.fault = s3_server.ends_early
    for call in (store.get("a", MANY), store.get_range("a", 0, 1000)):
        assert await cause_of(call) in (Cause.FAILED, Cause.LATE, Cause.TRUNCATED)
    s3.fault = s3_server.cuts_bodies
    assert len(await store.get("a", MANY)) == 500, "with a head that fits: what is read has lengths of its own"


async def test_a_body_that_drips_is_given_up(s3: S3Server) -> None:
    store = impatient(s3)
    await store.create("a", [bytes(100_000)])
    store._call_s = 0.5
    s3.fault = s3_server.drips
    assert await cause_of(store.get("a", MANY)) is Cause.LATE


async def test_a_bucket_that_vanishes_is_a_failure_and_its_return_is_noticed(s3: S3Server) -> None:
    clock = [0.0]
    store = ObjectStore(open_store(s3.url, s3.options)._store, clock=lambda: clock[0])
    await store.create("a", [b"x"])
    s3.ask("POST", "/moto-api/reset")
    for _ in range(3):
        assert await cause_of(store.get("a", MANY)) is Cause.FAILED
    assert store.state is StoreState.DEGRADED
    asked = s3.requests
    assert await cause_of(store.create("b", [b"x"])) is Cause.DEGRADED
    assert s3.requests == asked, "a store that has failed lately is not asked"
    s3.ask("PUT", f"/{s3_server.BUCKET}")
    clock[0] += 60.0
    assert await store.create("b", [b"x"])
    assert store.state is StoreState.OK
    assert store.breaker.failed_calls == {Cause.FAILED: 3}


async def test_a_server_that_is_gone_fails_every_call(s3: S3Server) -> None:
    store = impatient(s3, timeout=1.0)
    s3.close()
    assert set(await every_call(store)) <= {Cause.FAILED, Cause.LATE}
    s3.__init__()  # type: ignore[misc]  # for the fixture's end


async def test_retries_hide_a_failure_that_passes(s3: S3Server) -> None:
    store = impatient(s3, max_retries=3)
    await store.create("a", [b"x"])
    failures = iter([s3_server.says_500])

    def once(environ, start_response, backend):  # type: ignore[no-untyped-def]
        return next(failures, lambda *_: backend(environ, start_response))(environ, start_response, backend)

    s3.fault = once
    assert await store.get("a", MANY) == b"x"
    assert not store.breaker.failed_calls


async def test_a_full_disk_is_a_failure_that_leaves_nothing_half_written(full_disk: Path) -> None:
    store = open_store(f"file://{full_disk}/kv", {})
    assert await store.create("a", [bytes(100_000)])
    assert await cause_of(store.create("b", [bytes(400_000)])) is Cause.FAILED
    assert [each.path async for each in store.listing("")] == ["a"]
    left = [name for _, _, names in os.walk(full_disk) for name in names]
    assert left == ["a"], "what was written of it takes no room"
    assert await store.create("b", [bytes(50_000)]), "what fits is still written"
    assert store.breaker.failed_calls == {Cause.FAILED: 1}


async def test_a_directory_that_vanishes_is_a_failure_for_writers_or_made_again(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/kv", {})
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("in the way")
    assert await cause_of(store.create("a/b", [b"x"])) is Cause.FAILED


async def test_a_mount_that_drops_fails_the_store_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its directory would be made anew, and fill the file system under it. Here every directory is on that one."""
    directory = tmp_path / "kv"
    store = open_store(f"file://{directory}", {})
    assert await store.create("a", [b"x"])
    monkeypatch.setattr(store, "_under", os.stat(tmp_path).st_dev)
    assert await cause_of(store.create("b", [b"x"])) is Cause.FAILED
    directory.rename(tmp_path / "away")
    assert await cause_of(store.replace("b", [b"x"])) is Cause.FAILED
    assert not directory.exists() and await cause_of(store.get("a", MANY)) is Cause.ABSENT
    monkeypatch.setattr(store, "_under", None)
    assert await store.create("b", [b"x"]), "no mount has dropped, so it is made anew"


def test_what_is_under_a_mount_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_module._device_under(Path("/")) is None
    assert store_module._device_under(Path("/proc/self").resolve()) == Path("/").stat().st_dev
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    assert store_module._device_under(tmp_path) is None, "a part of a file system, mounted on it"


def test_a_directory_in_which_no_file_can_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="no file can be made in the directory /proc"):
        open_store("file:///proc", {})
    open_store("file:///proc", {}, make=False)


async def test_of_several_objects_those_that_cannot_be_deleted_are_told(store: ObjectStore, tmp_path: Path) -> None:
    for name in ("a/b", "a/c"):
        await store.create(name, [b"x"])
    assert await store.delete_each([]) == {}
    assert await store.delete_each(["a/none", "a/b"]) == {}
    assert [each.path async for each in store.listing("a")] == ["a/c"]


async def test_where_none_of_several_can_be_deleted_the_store_has_failed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/kv", {})
    for name in ("a", "b"):
        (tmp_path / "kv" / name / "x").mkdir(parents=True)
    await store.create("c", [b"x"])
    assert {*await store.delete_each(["a", "c"])} == {"a"}
    assert await cause_of(store.delete_each(["a", "b"])) is Cause.FAILED
