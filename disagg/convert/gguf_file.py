"""Reads a GGUF file: metadata, tensor directory, and tensors as float32 arrays.

Parses the header itself, because gguf.GGUFReader builds an object for every one of the hundred thousand strings of a
vocabulary and takes seconds to open a file. Knows the container; nothing of models or tokenizers.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from msgspec import Struct
from numpy.typing import NDArray

from disagg.types.arithmetic import round_up
from disagg.types.errors import ConfigError

SUPPORTED_VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT_BYTES: Final = 32
MAX_ALIGNMENT_BYTES: Final = 1 << 20
MAX_DIMS: Final = 8  # the format's own limit is 4
_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorEntry(Struct, frozen=True):
    """One row of the tensor directory. `shape` is in numpy order, i.e. GGUF's dimensions reversed."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int  # bytes, from the start of the file

    @property
    def num_bytes(self) -> int:
        block_values, block_bytes = GGML_QUANT_SIZES[self.quantization]
        return math.prod(self.shape) // block_values * block_bytes


class GgufFile:
    """An open GGUF file. `metadata` maps keys to str, int, float, bool or lists of them; `tensors` names to entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error
        try:
            self.metadata, self.tensors = _Header(self._bytes).parse()
        except (struct.error, ValueError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
            self.close()
            raise ConfigError(f"{path} is not a complete GGUF file: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._bytes.close()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor dequantized, with its shape in numpy order; a copy that outlives the file."""
        entry = self.tensors[name]
        block_values, block_bytes = GGML_QUANT_SIZES[entry.quantization]
        row_bytes = entry.shape[-1] // block_values * block_bytes
        # bytes() copies: a view would keep the mapping open past close().
        raw = np.frombuffer(bytes(self._bytes[entry.offset : entry.offset + entry.num_bytes]), dtype=np.uint8)
        if entry.quantization in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            plain = raw.view(np.float32 if entry.quantization == GGMLQuantizationType.F32 else np.float16)
            return plain.astype(np.float32).reshape(entry.shape)
        try:
            values = dequantize(raw.reshape(*entry.shape[:-1], row_bytes), entry.quantization)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: tensor {name} is quantized as {entry.quantization.name}, which cannot be read"
            ) from error
        return values.reshape(entry.shape).astype(np.float32, copy=False)

    def require(self, key: str) -> Any:
        """A metadata value. Raises ConfigError where the file lacks it."""
        if key not in self.metadata:
            raise ConfigError(f"{self.path} lacks the metadata key {key!r}")
        return self.metadata[key]


class _Header:
    """A cursor over the header's bytes. Raises struct.error, ValueError or KeyError on anything malformed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with the GGUF magic number")
        self._at = 4
        version = self._number("I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"its version is {version}; versions {SUPPORTED_VERSIONS} are supported")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        rows = [(self._string(), *self._tensor_row()) for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT_BYTES:
            raise ValueError(f"its alignment is {str(alignment)[:40]}; it must be from 1 to {MAX_ALIGNMENT_BYTES}")
        start = round_up(self._at, alignment)
        tensors = {name: TensorEntry(shape, kind, start + offset) for name, shape, kind, offset in rows}
        for name, entry in tensors.items():
            block_values, _ = GGML_QUANT_SIZES[entry.quantization]
            if 0 in entry.shape or not entry.shape or entry.shape[-1] % block_values:
                raise ValueError(f"tensor {name[:80]!r} has a shape of {list(entry.shape)}")
            if entry.offset + entry.num_bytes > len(self._data):
                raise ValueError(f"tensor {name} ends past the end of the file")
        return metadata, tensors

    def _tensor_row(self) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        num_dims = self._number("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions; at most {MAX_DIMS} are read")
        dims = tuple(self._number("Q") for _ in range(num_dims))
        return dims[::-1], GGMLQuantizationType(self._number("I")), self._number("Q")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        (num_bytes,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + num_bytes
        if self._at > len(self._data):
            raise ValueError("a string ends past the end of the file")
        return self._data[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        item_kind, count = self._number("I"), self._number("Q")
        if item_kind == _STRING:
            return [self._string() for _ in range(count)]
        if item_kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{_SCALARS[item_kind]}")
        return list(values)
