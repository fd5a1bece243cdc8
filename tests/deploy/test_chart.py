"""A matrix of values: what Helm makes of each is what Kubernetes and our own processes take, under names of its own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from disagg.cli.flags import overrides_of
from disagg.cli.main import cli
from disagg.config.check import check_role
from disagg.config.load import load_config
from disagg.config.tree import Config, ServerRef
from disagg.discovery.pods import found_in
from disagg.offload.options import storage_target
from tests.deploy.chart import CHART, HELMS, HERE, NAMESPACE, VALUES, helm, of_kind, processes, rendered
from tests.deploy.kubernetes_schemas import CRDS, KUBERNETES
from tests.deploy.matrix import given, matrix, name_of

POOLS = ("prefill", "decode", "mixed")


def test_the_matrix_is_as_large_as_was_promised() -> None:
    assert len(VALUES) >= 20
    assert len(KUBERNETES) == 2


@matrix
def test_both_helms_find_nothing_to_say_and_render_the_same(values: Path) -> None:
    for version in HELMS:
        linted = helm(version, "lint", "--strict", str(CHART), "--values", str(values))
        assert linted.returncode == 0, linted.stdout + linted.stderr
        assert "WARNING" not in linted.stdout
    of_3, of_4 = ({name_of(each): each for each in rendered(version, values)} for version in HELMS)
    assert of_3 == of_4


@matrix
def test_every_manifest_is_valid(values: Path) -> None:
    manifests = rendered("helm-4", values)
    names = [name_of(each) for each in manifests]
    assert len(names) == len(set(names))
    for manifest in manifests:
        crd = CRDS.get(manifest["kind"].lower())
        if crd is not None:
            jsonschema.validate(manifest, crd, jsonschema.Draft202012Validator)
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_what_is_no_manifest_is_found() -> None:
    """The two validators that the matrix relies on refuse what Kubernetes would."""
    [route] = of_kind(rendered("helm-4", HERE / "values" / "gateway.yaml"), "HTTPRoute")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**route, "spec": {**route["spec"], "rule": []}}, CRDS["httproute"])
    [router] = of_kind(rendered("helm-4", HERE / "values" / "defaults.yaml"), "Deployment")
    for version in KUBERNETES:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**router, "spec": {**router["spec"], "replica": 1}}, version, strict=True)


@matrix
def test_every_command_and_setting_is_one_that_the_processes_take(values: Path, tmp_path: Path) -> None:
    for process in processes(rendered("helm-4", values)):
        program, role, *args = process.argv
        file = tmp_path / f"{role}.toml"
        file.write_text(process.config)
        args = [str(file) if each == "/etc/disagg/disagg.toml" else each for each in args]
        assert (program, role) == ("disagg", process.role)
        context = cli.commands[role].make_context(role, args)
        environ = process.environ(f"{process.name}-0", "10.0.0.1")
        config = load_config(context.params["file"], overrides_of(context.params["sets"]), environ)
        check_role(config, process.role)
        if config.storage.url:
            storage_target(config.storage.url, config.storage.options)
        check_promises(config, process.role, f"{process.name}-0", given(values))


def check_promises(config: Config, role: str, pod: str, values: dict[str, Any]) -> None:
    """What the chart's own values say arrives in the settings."""
    own = values[role]
    if role == "router":
        router = config.router
        assert (router.name, router.http_port, router.grpc_port) == (pod, own["ports"]["http"], own["ports"]["grpc"])
        assert router.drain_s == own["drainSeconds"]
        return
    server = config.server
    assert (server.name, server.tp, server.drain_s) == (pod, own["tp"], own["drainSeconds"])
    assert (server.port, server.metrics_port) == (own["ports"]["grpc"], own["ports"]["metrics"])
    assert (server.host, server.advertise_host) == ("::", "10.0.0.1")
    assert config.model.device == ("cuda" if values["gpu"]["enabled"] else "cpu")
    assert config.offload.enabled == values["offload"]["enabled"]
    assert config.offload.host_bytes == amount_of(values["offload"]["hostMemory"])
    storage = values["storage"]
    assert config.storage.url == (
        storage["url"] or ("file:///var/lib/disagg/kv" if storage["pvc"]["claimName"] else "")
    )
    assert config.storage.budget_bytes == amount_of(storage["budget"])
    assert config.storage.options == storage["options"]
    mounted = values["model"]["pvc"]["claimName"] or values["model"]["image"]["reference"]
    if mounted or values["model"]["hostPath"]["path"]:
        assert config.model.name == f"/model/{values['model']['path']}".rstrip("/")
        assert config.model.public_name == values["model"]["servedName"]


def amount_of(quantity: str | int) -> int:
    """Bytes, as Kubernetes (4Ti) or we (4TiB) write them; 0 for none."""
    if isinstance(quantity, int):
        return quantity
    number, unit = re.fullmatch(r"(\d*)([KMGT]i)?B?", quantity).groups()
    return int(number or 0) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


@matrix
def test_routers_know_every_server_that_there_can_be_by_a_name_that_its_pod_gets(values: Path) -> None:
    manifests = rendered("helm-4", values)
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "Service")}
    autoscaled = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "HorizontalPodAutoscaler")}
    autoscaled |= {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "ScaledObject")}
    expected = set()
    for pool in of_kind(manifests, "StatefulSet"):
        name, service = pool["metadata"]["name"], pool["spec"]["serviceName"]
        scaling = autoscaled.get(name, {})
        most = scaling.get("maxReplicas", scaling.get("maxReplicaCount", pool["spec"].get("replicas")))
        [port] = [each["port"] for each in services[service]["ports"] if each["name"] == "grpc"]
        assert services[service]["clusterIP"] == "None"
        assert services[service]["publishNotReadyAddresses"] is True
        assert services[service]["selector"].items() <= pool["spec"]["template"]["metadata"]["labels"].items()
        domain = f"{service}.{NAMESPACE}.svc.{given(values)['clusterDomain']}"
        role = pool["metadata"]["labels"]["disagg/role"]
        expected |= {(f"{name}-{i}", role, f"{name}-{i}.{domain}:{port}") for i in range(most)}
    [router] = [each for each in processes(manifests) if each.role == "router"]
    if given(values)["discovery"] == "kubernetes":
        said = tomllib.loads(router.config)["router"]
        assert (said["discovery"], said["namespace"], said.get("servers")) == ("kubernetes", NAMESPACE, None)
        wanted = dict(each.split("=") for each in said["selector"].split(","))
        for each in processes(manifests):  # found_in leaves routers out by their role
            assert wanted.items() <= each.labels.items()
            if each.role != "router":
                found = found_in(each.as_pod(f"{each.name}-0", "10.0.0.1"))
                assert found is not None and (found.name, found.role) == (f"{each.name}-0", each.role)
                assert found.address == f"10.0.0.1:{tomllib.loads(each.config)['server']['port']}"
        return
    assert {(each.name, each.role, each.address) for each in servers_of(router.config)} == expected
    assert expected


def servers_of(toml: str) -> list[ServerRef]:
    return [ServerRef(**each) for each in tomllib.loads(toml)["router"]["servers"]]


def test_releases_whose_long_names_begin_alike_have_nothing_in_common() -> None:
    names: dict[str, set[tuple[str, str]]] = {}
    for release in (
        "a" * 39,
        "a" * 40,
        "a" * 41,
        "a" * 52,
        "a" * 51 + "-b",
        "a" * 30 + "-" + "b" * 20,
        "disagg-" + "a" * 46,
    ):
        done = helm("helm-4", "template", release, str(CHART), "--namespace", NAMESPACE)
        assert done.returncode == 0, done.stderr
        names[release] = {name_of(each) for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each}
        for _, name in names[release]:
            assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and "--" not in name
            assert len(name) <= 40 + len("-prefill")
    assert len(set().union(*names.values())) == sum(len(each) for each in names.values())
