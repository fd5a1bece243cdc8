"""Turns one GGUF file into a Hugging Face model directory. Knows nothing of caches, locks or packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gguf.constants import GGMLQuantizationType

from disagg.convert.architectures import architecture_of, checkpoint_names
from disagg.convert.gguf_file import GgufFile
from disagg.convert.gguf_tokenizer import build_tokenizer, ends_of_text, special_tokens, tokenizer_config
from disagg.convert.safetensors_file import SINGLE_NAME, StoredDtype, write_weights
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line

CONVERTER_VERSION: Final = "2"  # part of the cache's directory name: raise it when the output changes
MAX_FLOAT32_BYTES: Final = 1_000_000_000
TORCH_NAMES: Final = {"F32": "float32", "BF16": "bfloat16"}

Progress = Callable[[str, float], None]


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Fills the empty directory `target`. Raises ConfigError for a GGUF that cannot be converted faithfully.

    The directory is complete when this returns, and only then; whoever calls makes it appear at once.
    """
    try:
        _convert(source, target, progress)
    except (ConfigError, OSError, MemoryError):
        raise
    except (
        Exception
    ) as error:  # metadata may be of any type and tensors of any shape, and tokenizers has its own exceptions
        raise ConfigError(
            f"{source} cannot be converted, what it says makes no sense: {one_line(str(error), 200)}"
        ) from error


def _convert(source: Path, target: Path, progress: Progress) -> None:
    progress("reading the header", 0.0)
    with GgufFile(source) as gguf:
        architecture = architecture_of(gguf)
        config = architecture.config(gguf)
        names = checkpoint_names(gguf, architecture)
        dtype = stored_dtype(gguf)

        progress("building the tokenizer", 0.0)
        build_tokenizer(gguf).save(str(target / "tokenizer.json"), pretty=False)
        _write_json(target / "tokenizer_config.json", tokenizer_config(gguf))
        _write_json(target / "special_tokens_map.json", special_tokens(gguf))

        write_weights(
            target / SINGLE_NAME,
            {name: gguf.tensors[source_name].shape for name, source_name in names.items()},
            dtype,
            load=lambda name: architecture.restore(name, gguf.tensor(names[name]), config),
            report=lambda fraction: progress("converting the weights", fraction),
        )
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
        if len(ends := ends_of_text(gguf)) > 1:
            ids["eos_token_id"] = ends
        _write_json(target / "generation_config.json", ids)
        _write_json(target / "config.json", {**config, "torch_dtype": TORCH_NAMES[dtype]})


def stored_dtype(gguf: GgufFile) -> StoredDtype:
    """What to store the weights in: float32, which loses nothing, unless they are bfloat16 already or too many."""
    matrices = [entry for entry in gguf.tensors.values() if len(entry.shape) > 1]
    if all(entry.quantization == GGMLQuantizationType.BF16 for entry in matrices):
        return "BF16"
    num_values = 0
    for entry in gguf.tensors.values():
        size = 1
        for length in entry.shape:
            size *= length
        num_values += size
    return "F32" if num_values * 4 <= MAX_FLOAT32_BYTES else "BF16"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
