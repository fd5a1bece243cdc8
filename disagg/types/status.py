"""Exit statuses of every command and process; docs/operations.md has them as a table. Knows nothing else."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1  # it may go well another time
REFUSED: Final = 2  # command line, configuration, model or machine: the same would come again however often it is tried
CANNOT_START: Final = 126  # as shells say it: the system could not start a child now
BY_SIGNAL: Final = 128  # and the signal's number, as shells say it: told to end before there was anything to drain
INTERRUPTED: Final = 130  # as shells say it: Ctrl-C
