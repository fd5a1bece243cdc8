"""Finds, reads the headers of, and writes safetensors files.

Written by hand rather than with the safetensors library for two reasons: one tensor at a time is in memory, and numpy
has no bfloat16. Knows names, dtypes, shapes and bytes; nothing of models.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from disagg.types.errors import ConfigError

StoredDtype = Literal["F32", "BF16"]
STORED_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2}
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit


class TensorHeader(Struct, frozen=True):
    """What a safetensors header says about one tensor; offsets are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class WeightFile(Struct, frozen=True):
    """One safetensors file: its directory and the raw bytes of its header."""

    path: Path
    file_bytes: int
    header: bytes
    tensors: dict[str, TensorHeader]


def find_weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face directory, sorted. Raises ConfigError saying what is missing.

    An index decides where there is one; else model.safetensors; else every *.safetensors file.
    """
    index = model_dir / INDEX_NAME
    single = model_dir / SINGLE_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not a safetensors index with a weight_map: {error!r}") from error
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise ConfigError(f"model directory {model_dir} lacks {', '.join(missing)}, which {INDEX_NAME} names")
        return tuple(model_dir / name for name in names)
    if single.is_file():
        return (single,)
    files = tuple(sorted(model_dir.glob("*.safetensors")))
    if not files:
        raise ConfigError(f"model directory {model_dir} lacks safetensors weights ({SINGLE_NAME} or {INDEX_NAME})")
    return files


def read_header(path: Path) -> WeightFile:
    """Reads only the header. Raises ConfigError where the file is truncated or no safetensors file."""
    file_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(_MAX_HEADER_BYTES, file_bytes):
                raise ValueError(f"its header would be {header_bytes} bytes long")
            header = file.read(header_bytes)
        rows = {name: row for name, row in json.loads(header).items() if name != "__metadata__"}
        tensors = msgspec.convert(rows, dict[str, TensorHeader])
    except (struct.error, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    needed = 8 + header_bytes + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if needed > file_bytes:
        raise ConfigError(f"{path} is cut short: its header promises {needed} bytes, it holds {file_bytes}")
    return WeightFile(path, file_bytes, header, tensors)


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: StoredDtype,
    load: Callable[[str], NDArray[np.float32]],
    report: Callable[[float], None],
) -> None:
    """Writes every tensor of `shapes` as `dtype`, calling `load(name)` for one after the other.

    `report` gets the fraction of bytes written. The data is on disk when this returns.
    """
    directory: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total_bytes = 0
    for name, shape in shapes.items():
        num_bytes = int(np.prod(shape, dtype=np.int64)) * STORED_BYTES[dtype]
        directory[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [total_bytes, total_bytes + num_bytes]}
        total_bytes += num_bytes
    header = json.dumps(directory, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # readers map the file and want the data aligned

    written_bytes = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, shape in shapes.items():
            values = load(name)
            assert values.shape == shape, f"{name} is {values.shape}, not {shape}"
            written_bytes += file.write(_stored(values, dtype))
            report(written_bytes / total_bytes)
        file.flush()
        os.fsync(file.fileno())


def _stored(values: NDArray[np.float32], dtype: StoredDtype) -> bytes:
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "F32":
        return bytes(values.data)
    bits = values.view("<u4")
    # Round to the nearest, ties to even, as torch does. Weights hold no NaN, the one value this would break.
    return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").data)
