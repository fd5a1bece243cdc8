"""Tokens that a model directory names beside tokenizer.json, which transformers adds to it.

    tokenizer_config.json     roles (bos_token, ...), added_tokens_decoder, further special tokens
    special_tokens_map.json   roles, before those of the other file ┐ of directories that were saved long ago: they count
    added_tokens.json         text -> id                            ┘ where the other one has no added_tokens_decoder

Whoever leaves them out takes a control token of a prompt for its characters, and a chat template's bos_token for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from disagg.text.model_files import (
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
    token_content,
)
from disagg.types.errors import ConfigError
from disagg.types.plain import quoted

ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER: Final = ("extra_special_tokens", "additional_special_tokens")  # as it is called now, and before
_DECODER: Final = "added_tokens_decoder"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def roles_of(files: ModelFiles) -> tuple[dict[str, str], list[str]]:
    """Texts of special tokens by role, and by names of the model's own; and of those that have none."""
    said = files.json(TOKENIZER_CONFIG)
    if _DECODER not in said:
        said = {**said, **files.json(SPECIAL_TOKENS_MAP)}
    roles = {role: text for role in ROLES if (text := token_content(said.get(role))) is not None}
    further: list[str] = []
    for name in _FURTHER:
        listed = said.get(name)
        if isinstance(listed, Mapping):
            own = {key: text for key, each in listed.items() if (text := token_content(each)) is not None}
            roles = {**own, **roles}
        elif isinstance(listed, list):
            further += [text for each in listed if (text := token_content(each)) is not None]
    return roles, further


def declare(inner: tokenizers.Tokenizer, files: ModelFiles, rows: int | None) -> dict[str, str]:
    """Adds what the tokenizer lacks, and flags of what it has; returns texts by role. rows: of the model, or None if they are
    not known.

    A text whose token would have no row stays text. Raises ConfigError for files in which a token is no token, and where one
    would get another id than it has by name.
    """
    roles, further = roles_of(files)
    special = dict.fromkeys(text for text in (*roles.values(), *further) if text)
    known = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    with_ids = _with_ids(files, special, known)
    before = {text: repr(token) for text, token in known.items()}
    next_id = inner.get_vocab_size(with_added_tokens=True)
    named: dict[str, int] = {}  # those that are new
    for token_id, token in sorted(with_ids.items()):
        if inner.token_to_id(token.content) is None and token.content not in named:
            if rows is not None and token_id >= rows:
                continue
            named[token.content] = token_id
            next_id += 1
        known[token.content] = token
    for text in special:
        if text not in known:
            if inner.token_to_id(text) is None:
                if rows is not None and next_id >= rows:
                    continue
                next_id += 1
            known[text] = AddedToken(text, special=True)
        known[text].special = True
    inner.add_tokens([token for text, token in known.items() if before.get(text) != repr(token)])
    for text, token_id in named.items():
        if (got := inner.token_to_id(text)) != token_id:
            raise ConfigError(
                f"{files.model_dir}: {quoted(text)} is token {token_id} by the files beside {TOKENIZER}, and after those "
                f"in it comes {got}"
            )
    return roles


def _with_ids(files: ModelFiles, special: Container[str], known: Container[str]) -> dict[int, AddedToken]:
    """Raises ConfigError. special, known: texts of special tokens, and of those that the tokenizer says more of itself."""
    config = files.json(TOKENIZER_CONFIG)
    older = _DECODER not in config
    found = _older(files.json(ADDED_TOKENS), special, known) if older else _with_flags(config[_DECODER])
    if found is None:
        where = files.model_dir / (ADDED_TOKENS if older else TOKENIZER_CONFIG)
        raise ConfigError(f"{where}: what it says of added tokens is no table of ids and tokens")
    return found


def _with_flags(said: Any) -> dict[int, AddedToken] | None:
    """Of added_tokens_decoder; None where it is no such thing."""
    if not isinstance(said, Mapping) or not all(name.isascii() and name.isdigit() for name in said):
        return None
    found: dict[int, AddedToken] = {}
    for name, token in said.items():
        text = token_content(token)
        if text is None or len(name) > len(str(1 << 31)):
            return None
        flags = {flag: token[flag] for flag in _FLAGS if flag in token} if isinstance(token, Mapping) else {}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            return None
        if text:
            found[int(name)] = AddedToken(text, **flags)
    return found


def _older(said: Mapping[str, Any], special: Container[str], known: Container[str]) -> dict[int, AddedToken] | None:
    """Of added_tokens.json; None where it is no such thing."""
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 31 for each in said.values()):
        return None
    return {
        token_id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in said.items()
        if text and text not in known
    }
