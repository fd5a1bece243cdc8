from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf.constants import GGMLQuantizationType, TokenType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from disagg.convert.gguf_file import GgufFile
from disagg.convert.gguf_tokenizer import build_tokenizer, ends_of_text, tokenizer_config
from disagg.convert.model_dir import resolve
from disagg.convert.safetensors_file import write_weights
from disagg.types.errors import ConfigError
from tests.campaigns import Campaign, sizes
from tests.convert.conftest import HEAD_DIM, llama_weights, write_llama


def test_a_float32_gguf_comes_back_bit_for_bit(tmp_path: Path) -> None:
    converted = load_file(resolve(str(write_llama(tmp_path / "tiny.gguf")), tmp_path) / "model.safetensors")
    expected = llama_weights()
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(converted[name], values)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_quantized_tensors_read_as_the_reference_dequantizes_them(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    with GgufFile(write_llama(tmp_path / "tiny.gguf", kind)) as file:
        values = llama_weights()["model.layers.1.mlp.up_proj.weight"]
        np.testing.assert_array_equal(file.tensor("blk.1.ffn_up.weight"), dequantize(quantize(values, kind), kind))


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    path = write_llama(tmp_path / "tiny.gguf", GGMLQuantizationType.BF16)
    stored = load_torch(resolve(str(path), tmp_path) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    expected = torch.from_numpy(llama_weights()["model.layers.0.mlp.up_proj.weight"]).bfloat16()
    assert torch.equal(stored, expected)


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(derandomize=True, deadline=None)
def test_bfloat16_rounds_as_torch_does(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    array = np.array(values, dtype=np.float32)
    path = tmp_path_factory.getbasetemp() / "rounded.safetensors"
    write_weights(path, {"x": array.shape}, "BF16", load=lambda _: array, report=lambda _: None)
    assert torch.equal(load_torch(path)["x"], torch.from_numpy(array).bfloat16())


def test_a_sentencepiece_vocabulary_becomes_a_tokenizer(tmp_path: Path) -> None:
    model_dir = resolve(str(write_llama(tmp_path / "tiny.gguf")), tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    # "▁a" scores better than "▁ab", but "ab" best of all: its letters join first, then the space.
    assert tokenizer.encode("ab é").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


class Vocabulary:
    """What a GGUF says of its tokens, and nothing else."""

    def __init__(self, model: str, pre: str, **said: bool) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if model == "gpt2" else ["a", "\u2581"]
        self.path = "tokens.gguf"
        self.metadata = {f"tokenizer.ggml.{name}": value for name, value in said.items()} | {
            "general.architecture": "llama",
            "llama.context_length": 64,
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": ["<s>", *letters],
            "tokenizer.ggml.token_type": [TokenType.CONTROL, *[TokenType.NORMAL] * len(letters)],
            "tokenizer.ggml.scores": [0.0] * (1 + len(letters)),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 0,
        }

    def require(self, key: str) -> Any:
        return self.metadata[key]


@pytest.mark.parametrize(
    ("model", "pre", "said", "begins"),
    [
        ("gpt2", "llama-bpe", {}, True),
        ("gpt2", "llama-bpe", {"add_bos_token": False}, False),
        ("gpt2", "gpt-2", {}, False),
        ("gpt2", "smollm", {"add_bos_token": True}, True),
        ("llama", "default", {}, True),
        ("llama", "default", {"add_bos_token": False}, False),
    ],
)
def test_a_text_begins_as_llama_cpp_has_it_where_the_file_does_not_say(
    model: str, pre: str, said: dict[str, bool], begins: bool
) -> None:
    """Files of Llama 3 do not say that a text begins with BOS, and those of before October 2023 say it of none."""
    gguf: Any = Vocabulary(model, pre, **said)
    assert (build_tokenizer(gguf).encode("a").tokens[0] == "<s>") == begins
    assert tokenizer_config(gguf)["add_bos_token"] == begins


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{{ '<start_of_turn>model' }}{{ m }}<end_of_turn>", [0, 2]),
        ("{{ m }}", [0]),  # there is such a token, but no turn ends with it
        (None, [0]),  # a base model's
    ],
)
def test_an_answer_ends_with_its_turn_where_the_file_says_eos_alone(template: str | None, ends: list[int]) -> None:
    """As Gemma's files do, whose chats would go on for as long as they may."""
    gguf: Any = Vocabulary("llama", "default")
    gguf.metadata |= {
        "tokenizer.ggml.tokens": ["<eos>", "a", "<end_of_turn>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [TokenType.CONTROL, TokenType.NORMAL, TokenType.CONTROL, TokenType.NORMAL],
        "tokenizer.ggml.eos_token_id": 0,
    }
    if template is not None:
        gguf.metadata["tokenizer.chat_template"] = template
    assert ends_of_text(gguf) == ends


def test_every_end_of_text_is_written_where_workers_look_for_it(tmp_path: Path) -> None:
    model_dir = resolve(str(write_llama(tmp_path / "tiny.gguf", eot_token_id=1)), tmp_path)
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "'mamba'.*llama, gemma3"),
        ({"extra_tensor": "rope_freqs.weight"}, r"rope_freqs\.weight"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, r"blk\.0\.attn_q\.bias"),
        ({"extra_tensor": "blk.9.attn_norm.weight"}, r"blk\.9\.attn_norm\.weight, and says that it has 2 layers"),
        ({"rope_scaling": "yarn"}, "rope scaling"),
        ({"rotated": HEAD_DIM // 2}, r"rotates \d+ of the \d+ dimensions of a head"),
        ({"tokenizer": "bert"}, "'bert'"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_llama(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ConfigError, match=message):
        resolve(str(path), tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"] == []


def test_a_file_that_says_that_whole_heads_are_rotated_is_converted(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", rotated=HEAD_DIM)
    config = json.loads((resolve(str(path), tmp_path / "cache") / "config.json").read_text())
    assert config["head_dim"] == HEAD_DIM


@given(keep=st.floats(0, 0.999))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_a_gguf_cut_short_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = write_llama(folder / "tiny.gguf")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ConfigError, match=r"tiny\.gguf"):
        GgufFile(path)


@sizes(100)
def test_a_spoilt_header_is_one_error_or_a_model(tmp_path: Path, examples: int) -> None:
    """What is converted has every number that its names promise: nothing of a spoilt file is left behind."""
    path = write_llama(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    with GgufFile(path) as file:
        header_bytes = min(tensor.offset for tensor in file.tensors.values())
    campaign = Campaign(examples)
    found = {"made": 0, "refused": 0}

    @settings(derandomize=True, deadline=None, database=None, max_examples=campaign.examples)
    @given(number=st.integers(0, 2**63))
    def run(number: int) -> None:
        campaign.begin()
        random, content = Random(number), bytearray(whole)
        for _ in range(random.choice((1, 1, 2, 4))):
            at = random.randrange(header_bytes)
            value = random.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)).to_bytes(8, "little")
            spoilt = value if random.random() < 0.5 else bytes([random.randrange(256)])
            content[at : at + len(spoilt)] = spoilt
        path.write_bytes(content)
        cache = tmp_path / "cache"
        try:
            resolve(str(path), cache)
            found["made"] += 1
        except ConfigError as error:
            found["refused"] += 1
            said = str(error)
        else:
            said = str(path)
        assert str(tmp_path) in said and len(said) < 2000
        shutil.rmtree(cache, ignore_errors=True)

    run()
    campaign.check()
    assert all(found.values()), found
