"""Whatever settings people write into values arrive in the processes as they are, through YAML, Helm's templates and TOML."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.config.load import load_config
from disagg.config.tree import Config
from disagg.types.errors import ConfigError
from tests.deploy.chart import CHART, of_kind, template
from tests.deploy.settings_schema import known

# What YAML, an environment and a terminal can carry at all.
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")) | st.sampled_from("\x7f\t\n\"'\\<&>{}#"), max_size=20)
SECONDS = st.floats(2, 1e6, allow_nan=False) | st.integers(2, 10**6) | st.sampled_from(["2500ms", "2m", "90"])
SECTIONS = {
    "engine": {
        "max_waiting": st.integers(1, 2**53),
        "gpu_memory_utilization": st.floats(1e-9, 1, exclude_min=True),
        "prefix_cache": st.booleans(),
        "preempt_after_s": SECONDS,
        "kv_memory_bytes": st.integers(1 << 14, 2**50)
        | st.sampled_from(["2GiB", "512MiB", "1.5 GiB", "10GB", "2Gi", "900M"]),
        "preemption": st.sampled_from(["latest", "fewest_tokens"]),
    },
    "worker": {"command": st.lists(TEXTS, max_size=4), "silent_s": SECONDS},
    "transfer": {"ucx_tls": TEXTS, "ucx_net_devices": TEXTS, "link_lease_s": SECONDS},
    # Beneath a directory that can be written, wherever its signs lead within it.
    "record": {"dir": TEXTS.filter(lambda text: ".." not in text).map("/tmp/records/".__add__)},
}


def some(fields: dict[str, st.SearchStrategy[object]]) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional=fields)


def load(toml: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(toml)
        file.flush()
        return load_config(Path(file.name), environ={})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    everywhere=some({name: some(fields) for name, fields in SECTIONS.items()}),
    own=some({name: some(fields) for name, fields in SECTIONS.items()}),
)
def test_settings_arrive_as_they_were_written(
    everywhere: dict[str, dict[str, object]], own: dict[str, dict[str, object]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        values = Path(directory) / "values.yaml"
        values.write_text(yaml.safe_dump({"config": everywhere, "decode": {"config": own}}, allow_unicode=False))
        done = template("helm-4", values)
    assert done.returncode == 0, done.stderr
    maps = of_kind(tuple(yaml.load_all(done.stdout, yaml.CSafeLoader)), "ConfigMap")
    tomls = {each["metadata"]["labels"]["disagg/role"]: each["data"]["disagg.toml"] for each in maps}
    for role in ("prefill", "decode"):
        given_here = {
            f"{section}.{name}": value
            for part in (everywhere, own if role == "decode" else {})
            for section, fields in part.items()
            for name, value in fields.items()
        }
        expected = load_config(overrides=given_here, environ={})
        arrived = load(tomls[role])
        for path in given_here:
            section, _, name = path.partition(".")
            assert getattr(getattr(arrived, section), name) == getattr(getattr(expected, section), name), path


SIZES = [
    "0",
    "1",
    "100B",
    "16384",
    "60Ki",
    "2Mi",
    "900m",
    "900M",
    "2Gi",
    "2 gib",
    "2G",
    "1.5Gi",
    "0.3Ki",
    "1e9",
    "2Gib",
    "3T",
]
TIMES = ["0", "0s", "1us", "60ms", "1.5s", "2m", "25h", "1d", "90 s"]


@pytest.mark.parametrize("text", SIZES + TIMES)
def test_the_chart_refuses_the_texts_that_processes_refuse_and_no_others(text: str, tmp_path: Path) -> None:
    """Each setting that is a size or a duration, with its own bounds."""
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    fine: dict[str, dict[str, str]] = {}
    for path in known()["bounds"]:
        if path.endswith("_bytes") is not (text in SIZES) or path in ("router.lease_s", "router.heartbeat_s"):
            continue  # these two go together, and have cases of their own
        section, _, name = path.partition(".")
        values = {"config": {section: {name: text}}}
        refusal = refusal_of(path, text)
        if not refusal:
            fine.setdefault(section, {})[name] = text
            continue
        if schema.evolve(schema=schema.schema["properties"]["config"]).is_valid(values["config"]):
            (file := tmp_path / "refused.yaml").write_text(yaml.safe_dump(values))
            done = template("helm-4", file)
            assert done.returncode != 0, f"{path} = {text}: {refusal}"
            assert f"config.{path} is {text}" in done.stderr
    enough = {"resources": {"limits": {"memory": "4Ti"}}}  # for whatever a router may keep
    (file := tmp_path / "fine.yaml").write_text(yaml.safe_dump({"config": fine, "router": enough}))
    done = template("helm-4", file)
    assert done.returncode == 0, done.stderr


def refusal_of(path: str, text: str) -> str:
    """What a server on GPUs says of it; empty if it takes it."""
    try:
        load_config(overrides={path: text, "model.device": "cuda"}, environ={})
    except ConfigError as error:
        return str(error)
    return ""
