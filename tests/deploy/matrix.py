"""The matrix of values, for tests that hold for each of them, and what such values ask for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, VALUES, Manifest

matrix = pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)


@functools.cache
def given(values: Path) -> dict[str, Any]:
    """The values, on top of the chart's own."""
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    merged: dict[str, Any] = json.loads(json.dumps(own))  # anchors would make one object of several

    def merge(into: dict[str, Any], more: dict[str, Any]) -> None:
        for name, value in more.items():
            if isinstance(value, dict) and isinstance(into.get(name), dict):
                merge(into[name], value)
            else:
                into[name] = value

    merge(merged, yaml.safe_load(values.read_text()))
    return merged


def name_of(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def has_tls(values: dict[str, Any]) -> bool:
    return bool(values["tls"]["certManager"]["enabled"] or values["tls"]["routerSecret"])
