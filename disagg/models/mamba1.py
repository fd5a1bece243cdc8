"""Mamba-1 over several tokens, continuing from a state.

transformers' Mamba-1 modules begin every scan of several tokens from zero, whatever state they have (its
`mamba_selective_scan`, as the kernel of the same name), so a prompt could not be computed in chunks. The computation is
that of the paper (https://arxiv.org/abs/2312.00752, algorithm 2) with the weights and the optional norms of transformers'
modules. Single tokens are left to the module. Knows one module's weights; nothing of pages or batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus

from disagg.models.state_cache import LayerStates

MAMBA1_MODULES = frozenset({"FalconMambaMixer", "JambaMambaMixer", "MambaMixer"})

# Tokens whose transitions are in memory at a time: [64, channels, states] of float32.
BLOCK_TOKENS = 64


class Mamba1:
    """A module's weights, run over one sequence's next tokens."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def forward(self, hidden: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """hidden: [1, n, H], n > 1. Returns [1, n, H]."""
        module, num_tokens = self._module, hidden.shape[1]
        layer = module.layer_idx
        inputs, gate = module.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)
        inputs = states.update_conv_state(inputs, layer, conv_kernel_size=module.conv_kernel_size)
        inputs = module.act(causal_conv1d(inputs, module.conv1d)[..., -num_tokens:]).transpose(1, 2)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, b, c = module.x_proj(inputs).split(sizes, dim=-1)
        if hasattr(module, "dt_layernorm"):
            time_step, b, c = module.dt_layernorm(time_step), module.b_layernorm(b), module.c_layernorm(c)
        begin = states.get_recurrent_state(layer)
        scanned, end = selective_scan(
            inputs[0].float(),
            softplus(module.dt_proj(time_step[0]).float()),
            -torch.exp(module.A_log.float()),
            b[0].float(),
            c[0].float(),
            None if begin is None else begin[0].float(),
        )
        states.update_recurrent_state(end.unsqueeze(0), layer)
        scanned = scanned + inputs[0] * module.D.float()
        scanned = scanned * silu(gate[0].transpose(0, 1))
        output: torch.Tensor = module.out_proj(scanned.to(hidden.dtype))
        return output.unsqueeze(0)


def causal_conv1d(inputs: torch.Tensor, layer: torch.nn.Conv1d) -> torch.Tensor:
    """inputs: [B, channels, n]; of the same shape: each output sees the inputs up to its own, and zeros before the first."""
    return conv1d(inputs, layer.weight, layer.bias, padding=layer.kernel_size[0] - 1, groups=layer.groups)[
        ..., : inputs.shape[-1]
    ]


def selective_scan(
    inputs: torch.Tensor,
    time_step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    begin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """state[t] = exp(time_step[t] a) state[t - 1] + time_step[t] b[t] inputs[t]; output[t] = state[t] c[t].

    All float32. inputs, time_step: [n, channels]; a: [channels, states]; b, c: [n, states]; begin: [channels, states] or
    None for zeros. Returns outputs [n, channels] and the last state.
    """
    state = torch.zeros_like(a) if begin is None else begin
    outputs = []
    for start in range(0, inputs.shape[0], BLOCK_TOKENS):
        some = slice(start, start + BLOCK_TOKENS)
        decay = torch.exp(time_step[some].unsqueeze(2) * a)
        states = (time_step[some] * inputs[some]).unsqueeze(2) * b[some].unsqueeze(1)
        for now, decay_now in zip(states.unbind(0), decay.unbind(0), strict=True):
            state = now.addcmul_(decay_now, state)
        outputs.append(torch.matmul(states, c[some].unsqueeze(2)).squeeze(2))
    return torch.cat(outputs), state.clone()
