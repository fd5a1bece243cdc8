"""From what the operator calls a model to a Hugging Face directory on disk.

A directory is taken as it is. A known name or a GGUF file is converted once into a cache: built beside its place and
renamed into it, under a lock that ends with its holder, so that a killed conversion leaves only what the next one
clears away, and a directory that exists is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from disagg.convert.catalog import KNOWN_MODELS, find_gguf
from disagg.convert.converter import CONVERTER_VERSION, Progress, convert_gguf
from disagg.convert.safetensors_file import find_weight_files
from disagg.types.errors import ConfigError
from disagg.types.plain import quoted
from disagg.types.small_files import home_expanded

SETTLED_S: Final = 2.0
_DIGEST_CHARS: Final = 64
_COPY_BYTES: Final = 8 * 1024 * 1024


def resolve(name_or_dir: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The model directory for a directory, a known model's name, or a path to a .gguf file.

    `progress(stage, fraction)` is called while converting; a later call finds the result in milliseconds.
    Raises ConfigError naming the value and what is allowed.
    """
    report: Progress = progress or (lambda stage, fraction: None)
    try:
        name_or_dir.encode()
    except UnicodeEncodeError as error:  # it is said in messages that are text
        raise ConfigError(f"model {quoted(name_or_dir)}: it is not UTF-8 at character {error.start}") from error
    if name_or_dir in KNOWN_MODELS:
        return _cached(
            cache_dir / f"{name_or_dir}-{CONVERTER_VERSION}",
            lambda building: _convert_parts(find_gguf(name_or_dir), building, report),
            report,
        )
    path = home_expanded(name_or_dir, "model.name")
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # such as a name that is too long for the system
        raise ConfigError(f"model {quoted(name_or_dir)} cannot be looked at: {error.strerror or error}") from error
    if is_dir:
        require_model_dir(path)
        return path
    if path.suffix == ".gguf" and is_file:
        return _cached(
            cache_dir / f"{path.stem}-{_digest(path, cache_dir)[:16]}-{CONVERTER_VERSION}",
            lambda building: convert_gguf(path, building, report),
            report,
        )
    raise ConfigError(
        f"model {quoted(name_or_dir)} is neither a directory nor a .gguf file nor one of the known models: "
        f"{', '.join(KNOWN_MODELS)}"
    )


def require_model_dir(path: Path) -> None:
    """Raises ConfigError saying what a directory lacks to be a model directory."""
    if not (path / "config.json").exists():
        raise ConfigError(f"model directory {path} lacks config.json")
    find_weight_files(path)


def _cached(target: Path, build: Callable[[Path], None], report: Progress) -> Path:
    if target.is_dir():
        return target
    building = target.with_name(f".{target.name}.building")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), report):
            if target.is_dir():  # another process was first
                return target
            # We hold the lock, so whatever is here was left by a process that died.
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                build(building)
                _flush(building)
                os.rename(building, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)  # gone already if renamed; else give back the disk
    except OSError as error:
        raise ConfigError(f"the model cannot be converted into {target}: {error}") from error
    report("done", 1.0)
    return target


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """The lock is the kernel's, so it ends with its holder however that ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that converts this model", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert_parts(parts: tuple[Path, ...], building: Path, report: Progress) -> None:
    if len(parts) == 1:
        convert_gguf(parts[0], building, report)
        return
    joined = building / "joined.gguf"
    report("joining the parts", 0.0)
    with joined.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, _COPY_BYTES)
    convert_gguf(joined, building, report)
    joined.unlink()


def _digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 of a whole file. Kept beside the conversions for as long as nothing has written to the file.

    A sample would not do: models of one shape differ in the middle of their files, and have equal headers.
    """
    kept = cache_dir / f".{path.stem}.digest"
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        known = f"{path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        with contextlib.suppress(OSError, ValueError):
            of, _, digest = kept.read_text("utf-8").rpartition(" ")
            if of == known and len(digest) == _DIGEST_CHARS:
                return digest
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (
        time.time() - stat.st_mtime < SETTLED_S
    ):  # a write within one tick of the clock would leave its times as they are
        return digest
    with contextlib.suppress(OSError):  # it is only found out again
        cache_dir.mkdir(parents=True, exist_ok=True)
        beside = kept.with_name(f"{kept.name}.{os.getpid()}")
        beside.write_text(f"{known} {digest}", "utf-8")
        os.replace(beside, kept)
    return digest


def _flush(directory: Path) -> None:
    """On disk, so that a directory which is there after a power failure is whole."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
