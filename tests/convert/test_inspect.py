from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig

from disagg.convert import inspect
from disagg.convert.inspect import inspect_model
from disagg.models.families import ATTENTION_FREE
from disagg.models.layers import max_model_len_of
from disagg.types.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def model(folder: Path, **changes: Any) -> Path:
    """A directory whose config.json is BASE with `changes`; None removes a key."""
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.ones((3, 5), np.float16), "b": np.ones(2, np.float32)}, folder / "model.safetensors")
    return folder


def test_what_is_left_out_follows_from_the_rest(tmp_path: Path) -> None:
    facts = inspect_model(model(tmp_path))
    assert (facts.num_kv_heads, facts.head_dim) == (4, 16)
    assert (facts.num_parameters, facts.weight_bytes, facts.torch_dtype) == (17, 38, "float16")
    assert facts.layer_types == (FULL,) * 6
    assert facts.bos_token_id is None


@pytest.mark.parametrize("at_the_top", [True, False])
@pytest.mark.parametrize(("table", "kind"), [("rope_parameters", "rope_type"), ("rope_scaling", "type")])
def test_a_context_that_longrope_shortens_is_said_with_the_reason(
    tmp_path: Path, table: str, kind: str, at_the_top: bool
) -> None:
    original = {"original_max_position_embeddings": 64}
    rope = {kind: "longrope", "short_factor": [1.0], **({} if at_the_top else original)}
    facts = inspect_model(model(tmp_path, **{table: rope}, **(original if at_the_top else {})))
    assert facts.max_model_len == 64
    assert facts.max_model_len_note.startswith(
        "config.json says 512; past original_max_position_embeddings = 64, LongRoPE"
    )


def test_a_context_that_nothing_shortens_needs_no_reason(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    facts = inspect_model(model(tmp_path, rope_parameters=yarn))
    assert (facts.max_model_len, facts.max_model_len_note) == (512, "")


@pytest.mark.parametrize("name", ["layer_types", "layers_block_type"])
def test_layers_that_are_named_one_by_one_are_counted(tmp_path: Path, name: str) -> None:
    """As of `nemotron_h`, of which `transformers` saves no other number."""
    assert inspect_model(model(tmp_path, num_hidden_layers=None, **{name: [FULL] * 5})).num_layers == 5
    with pytest.raises(ConfigError, match="num_hidden_layers is 0"):
        inspect_model(model(tmp_path, num_hidden_layers=0, **{name: [FULL] * 5}))


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"])
def test_what_cannot_be_left_out_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json lacks {missing}"):
        inspect_model(model(tmp_path, **{missing: None}))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_number_that_is_zero_is_not_said_to_be_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is 0; it must be a number from 1"):
        inspect_model(model(tmp_path, **{name: 0}))


@pytest.mark.parametrize("family", sorted(ATTENTION_FREE))
def test_a_model_without_attention_has_neither_heads_nor_positions(tmp_path: Path, family: str) -> None:
    """As such checkpoints are published. Any number of ranks can hold its states."""
    folder = model(
        tmp_path, model_type=family, num_attention_heads=None, max_position_embeddings=None, num_heads=8, head_dim=16
    )
    facts, theirs = inspect_model(folder), AutoConfig.from_pretrained(folder)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (0, 0, 0)
    assert (facts.max_model_len, facts.max_model_len_note) == (max_model_len_of(folder, theirs), "")
    assert (facts.layer_types, facts.sliding_window) == (("mamba",) * 6, None)
    assert facts.tie_word_embeddings == theirs.tie_word_embeddings
    facts.check_heads(3)


def test_a_nested_text_config_counts(tmp_path: Path) -> None:
    text = {**BASE, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 128, "vocab_size": 77}
    folder = model(tmp_path, model_type="gemma3", text_config=text, num_hidden_layers=None, vocab_size=None)
    facts = inspect_model(folder)
    assert (facts.model_type, facts.head_dim, facts.vocab_size, facts.sliding_window) == ("gemma3", 32, 77, 128)
    assert facts.layer_types == (SLIDING,) * 5 + (FULL,)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "gemma2", "sliding_window": 64, "head_dim": 16},
        {"model_type": "gemma3_text", "sliding_window": 64, "head_dim": 16},
        {"model_type": "gemma3_text", "sliding_window": 64, "head_dim": 16, "sliding_window_pattern": 3},
        {"model_type": "cohere2", "sliding_window": 64},
        {"model_type": "qwen2", "sliding_window": 64},
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
        {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4},
    ],
    ids=str,
)
def test_layer_kinds_agree_with_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Mistral's configuration has no layer_types: there a window holds for all layers."""
    folder = model(tmp_path, **{"num_key_value_heads": 2, **changes})
    theirs = AutoConfig.from_pretrained(folder)
    expected = getattr(theirs, "layer_types", None) or [SLIDING if changes.get("sliding_window") else FULL] * 6
    facts = inspect_model(folder)
    assert list(facts.layer_types) == list(expected)
    assert facts.sliding_window == (64 if SLIDING in expected else None)


def test_ends_of_text_are_those_by_which_the_engine_ends_answers(tmp_path: Path) -> None:
    folder = model(tmp_path, eos_token_id=[2, 7, 2])
    assert inspect_model(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert inspect_model(folder).eos_token_ids == (9, 2)


def test_shards_add_up(tmp_path: Path) -> None:
    folder = model(tmp_path)
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        save_file({f"w{number}": np.ones((4, number), np.float32)}, folder / f"model-{number}.safetensors")
    save_file({"other": np.ones(1000, np.float32)}, folder / "consolidated.safetensors")
    index = {"weight_map": {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = inspect_model(folder)
    assert (facts.num_parameters, facts.weight_bytes) == (12, 48)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 files .*: model-2\.safetensors"):
        inspect_model(folder)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="cut short"):
        inspect_model(folder)
    weights.write_bytes(whole + b"x" * 100)
    with pytest.raises(ConfigError, match="goes on behind its tensors"):
        inspect_model(folder)
    weights.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        inspect_model(folder)


def test_an_index_that_names_no_files_is_refused(tmp_path: Path) -> None:
    (model(tmp_path) / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    with pytest.raises(ConfigError, match=r"index\.json names no files: its weight_map is empty"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("error", [IndexError("list index out of range"), KeyError("x"), AttributeError("no\nsuch")])
def test_whatever_goes_wrong_with_what_files_say_is_said_of_them(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise error

    monkeypatch.setattr(inspect, "read_header", fails)
    with pytest.raises(ConfigError, match=rf"^{tmp_path} cannot be read, .*: {type(error).__name__}: ") as raised:
        inspect_model(model(tmp_path))
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(inspect, "read_header", lambda path: (_ for _ in ()).throw(OSError(5, "it may pass")))
    with pytest.raises(OSError, match="it may pass"):
        inspect_model(tmp_path)
