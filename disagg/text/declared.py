"""Tokens that a model directory names beside tokenizer.json, which transformers adds to it.

    tokenizer_config.json     roles (bos_token, ...), added_tokens_decoder, further special tokens
    special_tokens_map.json   roles, before those of the other file ┐ of directories that were saved long ago: they count
    added_tokens.json         text -> id                            ┘ where the other one has no added_tokens_decoder

Whoever leaves them out takes a control token of a prompt for its characters, and a chat template's bos_token for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import tokenizers
from msgspec import Struct
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


class Declared(Struct, frozen=True):
    """roles: text by role, and by names of the model's own. tokens: with their ids, where one is named.

    Raises ConfigError, from `of`, for files in which a token is no token.
    """

    roles: dict[str, str]
    tokens: tuple[tuple[int | None, AddedToken], ...]

    @classmethod
    def of(cls, files: ModelFiles) -> Declared:
        config = files.json(TOKENIZER_CONFIG)
        older = _DECODER not in config
        said = {**config, **files.json(SPECIAL_TOKENS_MAP)} if older else config
        roles = {role: text for role in ROLES if (text := token_content(said.get(role))) is not None}
        further: list[str] = []
        for name in _FURTHER:
            listed = said.get(name)
            if isinstance(listed, Mapping):
                own = {key: text for key, each in listed.items() if (text := token_content(each)) is not None}
                roles = {**own, **roles}
            elif isinstance(listed, list):
                further += [text for each in listed if (text := token_content(each)) is not None]
        special = dict.fromkeys(text for text in (*roles.values(), *further) if text)
        where = files.model_dir / (ADDED_TOKENS if older else TOKENIZER_CONFIG)
        with_ids = _older(files.json(ADDED_TOKENS), special) if older else _with_flags(config[_DECODER])
        if with_ids is None:
            raise ConfigError(f"{where}: what it says of added tokens is no table of ids and tokens")
        return cls(roles, (*sorted(with_ids.items()), *((None, AddedToken(text, special=True)) for text in special)))


def declare(inner: tokenizers.Tokenizer, declared: Declared, rows: int | None, files: ModelFiles) -> None:
    """Adds what the tokenizer lacks, and flags of what it has. rows: of the model, or None if they are not known.

    A text whose token would have no row stays text. Raises ConfigError where a token would get another id than it has by name.
    """
    has = {token.content: repr(token) for token in inner.get_added_tokens_decoder().values()}
    flags = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    special = {token.content for token_id, token in declared.tokens if token_id is None}
    next_id = inner.get_vocab_size(with_added_tokens=True)
    wanted: dict[str, AddedToken] = {}
    named: dict[str, int] = {}
    for token_id, token in declared.tokens:
        text = token.content
        if inner.token_to_id(text) is None and text not in wanted:
            if rows is not None and (next_id if token_id is None else token_id) >= rows:
                continue
            next_id += 1
            if token_id is not None:
                named[text] = token_id
        elif token_id is None:  # only that it is special may be new
            token = flags.get(text, token)
        token.special = token.special or text in special
        wanted[text] = flags[text] = token
    inner.add_tokens([token for text, token in wanted.items() if has.get(text) != repr(token)])
    for text, token_id in named.items():
        if (got := inner.token_to_id(text)) != token_id:
            raise ConfigError(
                f"{files.model_dir}: {quoted(text)} is token {token_id} by the files beside {TOKENIZER}, and after those "
                f"in it comes {got}"
            )


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


def _older(said: Mapping[str, Any], special: Iterable[str]) -> dict[int, AddedToken] | None:
    """Of added_tokens.json; None where it is no such thing."""
    known = frozenset(special)
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 31 for each in said.values()):
        return None
    return {
        token_id: AddedToken(text, normalized=text not in known, special=text in known)
        for text, token_id in said.items()
        if text
    }
