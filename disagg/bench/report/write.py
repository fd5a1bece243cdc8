"""`disagg report`: from a directory of records to one page in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from disagg.bench.report.merge import merge
from disagg.bench.report.page import Report
from disagg.bench.report.read import read_records
from disagg.types.errors import ConfigError

NAME = "report.html"
MOST_WORDS = 10


def write_report(directory: Path, say: Callable[[str], None]) -> Path:
    """The page that was written. Raises ConfigError."""
    records = read_records(directory)
    for name, why in records.passed_over[:MOST_WORDS]:
        say(f"{name} {why}")
    if (more := len(records.passed_over) - MOST_WORDS) > 0:
        say(f"and {more} files more")
    answers = merge(records.requests.to_pylist()) if records.requests is not None else []
    page = Report(records, answers, directory.resolve().name).html()
    target, part = directory / NAME, directory / f".{NAME}.part"
    try:
        part.write_text(page, "utf-8")
        os.replace(part, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    return target
