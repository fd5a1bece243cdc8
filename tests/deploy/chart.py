"""The chart as the real Helm 3 and Helm 4 render it. `.ci/test-helm` puts them beside the Python that runs this."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "disagg"
HERE = Path(__file__).parent
VALUES = sorted((HERE / "values").glob("*.yaml"))
HELMS = ("helm-3", "helm-4")
RELEASE, NAMESPACE = "rel", "serving"
HELM_S = 60

Manifest = dict[str, Any]


def helm(version: str, *words: str) -> subprocess.CompletedProcess[str]:
    binary = Path(sys.prefix) / "helm" / version
    if not binary.exists():
        pytest.skip(f"{binary} is not there: run `python .ci/test-helm` with this Python", allow_module_level=True)
    environ = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}  # no plugins, no cluster, no settings of anybody
    return subprocess.run([str(binary), *words], capture_output=True, text=True, timeout=HELM_S, env=environ)


def template(version: str, values: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return helm(version, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(values), *words)


@functools.cache
def rendered(version: str, values: Path) -> tuple[Manifest, ...]:
    """Every manifest, also of hooks."""
    done = template(version, values)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each)


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


@dataclass(frozen=True)
class Process:
    """A container of the chart, and what Kubernetes would give it."""

    role: str
    pod: Manifest  # its spec
    container: Manifest
    config: str  # disagg.toml
    replicas: int
    name: str  # of what makes its pods
    labels: dict[str, str]

    @property
    def argv(self) -> list[str]:
        return [*self.container["command"], *self.container["args"]]

    def environ(self, pod_name: str, pod_ip: str) -> dict[str, str]:
        """As the kubelet fills it in, less what comes from secrets and the node."""
        fields = {
            "metadata.name": pod_name,
            "metadata.namespace": NAMESPACE,
            "metadata.uid": f"uid-{pod_name}",
            "status.podIP": pod_ip,
        }
        found: dict[str, str] = {}
        for each in self.container["env"]:
            if "value" in each:
                found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
            elif (path := each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")) in fields:
                found[each["name"]] = fields[path]
        return found

    def as_pod(self, name: str, ip: str, *, ready: bool = True) -> Manifest:
        """What the API has of it once it runs."""
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        return {
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": self.labels},
            "spec": self.pod,
            "status": {"phase": "Running", "podIP": ip, "conditions": conditions},
        }


def processes(manifests: tuple[Manifest, ...]) -> Iterator[Process]:
    """Routers and servers."""
    configs = {each["metadata"]["name"]: each["data"] for each in of_kind(manifests, "ConfigMap")}
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        pod = workload["spec"]["template"]["spec"]
        [container] = pod["containers"]
        [volume] = [each for each in pod["volumes"] if each["name"] == "config"]
        yield Process(
            role=workload["metadata"]["labels"]["disagg/role"],
            pod=pod,
            container=container,
            config=configs[volume["configMap"]["name"]]["disagg.toml"],
            replicas=workload["spec"].get("replicas", 1),
            name=workload["metadata"]["name"],
            labels=workload["spec"]["template"]["metadata"]["labels"],
        )
