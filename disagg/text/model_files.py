"""The small files of a model directory, each read once, so that what is used and what is hashed are the same bytes.

Whoever loads a model takes `digests`: text is turned into tokens by one process and tokens are computed by another, and both
must have had the same files. Knows names, limits and JSON; nothing of what the files are for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from disagg.types.errors import ConfigError
from disagg.types.small_files import CONFIG_BYTES, json_object, read_small

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"

# Every file that decides how text becomes tokens and when an answer ends, with the most bytes that are read of it.
# The largest known tokenizer.json has 33 MB, the largest tokenizer_config.json 1.2 MB.
LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        CONFIG: CONFIG_BYTES,
        GENERATION: 1 << 20,
        TOKENIZER: 128 << 20,
        TOKENIZER_CONFIG: 8 << 20,
        CHAT_TEMPLATE: 1 << 20,
        SPECIAL_TOKENS_MAP: 1 << 20,
        ADDED_TOKENS: 8 << 20,
    }
)
_LATER: Final = frozenset({SPECIAL_TOKENS_MAP, ADDED_TOKENS})  # of which older versions say nothing
_OF_TEXT: Final = frozenset(
    {TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS_MAP, ADDED_TOKENS}
)  # a directory of weights alone has none of them


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """contents: by name, of those of LIMITS that are there."""

    model_dir: Path
    contents: Mapping[str, bytes]

    @classmethod
    def read(cls, model_dir: Path, names: Iterable[str] = LIMITS) -> ModelFiles:
        """Raises ConfigError for a file that cannot be read or is too large."""
        contents = {}
        for name in names:
            try:
                contents[name] = read_small(model_dir / name, LIMITS[name])
            except FileNotFoundError:
                continue
        return cls(model_dir, contents)

    def json(self, name: str) -> dict[str, Any]:
        """Empty where the file is missing. Raises ConfigError where it holds no JSON object."""
        content = self.contents.get(name)
        return {} if content is None else json_object(content, self.model_dir / name)

    def text(self, name: str) -> str | None:
        """None where the file is missing. Raises ConfigError where it is not UTF-8."""
        try:
            return self.contents[name].decode("utf-8") if name in self.contents else None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.model_dir / name} is not UTF-8: {error}") from error

    def digests(self) -> dict[str, str]:
        """SHA-256 by name."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Names of files that are not the same on both sides, by digests. Who says nothing may have the same.

    Only config.json is always there: without it a side says nothing at all, and without tokenizer.json nothing of text. Of
    what older versions do not read they say nothing either.
    """
    if CONFIG not in ours or CONFIG not in theirs:
        return ()
    silent = _OF_TEXT if TOKENIZER not in ours or TOKENIZER not in theirs else frozenset()
    silent |= {name for name in _LATER if name not in ours or name not in theirs}
    return tuple(name for name in LIMITS if name not in silent and ours.get(name) != theirs.get(name))


def token_content(token: object) -> str | None:
    """The text of a token in tokenizer_config.json, which is a string or an object with a `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
