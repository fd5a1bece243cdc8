"""Tokens that files beside tokenizer.json name, against `transformers`: text to ids, ids to text, and chat prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from disagg.text.chat import ChatTemplate
from disagg.text.declared import declare
from disagg.text.model_files import ModelFiles
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import ConfigError
from tests.models.tiny import SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

END, START, MESSAGE_END = SPECIAL_TOKENS
ROWS = VOCAB_SIZE + 8
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "go"},
]
TEXT = f"<|tool|>hi {MESSAGE_END} x<|tool|> <|other|>{START}y {END}"
IDS = (VOCAB_SIZE, 257, 71, 258, VOCAB_SIZE + 1, 72, 256)
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, **PLAIN, **flags}


def none_special(tokenizer: dict[str, Any]) -> None:
    for each in tokenizer["added_tokens"]:
        each["special"] = False


def write(
    directory: Path,
    config: dict[str, Any],
    files: dict[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], None] | None = None,
    rows: int = ROWS,
) -> Path:
    write_tokenizer(directory)
    facts = {"model_type": "llama", "vocab_size": rows, "eos_token_id": 256}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **config}
    for name, content in {"config.json": facts, "tokenizer_config.json": settings, **(files or {})}.items():
        (directory / name).write_text(json.dumps(content))
    if edit is not None:
        content = json.loads((directory / "tokenizer.json").read_text())
        edit(content)
        (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def taking_blanks(tokenizer: dict[str, Any]) -> None:
    for each in tokenizer["added_tokens"]:
        each["lstrip"] = True


MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
OLD = {"bos_token": START, "eos_token": END}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], None] | None]] = {
    "nothing": ({}, {}, None),
    "roles": (OLD, {}, None),
    "roles, of none that is special": (OLD, {}, none_special),
    "roles, one of them empty": ({**OLD, "pad_token": ""}, {}, None),
    "a role that is new": ({**OLD, "pad_token": "<|tool|>"}, {}, None),
    "further": ({**OLD, "extra_special_tokens": ["<|tool|>", "<|other|>"]}, {}, None),
    "further, by names of its own": ({**OLD, "extra_special_tokens": {"tool_token": "<|tool|>"}}, {}, None),
    "further, as it was called": ({**OLD, "additional_special_tokens": ["<|tool|>"]}, {}, None),
    "with ids": ({**OLD, "added_tokens_decoder": {"512": token("<|tool|>", special=True)}}, {}, None),
    "with ids, not in order": (
        {"added_tokens_decoder": {"513": token("<|other|>", special=True), "512": token("<|tool|>")}},
        {},
        None,
    ),
    "with ids, taking blanks": ({"added_tokens_decoder": {"512": token("<|tool|>", rstrip=True)}}, {}, None),
    "flags that differ": (
        {"added_tokens_decoder": {str(256 + at): token(text, special=True) for at, text in enumerate(SPECIAL_TOKENS)}},
        {},
        none_special,
    ),
    "older": ({}, {MAP: OLD}, None),
    "older, of none that is special": ({}, {MAP: OLD}, none_special),
    "older, as objects": ({}, {MAP: {role: token(text) for role, text in OLD.items()}}, None),
    "older goes first": ({"bos_token": MESSAGE_END}, {MAP: OLD}, None),
    "older counts for nothing": (
        {"bos_token": MESSAGE_END, "added_tokens_decoder": {"256": token(END, special=True)}},
        {MAP: OLD, ADDED: {"<|tool|>": 512}},
        None,
    ),
    "older, with ids": ({}, {ADDED: {"<|other|>": 513, "<|tool|>": 512}}, None),
    "older, with ids that the tokenizer has": ({}, {ADDED: {END: 256, START: 257, "<|tool|>": 512}}, taking_blanks),
    "older, with ids that are special": ({}, {MAP: {"pad_token": "<|tool|>"}, ADDED: {"<|tool|>": 512}}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_text_ids_and_chats_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    config, files, edit = CASES[case]
    directory = write(tmp_path, config, files, edit)
    theirs: Any = AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    for skips in (True, False):
        assert ours.decode(IDS, skip_special_tokens=skips) == theirs.decode(IDS, skip_special_tokens=skips)
    template = ChatTemplate.load(directory)
    assert template is not None
    assert template.render(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


def test_a_text_for_whose_token_the_model_has_no_row_stays_text(tmp_path: Path) -> None:
    config = {"pad_token": "<|tool|>", "added_tokens_decoder": {"512": token("<|other|>")}}
    with_rows = Tokenizer.load(write(tmp_path, config))
    assert with_rows.encode("<|other|><|tool|>") == [512, 513]
    without = Tokenizer.load(write(tmp_path, config, rows=VOCAB_SIZE))
    assert without.decode(without.encode("<|other|><|tool|>")) == "<|other|><|tool|>"
    assert not without.beyond_vocab


def test_a_token_that_would_have_another_id_than_it_was_trained_with_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, {"added_tokens_decoder": {"514": token("<|tool|>")}})
    with pytest.raises(ConfigError, match=r"<\|tool\|>.* is token 514 by the files beside tokenizer.json.* comes 512"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": ["<|tool|>"]}, {}),
        ({"added_tokens_decoder": {"first": token("<|tool|>")}}, {}),
        ({"added_tokens_decoder": {"512": {"text": "<|tool|>"}}}, {}),
        ({"added_tokens_decoder": {"512": token("<|tool|>", rstrip="yes")}}, {}),  # type: ignore[arg-type]
        ({"added_tokens_decoder": {"9" * 30: token("<|tool|>")}}, {}),
        ({}, {ADDED: {"<|tool|>": "512"}}),
        ({}, {ADDED: {"<|tool|>": -1}}),
        ({}, {ADDED: {"<|tool|>": True}}),
        ({}, {ADDED: ["<|tool|>"]}),
        ({}, {MAP: "bos"}),
    ],
)
def test_files_that_make_no_sense_are_one_error(tmp_path: Path, config: dict[str, Any], files: dict[str, Any]) -> None:
    directory = write(tmp_path, config, files)
    with pytest.raises(ConfigError, match=r"(tokenizer_config|added_tokens|special_tokens_map)\.json"):
        Tokenizer.load(directory)


def test_a_hundred_thousand_tokens_are_added_at_once(tmp_path: Path) -> None:
    named = {f"<|{number}|>": VOCAB_SIZE + number for number in range(100_000)}
    directory = write(tmp_path, {}, {ADDED: named}, rows=VOCAB_SIZE + len(named))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("<|99999|>") == [VOCAB_SIZE + 99_999]
    declare(tokenizer._inner, ModelFiles.read(directory), None)  # once more: there is nothing to add
    assert tokenizer.encode("<|99999|>") == [VOCAB_SIZE + 99_999]


def test_a_name_that_a_template_has_already_is_left_to_it(tmp_path: Path) -> None:
    template = ChatTemplate.load(
        write(tmp_path, {"extra_special_tokens": {"messages": "<|tool|>", "no name": "<|x|>", "own": "<|y|>"}})
    )
    assert template is not None
    assert template.render(MESSAGES[:1]) == "[user] hi"


def test_the_tokenizers_own_end_is_known_where_the_model_names_another_one(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, {"eos_token": MESSAGE_END})).end_token_id == 258
    assert Tokenizer.load(write(tmp_path, {"eos_token": END})).end_token_id is None
    assert Tokenizer.load(write(tmp_path, {})).end_token_id is None
    generation = {"generation_config.json": {"eos_token_id": [258, 256]}}
    assert Tokenizer.load(write(tmp_path, {"eos_token": MESSAGE_END}, generation)).end_token_id is None
    assert Tokenizer.load(write(tmp_path, {"eos_token": "<|tool|>"}, rows=VOCAB_SIZE)).end_token_id is None
