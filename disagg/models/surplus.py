"""Stored tensors that a model does not use, though by their names they are more of what it uses. Pure: names and numbers.

    model.layers.25.mlp.up_proj.weight    the model has such a weight in layer 2, but no layer 25: refused
    vision_tower.layers.25.fc1.weight     it has nothing of the kind: of another model, ignored
    model.layers.24.…                     the first after its last layer, where the configuration announces one that predicts
                                          further tokens, which is not served: ignored

A checkpoint of more layers than its configuration says would answer as another model than the one that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")  # a whole part of a dotted name
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
