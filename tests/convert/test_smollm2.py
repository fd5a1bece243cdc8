from __future__ import annotations

import time
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from disagg.convert.inspect import inspect_model
from disagg.convert.model_dir import resolve

TEXTS = [
    "Hello, world!",
    "12345 + 6789 = 19134",
    "  two  spaces\n\nand\ttabs ",
    "naïve café 日本語 العربية 🎉👩‍👩‍👧",
    "def f(x):\n    return x ** 2\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def loaded(fresh_smollm: Path) -> tuple[torch.nn.Module, dict[str, set[str]]]:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(fresh_smollm, output_loading_info=True)


def test_transformers_loads_every_weight_and_no_other(
    loaded: tuple[torch.nn.Module, dict[str, set[str]]],
) -> None:
    _, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_the_model_knows_the_capital_of_france(
    fresh_smollm: Path, loaded: tuple[torch.nn.Module, dict[str, set[str]]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fresh_smollm)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = loaded[0].generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == 2, "the answer ends with <|im_end|>"


def test_transformers_tokenizes_as_tokenizer_json_says(fresh_smollm: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(fresh_smollm)
    ours = tokenizers.Tokenizer.from_file(str(fresh_smollm / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_known_ids_come_out(fresh_smollm: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(fresh_smollm / "tokenizer.json"))
    assert tokenizer.encode("Hello, world!").ids == [19556, 28, 905, 17]
    assert tokenizer.encode("12345").tokens == list("12345")
    assert tokenizer.encode("<|im_start|>x<|im_end|>").ids[::2] == [1, 2]


def test_facts_agree_with_transformers(fresh_smollm: Path, loaded: tuple[torch.nn.Module, dict[str, set[str]]]) -> None:
    facts, (model, _) = inspect_model(fresh_smollm), loaded
    config = model.config
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert (facts.vocab_size, facts.max_model_len) == (config.vocab_size, config.max_position_embeddings)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.torch_dtype == str(model.dtype).removeprefix("torch.") == "float32"
    assert facts.weight_bytes == 4 * facts.num_parameters
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    assert facts.sliding_window is None
    assert facts.layer_types == ("full_attention",) * 30


def test_the_second_call_takes_milliseconds(fresh_smollm: Path) -> None:
    start = time.process_time()
    assert resolve("smollm2-135m", fresh_smollm.parent) == fresh_smollm
    assert time.process_time() - start < 0.5  # the first one takes seconds
