"""What UCX wrote last in a worker that was killed, which it can say nothing of itself any more."""

from __future__ import annotations

import logging
from pathlib import Path

from disagg.messages.control import ucx_log_of

logger = logging.getLogger(__name__)

LAST_BYTES = 4096
LAST_LINES = 8


def log_last_words(directory: str, rank: int) -> None:
    """Into our own log. The worker may have logged some of it itself."""
    for line in last_words(Path(ucx_log_of(directory, rank))):
        logger.warning("UCX of rank %d said last: %s", rank, line)


def last_words(file: Path) -> list[str]:
    """The last lines that belong to no table; none where UCX was not loaded, or its log goes elsewhere."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - LAST_BYTES))
            text = log.read().decode(errors="replace").replace("\0", "")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip() and "   | " not in line and "   +-" not in line][
        -LAST_LINES:
    ]
