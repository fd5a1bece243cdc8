"""Files of results: tried before a run, whole or not there after it. Knows paths and bytes."""

from __future__ import annotations

import os
from pathlib import Path

from disagg.types.errors import ConfigError, DisaggError


def try_to_write(file: Path) -> None:
    """What a run has found must not be lost for want of a directory. Leaves nothing. Raises ConfigError."""
    part = _part(file)
    try:
        if file.exists():
            with file.open("ab"):
                pass
        else:
            part.touch()
            part.unlink()
    except OSError as error:
        raise _cannot(ConfigError, file, error) from error


def keep(file: Path, content: bytes) -> None:
    """Replaces the file's content. Raises DisaggError; the old content then stays where that is possible."""
    target, part = file.resolve(), _part(file)
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout
            target.write_bytes(content)
            return
        try:
            part.write_bytes(content)
            os.replace(part, target)
        except OSError:  # a directory where only this file may be written
            part.unlink(missing_ok=True)
            if not target.exists():
                raise
            target.write_bytes(content)
    except OSError as error:
        raise _cannot(DisaggError, file, error) from error


def _part(file: Path) -> Path:
    target = file.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def _cannot(kind: type[DisaggError], file: Path, error: OSError) -> DisaggError:
    return kind(f"{file} cannot be written: {error.strerror or error}")
