"""Stored tensors that a model does not use, though by their names they are more of what it uses. Pure: names and numbers.

    model.layers.25.mlp.up_proj.weight    the model has such a weight in layer 2, but no layer 25: refused
    vision_tower.layers.25.fc1.weight     it has nothing of the kind: of another model, ignored
    model.layers.2.self_attn.q_proj.bias  the model has that layer, but the configuration asks for no such bias: refused
    model.layers.24.…                     the first after its last layer, where the configuration announces one that predicts
                                          further tokens, which is not served: ignored

A checkpoint of more layers than its configuration says would answer as another model than the one that was trained; so would
one whose layers have more in them: biases, norms, scales of quantized weights, adapters that were not merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")  # a whole part of a dotted name
# Ends of names in layers that are no weights: what computations of other libraries, or older ones, kept beside them.
_NO_WEIGHTS = frozenset(
    {
        *("inv_freq", "original_inv_freq", "freqs", "cos_cached", "sin_cached", "position_ids"),  # rotations
        *("masked_bias", "causal_mask"),
        *(
            "q_scale",
            "k_scale",
            "v_scale",
            "kv_scale",
            "k_zero_point",
            "v_zero_point",
            "prob_output_scale",
        ),  # of FP8 KV
        *("_extra_state", "num_batches_tracked"),
    }
)
# num_nextn_predict_layers, num_mtp_layers, mtp_num_layers, mtp_num_hidden_layers
_FURTHER_LAYERS = re.compile(r"nextn.*layers|mtp.*layers")


def surplus(unused: Iterable[str], used: Iterable[str], num_layers: int, further_layers: int) -> list[str]:
    """Those of the unused names, in order, that with a lower number in them are used.

    further_layers: how many layers after its own the configuration announces, see further_layers_of.
    """
    least: dict[tuple[str, str], int] = {}
    for name in used:
        for around, number in _numbered(name):
            least[around] = min(number, least.get(around, number))
    allowed = range(num_layers, num_layers + further_layers)
    return sorted(
        name
        for name in set(unused)
        if any(number > least.get(around, number) and number not in allowed for around, number in _numbered(name))
    )


def strangers(unused: Iterable[str], used: Iterable[str]) -> list[str]:
    """Those of the unused names, in order, that are weights of a module or in a layer of which other weights are used."""
    modules: set[str] = set()
    layers: set[str] = set()
    for name in used:
        modules.add(name.rpartition(".")[0])
        layers.update(_layers_around(name))
    modules.discard("")
    return sorted(
        name
        for name in set(unused)
        if name.rpartition(".")[2] not in _NO_WEIGHTS
        and (name.rpartition(".")[0] in modules or not layers.isdisjoint(_layers_around(name)))
    )


def _layers_around(name: str) -> Iterator[str]:
    """model.layers.2.mlp.experts.4.up.weight: model.layers.2 and model.layers.2.mlp.experts.4."""
    return (name[: found.end()] for found in _NUMBER.finditer(name))


def further_layers_of(config: Mapping[str, Any]) -> int:
    """How many layers config.json announces that only predict further tokens: 0 where it says nothing of the kind."""
    said = [
        value
        for name, value in config.items()
        if _FURTHER_LAYERS.search(name) and isinstance(value, int) and not isinstance(value, bool)
    ]
    nested = config.get("text_config")
    return max(0, *said, further_layers_of(nested) if isinstance(nested, dict) else 0)


def _numbered(name: str) -> Iterator[tuple[tuple[str, str], int]]:
    """For each number in a name: what is around it, and the number."""
    for found in _NUMBER.finditer(name):
        yield (name[: found.start()], name[found.end() :]), int(found[0])
