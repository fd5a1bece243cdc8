"""Reads the small files of a model directory, which others write: each step is bounded before it begins.

A file is a regular one and has at most the bytes that its reader allows; JSON is at most MAX_DEPTH deep. Parsed JSON takes
at most about 25 times the bytes of its text. Whatever is wrong is one ConfigError that names the file. Knows bytes and
JSON; nothing of what files are for.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from disagg.types.errors import ConfigError
from disagg.types.plain import quoted

MAX_DEPTH: Final = 64
CONFIG_BYTES: Final = 4 << 20  # config.json and its like; the largest known have some hundred KB


def read_small(path: Path, most_bytes: int) -> bytes:
    """The whole file. FileNotFoundError is left to the caller; all else that is wrong raises ConfigError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a device may do anything
            raise ConfigError(f"{path} is no regular file")
        # What is a pipe by now must not hold us, so the file is opened without waiting for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path} is no regular file")
            if found.st_size > most_bytes:
                raise ConfigError(f"{path} has {found.st_size} bytes; at most {most_bytes} are read")
            content = file.read(found.st_size + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if len(content) > found.st_size:
        raise ConfigError(f"{path} grew while it was read")
    return content


def home_expanded(path: str | Path, setting: str) -> Path:
    """With the home directory in place of `~` and `~user`. Raises ConfigError naming the setting if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{setting} = {quoted(str(path))}: there is no such home directory") from error


def json_object(content: bytes, path: Path) -> dict[str, Any]:
    """path: for messages. Raises ConfigError where the content is no JSON object, or is nested too deeply."""
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{path} is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    if nested_too_deep(value):
        raise ConfigError(f"{path} is nested more than {MAX_DEPTH} deep")
    _check_text(content, value, path)
    return value


def nested_too_deep(value: object) -> bool:
    """Whether lists and tables stand in each other more than MAX_DEPTH deep; what recurses over them needs a bound."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _check_text(content: bytes, value: dict[str, Any], path: Path) -> None:
    """An escape may name half of a surrogate pair, and what it stands in is no text: nothing can be done with it."""
    if b"\\ud" not in content.lower():
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path} has half of a surrogate pair in a text: {error.reason}") from error
