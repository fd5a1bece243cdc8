"""A fresh conversion of the default model, and GGUF files small enough to write in a test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from disagg.convert.model_dir import resolve

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, WIDE = 4, 2, 8, 32, 2, 64
TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁a", "▁ab", "ab"]


@pytest.fixture(scope="session")
def fresh_smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    cache = tmp_path_factory.mktemp("models")
    yield resolve("smollm2-135m", cache)
    shutil.rmtree(cache)  # half a gigabyte, of which pytest would keep three


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k. values: [heads * head_dim, hidden]."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def llama_weights() -> dict[str, np.ndarray]:
    """Under transformers' names."""
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: rng.standard_normal(shape, dtype=np.float32) * 0.3 for name, shape in shapes.items()}


def write_llama(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra_tensor: str | None = None,
    rope_scaling: str | None = None,
    rotated: int | None = None,
    tokenizer: str = "llama",
    eot_token_id: int | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if rope_scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling)
    if rotated is not None:
        writer.add_rope_dimension_count(rotated)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 260 + [-1.0, -1.0, -2.0, -4.0, -3.0])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_token_types(kinds + [TokenType.NORMAL] * (len(TOKENS) - len(kinds)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    if eot_token_id is not None:
        writer.add_eot_token_id(eot_token_id)
    for name, values in gguf_names(llama_weights()).items():
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.zeros(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    renamed = {}
    for name, values in weights.items():
        if "q_proj" in name or "k_proj" in name:
            values = permuted(values, HEADS if "q_proj" in name else KV_HEADS)
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        renamed[name] = values
    return renamed
