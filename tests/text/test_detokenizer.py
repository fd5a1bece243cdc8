from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from disagg.text.detokenizer import Detokenizer
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import ConfigError
from tests.text.conftest import gemma_style, llama_style, sentencepiece

SCRIPTS = st.text(
    st.sampled_from("ab .,\n\t▁0129éñßΩжя日本語中文한국어עבריתالعربية🎉👩‍👩‍👧‍👦🇰🇷🏳️‍🌈𝔘\u0301<>|")
    | st.characters(exclude_categories=["Cs"]),
    max_size=40,
)
FIXED = settings(derandomize=True, deadline=None, max_examples=150)


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in chunks whose lengths `cuts` gives, repeated as needed."""
    chunks, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        chunks.append(ids[at : at + size])
        at, turn = at + max(size, 0), turn + 1
    return chunks


def streamed(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.finish()


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(text=SCRIPTS, cuts=CUTS)
@FIXED
def test_text_in_every_script_streams_as_it_decodes(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text)
    assert streamed(Detokenizer(tokenizer), pieces(ids, cuts)) == tokenizer.decode(ids)


@given(data=st.data(), cuts=CUTS, skip=st.booleans())
@FIXED
def test_random_ids_that_decode_cleanly_stream_as_they_decode(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    got = streamed(Detokenizer(tokenizer, skip_special_tokens=skip), pieces(ids, cuts))
    if "�" in whole:  # only then may the two differ, and only in how a broken character is shown
        assert "�" in got
    else:
        assert got == whole


@given(data=st.data(), cuts=CUTS)
@FIXED
def test_byte_level_streams_broken_characters_as_they_decode_too(
    smollm: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, 300) | st.integers(0, smollm.vocab_size - 1), max_size=30))
    assert streamed(Detokenizer(smollm), pieces(ids, cuts)) == smollm.decode(ids)


@given(prompt=SCRIPTS, output=SCRIPTS, cuts=CUTS)
@FIXED
def test_output_is_what_it_adds_to_the_prompt(tokenizer: Tokenizer, prompt: str, output: str, cuts: list[int]) -> None:
    prompt_ids = tokenizer.encode(prompt)
    output_ids = tokenizer.encode(output, add_special_tokens=False)
    before, whole = tokenizer.decode(prompt_ids), tokenizer.decode(prompt_ids + output_ids)
    if whole.startswith(before) and "�" not in whole:
        got = streamed(Detokenizer(tokenizer, start_ids=prompt_ids), pieces(output_ids, cuts))
        assert before + got == whole


@given(text=SCRIPTS)
@FIXED
def test_nothing_given_out_is_ever_taken_back(tokenizer: Tokenizer, text: str) -> None:
    ids, detokenizer, shown = tokenizer.encode(text), Detokenizer(tokenizer), ""
    whole = tokenizer.decode(ids)
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert whole.startswith(shown)


def test_half_an_emoji_waits_for_its_other_half(smollm: Tokenizer) -> None:
    ids, detokenizer = smollm.encode("🎉"), Detokenizer(smollm)
    assert len(ids) > 1
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🎉"]
    assert detokenizer.finish() == ""


def test_a_character_cut_off_by_the_end_shows_as_replacement(smollm: Tokenizer) -> None:
    ids, detokenizer = smollm.encode("ok 🎉")[:-1], Detokenizer(smollm)
    assert detokenizer.push(ids) == "ok "
    assert detokenizer.finish() == "�"


def test_an_emoji_begun_in_the_prompt_is_finished_in_the_output(smollm: Tokenizer) -> None:
    ids = smollm.encode("see 🎉!")
    cut = len(smollm.encode("see 🎉")) - 1
    assert Detokenizer(smollm, start_ids=ids[:cut]).push(ids[cut:]) == "🎉!"


def test_the_first_space_goes_only_where_no_prompt_precedes() -> None:
    tokenizer = llama_style()
    (word,) = [at for at in range(tokenizer.vocab_size) if tokenizer.token(at) == "▁the"]
    assert Detokenizer(tokenizer).push([word, word]) == "the the"
    assert Detokenizer(tokenizer, start_ids=tokenizer.encode("ab")).push([word]) == " the"


def test_special_tokens_show_only_when_asked_for(smollm: Tokenizer) -> None:
    ids = smollm.encode("hi<|im_end|>")
    assert Detokenizer(smollm).push(ids) == "hi"
    assert Detokenizer(smollm, skip_special_tokens=False).push(ids) == "hi<|im_end|>"


def test_a_replay_that_pushes_the_accepted_ids_goes_on_in_the_same_place(smollm: Tokenizer) -> None:
    ids = smollm.encode("naïve café 日本語 🎉 done")
    for cut in range(len(ids)):
        first = Detokenizer(smollm)
        shown = "".join(first.push([token_id]) for token_id in ids[:cut])
        replayed = Detokenizer(smollm)
        assert replayed.push(ids[:cut]) == shown
        assert replayed.push(ids[cut:]) == first.push(ids[cut:])


def test_the_cost_of_a_token_does_not_grow_with_the_text(smollm: Tokenizer) -> None:
    ids = smollm.encode("The quick brown fox jumps over the lazy dog. ") * 3000
    detokenizer = Detokenizer(smollm)
    third, spent = len(ids) // 3, []
    for part in range(3):
        start = time.process_time()
        for token_id in ids[part * third : (part + 1) * third]:
            detokenizer.push([token_id])
        spent.append(time.process_time() - start)
    assert spent[2] < 3 * min(spent[:2]) + 0.05


def test_a_decoder_that_cannot_stream_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="WordPiece"):
        sentencepiece(decoders.WordPiece())


def test_trailing_spaces_that_the_decoder_strips_are_held_until_text_follows() -> None:
    tokenizer = sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)])
    )
    by_text = {tokenizer.token(at): at for at in range(tokenizer.vocab_size)}
    ids = [by_text[token] for token in ("▁a", "▁", "▁▁", "b", "▁")]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "  ", " b", ""]
    assert detokenizer.finish() == ""
    assert tokenizer.decode(ids) == "a   b"


def test_bytes_that_form_no_character_show_as_one_replacement_each() -> None:
    tokenizer = gemma_style()
    by_text = {tokenizer.token(at): at for at in range(tokenizer.vocab_size)}
    ids = [by_text[token] for token in ("a", "<0xE2>", "<0x82>", "b", "<0xE2>", "<0x41>")]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "", "��b", "", "�A"]
    assert detokenizer.push(ids[1:3]) + detokenizer.finish() == "��"
