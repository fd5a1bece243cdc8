"""The chart's schema knows the settings that there are."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

from disagg.config.load import dump_config
from disagg.config.tree import Config
from disagg.telemetry.traces import read_endpoint
from disagg.types.errors import ConfigError
from tests.deploy.settings_schema import KNOWN, OF_THE_CHART, PATTERNS, SCHEMA, VALUES, definitions, known, require


def test_the_schema_has_the_settings_of_the_configuration_tree() -> None:
    written = json.loads(SCHEMA.read_text())["definitions"]
    for name, made in definitions().items():
        assert written[name] == made, "settings have changed: run `python -m tests.deploy.settings_schema`"


def test_templates_know_the_defaults_and_bounds_that_processes_have() -> None:
    assert json.loads(KNOWN.read_text()) == known(), (
        "settings have changed: run `python -m tests.deploy.settings_schema`"
    )


def test_no_value_that_templates_rely_on_can_be_taken_away() -> None:
    schema = json.loads(SCHEMA.read_text())
    before = json.dumps(schema)
    require(schema, yaml.safe_load(VALUES.read_text()))
    assert json.dumps(schema) == before, "values have changed: run `python -m tests.deploy.settings_schema`"
    assert "resources" in schema["properties"]["router"]["required"]


@pytest.mark.parametrize(
    ("endpoint", "fine"),
    [
        *(
            (each, True)
            for each in ("c.svc:4317", "grpc://c", "grpcs://[::1]:1", "http://c:4318/v1/traces", "https://c")
        ),
        *((each, False) for each in ("nonsense", "ftp://c:1", "http://", "http://u@c:4317", "http://c?x=1", ":4317")),
    ],
)
def test_the_schema_takes_the_endpoints_that_processes_take(endpoint: str, fine: bool) -> None:
    assert bool(re.search(PATTERNS["otlp_endpoint"], endpoint)) is fine
    if fine:
        read_endpoint(endpoint)
    else:
        with pytest.raises(ConfigError):
            read_endpoint(endpoint)


def test_what_the_chart_keeps_for_itself_are_settings() -> None:
    tree = tomllib.loads(dump_config(Config()))
    for section, names in OF_THE_CHART.items():
        assert names <= set(tree[section]), section


def test_every_object_of_the_schema_refuses_what_it_does_not_know() -> None:
    free = []

    def walk(path: str, schema: object) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object" and "additionalProperties" not in schema:
                free.append(path)
            for name, each in schema.items():
                walk(f"{path}/{name}", each)
        elif isinstance(schema, list):
            for each in schema:
                walk(path, each)

    walk("", json.loads(SCHEMA.read_text()))
    assert free == ["/properties/global"]  # what Helm gives every chart
