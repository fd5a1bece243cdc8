"""Finds, reads the headers of, and writes safetensors files.

Written by hand rather than with the safetensors library for two reasons: one tensor at a time is in memory, and numpy
has no bfloat16. Knows names, dtypes, shapes and bytes; nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from disagg.types.errors import ConfigError
from disagg.types.small_files import read_small

StoredDtype = Literal["F32", "BF16"]
STORED_BYTES: Final[Mapping[str, int]] = {"F32": 4, "BF16": 2}
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES: Final = 64 << 20  # the largest known has 9 MB
_MAX_FILES: Final = 4096
_MAX_NAME_CHARS: Final = 255
_MAX_DIMS: Final = 16
# Bits of one value, of every dtype that the format has.
DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorHeader(Struct, frozen=True):
    """What a safetensors header says about one tensor; offsets are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


class WeightFile(Struct, frozen=True):
    """One safetensors file and its directory."""

    path: Path
    file_bytes: int
    tensors: dict[str, TensorHeader]


class _Index(Struct):
    weight_map: dict[str, str]


def find_weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face directory, sorted. Raises ConfigError saying what is missing.

    model.safetensors where it is there, as transformers has it, which loads it whatever an index beside it says; else those that
    the index names. By other names transformers reads none.
    """
    index = model_dir / INDEX_NAME
    single = model_dir / SINGLE_NAME
    if _is_regular(single):
        return (single,)
    if _is_regular(index):
        names = _names_of(index)
        missing = [name for name in names if not _is_regular(model_dir / name)]
        if missing:
            raise ConfigError(
                f"model directory {model_dir} lacks {len(missing)} files that {INDEX_NAME} names: {', '.join(missing[:3])}"
            )
        return tuple(model_dir / name for name in names)
    others = [each.name for each in islice(model_dir.glob("*.safetensors"), 3)]
    unnamed = f"; {', '.join(others)} by another name are not read" if others else ""
    raise ConfigError(f"model directory {model_dir} lacks safetensors weights ({SINGLE_NAME} or {INDEX_NAME}){unnamed}")


def _is_regular(path: Path) -> bool:
    """False where there is nothing, or a link to nothing. Raises ConfigError for what is there and is no regular file.

    To open a pipe would wait for whoever writes into it, a device may do anything, and to leave such a file out would load
    other weights than whoever put it there meant. Nothing is opened to find out.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # such as a circle of links
        raise ConfigError(f"{path} cannot be looked at: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no regular file")
    return True


def _names_of(index: Path) -> list[str]:
    """Of the files that an index lists. They are in its directory, or below it."""
    try:
        names = sorted(set(msgspec.json.decode(read_small(index, _MAX_INDEX_BYTES), type=_Index).weight_map.values()))
    except (ValueError, RecursionError, FileNotFoundError) as error:
        raise ConfigError(f"{index} is not a safetensors index with a weight_map: {error}") from error
    if not names:
        raise ConfigError(f"{index} names no files: its weight_map is empty")
    if len(names) > _MAX_FILES:
        raise ConfigError(f"{index} names {len(names)} files; at most {_MAX_FILES} are read")
    for name in names:
        if not 0 < len(name) <= _MAX_NAME_CHARS or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"{index} names {name[:80]!r}, which is no file in its directory")
    return names


def read_header(path: Path) -> WeightFile:
    """Reads only the header. Raises ConfigError where the file is truncated or no safetensors file.

    Costs at most four times the header's bytes, of which there are fewer than the file has.
    """
    try:
        # Without waiting for a writer: what was a regular file may have become a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no regular file")
            file_bytes = found.st_size
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"its header would be {header_bytes} bytes long")
            rows = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
        rows.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(row, type=TensorHeader) for name, row in rows.items()}
        _check_tensors(tensors)
    except (struct.error, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    needed = 8 + header_bytes + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if needed > file_bytes:
        raise ConfigError(f"{path} is cut short: its header promises {needed} bytes, it holds {file_bytes}")
    if needed < file_bytes:
        raise ConfigError(
            f"{path} goes on behind its tensors: its header promises {needed} bytes, it holds {file_bytes}"
        )
    return WeightFile(path, file_bytes, tensors)


def _check_tensors(tensors: Mapping[str, TensorHeader]) -> None:
    """Each has the bytes that its shape needs, one follows the other, and none shares them. Raises ValueError."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda row: row[1].data_offsets):
        first, last = tensor.data_offsets
        if first < 0:
            raise ValueError(f"tensor {name[:80]!r} begins at byte {first}, before all of them")
        if first < end:
            raise ValueError(f"tensors {before[:80]!r} and {name[:80]!r} share bytes")
        if first > end:
            raise ValueError(f"{first - end} bytes before tensor {name[:80]!r} are no tensor's")
        if len(tensor.shape) > _MAX_DIMS or any(length < 0 for length in tensor.shape):
            raise ValueError(f"tensor {name[:80]!r} has no shape that a tensor can have")
        bits = DTYPE_BITS.get(tensor.dtype)
        if bits is None:
            raise ValueError(f"tensor {name[:80]!r} has dtype {tensor.dtype[:20]!r}, which this version does not know")
        if last < first or tensor.nbytes * 8 != tensor.num_values * bits:
            raise ValueError(f"tensor {name[:80]!r} has {tensor.nbytes} bytes for a shape of {list(tensor.shape)}")
        end, before = last, name


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
