"""A matrix of values: what Helm makes of each is what Kubernetes and our own processes take, and what operators were promised."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as kubernetes_utils

from disagg.cli.flags import overrides_of
from disagg.cli.main import cli
from disagg.config.check import check_exposure, check_role
from disagg.config.load import load_config
from disagg.config.tree import Config, ServerRef
from disagg.discovery.pods import found_in
from disagg.offload.options import storage_target
from tests.deploy.chart import (
    CHART,
    HELMS,
    HERE,
    NAMESPACE,
    RELEASE,
    VALUES,
    Manifest,
    helm,
    of_kind,
    processes,
    rendered,
    template,
)

KUBERNETES = kubernetes_validate.utils.all_versions()[-2:]
CRDS = {file.stem: json.loads(file.read_text()) for file in (HERE / "crds").glob("*.json")}
POOLS = ("prefill", "decode", "mixed")
matrix = pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)

# Its schemas are some MB, and it would read them anew for each manifest.
kubernetes_utils.schema_contents = functools.cache(kubernetes_utils.schema_contents)


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


def name_of(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


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


@matrix
def test_routers_may_read_pods_and_nobody_may_do_more(values: Path) -> None:
    manifests = rendered("helm-4", values)
    bindings, roles = of_kind(manifests, "RoleBinding"), of_kind(manifests, "Role")
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")
    if given(values)["discovery"] != "kubernetes":
        assert not bindings and not roles
        return
    [role], [binding] = roles, bindings
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    [router] = [each.pod for each in processes(manifests) if each.role == "router"]
    assert [(each["name"], each["namespace"]) for each in binding["subjects"]] == [
        (router["serviceAccountName"], NAMESPACE)
    ]
    made = {each["metadata"]["name"] for each in of_kind(manifests, "ServiceAccount")}
    used = {each.pod["serviceAccountName"] for each in processes(manifests)}
    assert made == (used if given(values)["serviceAccount"]["create"] else set())


@matrix
def test_routers_ask_for_the_keys_that_a_secret_holds_and_else_say_that_they_ask_nobody(values: Path) -> None:
    manifests, auth = rendered("helm-4", values), given(values)["auth"]
    for process in processes(manifests):
        said = tomllib.loads(process.config)["auth"]
        mounts = {each["mountPath"]: each["name"] for each in process.container["volumeMounts"]}
        volumes = {each["name"]: each for each in process.pod["volumes"]}
        expected: dict[str, Any] = {}
        for value, setting, directory in (
            ("apiKeys", "api_keys_file", "/etc/disagg-auth/api-keys"),
            ("jwks", "jwks_file", "/etc/disagg-auth/jwks"),
            ("quotas", "limits_file", "/etc/disagg-auth/quotas"),
        ):
            secret = auth[value]["secretName"]
            if process.role == "router" and secret:
                expected[setting] = f"{directory}/{auth[value]['key']}"
                assert volumes[mounts[directory]]["secret"]["secretName"] == secret
            else:
                assert directory not in mounts
        if process.role == "router":
            named = {"jwt_audience": auth["jwks"]["audience"], "jwt_issuer": auth["jwks"]["issuer"]}
            expected |= {name: value for name, value in named.items() if value}
            expected |= {"operators": auth["operators"]} if auth["operators"] else {}
        seen = process.role != "router" and has_tls(given(values))
        assert said == (expected or ({} if seen else {"insecure": True}))


def has_tls(values: dict[str, Any]) -> bool:
    return bool(values["tls"]["certManager"]["enabled"] or values["tls"]["routerSecret"])


@matrix
def test_routers_and_servers_show_certificates_and_whoever_asks_a_router_speaks_tls(
    values: Path, tmp_path: Path
) -> None:
    manifests, said = rendered("helm-4", values), given(values)
    made = {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate")}
    secure = has_tls(said)
    for process in processes(manifests):
        mounts = [each for each in process.container["volumeMounts"] if each["mountPath"] == "/etc/disagg-tls"]
        assert bool(mounts) is bool(tomllib.loads(process.config).get("tls")) is secure
        if not secure:
            continue
        (file := tmp_path / "disagg.toml").write_text(process.config)
        config = load_config(file, {}, {})
        assert config.tls.ca == "/etc/disagg-tls/ca.crt"
        check_exposure(config, process.role)
        [secret] = [each["secret"] for each in process.pod["volumes"] if each["name"] == mounts[0]["name"]]
        whose = "router" if process.role == "router" else "server"
        named = said["tls"][f"{whose}Secret"]
        assert secret["secretName"] == (named or f"{RELEASE}-disagg-{whose}-tls")
        if not named:
            shown = made[secret["secretName"]]
            assert {"server auth", "client auth"} <= set(shown["usages"])
            assert process.role == "router" or shown["dnsNames"] == [config.tls.server_name]
    assert bool(made) is said["tls"]["certManager"]["enabled"]
    [service] = [each for each in of_kind(manifests, "Service") if each["spec"].get("clusterIP") != "None"]
    assert [each["appProtocol"] for each in service["spec"]["ports"]] == (
        ["https", "https"] if secure else ["http", "kubernetes.io/h2c"]
    )
    for test in of_kind(manifests, "Pod"):
        [container] = test["spec"]["containers"]
        volumes = {each["name"]: each for each in test["spec"]["volumes"]}
        assert ("--ca=/etc/disagg-tls/ca.crt" in container["args"]) is ("tls" in volumes) is secure
        if secure:  # but no key of the routers
            assert volumes["tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    for monitor in of_kind(manifests, "ServiceMonitor"):
        [endpoint] = monitor["spec"]["endpoints"]
        of_router = monitor["metadata"]["labels"]["disagg/role"] == "router"
        assert endpoint.get("scheme", "http") == ("https" if secure and of_router else "http")


def test_an_issuer_of_the_release_signs_unless_one_is_named() -> None:
    own = rendered("helm-4", HERE / "values" / "tls-cert-manager.yaml")
    signing = {each["spec"]["issuerRef"]["name"] for each in of_kind(own, "Certificate")}
    assert signing <= {each["metadata"]["name"] for each in of_kind(own, "Issuer")}
    [authority] = [each["spec"] for each in of_kind(own, "Certificate") if each["spec"].get("isCA")]
    assert {"ca": {"secretName": authority["secretName"]}} in [each["spec"] for each in of_kind(own, "Issuer")]
    named = rendered("helm-4", HERE / "values" / "tls-issuer.yaml")
    assert not of_kind(named, "Issuer")
    references = [each["spec"]["issuerRef"] for each in of_kind(named, "Certificate")]
    assert references == [{"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}] * 2


@matrix
def test_pods_are_confined_probed_and_given_the_time_to_drain(values: Path) -> None:
    for process in processes(rendered("helm-4", values)):
        pod, container, own = process.pod, process.container, given(values)[process.role]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        watches = process.role == "router" and given(values)["discovery"] == "kubernetes"
        assert pod["automountServiceAccountToken"] is watches
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["allowPrivilegeEscalation"] is False
        amounts = container.get("resources", {}).get("limits", {})
        wants_rdma = any(name.startswith("rdma/") and amount != "0" for name, amount in amounts.items())
        added = {"add": ["IPC_LOCK"]} if wants_rdma else {}
        assert confined["capabilities"] == {"drop": ["ALL"], **added}
        assert all(isinstance(amount, str) for amount in amounts.values())
        grace = pod["terminationGracePeriodSeconds"]
        slept = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert grace >= 35
        assert grace >= slept + own["drainSeconds"] + 5
        port, ready = ("http", "/health?waiting") if process.role == "router" else ("metrics", "/health")
        scheme = {"scheme": "HTTPS"} if process.role == "router" and has_tls(given(values)) else {}
        paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        assert paths == {
            "startup": {"path": "/live", "port": port, **scheme},
            "readiness": {"path": ready, "port": port, **scheme},
            "liveness": {"path": "/live", "port": port, **scheme},
        }
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert {"/tmp", "/var/cache/disagg"} <= writable
        if process.role != "router":
            assert "/dev/shm" in writable
            [shm] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
            assert shm == {"medium": "Memory", "sizeLimit": own["shmSize"]}
            gpu = given(values)["gpu"]
            wanted = str(ranks_of(own)) if gpu["enabled"] else None
            assert amounts.get(gpu["resource"]) == wanted


def ranks_of(own: dict[str, Any]) -> int:
    """Each with a GPU of its own."""
    server = {"dp": 1, "pp": 1, **own["config"].get("server", {})}
    return int(own["tp"] * server["dp"] * server["pp"])


@matrix
def test_pools_are_where_the_values_say_and_found_by_their_labels(values: Path) -> None:
    manifests = rendered("helm-4", values)
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        role = workload["metadata"]["labels"]["disagg/role"]
        own, spec = given(values)[role], workload["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert labels["disagg/role"] == role
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert spec.get("replicas") == (None if own["autoscaling"]["enabled"] else own["replicas"])
        pod = spec["template"]["spec"]
        assert pod.get("nodeSelector", {}) == own["nodeSelector"]
        assert pod.get("tolerations", []) == own["tolerations"]
    roles = {each.role for each in processes(manifests)}
    assert roles == {"router", "prefill", "decode"} | ({"mixed"} if given(values)["mixed"]["enabled"] else set())


@matrix
def test_only_routers_peers_and_scrapers_reach_servers(values: Path) -> None:
    policies = {
        each["metadata"]["labels"]["disagg/role"]: each["spec"]
        for each in of_kind(rendered("helm-4", values), "NetworkPolicy")
    }
    network = given(values)["networkPolicy"]
    if not network["enabled"]:
        assert policies == {}
        return
    for role, spec in policies.items():
        assert spec["policyTypes"] == ["Ingress"]
        if role == "router":
            assert all("from" in rule for rule in spec["ingress"]) == bool(network["clientsFrom"])
            if network["clientsFrom"]:  # and `helm test` is a client
                roles = [
                    each.get("podSelector", {}).get("matchLabels", {}).get("disagg/role")
                    for each in spec["ingress"][0]["from"]
                ]
                assert "test" in roles
            continue
        for rule in spec["ingress"]:
            assert rule["from"], "an empty list lets everybody in"
            for peer in rule["from"]:
                if peer not in network["metricsFrom"]:
                    assert set(peer) == {"podSelector"}
                    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == RELEASE
    assert set(policies) == {each.role for each in processes(rendered("helm-4", values))}


@pytest.mark.parametrize("name", ["defaults", "mixed-beside"])
def test_whoever_may_be_given_another_role_reaches_all_peers_and_is_reached_by_them(name: str) -> None:
    manifests = rendered("helm-4", HERE / "values" / f"{name}.yaml")
    servers = {each.role for each in processes(manifests)} - {"router"}
    for policy in of_kind(manifests, "NetworkPolicy"):
        if policy["metadata"]["labels"]["disagg/role"] == "router":
            continue
        reached_by = [
            set(expression["values"])
            for rule in policy["spec"]["ingress"]
            if "ports" not in rule
            for peer in rule["from"]
            for expression in peer["podSelector"]["matchExpressions"]
        ]
        assert reached_by == [servers], policy["metadata"]["name"]


@matrix
def test_volumes_and_strategies_of_a_persons_own_are_where_they_say(values: Path) -> None:
    for workload in of_kind(rendered("helm-4", values), "Deployment", "StatefulSet"):
        own = given(values)[workload["metadata"]["labels"]["disagg/role"]]
        pod = workload["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert [each for each in own["extraVolumes"] if each not in pod["volumes"]] == []
        assert [each for each in own["extraVolumeMounts"] if each not in container["volumeMounts"]] == []
        names = [each["name"] for each in pod["volumes"]]
        assert len(names) == len(set(names))
        assert {each["name"] for each in container["volumeMounts"]} <= set(names)
        if workload["kind"] == "StatefulSet":
            kind, partition = own["updateStrategy"]["type"], own["updateStrategy"]["partition"]
            rolls = {"rollingUpdate": {"partition": partition}} if kind == "RollingUpdate" else {}
            assert workload["spec"]["updateStrategy"] == {"type": kind, **rolls}


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


def test_pods_begin_again_when_their_settings_change_and_only_then() -> None:
    def sums(name: str) -> dict[str, str]:
        found = of_kind(rendered("helm-4", HERE / "values" / name), "Deployment", "StatefulSet")
        return {
            each["metadata"]["labels"]["disagg/role"]: each["spec"]["template"]["metadata"]["annotations"][
                "checksum/config"
            ]
            for each in found
        }

    plain, network, settings = sums("defaults.yaml"), sums("network-closed.yaml"), sums("settings.yaml")
    assert plain == network
    assert all(plain[role] != settings[role] for role in plain)


def with_values(tmp_path: Path, values: dict[str, Any]) -> tuple[Manifest, ...]:
    """Manifests of values that are not in the matrix."""
    text = yaml.safe_dump(values)
    (file := tmp_path / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml").write_text(
        text
    )  # rendered once by its name
    return rendered("helm-4", file)


IN = "DuringSchedulingIgnoredDuringExecution"
ON_NODES = {"nodeAffinity": {f"preferred{IN}": [{"weight": 1, "preference": {"matchExpressions": []}}]}}
NEAR = {"podAffinity": {f"preferred{IN}": []}}


@pytest.mark.parametrize(
    ("pairs", "own", "kinds", "near"),
    [
        ("required", {}, {"podAffinity"}, {f"required{IN}"}),
        ("required", ON_NODES, {"nodeAffinity", "podAffinity"}, {f"required{IN}"}),
        ("required", {**ON_NODES, "podAffinity": {}}, {"nodeAffinity", "podAffinity"}, {f"required{IN}"}),
        ("preferred", {}, {"podAffinity"}, {f"preferred{IN}"}),
        ("preferred", ON_NODES, {"nodeAffinity"}, set()),
        ("preferred", NEAR, {"podAffinity"}, {f"preferred{IN}"}),
        ("none", ON_NODES, {"nodeAffinity"}, set()),
        ("none", {}, set(), set()),
    ],
)
def test_what_pairs_require_is_required_beside_an_affinity_of_the_pools_own(
    pairs: str, own: dict[str, Any], kinds: set[str], near: set[str], tmp_path: Path
) -> None:
    made = with_values(tmp_path, {"pairs": {"affinity": pairs}, "decode": {"affinity": own}})
    [decode] = [each.pod for each in processes(made) if each.role == "decode"]
    affinity = decode.get("affinity", {})
    assert set(affinity) == kinds
    assert set(affinity.get("podAffinity", {})) == near
    if "nodeAffinity" in kinds:
        assert affinity["nodeAffinity"] == ON_NODES["nodeAffinity"]
    if near and own is not NEAR:
        [term] = affinity["podAffinity"].popitem()[1]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


def test_a_rollout_of_routers_waits_for_models_that_load(tmp_path: Path) -> None:
    def deadline_s(values: dict[str, Any]) -> int:
        [router] = of_kind(with_values(tmp_path, values), "Deployment")
        return int(router["spec"]["progressDeadlineSeconds"])

    loads = {"worker": {"load_timeout_s": "30m"}}
    assert deadline_s({}) == 600 + 600
    assert deadline_s({"decode": {"config": loads}}) == 1800 + 600
    assert deadline_s({"mixed": {"config": loads}}) == 600 + 600, "there is no mixed pool"
    assert deadline_s({"config": {"worker": {"load_timeout_s": "1000000h"}}}) == 2**31 - 1


@pytest.mark.parametrize("version", HELMS)
def test_volumes_from_images_are_taken_where_nothing_says_that_there_are_none(version: str) -> None:
    for name in ("model-image", "extra-volumes"):
        for words in ((), ("--kube-version", "1.33.0"), ("--kube-version", "1.35.1", "--api-versions", "v1/Pod")):
            done = template(version, HERE / "values" / f"{name}.yaml", *words)
            assert done.returncode == 0, done.stderr


def test_the_pod_of_helm_test_is_where_routers_may_be(tmp_path: Path) -> None:
    [plain] = of_kind(with_values(tmp_path, {}), "Pod")
    assert not {"nodeSelector", "tolerations"} & set(plain["spec"])
    where = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "cpu", "operator": "Exists"}]}
    [test] = of_kind(with_values(tmp_path, {"router": where}), "Pod")
    assert {name: test["spec"][name] for name in where} == where
