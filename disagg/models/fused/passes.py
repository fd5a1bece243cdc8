"""The fusion pass: replaces modules of transformers that have a known shape by ones that take fewer and larger steps.

    norm      RMSNorm in one launch instead of six
    residual  with the addition before it, also across layers; needs `norm`
    gate_up   gate and up projections as one product, and act(gate) * up in one launch
    qkv       query, key and value projections as one product; RoPE, norms of heads and the writing of K and V in one launch
    few_rows  products of up to 128 rows by kernels that also norm, gate, or leave partial sums to the next norm
              (models/products); needs `residual`, `gate_up` and `qkv`
    rank_sums of several ranks: sums of few rows are part of the products and norms that `few_rows` has, in memory that all ranks
              write (models/sums), instead of NCCL's where that is the slower (sum_times); needs `few_rows`
    rotation  cosines and sines of positions from a table, and token ids, by a launch each instead of a dozen (ends)
    ends      logits where they are wanted, without a copy; of no rows picked, where all are wanted (ends)

Each is a switch. A module is replaced only if its code is, statement for statement, that of a class known here (shapes); what
is not, runs as it is. Merged weights are not held twice. Knows modules; nothing of batches or pools.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from disagg.models.fused.ends import FusedHead, FusedJoinedHead, FusedRotation, rotation_table
from disagg.models.fused.modules import FusedAttention, FusedLayer, FusedMLP, FusedRMSNorm
from disagg.models.fused.shapes import hands_on_unseen, same_code, same_functions
from disagg.models.sharding import RowParallelLinear, VocabParallelLinear

FUSIONS = ("norm", "residual", "gate_up", "qkv", "few_rows", "rank_sums", "rotation", "ends")
# Of `rope_type`: in others what a position is rotated by depends on how long the sequence is.
_ROTATES_BY_POSITION = ("default", "linear", "llama3", "yarn")

_SILU = (type(ACT2FN["silu"]), torch.nn.SiLU)
_GELU_TANH = (type(ACT2FN["gelu_pytorch_tanh"]),)
_ATTENTION = (llama.LlamaAttention, MistralAttention, Qwen2Attention)
_ROTATIONS = (
    llama.LlamaRotaryEmbedding,
    Qwen2RotaryEmbedding,
)  # alike but for where they cast, in versions before 5.23


def fuse(
    module: PreTrainedModel, wanted: Collection[str], whole_heads: Collection[int], positions: int
) -> dict[str, int]:
    """How many modules each fusion replaced, in place.

    whole_heads: layers whose attention may be fused: it has K and V of its own, and passes this rank's heads and no others.
    positions: tokens that a sequence may have.
    """
    assert set(wanted) <= set(FUSIONS), f"{wanted} are not all known fusions"
    passes: dict[str, Callable[[Any], bool]] = {
        "norm": _fuse_norm,
        "gate_up": _fuse_mlp,
        "qkv": lambda part: getattr(part, "layer_idx", None) in whole_heads and _fuse_attention(part),
        "rotation": lambda part: _fuse_rotation(part, positions, module.dtype),
    }
    found = {
        name: sum([fuse_one(part) for part in list(module.modules())])
        for name, fuse_one in passes.items()
        if name in wanted
    }
    if {"norm", "residual"} <= set(wanted):
        layers = _fuse_layers(module)
        found["residual"] = len(layers)
        if "few_rows" in wanted:
            found["few_rows"] = sum([_fuse_few_rows(layer, "rank_sums" in wanted) for layer in layers])
    if "ends" in wanted:
        found["ends"] = int(_fuse_head(module))
    return found


def _fuse_norm(part: Any) -> bool:
    plain = same_code(type(part), llama.LlamaRMSNorm)
    if not plain and not same_code(type(part), GemmaRMSNorm, ("forward", "_norm")):
        return False
    part.__class__ = FusedRMSNorm
    assert isinstance(part, FusedRMSNorm)
    part.eps_name, part.offset = ("variance_epsilon", False) if plain else ("eps", True)
    return True


def _fuse_mlp(part: Any) -> bool:
    if not same_code(type(part), llama.LlamaMLP) or not isinstance(part.act_fn, _SILU + _GELU_TANH):
        return False
    merged = _merge([part.gate_proj, part.up_proj])
    if merged is None:
        return False
    tanh = isinstance(part.act_fn, _GELU_TANH)
    part.__class__ = FusedMLP
    assert isinstance(part, FusedMLP)
    part.merged, part.merged_bias = merged
    part.tanh = tanh
    return True


def _fuse_attention(part: Any) -> bool:
    cls = type(part)
    plain = any(same_code(cls, reference) for reference in _ATTENTION)
    normed = same_code(cls, Qwen3Attention)
    rotates = (
        same_functions(cls, llama.LlamaAttention, ("apply_rotary_pos_emb", "rotate_half")) if plain or normed else False
    )
    if not rotates or part.head_dim % 2:
        return False
    norms = (part.q_norm, part.k_norm) if normed else None
    if norms is not None and not all(isinstance(norm, FusedRMSNorm) and not norm.offset for norm in norms):
        return False
    merged = _merge([part.q_proj, part.k_proj, part.v_proj])
    if merged is None:
        return False
    part.__class__ = FusedAttention
    assert isinstance(part, FusedAttention)
    part.merged, part.merged_bias = merged
    part.head_norms = norms
    return True


def _fuse_layers(module: PreTrainedModel) -> list[FusedLayer]:
    """Decoder layers with two norms that were fused."""
    layers: list[Any] = [part for part in module.modules() if same_code(type(part), llama.LlamaDecoderLayer)]
    layers = [
        part
        for part in layers
        if isinstance(part.input_layernorm, FusedRMSNorm) and isinstance(part.post_attention_layernorm, FusedRMSNorm)
    ]
    model = module.base_model
    chained = (
        layers == list(getattr(model, "layers", ()))
        and isinstance(getattr(model, "norm", None), FusedRMSNorm)
        and hands_on_unseen(type(model).forward, "hidden_states")
    )
    behind = [*(part.input_layernorm for part in layers[1:]), getattr(model, "norm", None)]
    for index, part in enumerate(layers):
        part.__class__ = FusedLayer
        assert isinstance(part, FusedLayer)
        part.next_norm = (behind[index],) if chained else ()
        part.few_rows, part.ranks = False, None
    return layers


def _fuse_few_rows(layer: FusedLayer, rank_sums: bool) -> bool:
    """rank_sums: also where both projections are cut over ranks."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMLP):
        return False
    output, down = attention.o_proj, mlp.down_proj
    if rank_sums and isinstance(output, RowParallelLinear) and isinstance(down, RowParallelLinear):
        layer.few_rows, layer.ranks = True, output.ranks
    else:
        layer.few_rows = type(output) is type(down) is torch.nn.Linear
    return layer.few_rows


def norm_of_sums(module: PreTrainedModel) -> FusedRMSNorm | None:
    """One of those behind what several ranks add up in memory that they share; None where no layer does. All are of one size."""
    layers = (part for part in module.modules() if isinstance(part, FusedLayer) and part.ranks is not None)
    return next((layer.input_layernorm for layer in layers), None)


def _fuse_rotation(part: Any, positions: int, dtype: torch.dtype) -> bool:
    known = any(same_code(type(part), reference) for reference in _ROTATIONS)
    if not known or part.rope_type not in _ROTATES_BY_POSITION:
        return False
    table = rotation_table(part, positions, dtype)
    if table is None:
        return False
    part.__class__ = FusedRotation
    assert isinstance(part, FusedRotation)
    part.table = table
    return True


def _fuse_head(module: Any) -> bool:
    """Where logits are what the output layer gives, and nothing is done with them behind it."""
    head = getattr(module, "lm_head", None)
    if not same_code(type(module), llama.LlamaForCausalLM) or getattr(head, "bias", None) is not None:
        return False
    fused: Any = head
    if type(head) is torch.nn.Linear:
        fused.__class__ = FusedHead
    elif isinstance(head, VocabParallelLinear) and head.vocab_size % head.ranks.size == 0:
        fused.__class__ = FusedJoinedHead
    else:
        return False
    fused.out = None
    return True


def _merge(parts: list[Any]) -> tuple[Tensor, Tensor | None] | None:
    """Weights and biases of linear layers as one, of which the layers' own become views. None if they are not plain."""
    linears = [part for part in parts if type(part) is torch.nn.Linear]
    biases = [part.bias for part in linears if part.bias is not None]
    if len(linears) != len(parts) or len(biases) not in (0, len(parts)):
        return None
    merged = torch.cat([part.weight.detach() for part in linears])
    sizes = [part.out_features for part in linears]
    for part, view in zip(linears, torch.split(merged, sizes), strict=True):
        part.weight = torch.nn.Parameter(view, requires_grad=False)
    return merged, torch.cat([bias.detach() for bias in biases]) if biases else None
