"""What a model's files say may be anything at all: whatever goes wrong while it is read is said of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from disagg.types.errors import ConfigError
from disagg.types.plain import one_line

MAX_SAID_CHARS = 200


@contextlib.contextmanager
def making_sense(model_dir: Path) -> Iterator[None]:
    """Raises ConfigError for every exception but those that may pass: of the system, and for want of memory."""
    try:
        yield
    except (ConfigError, OSError, MemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(str(error), MAX_SAID_CHARS)}"
        raise ConfigError(f"{model_dir} cannot be read, what its files say makes no sense: {said}") from error
