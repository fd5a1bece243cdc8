"""Cuts a loaded module for one of several pipeline stages, in place.

    stage 0    embeddings │ layers 0 .. 11  │ ─ hidden states ─┐
    stage 1               └──> layers 12 .. 20 │ ─ hidden ───┐ │
    stage 2                                 └──> layers 21 .. 29 │ norm, head ──> logits

What stands around the layers runs on every stage as transformers has it, which makes positions' rotations everywhere; the
embeddings' rows are the first stage's, and the head is the last one's. In place of another stage's layers stand modules without
weights: the first one gives what was received, and one behind the stage's own keeps what is to be sent.

This is right for a model that hands each layer what the one before gave, and beside it only what follows from positions:
`LayerWatch` looks at one forward, and a model that does otherwise is refused. Knows transformers' modules; nothing of pools,
batches or processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from disagg.models.attention.calls import LayerPlace
from disagg.models.layers import LayerPlaces
from disagg.models.split import Layers, most_stages, split_layers
from disagg.types.errors import ConfigError

# What layers are given beside hidden states, and what follows from positions alone.
OF_POSITIONS = frozenset({"position_embeddings", "position_ids", "cache_position"})


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a layer gives: [1, rows, width]. in_tuple: as the first of a tuple of so many; 0 if it is in none."""

    width: int
    dtype: torch.dtype
    in_tuple: int


def layers_of(module: PreTrainedModel) -> torch.nn.ModuleList:
    """Raises ConfigError where they are not one list in the model."""
    layers = getattr(module.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != module.config.num_hidden_layers:
        raise _cannot(module, "has no list of its layers")
    return layers


def _cannot(module: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"server.pp > 1: {type(module).__name__} {why}, so its layers cannot be cut by stage; server.pp must be 1"
    )


class LayerWatch:
    """What each layer is given and gives in the one forward that runs within it."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._layers = layers_of(module)
        self._given: list[dict[str, Any]] = []
        self._gave: list[Any] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerWatch:
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._after))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        bound = inspect.signature(layer.forward).bind(*args, **options)
        given = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        self._given.append(given)

    def _after(self, layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._gave.append(output)

    def hidden(self) -> tuple[Hidden, ...]:
        """Of each layer. Raises ConfigError for a model whose layers need or give more than hidden states."""
        number = len(self._layers)
        if not len(self._given) == len(self._gave) == number:
            raise _cannot(self._module, f"runs {len(self._given)} layers of {number} in a forward")
        found, before = [], None
        for given, output in zip(self._given, self._gave, strict=True):
            name, hidden = next(iter(given.items()))
            if before is not None and hidden is not before:
                raise _cannot(self._module, "changes hidden states between layers")
            others = [other for other, value in given.items() if other != name and any(_tensors(value))]
            if more := sorted(set(others) - OF_POSITIONS):
                raise _cannot(self._module, f"gives its layers {', '.join(more)} beside hidden states")
            before = output[0] if isinstance(output, tuple) else output
            if not isinstance(before, torch.Tensor) or before.dim() != 3:
                raise _cannot(self._module, "has layers that give something else than hidden states")
            found.append(Hidden(before.shape[2], before.dtype, len(output) if isinstance(output, tuple) else 0))
        return tuple(found)


def hidden_of(module: PreTrainedModel, probe: Callable[[], object]) -> tuple[Hidden, ...]:
    """What each layer gives, found by a forward that `probe` runs. Raises ConfigError as `LayerWatch.hidden`."""
    with LayerWatch(module) as watch:
        probe()
    return watch.hidden()


def _tensors(value: Any) -> Iterator[bool]:
    """True for each one in it."""
    if isinstance(value, torch.Tensor):
        yield True
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


# ---- where to cut


def cuts_of(module: PreTrainedModel, places: LayerPlaces, stages: int) -> tuple[int, ...]:
    """Stage s has layers [cuts[s], cuts[s + 1]): as evenly by weights as they go. Raises ConfigError if there are too many
    stages.

    The head counts half: steps with chunks compute it for few of their rows, and steps without for all.
    """
    whole: Any = module
    head = whole.get_output_embeddings()
    if head is None or module.get_input_embeddings() is None:
        raise _cannot(module, "has no embeddings of its own")
    layers = Layers(
        costs=[_weights(layer) for layer in layers_of(module)],
        head=_weights(head) / 2,
        keeps={layer for group in places.groups for layer in group.layers},
        shared={(call.layer, call.source) for call in places.calls if call.source != call.layer},
    )
    cuts = split_layers(layers, stages)
    if cuts is None:
        raise ConfigError(
            f"server.pp = {stages}: every stage needs a layer that has a KV cache or a state of its own, and layers that share "
            f"one are in one stage; with the {len(layers.costs)} layers of this model it must be at most {most_stages(layers)}"
        )
    return cuts


def _weights(part: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


def places_of(places: LayerPlaces, first: int, stop: int) -> tuple[LayerPlaces, tuple[int, ...]]:
    """(where the layers in [first, stop) keep what they keep, of which groups these are, by index)."""
    parts = [group.on_stage(first, stop) for group in places.groups]
    own = [index for index, part in enumerate(parts) if part is not None]

    def moved(whole: Mapping[int, LayerPlace]) -> dict[int, LayerPlace]:
        here = {}
        for layer, place in whole.items():
            part = parts[place.group]
            if first <= layer < stop and part is not None:
                source = places.groups[place.group].layers[place.index]
                here[layer] = replace(place, group=own.index(place.group), index=part.layers.index(source))
        return here

    cut = LayerPlaces(
        groups=tuple(part for part in parts if part is not None),
        attention=moved(places.attention),
        states=moved(places.states),
        calls=tuple(call for call in places.calls if first <= call.layer < stop),
    )
    return cut, tuple(own)


# ---- cutting


class _Elsewhere(torch.nn.Module):
    """In place of a layer of another stage: gives what it is given. Has what the model looks up on its layers."""

    def __init__(self, layer: torch.nn.Module, hidden: Hidden) -> None:
        super().__init__()
        self._in_tuple = hidden.in_tuple
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, *[None] * (self._in_tuple - 1)) if self._in_tuple else hidden_states


class _Entry(_Elsewhere):
    """Gives what was received."""

    received: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None, "a stage computes what it has not received"
        return super().forward(received)


class _Exit(_Elsewhere):
    """Keeps what is to be sent."""

    left: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.left = hidden_states
        return super().forward(hidden_states)


class _NoRows(torch.nn.Module):
    """In place of embeddings that another stage has. What it gives must reach nothing, so it is no number."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.full((*ids.shape, self._width), torch.nan, dtype=self._dtype, device=ids.device)


class _NoHead(torch.nn.Module):
    """In place of the last stage's head: it sees no rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight[:0].clone(), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class StageCut:
    """A module that was cut. incoming, outgoing: what crosses to it and from it; None at the ends."""

    def __init__(self, module: PreTrainedModel, hidden: tuple[Hidden, ...], first: int, stop: int) -> None:
        layers, whole = layers_of(module), cast(Any, module)
        self.incoming = hidden[first - 1] if first else None
        self.outgoing = hidden[stop - 1] if stop < len(layers) else None
        for index, layer in enumerate(list(layers)):
            if not first <= index < stop:
                kind = _Entry if index == 0 else _Exit if index == stop else _Elsewhere
                layers[index] = kind(layer, hidden[index])
        self._entry, self._exit = layers[0], layers[stop] if stop < len(layers) else None
        if self.incoming is not None:
            embeddings = whole.get_input_embeddings()
            whole.set_input_embeddings(_NoRows(embeddings.embedding_dim, embeddings.weight.dtype))
        if self.outgoing is not None:
            whole.set_output_embeddings(_NoHead(whole.get_output_embeddings().weight))

    def receive(self, hidden: torch.Tensor | None) -> None:
        """For the next forward. hidden: [1, rows, width], of the stage before; None for the first stage."""
        assert (hidden is None) == (self.incoming is None), "hidden states for a first stage, or none for a later one"
        if isinstance(self._entry, _Entry):
            self._entry.received = hidden

    def left(self) -> torch.Tensor:
        """[1, rows, width], that the last forward gives to the next stage."""
        assert isinstance(self._exit, _Exit) and self._exit.left is not None, "nothing has left this stage"
        left, self._exit.left = self._exit.left, None
        return left
