"""Recurrent layers: what they keep of a sequence is one state, read from a page before a run and written to one after it.

transformers' recurrent modules (Mamba, short convolutions, gated delta nets) compute many tokens of one sequence, or one
token of many; a batch of ours has rows of both kinds. So `attach` puts itself in front of each such module, and the step
that is active calls it once per prefill run and once for all decode rows:

    hidden   [1, N, H]   prefill run 0 │ run 1   │ decode rows
    calls                [1, n0, H]    │ [1, n1] │ [B, 1, H]
    states               a page, or none at a sequence's beginning; B pages

Everything around the module, attention among it, sees all rows at once. Knows the calls that recurrent modules make to
transformers' cache; nothing of attention, or of which families are served.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import transformers

from disagg.messages.layout import StatePart
from disagg.models.attention.calls import LayerPlace
from disagg.models.batch import ForwardBatch, StateTables
from disagg.models.mamba1 import MAMBA1_MODULES, Mamba1
from disagg.models.pool import TORCH_DTYPES, Pool, StatePages
from disagg.models.state_cache import LayerStates
from disagg.types.errors import ConfigError

# Modules that keep a state in the cache that they are given, and continue from it exactly, by the names of their classes.
# (test_states.py; of transformers' Mamba-1 modules, our own forward does.)
STATE_MODULES = MAMBA1_MODULES | {
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "Lfm2MoeShortConv",
    "Lfm2ShortConv",
    "Lfm3ShortConv",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
}

# A Mamba-2 layer does not see a token whose time step is that short.
NEGLIGIBLE_TIME_STEP = 1e-8

# transformers limits their time steps to `time_step_min`, of which its initial values are made, where it computes several
# tokens, and not where it computes one. Their publisher's own code limits them to `time_step_limit`, and so do other servers.
_LIMITED_BY_CONFIG = frozenset({"NemotronHMamba2Mixer"})

# What modules call the cache that they are given; and all that they may be given.
_CACHE_ARGUMENTS = frozenset({"cache_params", "past_key_values"})
_ARGUMENTS = _CACHE_ARGUMENTS | {"hidden_states", "attention_mask"}

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


Compute = Callable[[torch.Tensor, LayerStates], torch.Tensor]
"""([B, n, H], the states before) -> [B, n, H], leaving the states after: a recurrent module on n tokens of B sequences."""


class LayerRecurrence(Protocol):
    """What one forward does with each recurrent module's call."""

    def recur(self, layer: int, compute: Compute, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [1, N, H], all rows of the batch. Returns [1, N, H]."""


_ACTIVE: ContextVar[LayerRecurrence | None] = ContextVar("disagg_layer_recurrence", default=None)


@contextlib.contextmanager
def active_states(recurrence: LayerRecurrence) -> Iterator[None]:
    """Within it, calls of attached modules in this thread go to `recurrence`."""
    token = _ACTIVE.set(recurrence)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def attach(module: torch.nn.Module) -> None:
    """From now on, the model's recurrent modules run through the active LayerRecurrence, and not without one.

    Raises ConfigError for one that would not compute the same in chunks as at once.
    """
    limit = getattr(getattr(module, "config", None), "time_step_limit", None)
    for part in module.modules():
        if type(part).__name__ in STATE_MODULES:
            if type(part).__name__ in _LIMITED_BY_CONFIG and limit is not None:
                part.time_step_limit = cast(Any, tuple(limit))
            least, most = getattr(part, "time_step_limit", None) or (0.0, math.inf)
            if least > NEGLIGIBLE_TIME_STEP or most < math.inf:
                raise ConfigError(
                    f"layer {part.layer_idx} limits its time steps to {least} and {most}, which transformers does where it "
                    "computes several tokens but not where it computes one"
                )
            part.forward = _Attached(part)


class _Attached:
    """Stands in front of a recurrent module's forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Raises ConfigError for a module that needs more than its hidden states and a cache."""
        self._layer = cast(int, module.layer_idx)
        self._forward = module.forward
        self._mamba1 = Mamba1(module) if type(module).__name__ in MAMBA1_MODULES else None
        self._name = f"transformers {transformers.__version__}'s {type(module).__name__}"
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = next(name for name in parameters if name in _CACHE_ARGUMENTS)
        others = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in _ARGUMENTS]
        self._others = [parameter.name for parameter in others]
        if any(parameter.default is parameter.empty for parameter in others):
            raise ConfigError(f"{self._name} needs {', '.join(self._others)}, which this version does not give it")

    def __call__(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        recurrence = _ACTIVE.get()
        assert recurrence is not None, "a recurrent layer was called outside PagedModel.forward"
        assert options.get("attention_mask") is None, "transformers built a mask, though no row is padding"
        given = [name for name in self._others if options.get(name) is not None]
        assert not given, f"{self._name} is given {', '.join(given)}"
        return recurrence.recur(self._layer, self._compute, hidden_states)

    def _compute(self, hidden: torch.Tensor, states: LayerStates) -> torch.Tensor:
        if self._mamba1 is not None and hidden.shape[1] > 1:
            return self._mamba1.forward(hidden, states)
        output: torch.Tensor = self._forward(hidden, **{self._cache_argument: states})
        return output


class PagedStates:
    """One forward over one pool: each recurrent layer's states from the pages that runs read to those that they write."""

    def __init__(self, batch: ForwardBatch, pool: Pool, layer_places: Mapping[int, LayerPlace]) -> None:
        """layer_places: of every recurrent layer, by its index in the model."""
        self._layer_places = layer_places
        self._calls = dict.fromkeys(layer_places, 0)
        self._groups = {
            index: _GroupStates(batch, tables, view)
            for index, (tables, view) in enumerate(zip(batch.tables, pool.views, strict=True))
            if isinstance(tables, StateTables) and isinstance(view, StatePages)
        }

    def recur(self, layer: int, compute: Compute, hidden: torch.Tensor) -> torch.Tensor:
        self._calls[layer] += 1
        where = self._layer_places[layer]
        return self._groups[where.group].recur(where.index, compute, hidden)

    def assert_every_layer_ran_once(self) -> None:
        """A layer that ran twice, or not at all, would leave a wrong state without any error."""
        wrong = {layer: calls for layer, calls in self._calls.items() if calls != 1}
        assert not wrong, f"calls of recurrent layers, where not one: {wrong}"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a module. reads: [sequences] int64, the pages of the states before; None where a sequence begins."""

    rows: slice
    reads: torch.Tensor | None
    one_token_each: bool


class _GroupStates:
    """What the layers of one group have in common in one forward."""

    def __init__(self, batch: ForwardBatch, tables: StateTables, view: StatePages) -> None:
        self._view = view
        self._names = [part.name for part in view.group.parts]
        self._writes = tables.writes
        self._calls = []
        for index, run in enumerate(batch.prefills):
            reads = tables.reads[index : index + 1] if run.context_tokens else None
            self._calls.append(_Call(slice(run.start, run.start + run.num_tokens), reads, one_token_each=False))
        if batch.decodes is not None:
            reads = tables.reads[len(batch.prefills) :]
            self._calls.append(_Call(slice(batch.decodes.start, batch.num_rows), reads, one_token_each=True))

    def recur(self, layer_in_group: int, compute: Compute, hidden: torch.Tensor) -> torch.Tensor:
        """All states are read before any is written: one run's page may be another's beginning."""
        parts = self._view.parts(layer_in_group)
        outputs = []
        after: list[list[torch.Tensor]] = [[] for _ in parts]
        for call in self._calls:
            states = LayerStates(None if call.reads is None else self._read(parts, call.reads))
            rows = hidden[:, call.rows]
            if call.one_token_each:
                outputs.append(compute(rows.transpose(0, 1), states).transpose(0, 1))
            else:
                outputs.append(compute(rows, states))
            for written, name in zip(after, self._names, strict=True):
                written.append(states.states[name])
        for part, written in zip(parts, after, strict=True):
            part.index_copy_(0, self._writes, _joined(written, 0).to(part.dtype))
        return _joined(outputs, 1)

    def _read(self, parts: Sequence[torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        states = [part.index_select(0, pages) for part in parts]
        return dict(zip(self._names, states, strict=True))


def _joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


class StateProbe:
    """Runs each recurrent layer from its beginning and one token on, and notes what it keeps.

    parts: by layer, in order of the calls.
    """

    def __init__(self) -> None:
        self.parts: dict[int, tuple[StatePart, ...]] = {}

    def recur(self, layer: int, compute: Compute, hidden: torch.Tensor) -> torch.Tensor:
        """Raises ConfigError when the module and this version of transformers do not understand each other."""
        assert layer not in self.parts, f"recurrent layer {layer} runs twice"
        begun = LayerStates()
        try:
            output = compute(hidden, begun)
            compute(hidden[:, -1:], LayerStates({name: state.clone() for name, state in begun.states.items()}))
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"transformers {transformers.__version__} does not keep the states of recurrent layers as this version "
                f"expects: {error}"
            ) from error
        self.parts[layer] = tuple(
            StatePart(name, tuple(state.shape[1:]), _DTYPE_NAMES[state.dtype]) for name, state in begun.states.items()
        )
        return output
