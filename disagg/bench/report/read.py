"""Reads the records of a directory. What cannot be read is passed over with a word: a file that is cut off, or no record.

Every file is measured by its metadata before its rows are read; of very many rows the first are taken. Knows Parquet and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from disagg.telemetry.record_files import PART, require_pyarrow
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line

FILE_BYTES = 256 << 20
MOST_FILES = 50_000
MOST_STEPS, MOST_REQUESTS = 5_000_000, 500_000
MOST_TOKENS = 50_000_000  # of all requests together
_STEPS = (
    "server role incarnation rank time_s seconds step prefill_tokens decode_tokens budget_tokens running waiting pages_used "
    "pages_evictable pages_free pages_total pools"
)
_REQUESTS = (
    "server role incarnation request_id attempt trunk choice tenant arrival_s admitted_s first_token_s end_s prompt_tokens "
    "cached_tokens first_index output_tokens finish_reason outcome preemptions token_s"
)
_NESTED = frozenset(["pools", "runs"])  # which whoever uses them reads row by row
_TEXTS = frozenset(["server", "role", "incarnation", "request_id", "tenant", "finish_reason", "outcome"])
_MAY_LACK = frozenset(["admitted_s", "first_token_s", "finish_reason"])
LEAST, MOST = -1e9, 1e11  # of every number: as seconds since 1970, from 1938 until the year 5138
STEP_COLUMNS, REQUEST_COLUMNS = _STEPS.split(), _REQUESTS.split()


class Records(Struct):
    """Tables of Arrow. passed_over: files and why."""

    steps: Any
    requests: Any
    passed_over: list[tuple[str, str]]
    files: int


def read_records(directory: Path, more: Sequence[str] = ()) -> Records:
    """more: columns of steps that are wanted, too. Raises ConfigError if there is nothing to read."""
    require_pyarrow()
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    passed_over: list[tuple[str, str]] = []
    steps, step_files = _read_kind(directory, "steps", [*STEP_COLUMNS, *more], MOST_STEPS, passed_over)
    requests, request_files = _read_kind(directory, "requests", REQUEST_COLUMNS, MOST_REQUESTS, passed_over)
    passed_over += [(path.name, "was being written when its server ended") for path in directory.glob(f".*{PART}")]
    if steps is None and requests is None:
        why = f": {passed_over[0][0]} {passed_over[0][1]}" if passed_over else ""
        raise ConfigError(f"{directory} has no records that can be read (steps*.parquet, requests*.parquet){why}")
    return Records(steps, requests, passed_over, step_files + request_files)


def _read_kind(
    directory: Path, kind: str, columns: Sequence[str], most_rows: int, passed_over: list[tuple[str, str]]
) -> tuple[Any, int]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    tables: list[Any] = []
    rows = tokens = 0
    paths = sorted(directory.glob(f"{kind}*.parquet"))
    for path in paths[:MOST_FILES]:
        try:
            if not path.is_file() or path.stat().st_size > FILE_BYTES:
                raise ValueError(f"is no file of at most {FILE_BYTES} bytes")
            with ParquetFile(path) as file:
                meta = file.metadata
                missing = set(columns) - set(file.schema_arrow.names)
                if missing:
                    raise ValueError(f"has no column {min(missing)}")
                held = sum(
                    meta.row_group(group).column(column).num_values
                    for group in range(meta.num_row_groups)
                    for column in range(meta.num_columns)
                    if meta.row_group(group).column(column).path_in_schema.startswith("token_s.")
                )
                if rows + meta.num_rows > most_rows or tokens + held > MOST_TOKENS:
                    passed_over.append((path.name, "and what comes after it: there is more than is read"))
                    break
                tables.append(_plain(file.read(columns=list(columns))))
            rows += tables[-1].num_rows
            tokens += held
        except (OSError, ValueError, pa.ArrowException) as error:
            passed_over.append((path.name, one_line(f"is passed over: {error}", 200)))
    if len(paths) > MOST_FILES:
        passed_over.append((paths[MOST_FILES].name, f"and what comes after it: {MOST_FILES} files are read at most"))
    if not tables:
        return None, 0
    return pa.concat_tables(tables, promote_options="permissive"), len(tables)


def _plain(table: Any) -> Any:
    """The same with one type for each column, whichever a file has. Raises ValueError or ArrowException for values that no
    server writes: of another type, without a value, not finite, or beyond all sense."""
    import pyarrow as pa

    if not table.num_rows:
        raise ValueError("it has no rows")
    for index, name in enumerate(table.column_names):
        column = table.column(name)
        if name not in _NESTED:
            kind = (
                pa.string()
                if name in _TEXTS
                else pa.float64()
                if name.endswith("_s") or name == "seconds"
                else pa.int64()
            )
            column = column.cast(pa.list_(pa.float32()) if name == "token_s" else kind)
            table = table.set_column(index, name, column)
        if column.null_count and name not in _MAY_LACK:
            raise ValueError(f"{name} is without a value in some rows")
        if name not in _TEXTS | _NESTED:
            _check_numbers(name, column)
    return table


def _check_numbers(name: str, column: Any) -> None:
    flat = column.combine_chunks().flatten() if name == "token_s" else column.drop_null().combine_chunks()
    values = np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float64)
    if len(values) and not (np.isfinite(values).all() and values.min() >= LEAST and values.max() <= MOST):
        raise ValueError(f"{name} has values that are none, or not from {LEAST:g} to {MOST:g}")


def numbers(table: Any, column: str) -> np.ndarray:
    """A column; what is null is nan."""
    return np.asarray(table.column(column).to_numpy(zero_copy_only=False), dtype=np.float64)
