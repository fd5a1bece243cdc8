"""A directory is refused by its configuration and its headers, in one sentence, as a worker would refuse it that loads it."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.models import check
from disagg.models.check import check_model
from disagg.models.model import PagedModel
from disagg.text.model_files import ModelFiles
from disagg.types.errors import ConfigError
from tests.models.tiny import families, make_tiny

WEIGHT = "model.layers.1.mlp.up_proj.weight"
# What the names of Python's exceptions and of transformers' classes look like.
FOREIGN = re.compile(r"[A-Z]\w*(?:Config|Error|ForCausalLM|PreTrainedModel|Model)\b|Traceback|\n")

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {family: make_tiny(family, folder / family) for family in ("llama", "mixtral")}


@pytest.fixture
def llama(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["llama"], tmp_path / "llama"))


@pytest.fixture
def mixtral(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["mixtral"], tmp_path / "mixtral"))


def edit_config(model_dir: Path, **fields: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(model_dir: Path, edit: Callable[[Weights], None]) -> None:
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def refusal(model_dir: Path, tp: int = 1) -> str:
    """What is said; the same by whoever asks and by whoever loads."""
    with pytest.raises(ConfigError) as asked:
        check_model(ModelFiles.read(model_dir), "float32", tp)
    if tp == 1:
        with pytest.raises(ConfigError) as loaded:
            PagedModel.load(model_dir, "float32", "cpu")
        assert str(loaded.value) == str(asked.value)
    said = str(asked.value)
    assert str(model_dir) in said
    said = said.replace(str(model_dir), "")
    assert not FOREIGN.search(said), said
    assert len(said) < 600
    return said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rms_norm_eps": "a"}, "/config.json: rms_norm_eps is 'a'; it must be a number"),
        ({"rms_norm_eps": None}, "/config.json: rms_norm_eps is None; it must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it must be 0 or more"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "rope_theta is inf; it must be a f",
        ),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is no name that is known there"),
        ({"rope_parameters": [3]}, "rope_parameters is [3]; it must be an object or null"),
        ({"hidden_act": "loud"}, "'loud' is no name that is known there"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'; it must be a whole number or a list or null"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads is 3 and num_key_value_heads 2; the first must be a multiple",
        ),
        ({"num_attention_heads": 4.5}, "num_attention_heads is 4.5; it must be a whole number from 1"),
        ({"num_attention_heads": True}, "num_attention_heads is True; it must be a whole number from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be a whole number from 1 to 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be a whole number from 1 to 4"),
        ({"head_dim": 17}, "RoPE requires an even rotary dimension"),
        ({"head_dim": 18}, "weights of another shape: model.layers.0.self_attn"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number from 1"),
        ({"vocab_size": 600}, "model.embed_tokens.weight is stored as [512, 64], and config.json asks for [600, 64]"),
        ({"intermediate_size": 2**70}, "intermediate_size is a number too large to count with"),
        ({"max_position_embeddings": -4}, "max_position_embeddings is -4; it must be a whole number from 1"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of names"),
        ({"num_hidden_layers": 4}, "lacks 9 weights, such as model.layers.3.input_layernorm.weight"),
        ({"attention_bias": True}, "lacks 12 weights"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_configuration_that_cannot_be_served_is_refused_in_our_words(
    llama: Path, fields: dict[str, Any], said: str
) -> None:
    edit_config(llama, **fields)
    assert said in refusal(llama)


def take_away(weights: Weights) -> None:
    del weights[WEIGHT]


def cut_short(weights: Weights) -> None:
    weights[WEIGHT] = weights[WEIGHT][:3].clone()


def as_whole_numbers(weights: Weights) -> None:
    weights[WEIGHT] = weights[WEIGHT].to(torch.int8)


def as_eight_bits(weights: Weights) -> None:
    weights[WEIGHT] = weights[WEIGHT].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (take_away, f"lacks 1 weights, such as {WEIGHT}"),
        (cut_short, f"{WEIGHT} is stored as [3, 64], and config.json asks for [96, 64]"),
        (as_whole_numbers, f"{WEIGHT} is stored as I8; weights must be stored as one of F64, F32, F16, BF16"),
        (as_eight_bits, f"{WEIGHT} is stored as F8_E4M3; weights must be"),
    ],
)
def test_weights_that_do_not_fit_are_named(llama: Path, edit: Callable[[Weights], None], said: str) -> None:
    edit_weights(llama, edit)
    assert said in refusal(llama)


@pytest.mark.parametrize("take_one_away", [True, False])
def test_experts_that_cannot_be_put_together_are_named(mixtral: Path, take_one_away: bool) -> None:
    def edit(weights: Weights) -> None:
        name = next(name for name in weights if "experts" in name)
        if take_one_away:
            del weights[name]
        else:
            weights[name] = weights[name][:, :5].clone()

    edit_weights(mixtral, edit)
    assert "what is stored for model.layers.0.mlp.experts.gate_up_proj cannot be put together" in refusal(mixtral)


def test_ranks_that_cannot_share_the_heads_are_refused(llama: Path) -> None:
    check_model(ModelFiles.read(llama), "float32", 2)
    assert "TP size 3 cannot share 4 query heads" in refusal(llama, tp=3)


def test_what_is_stored_in_another_precision_or_beside_the_model_is_served(llama: Path) -> None:
    def edit(weights: Weights) -> None:
        weights[WEIGHT] = weights[WEIGHT].to(torch.bfloat16)
        weights["of.another.model"] = torch.zeros(3, dtype=torch.int8)

    edit_weights(llama, edit)
    check_model(ModelFiles.read(llama), "float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_that_the_configuration_does_not_know_are_refused(llama: Path, dtype: torch.dtype) -> None:
    edit_config(llama, num_hidden_layers=2)
    if dtype is not torch.float32:
        edit_weights(llama, lambda w: w.update({name: t.to(dtype) for name, t in w.items() if ".layers.2." in name}))
    said = refusal(llama)
    assert "weights more than config.json describes, such as 'model.layers.2." in said
    assert "a model of 2 layers" in said


def test_layers_of_experts_that_the_configuration_does_not_know_are_refused(mixtral: Path) -> None:
    edit_config(mixtral, num_hidden_layers=2)
    assert "weights more than config.json describes" in refusal(mixtral)


@pytest.mark.parametrize(
    ("announced", "served"),
    [
        ({"num_nextn_predict_layers": 1}, True),
        ({"mtp_num_hidden_layers": 1}, True),
        ({"num_nextn_predict_layers": 0}, False),
        ({"mtp_loss_scaling_factor": 1}, False),
    ],
)
def test_the_next_layers_are_ignored_where_they_are_announced(
    llama: Path, announced: dict[str, int], served: bool
) -> None:
    edit_config(llama, num_hidden_layers=2, **announced)
    if served:
        assert check_model(ModelFiles.read(llama), "float32") > 0
        edit_config(llama, num_hidden_layers=1, **announced)
    assert "weights more than config.json describes" in refusal(llama)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.2.mlp.down_proj.weight_scale",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_weights_in_the_models_own_parts_that_the_configuration_does_not_know_are_refused(
    llama: Path, name: str
) -> None:
    edit_weights(llama, lambda weights: weights.update({name: torch.ones(3)}))
    said = refusal(llama)
    assert f"1 weights in parts of the model that config.json does not describe, such as {name!r}" in said


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.rotary_emb.inv_freq",  # of checkpoints from before it was a buffer
        "model.layers.1.self_attn.k_scale",
        "vision_tower.layers.1.self_attn.q_proj.bias",
        "model.visual.merger.weight",
        "mtp.layers.0.self_attn.q_norm.weight",
    ],
)
def test_what_is_beside_the_models_own_weights_is_ignored(llama: Path, name: str) -> None:
    edit_weights(llama, lambda weights: weights.update({name: torch.ones(3)}))
    assert check_model(ModelFiles.read(llama), "float32") in (0, 3), "counted, unless the library knows of it"


def test_what_is_of_another_model_is_ignored_and_counted(llama: Path) -> None:
    def add(weights: Weights) -> None:
        weights |= {f"vision_tower.layers.{layer}.fc1.weight": torch.zeros(2, 3) for layer in range(9)}

    assert check_model(ModelFiles.read(llama), "float32") == 0
    edit_weights(llama, add)
    assert check_model(ModelFiles.read(llama), "float32") == 9 * 6


def test_no_weight_is_read_or_made(made: dict[str, Path], tmp_path: Path) -> None:
    """A model of 5 TB, of which only the header is there: its file is one hole."""
    llama = Path(shutil.copytree(made["llama"], tmp_path / "huge"))
    edit_config(llama, intermediate_size=2**31)
    path = llama / "model.safetensors"
    header = json.loads(path.read_bytes()[8 : 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]])
    header.pop("__metadata__")
    at = 0
    for tensor in header.values():
        tensor["shape"] = [2**31 if length == 96 else length for length in tensor["shape"]]
        size = 4 * torch.Size(tensor["shape"]).numel()
        tensor["data_offsets"] = [at, at + size]
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + at)
        except OSError:
            pytest.skip("this file system has no files of 5 TB")
    check_model(ModelFiles.read(llama), "float32")


@pytest.mark.parametrize("family", families())
def test_every_family_is_checked_without_values(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_values(module: object) -> None:
        raise AssertionError(f"{family} is probed on the CPU")

    make_tiny(family, tmp_path)
    monkeypatch.setattr(check, "_with_zeros", needs_values)
    check_model(ModelFiles.read(tmp_path), "bfloat16")


def test_what_only_values_decide_is_probed_with_zeros(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    lay_out = check.lay_out

    def needs_values(model_dir: Path, module: Any, dtype: str, longest: int) -> Any:
        devices.append(module.device.type)
        if module.device.type == "meta":
            raise NotImplementedError("nonzero")
        return lay_out(model_dir, module, dtype, longest)

    monkeypatch.setattr(check, "lay_out", needs_values)
    check_model(ModelFiles.read(llama), "float32")
    assert devices == ["meta", "cpu"]
