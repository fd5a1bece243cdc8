"""What tokenizer.json may make of a text is known before any text is read, and refused or bounded."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from disagg.router.intake import Intake
from disagg.text.model_files import ModelFiles
from disagg.text.tokenizer import READ_BYTES, Tokenizer
from disagg.text.tokenizer_bounds import MAX_GROWTH, charsmap_growth, growth
from disagg.text.tokenizer_trial import try_out
from disagg.types.errors import ConfigError, InvalidRequest

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
FIXED = settings(derandomize=True, deadline=None, max_examples=300)


def made(**parts: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", "added_tokens": [], **nothing, "decoder": BYTE_LEVEL, "model": BPE, **parts}


def read(**parts: Any) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_buffer(json.dumps(made(**parts)).encode()))


def in_turn(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(single: list[Any], **special: list[int]) -> dict[str, Any]:
    known = {name: {"id": name, "ids": ids, "tokens": ["a"] * len(ids)} for name, ids in special.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [TEXT], "special_tokens": known}


def token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def chart(key: bytes, written: bytes) -> bytes:
    """SentencePiece's, of one key of one byte."""
    units = [0] * 1024
    units[0] = 256 << 10
    at = 256 ^ key[0]
    units[at] = 512 << 10 | 1 << 8 | key[0]
    units[at ^ 512] = 1 << 31
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + written + b"\0"


ANY = [
    *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    {"type": "Prepend", "prepend": "▁"},
    replace(" ", "▁"),
    replace("a", "ﷺ"),
    replace("ab", "abab"),
    replace(" {2,}", "▁", "Regex"),
    replace("a*", "éa", "Regex"),
]
LETTERS = st.sampled_from("aab  é中ﷺİ가ẛ̣́\n日👩ΐ")


@given(parts=st.lists(st.sampled_from(ANY), max_size=5), text=st.text(LETTERS, min_size=1, max_size=12))
@FIXED
def test_no_text_grows_by_more_than_is_known_before_it_is_read(parts: list[dict[str, Any]], text: str) -> None:
    whole = in_turn(*parts)
    try:
        most = growth(whole, None)
    except ConfigError:
        return
    inner = tokenizers.Tokenizer.from_buffer(json.dumps(made(normalizer=whole)).encode())
    assert inner.normalizer is not None
    once = sum(4 for part in parts if part["type"] in ("Prepend", "Replace")) * most  # at the ends
    try:
        grown = inner.normalizer.normalize_str(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return
    assert len(grown.encode()) <= len(text.encode()) * most + once


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "most"),
    [
        (None, BYTE_LEVEL, 2),  # GPT-2, Llama 3
        ({"type": "NFC"}, BYTE_LEVEL, 6),  # Qwen
        (in_turn({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), None, 8),  # Llama 2
        (replace(" ", "▁"), {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, 3),
        (ANY[9], {"type": "BertPreTokenizer"}, 9),
        (in_turn({"type": "NFKC"}, replace(" {2,}", "▁", "Regex")), METASPACE, 256),  # XGLM
    ],
    ids=["gpt", "qwen", "llama", "gemma", "bert", "xglm"],
)
def test_the_kinds_that_models_use_pass(normalizer: Any, pre_tokenizer: Any, most: float) -> None:
    assert read(normalizer=normalizer, pre_tokenizer=pre_tokenizer).growth <= most


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"normalizer": in_turn(replace("a", "a" * 1000), in_turn(replace("a", "aa")))}, "more than 1024 bytes"),
        ({"normalizer": in_turn(*[replace("a", "aaaa")] * 6)}, "more than 1024 bytes"),
        ({"normalizer": replace("b*", "a" * 2000, "Regex")}, "more than 1024 bytes"),
        (
            {"normalizer": in_turn(replace("a", "ﷺ"), {"type": "NFKD"}, *[replace("ا", "ﷺ"), {"type": "NFKD"}] * 3)},
            "1024",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [METASPACE] * 6}}, "more than 1024 bytes"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 11}}, "more than 1024 bytes"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1000}}, "Prepend of 1000 bytes"),
        ({"normalizer": replace("", "a")}, "empty pattern"),
        ({"decoder": replace("a", "a" * 1000)}, "its decoder may make 1000 bytes"),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a", "aaa")] * 3}}, "its decoder may make 27 bytes"),
        ({"post_processor": template([TEXT] * 50)}, "the text 50 times"),
        ({"post_processor": template([token("a")], a=[0])}, "the text 0 times"),
        ({"post_processor": template([token("a"), TEXT], a=[0] * 1000)}, "adds 1000 ids"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([token("a"), TEXT], a=[0] * 40)] * 2}},
            "80 ids",
        ),
        ({"post_processor": template([token("<gone>"), TEXT], a=[0])}, "'<gone>', which its special_tokens lack"),
        ({"post_processor": template([TEXT, {"Sequence": {"id": "B", "type_id": 0}}])}, "a second text"),
        ({"model": {**BPE, "vocab": {"a" * 5000: 0}, "merges": []}}, "a token of 5000 characters"),
        ({"model": {**BPE, "end_of_word_suffix": "a" * 100}}, "end_of_word_suffix has 100"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, r"WordLevel .*'\[UNK\]'"),
        ({"model": {**BPE, "unk_token": "[UNK]"}}, r"BPE .*'\[UNK\]'"),
        (
            {
                "model": {
                    "type": "WordPiece",
                    "vocab": {"a": 0},
                    "unk_token": "[UNK]",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                }
            },
            r"WordPiece .*'\[UNK\]'",
        ),
        (
            {
                "model": {
                    "type": "WordPiece",
                    "vocab": {"[UNK]": 0},
                    "unk_token": "[UNK]",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 10**6,
                }
            },
            "max_input_chars_per_word is 1000000",
        ),
    ],
)
def test_what_may_take_any_amount_is_refused_with_its_cause(tmp_path: Path, parts: dict[str, Any], why: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(made(**parts)))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: .*{why}") as caught:
        Tokenizer.load(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_chart_grows_by_what_it_writes_for_its_shortest_keys() -> None:
    raw = chart(b"a", b"x" * 40)
    assert normalizers.Precompiled(raw).normalize_str("abaa") == "x" * 40 + "b" + "x" * 80
    written = base64.b64encode(raw).decode()
    assert charsmap_growth(written) == 40
    part = {"type": "Precompiled", "precompiled_charsmap": written}
    assert growth(part, None) == 40
    with pytest.raises(ConfigError, match="more than 1024"):
        growth(in_turn(part, part), None)
    with pytest.raises(ConfigError, match="cannot be read"):
        charsmap_growth("AAA")


def test_a_byte_level_model_may_name_a_token_for_the_unknown_that_it_never_needs() -> None:
    assert read(model={**BPE, "unk_token": "<|endoftext|>"}, pre_tokenizer=BYTE_LEVEL).encode("ab") == [2]
    assert read(model={**BPE, "unk_token": ""}).encode("ab") == [2]


def test_a_decoder_that_is_refused_is_shown_clipped(tmp_path: Path) -> None:
    decoder = replace("a+", "a" * 10_000, "Regex")
    (tmp_path / "tokenizer.json").write_text(json.dumps(made(decoder=decoder)))
    with pytest.raises(ConfigError, match=r"decoder that is not served: .*more characters") as caught:
        Tokenizer.load(tmp_path)
    assert len(str(caught.value)) < 800


def test_dropout_is_turned_off() -> None:
    tokenizer = read(model={**BPE, "dropout": 0.9})
    assert tokenizer.without_chance == "dropout 0.9"
    assert {tuple(tokenizer.encode("ab" * 20)) for _ in range(20)} == {(2,) * 20}
    assert read().without_chance == ""


UNKNOWN_TO_UNIGRAM = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}


def test_a_text_that_cannot_become_tokens_is_refused_with_the_cause() -> None:
    intake = Intake(read(model=UNKNOWN_TO_UNIGRAM), "m", 100, lambda: 100)
    assert asyncio.run(intake.tokenize("m", "aa")) == (0, 0)
    for text in ("b", "b" * 700):
        with pytest.raises(
            InvalidRequest, match=r"the text has text that .* cannot make tokens of: .*unknown token"
        ) as no:
            asyncio.run(intake.tokenize("m", text))
        assert no.value.param == "text"
    intake.close()


def test_a_text_is_measured_by_what_the_tokenizer_makes_of_it() -> None:
    """The one below MAX_GROWTH: a thousand bytes for one."""
    tokenizer = read(normalizer=replace("a", "a" * 1000))
    assert tokenizer.growth == 1000 <= MAX_GROWTH
    intake = Intake(tokenizer, "m", 100_000, lambda: 100_000)
    most = READ_BYTES // 1000
    with pytest.raises(InvalidRequest, match=f"the text has {most + 1} bytes; at most {most} are read, .* 1e"):
        asyncio.run(intake.tokenize("m", "a" * (most + 1)))
    assert len(asyncio.run(intake.tokenize("m", "a" * 50))) == 50_000
    intake.close()


def test_ids_whose_text_would_be_too_long_are_not_decoded() -> None:
    model = {**BPE, "vocab": {"a" * 4000: 0, "b": 1}, "merges": []}
    tokenizer = read(model=model, decoder={"type": "Sequence", "decoders": [replace("a", "a" * 16)]})
    with pytest.raises(InvalidRequest, match="the text of 300 token ids may have more than"):
        tokenizer.decode([0] * 300)
    assert tokenizer.decode([1] * 300) == "b" * 300
    assert tokenizer.decode([0]) == "a" * 64_000


def test_a_panic_at_a_text_is_told_with_its_cause(tmp_path: Path) -> None:
    """A template of the kind that the library takes, and then panics at; the check that would find it is taken out."""
    program = (
        "import sys, disagg.text.tokenizer as t; t.check_post_processor = lambda spec: None; "
        "from disagg.text.tokenizer_trial import main; sys.exit(main(int(sys.argv[1])))"
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(made(post_processor=template([token("<gone>"), TEXT], a=[0]))))
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used: .* panics at a text: 'no entry found"):
        asyncio.run(try_out(ModelFiles.read(tmp_path), None, program=("-c", program)))
