"""What an attention backend is, what it can, and what it is given.

A backend computes one *phase*: the rows of chunks of prompts (prefill), or one row each of many sequences (decode). Before
it is called, the new K and V are in their pages.

    once per forward and layer group    plan = backend.plan(work)           what all layers of the group share
    once per layer                      plan.run(layer_in_group, query, key, value, scoring, out)

Which backend a layer group gets is decided at start (attention/choice), by what each says it can (`Capabilities`) and what
the model's layers ask (`Ask`). Knows shapes and tables; nothing of models, requests, or who chooses.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from disagg.models.batch import DecodeBatch, PageTable, PrefillRun
from disagg.models.pool import AttentionPages

ALL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})


class Phase(enum.StrEnum):
    """Which kind of rows a backend computes."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns q k into weights. sinks: [query heads] logits that take weight and give no value, or None."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """True when a fused kernel that knows only a scale and a mask cannot be used."""
        return self.softcap is not None or self.sinks is not None


@dataclass(frozen=True, slots=True)
class Ask:
    """What the layers of one group ask, taken together."""

    phase: Phase
    device: str  # its type
    dtype: torch.dtype
    head_dim: int
    window: bool = False  # any layer has one
    softcap: bool = False  # likewise
    sinks: bool = False  # likewise
    hopper: bool = False  # the device is a chip of that generation


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, declared."""

    phase: Phase
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = ALL_DTYPES
    head_dims: tuple[int, int] = (1, 1 << 30)  # (multiple of, most)
    windows: bool = True
    softcaps: bool = True
    sinks: bool = True
    # `plan` and `run` may be part of a CUDA graph, whose replays find other numbers in the same tables.
    captured: bool = False
    least_tokens: int = 1  # see `share`
    step_tokens: int = 1  # see `share`
    prefix_tokens: int = 0  # see `share`
    # Places of a run's pages that no row sees are read, too, and given no weight: they must be finite.
    whole_pages: bool = False
    hopper: bool = False  # only on chips of that generation

    def share(self, run: PrefillRun) -> tuple[int, int]:
        """(rows before, rows) of a run that this backend is to take; the others are left to another one.

        A multiple of step_tokens behind a multiple of them, if it is least_tokens at least or behind prefix_tokens.
        """
        step = self.step_tokens
        before = -run.context_tokens % step
        rows = max(0, run.num_tokens - before) // step * step
        if rows and (rows >= self.least_tokens or run.context_tokens + before >= max(1, self.prefix_tokens)):
            return before, rows
        return 0, 0

    def lacks(self, ask: Ask) -> str:
        """What of it the backend cannot do; empty if it can do it all."""
        multiple, most = self.head_dims
        missing = {
            f"{ask.phase} phase": ask.phase != self.phase,
            f"device {ask.device}": ask.device not in self.devices,
            str(ask.dtype).removeprefix("torch."): ask.dtype not in self.dtypes,
            f"head_dim {ask.head_dim}": ask.head_dim % multiple != 0 or ask.head_dim > most,
            "windows": ask.window and not self.windows,
            "softcaps": ask.softcap and not self.softcaps,
            "sinks": ask.sinks and not self.sinks,
            "kernels for other chips than Hopper's": self.hopper and not ask.hopper,
        }
        return ", ".join(name for name, lacking in missing.items() if lacking)


PREPARING: ContextVar[bool] = ContextVar("disagg_attention_prepares", default=False)
"""Whether a backend is to do now, beside what it is asked, what first runs of other lengths would wait for."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Chunks of prompts, or some of them. rows: of `table`, one per run. tiles: see AttentionTables; then runs say nothing."""

    view: AttentionPages
    runs: tuple[PrefillRun, ...]
    table: PageTable
    rows: tuple[int, ...]
    tiles: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One row of each of many sequences. table: a row for each of them, in order."""

    view: AttentionPages
    batch: DecodeBatch
    table: PageTable


class AttentionPlan(Protocol):
    """One phase of one forward, for any layer of one group."""

    def run(
        self,
        layer_in_group: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Writes the phase's rows of `out`, and no others.

        query: [query_heads, N, head_dim], key, value: [kv_heads, N, head_dim], all rows of the batch, dims contiguous;
        out: [N, query_heads, head_dim], contiguous.
        """


Work = TypeVar("Work", PrefillWork, DecodeWork, contravariant=True)


class AttentionBackend(Protocol, Generic[Work]):
    """One way to compute one phase. What it can do stands beside its name (attention/choice)."""

    def plan(self, work: Work) -> AttentionPlan:
        """What all layers of the group share. Does not wait for the device."""
