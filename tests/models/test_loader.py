"""A directory either holds a model that is served exactly, or is refused with a sentence that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from disagg.convert.inspect import inspect_model
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.messages.sequence_diff import page_table
from disagg.models.attention.calls import LayerPlace, paged_attention
from disagg.models.layers import lay_out
from disagg.models.model import PagedModel
from disagg.types.errors import ConfigError
from disagg.worker.batch import build_batch
from tests.models.driver import Driver, run_of, sequence_of
from tests.models.tiny import EOS_TOKEN_ID, VOCAB_SIZE, WINDOW, make_tiny


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


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_of_text_that_the_model_has_no_row_for_is_left_out(llama_dir: Path, file: str) -> None:
    """The sampler would mask it until min_tokens: in the row of another request, or behind all rows."""
    (llama_dir / "generation_config.json").unlink()
    path = llama_dir / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"eos_token_id": [VOCAB_SIZE + 88, EOS_TOKEN_ID, VOCAB_SIZE - 1]}))
    assert PagedModel.load(llama_dir, "float32", "cpu").eos_token_ids == (EOS_TOKEN_ID, VOCAB_SIZE - 1)


def test_the_files_that_are_checked_are_those_that_are_loaded(llama_dir: Path) -> None:
    """Shards of another model, with their index, beside a checkpoint of one file."""
    weights = load_file(llama_dir / "model.safetensors")
    save_file({name: torch.ones(1) for name in weights}, llama_dir / "shard.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "shard.safetensors")}
    (llama_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    model = PagedModel.load(llama_dir, "float32", "cpu")
    assert torch.equal(model._loaded.module.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    assert inspect_model(llama_dir).num_parameters == sum(weight.numel() for weight in weights.values())


def group(name: str, layers: tuple[int, ...], *, heads: int = 2, dim: int = 16) -> LayerGroup:
    """A tiny model's layer group; its name says whether it has a window."""
    window = WINDOW if name.startswith("window") else 0
    return LayerGroup(name, layers, heads, dim, "float32", GroupKind.WINDOW if window else GroupKind.FULL, window)


def test_layers_with_one_window_and_shape_are_one_group(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("gemma3_text", tmp_path), "float32", "cpu")
    assert model.groups == (group("window-16", (0, 2)), group("full", (1,)))


def test_a_window_that_no_sequence_outgrows_is_full_attention(tmp_path: Path) -> None:
    make_tiny("gemma3_text", tmp_path, max_position_embeddings=WINDOW)
    assert PagedModel.load(tmp_path, "float32", "cpu").groups == (group("full", (0, 1, 2)),)


def test_layers_that_share_kv_have_the_slot_of_the_layer_that_has_it(tmp_path: Path) -> None:
    model = PagedModel.load(make_tiny("gemma3n_text", tmp_path), "float32", "cpu")
    assert model.groups == (group("window-16", (0, 2)), group("full", (1,)))
    assert model._loaded.places.attention == {
        0: LayerPlace(0, 0),
        1: LayerPlace(1, 0),
        2: LayerPlace(0, 1),
        3: LayerPlace(0, 1, writes=False),
        4: LayerPlace(1, 0, writes=False),
    }


def test_a_layer_that_shares_kv_but_not_the_window_is_refused(tmp_path: Path) -> None:
    module = PagedModel.load(make_tiny("gemma3n_text", tmp_path), "float32", "cpu")._loaded.module
    module.model.layers[3].self_attn.sliding_window = WINDOW // 2
    with pytest.raises(ConfigError, match="layer 3 shares the KV of layer 2, but not its window"):
        lay_out(tmp_path, module, "float32", 2048)


def test_groups_of_one_kind_are_named_by_their_shapes(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model = PagedModel.load(tmp_path, "float32", "cpu")
    attention = model._loaded.module.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(64, 16, bias=False) for _ in range(2))
    attention.num_key_value_groups = 4
    places = lay_out(tmp_path, model._loaded.module, "float32", 2048)
    assert places.groups == (group("full-2x16", (0, 2)), group("full-1x16", (1,), heads=1))
    assert places.attention == {0: LayerPlace(0, 0), 1: LayerPlace(1, 0), 2: LayerPlace(0, 1)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_finite_numbers_are_refused(llama_dir: Path, dtype: str, value: float) -> None:
    path = llama_dir / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights .* not finite numbers, such as model\.layers\.1\.mlp\.down_proj"):
        PagedModel.load(llama_dir, dtype, "cpu")


def test_finite_weights_whose_sum_is_infinite_are_numbers(llama_dir: Path) -> None:
    path = llama_dir / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:8] = 3e38
    save_file(weights, path, metadata={"format": "pt"})
    PagedModel.load(llama_dir, "float32", "cpu")


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
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        PagedModel.load(tmp_path, "float32", "cpu")


def test_a_directory_without_weights_is_refused(llama_dir: Path) -> None:
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks safetensors weights"):
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
    sequence = sequence_of([1, 2, 3, 4, 5, 6], num_groups=1)
    sequence.tables[0] = page_table([2, 0])
    batch, _ = build_batch([run_of(sequence, 4)], model.groups, 4)
    logits = model.forward(batch, driver.pool)
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
    assert rows[1].dtype == getattr(torch, dtype), "the sampler widens those of a batch at once"
    assert ((rows[1].float() - rows[0]).norm() / rows[0].norm()).item() < 0.05


def test_tiny_tokenizer_round_trips_and_names_every_id(llama_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llama_dir / "tokenizer.json"))
    text = "Hello, abacus! ünïcode 你好\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<|endoftext|>") == EOS_TOKEN_ID
    assert all(tokenizer.id_to_token(i) is not None for i in range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("vocab_size", 2**40, "describes a model of .* weights, and .* are stored"),
        ("intermediate_size", 2**36, "describes a model of .* weights, and .* are stored"),
        ("hidden_size", "wide", "config.json: hidden_size is 'wide'; it must be a whole number"),
        ("rope_parameters", [3], r"config.json: rope_parameters is \[3\]; it must be an object"),
    ],
)
def test_a_configuration_of_another_size_takes_no_memory(llama_dir: Path, name: str, value: object, said: str) -> None:
    """transformers would make what the files lack, and then say that it was missing."""
    edit_config(llama_dir, **{name: value})
    with pytest.raises(ConfigError, match=said):
        PagedModel.load(llama_dir, "float32", "cpu")


@pytest.mark.parametrize("spoil", ["header", "data", "shape"])
def test_weights_that_cannot_be_read_are_the_configurations_fault(llama_dir: Path, spoil: str) -> None:
    """The libraries have exceptions of their own, which a worker would end with."""
    weights = llama_dir / "model.safetensors"
    content = weights.read_bytes()
    if spoil == "shape":
        tensors = load_file(weights)
        name = next(name for name in tensors if name.endswith("up_proj.weight"))
        save_file({**tensors, name: tensors[name][:3].clone()}, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(content[:-8] if spoil == "data" else b"\xff" * 4096)
    with pytest.raises(ConfigError, match=str(llama_dir)):
        PagedModel.load(llama_dir, "float32", "cpu")
