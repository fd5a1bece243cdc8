"""The part of the chart's schema that is about settings: what `config` in its values may hold, made of the configuration tree.
And what the chart's templates know of settings, which no schema can say: settings.json beside it.

`python -m tests.deploy.settings_schema` writes both; to be run when settings have changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import yaml

from disagg.config.check import LEAST_KV_BYTES, LEAST_S, LINKS_PER_ARENA, MIXED_ONLY, WHOLE_PROMPTS
from disagg.config.load import ENV_PREFIX
from disagg.config.staging import PAGE_BYTES, Device, size_staging
from disagg.config.steps import CPU_PAGE_TOKENS
from disagg.config.tree import AuthConfig, Config, TlsConfig, TransferConfig
from disagg.memory.sizing import CPU_POOL_BYTES
from disagg.offload.options import MAX_SECONDS, STORE_OPTIONS, is_secret, options_of

SCHEMA = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "disagg" / "values.schema.json"
KNOWN = SCHEMA.with_name("settings.json")
VALUES = SCHEMA.with_name("values.yaml")
SIZE = r"^[0-9]+(\.[0-9]+)? *([KMGTkmgt]i?[Bb]|[KMGTkmgt]i|[KMGTkgt]|[Bb])?$"  # without 400m, a thousandth
DURATION = r"^[0-9]+(\.[0-9]+)? *(us|ms|s|m|h)?$"
# As telemetry.traces reads it: without a scheme it needs a port.
_HOST, _PORT = r"(\[[0-9a-fA-F:.]+\]|[^\s/?#@:\[\]]+)", r":[0-9]{1,5}"
PATTERNS = {"otlp_endpoint": rf"^$|^(grpcs?|https?)://{_HOST}({_PORT})?(/[^?#]*)?$|^{_HOST}{_PORT}$"}
# Settings that the chart decides, or that have values of their own. What is left of a section without any is left out.
OF_THE_CHART = {
    "auth": {field.name for field in msgspec.structs.fields(AuthConfig)},
    "tls": {field.name for field in msgspec.structs.fields(TlsConfig)},
    "model": {"name", "served_name", "device", "cache_dir"},
    "server": {"name", "pod", "tp", "first_gpu", "host", "port", "metrics_port", "advertise_host", "drain_s"},
    "router": {
        "name",
        "host",
        "http_port",
        "grpc_port",
        "discovery",
        "selector",
        "namespace",
        "kubeconfig",
        "servers",
        "drain_s",
    },
    "offload": {"enabled", "host_bytes"},
    "storage": {"url", "options", "budget_bytes", "compression"},
}

# Settings that templates hold against each other (templates/_fit.tpl), or count GPUs by.
JUDGED = {
    "model": ("dtype",),
    "engine": ("page_tokens", "checkpoint_tokens", "prefix_cache", "policy", "target_step_ms"),
    "router": ("lease_s", "heartbeat_s", "memory_bytes", "answer_bytes"),
    "server": ("dp", "pp"),
}
# Further settings that templates read, which may be variables as well: what those will be, only the pod knows.
READ = {
    "engine": ("kv_memory_bytes",),
    "worker": ("load_timeout_s",),
    "transfer": ("arena_bytes", "segment_bytes", "link_segments", "gather_bytes", "gather_buffers", "kernels"),
    "router": ("http_port", "grpc_port", "own_http_port"),
    "record": ("dir",),
}
DEVICES: tuple[Device, ...] = ("cpu", "cuda")
SIZED = ("arena_bytes", "segment_bytes", "gather_bytes")


def known() -> dict[str, Any]:
    """What templates know: `defaults` of what they judge or read, `wholePrompts`, `leastSeconds`, `leastKvBytes`,
    `cpuPageTokens`, `cpuPoolBytes`, `staging`: its sizes by device and what they must keep to, `bounds` of sizes and durations,
    which a schema sees in numbers only, `environment`: names of variables that would set what the chart decides or judges,
    `variables`: those of all other settings, `mixedOnly`, `storageOptions`: of what kind each is, by the URL's scheme,
    `storageSeconds`: the most that one may have, and `secretOptions`: those that no ConfigMap may have."""
    tree = Config()
    own = {_variable(section, name) for table in (OF_THE_CHART, JUDGED) for section in table for name in table[section]}
    return {
        "defaults": {
            section: {
                name: getattr(getattr(tree, section), name)
                for table in (JUDGED, READ)
                for name in table.get(section, ())
            }
            for section in {**JUDGED, **READ}
        },
        "wholePrompts": list(WHOLE_PROMPTS),
        "leastSeconds": {each.path: each.least_s for each in LEAST_S},
        "leastKvBytes": LEAST_KV_BYTES,
        "cpuPageTokens": CPU_PAGE_TOKENS,
        "cpuPoolBytes": CPU_POOL_BYTES,
        "staging": _staging(),
        "bounds": _bounds(),
        "variables": {_variable(*path.split(".")): path for path in _paths() if _variable(*path.split(".")) not in own},
        "mixedOnly": [f"engine.{name}" for name in MIXED_ONLY],
        "environment": sorted(own),
        "storageOptions": {scheme: options_of(scheme) for scheme in STORE_OPTIONS},
        "storageSeconds": MAX_SECONDS,
        "secretOptions": sorted({name for table in STORE_OPTIONS.values() for name in table if is_secret(name)}),
    }


def _staging() -> dict[str, Any]:
    made = {device: size_staging(TransferConfig(), device) for device in DEVICES}
    sizes = {device: {name: getattr(each, name) for name in SIZED} for device, each in made.items()}
    return {"sizes": sizes, "pageBytes": PAGE_BYTES, "linksPerArena": LINKS_PER_ARENA}


def _variable(section: str, name: str) -> str:
    return f"{ENV_PREFIX}{section}__{name}".upper()


def _paths() -> dict[str, dict[str, Any]]:
    """What `config` may hold: path -> its schema."""
    sections = _sections(set())["properties"]
    return {
        f"{section}.{name}": setting
        for section in sections
        for name, setting in sections[section]["properties"].items()
    }


def _bounds() -> dict[str, dict[str, float]]:
    words = ("minimum", "exclusiveMinimum", "maximum")
    found = {
        path: {word: setting[word] for word in words if word in setting}
        for path, setting in _paths().items()
        if setting.get("pattern") in (SIZE, DURATION)
    }
    return {path: bounds for path, bounds in found.items() if bounds}


def definitions() -> dict[str, Any]:
    """`settings` of every role, and `mixedSettings`, of mixed servers alone."""
    return {"settings": _sections(set(MIXED_ONLY)), "mixedSettings": _sections(set())}


def _sections(without: set[str]) -> dict[str, Any]:
    tree = msgspec.json.schema(Config)["$defs"]
    sections = {}
    for section in msgspec.structs.fields(Config):
        mine = OF_THE_CHART.get(section.name, set()) | (without if section.name == "engine" else set())
        described = tree[section.type.__name__ if isinstance(section.type, type) else str(section.type)]["properties"]
        kept = {name: _setting(name, kind) for name, kind in described.items() if name not in mine}
        if kept:
            sections[section.name] = _object(kept)
    return _object(sections)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    """As it may be written in TOML: sizes and durations are numbers, or texts with a unit."""
    said = {key: value for key, value in kind.items() if key not in ("default", "description", "title")}
    if name.endswith("_bytes"):
        return {**said, "type": ["integer", "string"], "pattern": SIZE}
    if name.endswith("_s") and said["type"] == "number":
        return {**said, "type": ["number", "string"], "pattern": DURATION}
    return {**said, "pattern": PATTERNS[name]} if name in PATTERNS else said


def require(schema: dict[str, Any], defaults: dict[str, Any]) -> None:
    """What has a default is needed: Helm takes away what somebody sets to null, and templates rely on all of it."""
    schema["required"] = sorted(name for name in defaults if name in schema["properties"])
    for name in schema["required"]:
        if "properties" in schema["properties"][name]:
            require(schema["properties"][name], defaults[name])


def main() -> None:
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"].update(definitions())
    require(schema, yaml.safe_load(VALUES.read_text()))
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")
    KNOWN.write_text(json.dumps(known(), indent=2) + "\n")


if __name__ == "__main__":
    main()
