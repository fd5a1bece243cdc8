"""Objects by path in one store, through obstore: a directory, S3, Google Cloud Storage or Azure.

    get, get_range      whole bytes, measured before they are fetched
    create, replace     atomically: a reader sees all of an object or nothing
    delete, listing

Each call has a deadline. What goes wrong is a StoreError with a cause; "it is not there" is an answer and no failure.
A breaker stands before all calls: a store that fails is left alone for a while, at no cost to anybody.
Knows paths and bytes; nothing of KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
from obstore.store import from_url

from disagg.offload.breaker import Breaker, StoreState
from disagg.offload.causes import Cause
from disagg.offload.directory import Entry, walk
from disagg.offload.keys import DEEPEST
from disagg.offload.options import OptionValue, StorageTarget, storage_target
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line

CALL_S = 10.0  # for an answer, and for so many bytes of it
BYTES_PER_S = 4 << 20  # a store that is slower than this is not worth waiting for: computing KV again is faster
LIST_CHUNK = 1000
DELETE_CHUNK = 500
DELETES_AT_ONCE = 16  # where a store has to be asked for each
PANIC = "PanicException"  # of the client; no Exception, and not importable
# What stores say when it is not the object that is missing but what it would be in.
_NO_CONTAINER = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist", "notFound: bucket")

# What a file system without hard links says, such as SMB, FAT and many of FUSE.
_NO_LINKS = tuple(f"(os error {code})" for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS))

_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO)

T = TypeVar("T")


class StoreError(Exception):
    """The store did not do what it was asked, or has not got it (ABSENT)."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.cause = cause


def open_store(
    url: str,
    options: Mapping[str, OptionValue],
    *,
    make: bool = True,
    breaker: Breaker | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ObjectStore:
    """make: a directory that is not there is made. breaker: see ObjectStore.

    Raises ConfigError for what no call could succeed with.
    """
    target = storage_target(url, options)
    try:
        if target.scheme == "file":
            directory = _directory(target, make)
            return ObjectStore(from_url(target.url), directory=directory, breaker=breaker, clock=clock)
        return ObjectStore(
            from_url(target.url, config=target.store, client_options=target.client, retry_config=target.retry),  # type: ignore[call-overload]
            breaker=breaker,
            clock=clock,
        )
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"storage.url = {target.url!r} with its options cannot be used: {_said(error)}") from error


def _directory(target: StorageTarget, make: bool) -> Path:
    directory = Path(unquote(urlsplit(target.url).path or "/"))
    if make:
        directory.mkdir(parents=True, exist_ok=True)
    if not directory.is_dir():
        raise ConfigError(f"storage.url = {target.url!r}: there is no directory {directory}")
    if make:
        _check_writes(target, directory)
    return directory


def _check_writes(target: StorageTarget, directory: Path) -> None:
    """Raises ConfigError where no file can ever be made, such as in /proc. A full disk, or one that this user may not write to,
    degrades the store as it does later.
    """
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno in _MAY_PASS:
            return
        raise ConfigError(
            f"storage.url = {target.url!r}: no file can be made in the directory {directory}: {error.strerror}"
        ) from error


def _device_under(directory: Path) -> int | None:
    """What would be written to if the mount that it lies in dropped; None if that is the same, or there is none."""
    at = directory
    while not at.is_mount():
        at = at.parent
    under = at.parent.stat().st_dev
    return None if under == directory.stat().st_dev else under


def _check_mount(directory: Path, under: int) -> None:
    """The client makes a directory that is gone: it would fill what is under a mount that has dropped. Raises OSError."""
    while not directory.exists():
        directory = directory.parent
    if directory.stat().st_dev == under:
        raise OSError(errno.ENODEV, "nothing is mounted any more where the store is", str(directory))


class ObjectStore:
    """directory: which the store is, if it is one. clock: seconds, rising. breaker: see there."""

    def __init__(
        self,
        store: Any,
        *,
        directory: Path | None = None,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_s: float = CALL_S,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self.breaker = breaker or Breaker()
        self._store = store
        self._directory = directory
        self._under = None if directory is None else _device_under(directory.resolve())
        self._has_links = True  # as far as is known; without them a directory cannot create files, only replace them
        self._clock = clock
        self._call_s = call_s
        self._bytes_per_s = bytes_per_s

    @property
    def state(self) -> StoreState:
        return self.breaker.state

    # ---- reading

    async def get(self, path: str, most_bytes: int) -> bytes:
        """All of an object. One of more than most_bytes is not fetched: StoreError, CORRUPT."""

        async def fetch() -> bytes:
            answer = await obstore.get_async(self._store, path)
            nbytes = answer.meta["size"]
            if nbytes > most_bytes:
                raise StoreError(Cause.CORRUPT, f"it has {nbytes} bytes; at most {most_bytes} are read")
            data = memoryview(await answer.bytes_async())
            if len(data) != nbytes:
                raise StoreError(Cause.TRUNCATED, f"{len(data)} of its {nbytes} bytes came")
            return bytes(data)

        return await self._call(fetch, most_bytes)

    async def get_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object; fewer where it ends before, and none where that is before `start`."""

        async def fetch() -> bytes:
            try:
                return bytes(await obstore.get_range_async(self._store, path, start=start, end=stop))
            except BaseError:  # stores refuse a range that begins behind the end, each in words of its own
                if start < (await obstore.head_async(self._store, path))["size"]:
                    raise
                return b""

        return await self._call(fetch, stop - start)

    async def size(self, path: str) -> int:
        async def head() -> int:
            return int((await obstore.head_async(self._store, path))["size"])

        return await self._call(head, 0)

    async def modified(self, path: str) -> float:
        """When an object was written, by the store's clock."""

        async def head() -> float:
            return _seconds((await obstore.head_async(self._store, path))["last_modified"])

        return await self._call(head, 0)

    # ---- writing

    async def create(self, path: str, buffers: Sequence[Any]) -> bool:
        """False, and nothing has changed, if there is an object of that name."""

        async def put() -> bool:
            if self._has_links:
                try:
                    await self._put(path, buffers, "create")
                    return True
                except (AlreadyExistsError, PreconditionError):
                    return False
                except BaseError as error:
                    if not isinstance(error, NotSupportedError):
                        self._has_links = self._directory is None or not any(sign in str(error) for sign in _NO_LINKS)
                        if self._has_links:
                            raise
            # A store without conditional writes. The worst of a race between the two calls is that the later one of
            # two equal objects stays.
            with contextlib.suppress(FileNotFoundError):
                await obstore.head_async(self._store, path)
                return False
            await self._put(path, buffers, "overwrite")
            return True

        return await self._call(put, sum(map(len, buffers)), writes=True)

    async def replace(self, path: str, buffers: Sequence[Any]) -> None:
        """An object of that name is another one from then on."""

        async def put() -> None:
            await self._put(path, buffers, "overwrite")

        await self._call(put, sum(map(len, buffers)), writes=True)

    async def _put(self, path: str, buffers: Sequence[Any], mode: Any) -> None:
        if self._directory is not None and self._under is not None:
            await asyncio.to_thread(_check_mount, self._directory, self._under)
        data = b"".join(memoryview(each) for each in buffers)
        await obstore.put_async(self._store, path, data, mode=mode, use_multipart=False)

    async def delete(self, paths: Sequence[str]) -> None:
        """Those that are not there are not there, either way."""
        for first in range(0, len(paths), DELETE_CHUNK):
            chunk = list(paths[first : first + DELETE_CHUNK])

            async def remove(chunk: list[str] = chunk) -> None:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, chunk)
                    return
                for path in chunk:  # a directory ends a call at the first that is not there
                    with contextlib.suppress(FileNotFoundError):
                        await obstore.delete_async(self._store, path)

            await self._call(remove, 0)

    async def delete_each(self, paths: Sequence[str]) -> dict[str, str]:
        """As `delete`, but goes on behind what cannot be deleted: the paths, and why. StoreError where of several none can be."""
        failed: dict[str, str] = {}
        for first in range(0, len(paths), DELETE_CHUNK):
            chunk = list(paths[first : first + DELETE_CHUNK])
            failed |= await self._call(partial(self._delete_each, chunk), 0)
        return failed

    async def _delete_each(self, chunk: list[str]) -> dict[str, str]:
        with contextlib.suppress(BaseError, OSError, ValueError):
            await obstore.delete_async(self._store, chunk)
            return {}
        failed: dict[str, Exception] = {}

        async def remove(path: str) -> None:
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                pass
            except (BaseError, OSError, ValueError) as error:
                failed[path] = error

        for first in range(0, len(chunk), DELETES_AT_ONCE):
            await asyncio.gather(*map(remove, chunk[first : first + DELETES_AT_ONCE]))
        if len(failed) == len(chunk) > 1:
            raise failed[chunk[0]]
        return {path: _said(error) for path, error in failed.items()}

    async def listing(self, prefix: str) -> AsyncIterator[Entry]:
        """Every object below a folder, in no order; of a directory also what is no object yet (directory.STAGED). Holds a chunk
        of them at a time."""
        fetch = self._chunks(prefix)
        while chunk := await self._call(fetch, 0):
            for each in chunk:
                yield each

    async def remove_staged(self, paths: Sequence[str]) -> None:
        """Files of a directory that never became objects."""
        directory = self._directory
        assert directory is not None or not paths, "only a directory has such files"

        def remove() -> None:
            for path in paths:
                (directory / path).unlink(missing_ok=True)  # type: ignore[operator]

        await self._call(lambda: asyncio.to_thread(remove), 0)

    def _chunks(self, prefix: str) -> Callable[[], Awaitable[list[Entry]]]:
        """Gives a chunk of a listing at each call; none at its end."""
        if self._directory is not None:
            found = walk(self._directory, prefix, LIST_CHUNK, DEEPEST)
            return lambda: asyncio.to_thread(next, found, [])
        stream = obstore.list(self._store, prefix, chunk_size=LIST_CHUNK)

        async def fetch() -> list[Entry]:
            chunk = await anext(stream, None) or ()
            return [Entry(each["path"], each["size"], _seconds(each["last_modified"])) for each in chunk]

        return fetch

    # ---- every call

    async def _call(self, work: Callable[[], Awaitable[T]], nbytes: int, *, writes: bool = False) -> T:
        call = self.breaker.begin(self._clock())
        if call is None:
            raise StoreError(Cause.DEGRADED, "the store has failed lately, and is left alone for a while")
        failed: Cause | None = None
        try:
            async with asyncio.timeout(self._call_s + nbytes / self._bytes_per_s):
                return await work()
        except StoreError:
            raise
        except FileNotFoundError as error:
            said = str(error)
            if writes or any(sign in said for sign in _NO_CONTAINER):
                failed = Cause.FAILED
                raise StoreError(failed, _said(error)) from error
            raise StoreError(Cause.ABSENT, "it is not there") from error
        except TimeoutError as error:
            failed = Cause.LATE
            raise StoreError(failed, "the store did not answer in time") from error
        except (BaseError, OSError, ValueError) as error:
            failed = Cause.LATE if "timed out" in str(error) else Cause.FAILED
            raise StoreError(failed, _said(error)) from error
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == PANIC:
                failed = Cause.FAILED
                raise StoreError(failed, f"the store's client broke: {_said(error)}") from error
            self.breaker.give_up(call, self._clock())
            call = None
            raise
        finally:
            if call is not None:
                self.breaker.end(call, self._clock(), failed)


def _seconds(when: datetime) -> float:
    return when.timestamp()


def _said(error: BaseException) -> str:
    """The sentence before the debug output that obstore appends."""
    return one_line(str(error).partition("\nDebug source:")[0].strip(), 300)
