"""Reads a trace: which request came when, how long it was, and what it had in common with others.

A line is a JSON object, as in the traces that Mooncake has published:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

timestamp: milliseconds. hash_ids: one for each block of 512 tokens of the prompt; equal ids are equal tokens. Without
timestamps a file gives lengths only. Everything is bounded before it is kept; what does not fit is one ConfigError with file
and line.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct

from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line

MOST_LINES = 1_000_000
LINE_BYTES = 1 << 20
MOST_INPUT = 1 << 22  # tokens of one prompt
MOST_OUTPUT = 1 << 20
BLOCK_TOKENS = 512

Milliseconds = Annotated[float, Meta(ge=0, le=1e13)]
HashId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Line(Struct):
    input_length: Annotated[int, Meta(ge=1, le=MOST_INPUT)]
    output_length: Annotated[int, Meta(ge=1, le=MOST_OUTPUT)]
    timestamp: Milliseconds | None = None
    hash_ids: tuple[HashId, ...] = ()


class Traced(Struct, frozen=True):
    """One request of a trace. at_s: None in a file without timestamps."""

    at_s: float | None
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


_decode = msgspec.json.Decoder(_Line).decode


def parse_line(line: bytes, block_tokens: int = BLOCK_TOKENS) -> Traced:
    """Raises ValueError for what is no request of a trace."""
    if len(line) > LINE_BYTES:
        raise ValueError(f"it has more than {LINE_BYTES} bytes")
    try:
        found = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    blocks = ceil_div(found.input_length, block_tokens)
    if len(found.hash_ids) > blocks:
        raise ValueError(
            f"{len(found.hash_ids)} hash_ids are more than the {blocks} blocks of {block_tokens} tokens that "
            f"{found.input_length} tokens have"
        )
    at_s = None if found.timestamp is None else found.timestamp / 1e3
    return Traced(at_s, found.input_length, found.output_length, found.hash_ids)


def read_trace(path: Path, most: int | None = None, block_tokens: int = BLOCK_TOKENS) -> tuple[Traced, ...]:
    """Its first `most` requests. Raises ConfigError naming file and line; all lines have timestamps, or none has."""
    out: list[Traced] = []
    try:
        with _open_regular(path) as file:
            for number, line in _lines(file):
                if most is not None and len(out) == most:
                    break
                if len(out) == MOST_LINES:
                    raise ConfigError(f"{path}: it has more than {MOST_LINES} requests, which is the most")
                try:
                    traced = parse_line(line, block_tokens)
                    if out and (traced.at_s is None) != (out[0].at_s is None):
                        raise ValueError("some lines have a timestamp, and some have none")
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: {one_line(str(error))}") from error
                out.append(traced)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if not out:
        raise ConfigError(f"{path}: there is no request in it")
    return tuple(out)


def _open_regular(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no regular file")
    return open(descriptor, "rb")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1 on, what is in it) of lines that are not blank; of one that is too long a little more than the limit."""
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    number = 0
    while line := file.readline(LINE_BYTES + 2):
        number += 1
        if stripped := line.strip():
            yield number, stripped if len(line) <= LINE_BYTES + 1 else line
