"""A directory either holds a model that is served exactly, or is refused with a sentence that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from disagg.messages.layout import LayerGroup
from disagg.models.attention import paged_attention
from disagg.models.model import PagedModel
from disagg.types.errors import ConfigError
from tests.models.driver import Driver, build_batch
from tests.models.tiny import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path)


def edit_config(model_dir: Path, **fields: object) -> None:
    path = model_dir / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_a_loaded_model_tells_what_the_worker_needs(llama_dir: Path) -> None:
    model = PagedModel.load(llama_dir, "bfloat16", "cpu")
    assert model.groups == (LayerGroup("full", (0, 1, 2), kv_heads=2, head_dim=16, dtype="bfloat16"),)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (VOCAB_SIZE, 2048, (EOS_TOKEN_ID,))
    assert model.num_layers == 3
    assert model.make_pool(5, 16).bytes.shape == (5, model.groups[0].page_bytes(16))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "falcon"}, "'falcon' is not served; served are .*llama"),
        ({"model_type": None}, "None is not served"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"num_hidden_layers": 4}, "lacks 9 weights"),
    ],
)
def test_what_cannot_be_served_is_refused(llama_dir: Path, fields: dict, sentence: str) -> None:
    edit_config(llama_dir, **fields)
    with pytest.raises(ConfigError, match=sentence):
        PagedModel.load(llama_dir, "float32", "cpu")


def test_unknown_dtype_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="float8"):
        PagedModel.load(llama_dir, "float8", "cpu")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        PagedModel.load(tmp_path, "float32", "cpu")


def test_a_directory_without_weights_is_refused(llama_dir: Path) -> None:
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        PagedModel.load(llama_dir, "float32", "cpu")


def test_a_missing_weight_is_refused(llama_dir: Path) -> None:
    path = llama_dir / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_proj"):
        PagedModel.load(llama_dir, "float32", "cpu")


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("phimoe", {"sliding_window": 16}, "do not ask attention for it"),
        (
            "qwen2_moe",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
            "is sliding_attention, but its sliding_window is None",
        ),
    ],
)
def test_a_window_that_only_the_mask_would_apply_is_refused(
    family: str, fields: dict, sentence: str, tmp_path: Path
) -> None:
    make_tiny(family, tmp_path, **fields)
    with pytest.raises(ConfigError, match=sentence):
        PagedModel.load(tmp_path, "float32", "cpu")


def test_longrope_is_served_up_to_where_its_factors_would_depend_on_the_batch(tmp_path: Path) -> None:
    factors = [1.0 + 0.1 * i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    make_tiny(
        "phi3",
        tmp_path,
        rope_parameters=rope | {"original_max_position_embeddings": 128},
        original_max_position_embeddings=128,
    )
    assert PagedModel.load(tmp_path, "float32", "cpu").max_model_len == 128


def test_a_layer_that_bypasses_attention_is_noticed(llama_dir: Path) -> None:
    model = PagedModel.load(llama_dir, "float32", "cpu")
    driver = Driver(model, 4, 4)
    sequence = driver.sequence([1, 2, 3], chunk=8)
    model._loaded.module.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(AssertionError, match=r"\{1: 0\}"):
        driver.step([sequence])


def test_attention_outside_a_forward_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="outside"):
        paged_attention(torch.nn.Module(), *[torch.zeros(1, 1, 1, 4)] * 3, None)


def test_a_batch_may_want_no_logits(llama_dir: Path) -> None:
    model = PagedModel.load(llama_dir, "float32", "cpu")
    driver = Driver(model, 4, 4)
    sequence = driver.sequence([1, 2, 3, 4, 5, 6], chunk=4)
    sequence.pages = [2, 0]
    logits = model.forward(build_batch([(sequence, 4)], 4), driver.pool)
    assert logits.shape == (0, VOCAB_SIZE)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_half_precision_logits_are_near_float32(family: str, dtype: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, weight_scale=0.3)
    rows = []
    for precision in ("float32", dtype):
        model = PagedModel.load(tmp_path, precision, "cpu")
        driver = Driver(model, 16, 4)
        sequence = driver.sequence(list(range(40)), chunk=16)
        driver.run([sequence], 1)
        rows.append(sequence.logits[0])
    assert rows[1].dtype == torch.float32
    assert ((rows[1] - rows[0]).norm() / rows[0].norm()).item() < 0.05


def test_tiny_tokenizer_round_trips_and_names_every_id(llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llama_dir / "tokenizer.json"))
    text = "Hello, abacus! ünïcode 你好\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<|endoftext|>") == EOS_TOKEN_ID
    assert all(tokenizer.id_to_token(i) is not None for i in range(VOCAB_SIZE))
