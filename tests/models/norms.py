"""A norm as the fusion pass leaves it, without a model around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from disagg.models.fused.modules import FusedRMSNorm


def fused_norm(weight: Tensor) -> FusedRMSNorm:
    norm: Any = torch.nn.Module()
    norm.weight, norm.eps = torch.nn.Parameter(weight), 1e-5
    norm.__class__ = FusedRMSNorm
    norm.eps_name, norm.offset = "eps", False
    return norm  # type: ignore[no-any-return]
