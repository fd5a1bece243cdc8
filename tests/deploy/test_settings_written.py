"""Whatever settings people write into values arrive in the processes as they are, through YAML, Helm's templates and TOML."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.config.load import load_config
from disagg.config.tree import Config
from disagg.offload.options import storage_target
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
    return refusal_of_all({path: text, "model.device": "cuda"})


def refusal_of_all(settings_of_it: dict[str, Any]) -> str:
    try:
        load_config(overrides=settings_of_it, environ={})
    except ConfigError as error:
        return str(error)
    return ""


STAGINGS: list[dict[str, Any]] = [
    {"arena_bytes": "2Gi"},
    {"arena_bytes": "64MiB"},
    {"arena_bytes": "64Mi", "segment_bytes": "4Mi"},
    {"arena_bytes": "64Mi", "segment_bytes": "4Mi", "gather_bytes": "4Mi"},
    {"arena_bytes": "64Mi", "segment_bytes": "4Mi", "gather_bytes": "4Mi", "link_segments": 5},
    {"arena_bytes": "4Gi", "segment_bytes": "256Mi", "link_segments": 4},
    {"arena_bytes": "4Gi", "segment_bytes": 268439552},
    {"segment_bytes": "2Mi"},
    {"segment_bytes": "16Mi", "gather_bytes": "0"},
    {"gather_bytes": 33558528, "link_segments": 2},
    {"gather_bytes": 1048577},
    {"link_segments": 3},
    {"kernels": "triton"},
    {"kernels": "torch", "gather_bytes": 0},
]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_chart_refuses_the_staging_that_servers_refuse_and_no_other(device: str, tmp_path: Path) -> None:
    refused = 0
    for number, staging in enumerate(STAGINGS):
        values = {"gpu": {"enabled": device == "cuda"}, "prefill": {"config": {"transfer": staging}}}
        (file := tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(values))
        done = template("helm-4", file)
        refusal = refusal_of_all(
            {f"transfer.{name}": each for name, each in staging.items()} | {"model.device": device}
        )
        assert (done.returncode != 0) is bool(refusal), f"{staging}: {refusal or 'fine'}: {done.stderr}"
        refused += bool(refusal)
    assert 3 < refused < len(STAGINGS) - 3


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("s3://kv", {"region": "eu-west-1", "virtual_hosted_style_request": True, "max_retries": 0}),
    ("s3://kv", {"endpoint": "http://[::1]:9000/a", "allow_http": "True"}),
    ("s3://kv", {"endpoint": "HTTPS://minio", "timeout": 86400}),
    ("s3://kv", {"endpoint": "http://minio"}),
    ("s3://kv", {"endpoint": "https://minio:65536"}),
    ("s3://kv", {"endpoint": "https://minio:x"}),
    ("s3://kv", {"endpoint": "https://"}),
    ("s3://kv", {"endpoint": "https://a b"}),
    ("s3://kv", {"sts_endpoint": "http://sts", "proxy_url": "http://proxy:3128"}),
    ("s3://kv", {"timeout": "1e2", "connect_timeout": 0.5}),
    ("s3://kv", {"timeout": 0}),
    ("s3://kv", {"timeout": 86400.5}),
    ("s3://kv", {"timeout": True}),
    ("s3://kv", {"max_retries": "7"}),
    ("s3://kv", {"max_retries": -1}),
    ("s3://kv", {"account_name": "x"}),
    ("s3://kv", {"Region": "x"}),
    ("s3://kv", {"web_identity_token_file": "/var/run/token", "access_key_id": "AKIA", "role_arn": 7}),
    ("gs://kv", {"service_account": "/run/account.json", "base_url": "https://gcs"}),
    ("az://kv", {"account_name": "x", "tenant_id": "some", "use_emulator": "FALSE"}),
    ("az://kv", {"use_emulator": "no"}),
    ("file:///var/lib/disagg/kv", {}),
    ("file:///var/lib/disagg/kv", {"timeout": 20}),
]


def test_the_chart_refuses_the_options_of_storage_that_servers_refuse_and_no_others(tmp_path: Path) -> None:
    for number, (url, options) in enumerate(OPTIONS):
        volume = {"claimName": "kv" if url.startswith("file:") else ""}
        values = {"offload": {"enabled": True}, "storage": {"url": url, "pvc": volume, "options": options}}
        (file := tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(values))
        done = template("helm-4", file)
        refusal = ""
        try:
            storage_target(url, options)
        except ConfigError as error:
            refusal = str(error)
        assert (done.returncode != 0) is bool(refusal), f"{options}: {refusal or 'fine'}: {done.stderr}"
        assert not refusal or any(f"storage.options.{name}" in done.stderr for name in options), done.stderr
